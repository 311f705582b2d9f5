"""An engine that responds immediately with fixed bytes in vLLM's format, so that only the proxy is measured."""

import asyncio
import random
import re
from collections.abc import Iterable, Iterator
from functools import cache

import orjson

PROMPT_TOKENS, SAMPLED_TOKENS, EVENTS = 1_000, 200, 200
CUT_PROMPT, CUT_TOKENS, CUT_AT = 200, 8, 4  # of a stream that is cut after four tokens
SLOW_S = 5.0
PACE_S = 0.008  # between the events of a paced stream: 125 tokens per second, as a busy engine samples them
HALF_WAY_S = 1.0  # until the last event of a stream that never ends, which arrives in a read of its own
MODE = re.compile(rb'"mode-([a-z]+)(?:-([0-9]+))?"')


def _entry(number: int) -> dict:
    token = f" word{number}"
    return {"token": token, "logprob": -1 - number / 1024, "bytes": list(token.encode()), "top_logprobs": []}


def whole(prompt_tokens: int = PROMPT_TOKENS, *, stop: int | None = None, text: str | None = None) -> bytes:
    """Return an unstreamed chat response with ids and logprobs, and that `text`.

    `stop` is the id of a stop token that ends the turn; without it, the limit does.
    """
    chance = random.Random(1)
    entries = [_entry(number) for number in range(SAMPLED_TOKENS)]
    choice = {
        "index": 0,
        "message": {
            "role": "assistant",
            "content": "".join(e["token"] for e in entries) if text is None else text,
            "refusal": None,
            "reasoning": None,
        },
        "logprobs": {"content": entries},
        "finish_reason": "length" if stop is None else "stop",
        "stop_reason": None,
        "token_ids": [chance.randrange(150_000) for _ in entries] if stop is None else sampled_ids(stop),
    }
    usage = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": SAMPLED_TOKENS,
        "total_tokens": prompt_tokens + SAMPLED_TOKENS,
    }
    return orjson.dumps(
        {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "created": 1,
            "model": "m",
            "choices": [choice],
            "usage": usage,
            "prompt_token_ids": [chance.randrange(150_000) for _ in range(prompt_tokens)],
        }
    )


def prompt_ids(count: int) -> list[int]:
    """Return the prompt ids of a streamed response."""
    return [number * 31 % 150_000 for number in range(count)]


def sampled_ids(stop: int | None = None) -> list[int]:
    """Return the sampled ids of a streamed response; the last one is `stop`, if there is one."""
    ids = [number * 37 % 150_000 for number in range(EVENTS)]
    return ids if stop is None else [*ids[:-1], stop]


def events(
    prompt_tokens: int = PROMPT_TOKENS, *, stop: int | None = None, first: int = 0, count: int = EVENTS
) -> list[bytes]:
    """Return the events of a streamed chat response: the role, one per token, usage, [DONE].

    `stop` is the id of a stop token that ends the turn; without it, the limit does. Of a turn of `count` tokens, the `first`
    ones are the end of the prompt.
    """
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m"}

    def chunk(delta: dict, number: int | None, finish: str | None = None, **top: object) -> bytes:
        logprobs = None if number is None else {"content": [_entry(number)]}
        choice: dict = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        if number is not None:
            choice["token_ids"] = [sampled[number]]
        return b"data: " + orjson.dumps({**head, "choices": [choice], **top}) + b"\n\n"

    sampled = sampled_ids(stop)
    prompt = [*prompt_ids(prompt_tokens), *sampled[:first]]
    begin = chunk({"role": "assistant", "content": ""}, None, prompt_token_ids=prompt)
    middle = [chunk({"content": f" word{number}"}, number) for number in range(first, count - 1)]
    last = chunk({"content": " end" if stop is None else ""}, count - 1, "length" if stop is None else "stop")
    tokens = len(prompt), count - first
    counts = {"prompt_tokens": tokens[0], "completion_tokens": tokens[1], "total_tokens": sum(tokens)}
    usage = (
        b"data: "
        + orjson.dumps({**head, "choices": [], "usage": counts, "system_fingerprint": "vllm-0.32.0"})
        + b"\n\n"
    )
    return [begin, *middle, last, usage, b"data: [DONE]\n\n"]


def framed(event: bytes) -> bytes:
    """Return an event as an HTTP chunk."""
    return b"%x\r\n%s\r\n" % (len(event), event)


@cache
def whole_answer(prompt_tokens: int) -> bytes:
    """Return the unstreamed HTTP response."""
    return answer_with(whole(prompt_tokens))


def answer_with(body: bytes) -> bytes:
    """Return an HTTP response with this JSON body."""
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body


@cache
def stream_events(prompt_tokens: int) -> list[bytes]:
    """Return the events of the streamed response, each as an HTTP chunk."""
    return [framed(event) for event in events(prompt_tokens)]


STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
STREAM_END = b"0\r\n\r\n"


class Engine(asyncio.Protocol):
    """One connection. The model name in the request selects the response: whole, stream, paced, slow or hang.

    A number selects the number of prompt tokens: `mode-stream-8000`.
    """

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.read = bytearray()
        self.needed = 0  # bytes of the request; 0 until its head is read

    def data_received(self, data: bytes) -> None:
        self.read += data
        if not self.needed:
            end = self.read.find(b"\r\n\r\n")
            if end < 0:
                return
            lines = bytes(self.read[:end]).lower().split(b"\r\n")
            length = next((int(line[15:]) for line in lines if line.startswith(b"content-length:")), 0)
            self.needed = end + 4 + length
        if len(self.read) < self.needed:
            return
        head, _, body = bytes(self.read[: self.needed]).partition(b"\r\n\r\n")
        del self.read[: self.needed]
        self.needed = 0
        self.answer(head, body)

    def answer(self, head: bytes, body: bytes) -> None:
        """Write the response; one write per event, as engines do."""
        if head.startswith(b"GET"):
            self.transport.write(answer_with(b'{"version":"0.32.0"}'))
        else:
            self._answer_call(body)

    def _answer_call(self, body: bytes) -> None:
        found = MODE.search(body)
        mode, tokens = (found[1], int(found[2] or PROMPT_TOKENS)) if found else (b"whole", PROMPT_TOKENS)
        if mode == b"slow":
            asyncio.get_running_loop().call_later(SLOW_S, self.transport.write, whole_answer(tokens))
        elif mode == b"hang":
            *chunks, last = stream_events(tokens)[: EVENTS // 2]
            self.transport.write(STREAM_HEAD + b"".join(chunks))
            asyncio.get_running_loop().call_later(HALF_WAY_S, self.transport.write, last)
        elif mode == b"stream":
            self.stream(stream_events(tokens))
        elif mode == b"paced":
            self._pace(iter([STREAM_HEAD, *stream_events(tokens), STREAM_END]))
        else:
            self.transport.write(whole_answer(tokens))

    def _pace(self, chunks: Iterator[bytes]) -> None:
        """Write one chunk after the other."""
        chunk = next(chunks, None)
        if chunk is not None and not self.transport.is_closing():
            self.transport.write(chunk)
            asyncio.get_running_loop().call_later(PACE_S, self._pace, chunks)

    def stream(self, chunks: Iterable[bytes]) -> None:
        """Write a streamed response in a burst."""
        self.transport.write(STREAM_HEAD)
        for chunk in chunks:
            self.transport.write(chunk)
        self.transport.write(STREAM_END)


class CutEngine(Engine):
    """It samples the first tokens of a stream, and then waits; a call that is resumed from them has the rest at once."""

    def answer(self, head: bytes, body: bytes) -> None:
        """Write the response."""
        if head.startswith(b"POST /detokenize "):
            count = body.count(b",", body.index(b"["), body.index(b"]")) + 1
            self.transport.write(_detokenized(count))
        elif head.startswith(b"GET"):
            super().answer(head, body)
        elif b'"prompt_token_ids":[' in body:
            self.stream(_parts(CUT_AT))
        else:
            self.transport.write(STREAM_HEAD + b"".join(_parts(0)[: CUT_AT + 1]))


@cache
def _parts(first: int) -> list[bytes]:
    return [framed(event) for event in events(CUT_PROMPT, first=first, count=CUT_TOKENS)]


@cache
def _detokenized(count: int) -> bytes:
    """Return the text of so many ids at the cut, or before the first one of them was sampled."""
    return answer_with(orjson.dumps({"prompt": "prompt" + "".join(f" word{at}" for at in range(count - 8))}))


async def listen(engine: type[Engine] = Engine) -> tuple[asyncio.Server, int]:
    """Start the engine on a free port; return the server and the port."""
    server = await asyncio.get_running_loop().create_server(engine, "127.0.0.1", 0, backlog=8192)
    return server, server.sockets[0].getsockname()[1]
