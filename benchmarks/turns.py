"""An engine for conversations: chat, `/tokenize` and `/detokenize` respond immediately with prepared bytes.

The template of the model `mode-exact-FIRST-GROWS` begins each turn with the recorded ids of the turns before: the first prompt
has FIRST ids, and each further prompt adds GROWS ids, 200 sampled ones and the next message. The template of
`mode-drift-FIRST-GROWS` splits the first sampled token.
"""

import random
import re
from collections import Counter
from functools import cache
from typing import ClassVar

import orjson

from benchmarks.upstream import EVENTS, Engine, answer_with, events, framed, sampled_ids, whole

STOP = 151_645  # greater than all other ids
WINDOW = 2**20
REPLY = "".join(f" word{number}" for number in range(EVENTS - 1))  # the text of each turn
_STOP_TEXT = "<|im_end|>"
_IDS = b'"prompt_token_ids":['
_MODEL = re.compile(rb'"mode-(exact|drift)-([0-9]+)-([0-9]+)"')


def messages(first: int, grows: int, turns: int) -> list[dict[str, str]]:
    """Return the messages of the last of so many turns, with about one word per token."""
    sent = [{"role": "user", "content": "word " * first}]
    for turn in range(1, turns):
        text = f"Turn {turn} " + "word " * (grows - EVENTS - 2)
        sent += [{"role": "assistant", "content": REPLY}, {"role": "user", "content": text}]
    return sent


@cache
def recorded(first: int, grows: int, turn: int) -> list[int]:
    """Return the prompt ids of a turn, the first one being 0, as a continued conversation has them."""
    if not turn:
        return random.Random(first).choices(range(150_000), k=first)
    bridge = [STOP + turn, *range(grows - EVENTS - 2), STOP + 1]  # the next message, and the beginning of its reply
    return [*recorded(first, grows, turn - 1), *sampled_ids(STOP), *bridge]


def rendering(mode: bytes, first: int, grows: int, turn: int) -> list[int]:
    """Return the prompt ids of a turn as the template renders its messages."""
    ids = recorded(first, grows, turn)
    if mode == b"exact" or not turn:
        return ids
    split = ids[first]
    return [*ids[:first], split + 1, split + 2, *ids[first + 1 :]]


@cache
def _tokenized(mode: bytes, first: int, grows: int, turn: int) -> bytes:
    ids = rendering(mode, first, grows, turn)
    return answer_with(orjson.dumps({"count": len(ids), "max_model_len": WINDOW, "tokens": ids, "token_strs": None}))


@cache
def _detokenized(text: str) -> bytes:
    return answer_with(orjson.dumps({"prompt": text}))


@cache
def _written_ids(mode: bytes, first: int, grows: int, turn: int) -> bytes:
    """Return the prompt ids in JSON, without brackets."""
    return orjson.dumps(rendering(mode, first, grows, turn))[1:-1]


@cache
def _responded(mode: bytes, first: int, grows: int, turn: int, *, streamed: bool) -> list[bytes]:
    """Return the HTTP response, or the chunks of a streamed one."""
    ids = _written_ids(mode, first, grows, turn)
    counts = b'"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d'
    count = ids.count(b",") + 1
    parts = events(0, stop=STOP) if streamed else [whole(0, stop=STOP, text=REPLY)]
    parts = [
        part.replace(_IDS, _IDS + ids).replace(counts % (0, EVENTS, EVENTS), counts % (count, EVENTS, count + EVENTS))
        for part in parts
    ]
    return [framed(part) for part in parts] if streamed else [answer_with(parts[0])]


class TurnsEngine(Engine):
    """One connection. `GET /counts` returns the number of requests of all connections by path."""

    counts: ClassVar[Counter[str]] = Counter()

    def answer(self, head: bytes, body: bytes) -> None:
        """Write the response."""
        path = head.split(b" ", 2)[1].decode()
        if path == "/counts":
            self.transport.write(answer_with(orjson.dumps(self.counts)))
            return
        self.counts[path] += 1
        found = _MODEL.search(body, max(0, body.rfind(b'"mode-')))
        if path == "/detokenize":
            is_single = b"," not in body
            self.transport.write(_detokenized(_STOP_TEXT if is_single else REPLY + _STOP_TEXT))
        elif found is None:
            super().answer(head, body)
        else:
            mode, *numbers = found[1], int(found[2]), int(found[3]), body.count(b'"role":"assistant"')
            if path == "/tokenize":
                self.transport.write(_tokenized(mode, *numbers))
            else:
                self._answer_turn(_sent_ids(body), mode, numbers, streamed=b'"stream":true' in body)

    def _answer_turn(self, ids: bytes, mode: bytes, numbers: list[int], *, streamed: bool) -> None:
        """Write the response for these prompt ids, or without them for the template's rendering."""
        if ids and ids != _written_ids(b"exact", *numbers):
            self.transport.write(b"HTTP/1.1 500 Other ids than recorded\r\nContent-Length: 0\r\n\r\n")
        elif streamed:
            self.stream(_responded(b"exact" if ids else mode, *numbers, streamed=True))
        else:
            self.transport.write(_responded(b"exact" if ids else mode, *numbers, streamed=False)[0])


def _sent_ids(body: bytes) -> bytes:
    """Return the prompt ids of a request as they are written there; empty if it has none."""
    start = body.find(_IDS) + len(_IDS)
    return body[start : body.index(b"]", start)] if start >= len(_IDS) else b""
