"""Requests of agents, drawn from a seed: calls of every dialect with odd values, headers and encodings.

They are sent over a plain socket, since an HTTP client would reject some of them.
"""

import asyncio
import gzip
import zlib
from copy import deepcopy
from dataclasses import dataclass
from random import Random
from typing import Any
from urllib.parse import urlsplit

import orjson
from tests.support.odd_values import nested, odd, odd_text, paths_in, put
from tests.support.responses_drawn import RICH

Json = dict[str, Any]
TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}},
}
CALL = {"id": "call-1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
CHAT_MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {
        "role": "user",
        "content": [{"type": "text", "text": "hi"}, {"type": "image_url", "image_url": {"url": "data:,"}}],
    },
    {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call-1", "content": "4"},
]
CHAT = {
    "model": "tiny", "messages": CHAT_MESSAGES, "tools": [TOOL], "tool_choice": "auto", "max_tokens": 64, "temperature": 1.0,
    "n": 1, "stop": ["x"], "logprobs": True, "top_logprobs": 1, "response_format": {"type": "text"}, "stream": False,
    "stream_options": {"include_usage": True}, "metadata": {"a": "b"}, "seed": 1, "logit_bias": {"5": 1}, "rollout_id": "r",
}  # fmt: skip
BLOCKS = [
    {"type": "thinking", "thinking": "hm", "signature": "s"},
    {"type": "text", "text": "Let me see.", "cache_control": {"type": "ephemeral"}},
    {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"a": 1}},
]
MESSAGES = {
    "model": "tiny", "max_tokens": 64, "system": [{"type": "text", "text": "Be brief."}], "stream": False,
    "messages": [
        {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "u"}}, {"type": "text", "text": "a"}]},
        {"role": "assistant", "content": BLOCKS},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "4", "is_error": False}]},
    ],
    "tools": [{"name": "f", "input_schema": {"type": "object"}}], "tool_choice": {"type": "auto"}, "temperature": 1.0,
    "stop_sequences": ["x"], "thinking": {"type": "disabled"}, "metadata": {"user_id": "u"},
}  # fmt: skip
PLAIN = [{"role": "user", "content": "hi"}]
GOOD: tuple[tuple[str, Json], ...] = (
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", {"model": "tiny", "messages": PLAIN, "max_tokens": 64}),
    ("/v1/completions", {"model": "tiny", "prompt": "hi", "max_tokens": 64, "logprobs": 1, "echo": False, "stream": False}),
    ("/v1/completions", {"model": "tiny", "prompt": [[5, 6], [7]], "max_tokens": 64, "n": 2}),
    ("/v1/completions", {"model": "default", "messages": PLAIN, "response_mask": [1, 0], "max_tokens": 64, "stop": ["x"]}),
    ("/inference/v1/generate", {"token_ids": [5, 6], "sampling_params": {"max_tokens": 64, "n": 1, "logprobs": 0}}),
    ("/generate", {"prompt": {"prompt_token_ids": [5, 6]}, "max_tokens": 64, "n": 1, "temperature": 1.0}),
    ("/v1/responses", RICH),
    ("/v1/responses", {"model": "tiny", "input": "hi", "max_output_tokens": 64, "stream": False}),
    ("/v1/messages", MESSAGES),
    ("/v1/messages", {"model": "tiny", "messages": PLAIN, "max_tokens": 64}),
    ("/v1/messages/count_tokens", MESSAGES),
    ("/v1/rollout/completed", {"rollout_id": "r", "status": "COMPLETED", "reward": 1.0, "final_messages": PLAIN}),
)  # fmt: skip
# Without Content-Length and Transfer-Encoding, after which the server correctly waits for more.
HEADERS = (
    b"Idempotency-Key", b"X-Rollout-Id", b"X-Rollout-Group", b"X-Stainless-Retry-Count", b"X-Reply-Ids", b"X-Reply-Tokens",
    b"X-Request-Id", b"Authorization", b"X-Api-Key", b"Content-Type", b"Accept", b"User-Agent", b"Content-Encoding", b"Expect",
    b"anthropic-version", b"anthropic-beta", b"X-Odd", b"Cookie", b"Date", b"Range",
)  # fmt: skip
VALUES = (
    b"", b"\xff", b"\xc3\xa9", b"a\x00b", b"a\x01\x1b[2J", b"x" * 300, b"x" * 9_000, b"choices",
    b"marin", b"../..", b"%00%2f", b"a b",
    b"{}", b"-1", b"1e400", b"99999999999999999999", b"None", b"application/json", b"text/html", b"gzip", b"br", b"bogus",
    b"*/*", b"Bearer \xff", b"Bearer tt_x", b"Basic ===", b"\xf0\x9f\x98\x80", b"deflate", b"application/json; charset=utf-16",
    b"100-continue",
)  # fmt: skip
REFUSALS = {400, 401, 403, 404, 405, 408, 409, 413, 415, 417, 422, 429, 431, 501, 502, 503, 504}


@dataclass(frozen=True)
class Request:
    """A POST: path, extra headers, and the bytes of its body."""

    path: str
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes


def drawn_request(random: Random, rollout: str, messages: list | None = None) -> Request:
    """Return a call within a rollout. `messages`: a chat to continue."""
    path, good = random.choice(GOOD)
    body = deepcopy(good)
    if messages is not None:
        path, body = GOOD[1][0], {**deepcopy(GOOD[1][1]), "messages": messages}
    for _ in range(random.choice((0, 1, 1, 2, 3))):
        _change(body, random)
    if "stream" in body and random.random() < 0.3:
        body["stream"] = True
    text = orjson.dumps(body, option=orjson.OPT_NON_STR_KEYS)
    if random.random() < 0.04:
        text = random.choice(
            (odd_text(random), nested(random, 199), b"", text[: random.randrange(len(text))], b"\xef\xbb\xbf" + text)
        )
    headers: list[tuple[bytes, bytes]] = []
    if random.random() < 0.25:
        headers.append((random.choice(HEADERS), random.choice(VALUES)))
    if random.random() < 0.06:
        headers.append((b"Content-Encoding", random.choice((b"gzip", b"deflate"))))
        text = gzip.compress(text) if random.random() < 0.5 else zlib.compress(text)
    prefix = f"/rollouts/{rollout}" if random.random() < 0.95 else ""
    return Request(prefix + path, tuple(headers), text)


async def ask_raw(url: str, request: Request) -> Answer:
    """Send a request on a new connection; its headers replace the usual ones."""
    at = urlsplit(url)
    reader, writer = await asyncio.open_connection(at.hostname, at.port)
    names = {name.lower() for name, _ in request.headers}
    usual = (
        (b"Host", b"localhost"),
        (b"Content-Type", b"application/json"),
        (b"Content-Length", b"%d" % len(request.body)),
    )
    lines = [*(pair for pair in usual if pair[0].lower() not in names), *request.headers, (b"Connection", b"close")]
    head = (
        b"POST "
        + request.path.encode()
        + b" HTTP/1.1\r\n"
        + b"".join(name + b": " + value + b"\r\n" for name, value in lines)
    )
    try:
        writer.write(head + b"\r\n" + request.body)
        text = await reader.read()
    finally:
        writer.close()
    return _parsed(text)


def complaint_of(request: Request, response: Answer) -> str | None:
    """Return what is wrong with a response; None if nothing is."""
    if response.status != 200 and response.status not in REFUSALS:
        return f"status {response.status}: {response.body[:500]!r}"
    if response.status == 200:
        return None
    try:
        error = orjson.loads(response.body)["error"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return f"a refusal ({response.status}) that is no JSON with an error: {response.body[:500]!r}"
    if not isinstance(error, dict) or not isinstance(error.get("message"), str):
        return f"an error without a message: {response.body[:500]!r}"
    if error.get("code") == "internal_error":
        return f"an internal error: {response.body[:500]!r}"
    return None


def _change(body: Json, random: Random) -> None:
    """Insert an odd value somewhere, or remove something."""
    found = paths_in(body)
    if not found:
        return
    path = random.choice(found)
    match random.randrange(8):
        case 0:
            put(body, path, None)
        case 1:
            depth = random.choice((100, 180, 190, *range(194, 202)))
            put(body, path, orjson.Fragment(nested(random, depth)))
        case 2:
            put(body, path, [_at(body, path)] * random.randrange(3))
        case _:
            put(body, path, odd(random))


def _at(value: Any, path: tuple) -> Any:
    for key in path:
        value = value[key]
    return value


def _parsed(text: bytes) -> Answer:
    """Parse the response in the bytes of a connection. Raises ValueError if there is none."""
    while text.startswith(b"HTTP/1.1 100"):
        text = text.partition(b"\r\n\r\n")[2]
    head, gap, body = text.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    if not gap or not first.startswith("HTTP/1."):
        raise ValueError(f"no answer of HTTP: {text[:300]!r}")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if headers.get("transfer-encoding") == "chunked":
        body = _joined(body)
    return Answer(int(first.split()[1]), headers, body)


def _joined(body: bytes) -> bytes:
    """Decode a chunked body, without an incomplete last chunk."""
    found = b""
    while body:
        size, _, body = body.partition(b"\r\n")
        length = int(size, 16) if size else 0
        found, body = found + body[:length], body[length + 2 :]
        if not length:
            break
    return found
