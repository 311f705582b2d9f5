"""An engine that answers at once, with fixed bytes in vLLM's shape: what is measured is what stands before it."""

import asyncio
import random

import orjson

PROMPT_TOKENS, SAMPLED_TOKENS, EVENTS = 1_000, 200, 200
SLOW_S = 5.0


def _entry(number: int) -> dict:
    token = f" word{number}"
    return {"token": token, "logprob": -1 - number / 1024, "bytes": list(token.encode()), "top_logprobs": []}


def whole() -> bytes:
    """An unstreamed chat response with ids and logprobs."""
    chance = random.Random(1)
    entries = [_entry(number) for number in range(SAMPLED_TOKENS)]
    choice = {
        "index": 0,
        "message": {
            "role": "assistant",
            "content": "".join(e["token"] for e in entries),
            "refusal": None,
            "reasoning": None,
        },
        "logprobs": {"content": entries},
        "finish_reason": "length",
        "stop_reason": None,
        "token_ids": [chance.randrange(150_000) for _ in entries],
    }
    usage = {
        "prompt_tokens": PROMPT_TOKENS,
        "completion_tokens": SAMPLED_TOKENS,
        "total_tokens": PROMPT_TOKENS + SAMPLED_TOKENS,
    }
    return orjson.dumps(
        {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "created": 1,
            "model": "m",
            "choices": [choice],
            "usage": usage,
            "prompt_token_ids": [chance.randrange(150_000) for _ in range(PROMPT_TOKENS)],
        }
    )


def events() -> list[bytes]:
    """The events of a streamed chat: role, one token each, the end."""
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m"}

    def chunk(delta: dict, number: int | None, finish: str | None = None, **top: object) -> bytes:
        logprobs = None if number is None else {"content": [_entry(number)]}
        choice: dict = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        if number is not None:
            choice["token_ids"] = [number * 37 % 150_000]
        return b"data: " + orjson.dumps({**head, "choices": [choice], **top}) + b"\n\n"

    ids = [number * 31 % 150_000 for number in range(PROMPT_TOKENS)]
    first = chunk({"role": "assistant", "content": ""}, None, prompt_token_ids=ids)
    middle = [chunk({"content": f" word{number}"}, number) for number in range(EVENTS - 1)]
    return [first, *middle, chunk({"content": " end"}, EVENTS - 1, "length"), b"data: [DONE]\n\n"]


def _framed(event: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(event), event)


WHOLE = whole()
WHOLE_ANSWER = (b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(WHOLE)) + WHOLE
STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
STREAM_EVENTS = [_framed(event) for event in events()]
STREAM_END = b"0\r\n\r\n"


class Engine(asyncio.Protocol):
    """One connection. What is answered depends on a word in the request's body: whole, stream, slow, hang."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.read = b""

    def data_received(self, data: bytes) -> None:
        self.read += data
        head, found, rest = self.read.partition(b"\r\n\r\n")
        if not found:
            return
        length = next(
            (int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")), 0
        )
        if len(rest) < length:
            return
        body, self.read = rest[:length], rest[length:]
        self.answer(head, body)

    def answer(self, head: bytes, body: bytes) -> None:
        """Write the answer; an event a write, as engines do."""
        if head.startswith(b"GET"):
            self.transport.write(
                b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 20\r\n\r\n{"version":"0.32.0"}'
            )
        elif b'"mode-slow"' in body:
            asyncio.get_running_loop().call_later(SLOW_S, self.transport.write, WHOLE_ANSWER)
        elif b'"mode-hang"' in body:
            self.transport.write(STREAM_HEAD + b"".join(STREAM_EVENTS[: EVENTS // 2]))
        elif b'"mode-stream"' in body:
            self.transport.write(STREAM_HEAD)
            for event in STREAM_EVENTS:
                self.transport.write(event)
            self.transport.write(STREAM_END)
        else:
            self.transport.write(WHOLE_ANSWER)


async def listen() -> tuple[asyncio.Server, int]:
    """The engine, listening on a free port."""
    server = await asyncio.get_running_loop().create_server(Engine, "127.0.0.1", 0, backlog=8192)
    return server, server.sockets[0].getsockname()[1]
