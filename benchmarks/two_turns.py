"""An engine for conversations of two turns: chat, `/tokenize` and `/detokenize` respond immediately with prepared bytes.

The model name `mode-exact-N` has a template whose rendering of the second turn begins with the recorded ids of the first,
N - 200 prompt ids and 200 sampled ones; that of `mode-drift-N` splits the first sampled token.
"""

from collections import Counter
from functools import cache
from typing import ClassVar

import orjson

from benchmarks.upstream import EVENTS, MODE, Engine, answer_with, events, framed, prompt_ids, sampled_ids

STOP = 151_645  # greater than all other ids
BRIDGE = [STOP + 1, *range(40), STOP + 2]  # the second question, and the beginning of its reply
WINDOW = 2**20
REPLY = "".join(f" word{number}" for number in range(EVENTS - 1))  # the text of the first turn
_STOP_TEXT = "<|im_end|>"
_IDS = b'"prompt_token_ids":['


def rendering(mode: bytes, tokens: int) -> list[int]:
    """Return the ids of the second turn's messages, as the template renders them."""
    first, *others = sampled_ids(STOP)
    shown = [first, *others] if mode == b"exact" else [first + 1, first + 2, *others]
    return [*prompt_ids(tokens - EVENTS), *shown, *BRIDGE]


@cache
def _tokenized(mode: bytes, tokens: int) -> bytes:
    ids = rendering(mode, tokens)
    return answer_with(orjson.dumps({"count": len(ids), "max_model_len": WINDOW, "tokens": ids, "token_strs": None}))


@cache
def _detokenized(text: str) -> bytes:
    return answer_with(orjson.dumps({"prompt": text}))


@cache
def _first_turn(tokens: int) -> list[bytes]:
    return [framed(event) for event in events(tokens - EVENTS, stop=STOP)]


@cache
def _rendered_ids(mode: bytes, tokens: int) -> bytes:
    return orjson.dumps(rendering(mode, tokens))[1:-1]


@cache
def _parts() -> tuple[bytes, bytes, list[bytes], bytes]:
    """Return the first event before and after the prompt ids, the events of tokens, and the event of usage."""
    first, *others, usage, _ = events(0, stop=STOP)
    before, _, after = first.partition(_IDS)
    return before + _IDS, after, [framed(event) for event in others], usage


def second_turn(ids: bytes) -> list[bytes]:
    """Return the chunks of the second turn's response, with these prompt ids in JSON."""
    before, after, others, usage = _parts()
    counts = b'"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d'
    prompt = ids.count(b",") + 1
    usage = usage.replace(counts % (0, EVENTS, EVENTS), counts % (prompt, EVENTS, prompt + EVENTS))
    return [framed(before + ids + after), *others, framed(usage), framed(b"data: [DONE]\n\n")]


class TwoTurnEngine(Engine):
    """One connection. `GET /counts` returns the number of requests of all connections by path."""

    counts: ClassVar[Counter[str]] = Counter()

    def answer(self, head: bytes, body: bytes) -> None:
        """Write the response."""
        path = head.split(b" ", 2)[1].decode()
        if path == "/counts":
            self.transport.write(answer_with(orjson.dumps(self.counts)))
            return
        self.counts[path] += 1
        found = MODE.search(body, max(0, body.rfind(b'"mode-')))
        if path == "/detokenize":
            is_single = b"," not in body
            self.transport.write(_detokenized(_STOP_TEXT if is_single else REPLY + _STOP_TEXT))
        elif found is None or found[2] is None:
            super().answer(head, body)
        elif path == "/tokenize":
            self.transport.write(_tokenized(found[1], int(found[2])))
        elif b'"role":"assistant"' not in body:
            self.stream(_first_turn(int(found[2])))
        else:
            self.stream(second_turn(_sent_ids(body) or _rendered_ids(found[1], int(found[2]))))


def _sent_ids(body: bytes) -> bytes:
    """Return the prompt ids of a request as they are written there; empty if it has none."""
    start = body.find(_IDS) + len(_IDS)
    return body[start : body.index(b"]", start)] if start >= len(_IDS) else b""
