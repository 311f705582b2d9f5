"""Agents' calls to faulty engines through a proxy: what agents get, and what is recorded."""

import asyncio
from contextlib import suppress
from random import Random
from typing import Any

import aiohttp
import orjson
from tests.support.all_readers import Failed, Readers
from tests.support.faulty_calls import FaultyCall
from tests.support.faulty_oracle import excuse, must_be_flagged
from tests.support.odd_values import odd_text
from tests.support.raw_engine import RawEngine, Sent

TIMEOUT_S = 50
ALLOWED = {200, 502, 503, 504}
ODD_HEADERS = (
    b"X-Odd: a\x01b", b"X-Odd: \xff\xfe", b"X-Odd: " + b"x" * 3_000, b"X-Step-Id: mine", b"X-Rollout-Id: other", b"X-Odd:",
    b"Content-Encoding: bogus", b"Set-Cookie: a=b", b"X-\x7f: a",
)  # fmt: skip
STATUSES = (
    b"204 No Content",
    b"400 Bad Request",
    b"500 Internal Server Error",
    b"099 Odd",
    b"999 Odd",
    b"101 Switching Protocols",
    b"429 Too Many Requests",
)


class Agent:
    """An agent with a proxy and a faulty engine of one kind. `faults_of_http`: the engine also violates HTTP."""

    def __init__(self, http: aiohttp.ClientSession, url: str, engine: RawEngine) -> None:
        self.http, self.url, self.engine = http, url, engine
        self.body: dict = {}
        self.faulty_http = False

    async def call(self, rollout: str, call: FaultyCall, random: Random, *, dialect: str | None = None) -> str | None:
        """Make the call, in `dialect` if that is not the engine's; return the ID of its step, if it has one. Raises
        Failed.
        """
        self.faulty_http = False

        async def respond(path: str, body: dict) -> Sent:
            if path != call.path:
                lookup = orjson.dumps({"tokens": call.truth.prompts[0]})
                return Sent([lookup if random.random() < 0.8 else odd_text(random)])
            self.body = body
            return self._sent(call, body, random)

        self.engine.respond = respond
        path, body = _in_dialect(call, dialect)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return await self._request(f"{self.url}/rollouts/{rollout}{path}", body, dialect or call.dialect)
        except TimeoutError:
            raise Failed(f"no end after {TIMEOUT_S} s") from None
        except aiohttp.ClientError as error:
            raise Failed(f"a response that no client can parse: {error!r}") from error

    async def _request(self, url: str, body: dict, dialect: str) -> str | None:
        async with self.http.post(
            url, data=orjson.dumps(body), headers={"Content-Type": "application/json"}
        ) as response:
            text, is_whole = b"", True
            try:
                async for read in response.content.iter_any():
                    text += read
            except aiohttp.ClientPayloadError:
                is_whole = False
        step_id = response.headers.get("X-Step-Id")
        if response.status not in ALLOWED and not self.faulty_http:
            raise Failed(f"the call is {response.status}: {text[:500]!r}")
        if response.status == 500 and b"internal_error" in text:
            raise Failed(f"the call is 500: {text[:500]!r}")
        if is_whole and not self.faulty_http and not _shaped(dialect, response.status, response.content_type, text):
            raise Failed(f"an answer of {response.status} that is not in the shape of {dialect}: {text[:1_000]!r}")
        return step_id

    def _sent(self, call: FaultyCall, body: dict, random: Random) -> Sent:
        text, content_type = call.response_to(body)
        sent = Sent([read for read in call.in_reads(text) if read], content_type)
        # After a lone CR, the LF of the same line break may follow: such a stream is not known to be complete.
        if text.endswith(b"data: [DONE]" + call.end) and not call.end.endswith(b"\r") and random.random() < 0.1:
            sent.then = "hang"
        if random.random() < 0.1:
            self.faulty_http, sent.then = True, "end"
            match random.randrange(5):
                case 0:
                    sent.headers = (random.choice(ODD_HEADERS),)
                case 1:
                    sent.status = random.choice(STATUSES)
                case 2:
                    sent.content_type = random.choice(
                        ("text/plain", "", "application/json; charset=x", "text/event-stream", "*/*")
                    )
                case 3:
                    sent.length = max(len(text) + random.choice((-5, 5)), 0)
                case _:
                    sent.then = "die"
        return sent

    async def judge(self, readers: Readers, rollout: str, step_id: str | None, call: FaultyCall) -> None:
        """Check the step of a call: it exists and is exact only with the sampled ids. Raises Failed."""
        if step_id is None:
            return
        steps = [step for step in await readers.steps(rollout) if step["step_id"] == step_id]
        if not steps:
            raise Failed(f"the step {step_id} is not in {rollout}")
        (step,) = steps
        if not step["fidelity"]["exact"] or excuse(call, self.body):
            return
        found = [(choice["index"], choice["prompt"], choice["ids"], choice["logprobs"]) for choice in step["choices"]]
        truth = [(choice.index, choice.prompt, choice.ids, choice.logprobs) for choice in call.truth.choices]
        prompts = step.get("prompts") or [step["prompt_ids"]]
        if prompts != call.truth.prompts or sorted(found) != truth:
            raise Failed(f"an exact step differs from what was sampled, after {call.used}: {prompts} {found}")
        if must_be_flagged(call, self.body):
            raise Failed(f"nothing is flagged after {call.used}")


def _in_dialect(call: FaultyCall, dialect: str | None) -> tuple[str, dict]:
    """Return the path and body of a call, in the dialect of an agent."""
    if dialect is None:
        return call.path, call.body
    body: dict[str, Any] = {"model": "tiny", "stream": call.body.get("stream", False)}
    if dialect == "gemini":
        method = "streamGenerateContent?alt=sse" if body["stream"] else "generateContent"
        config = {"maxOutputTokens": call.body["max_tokens"]}
        contents = [{"role": "user", "parts": [{"text": "hi"}]}]
        return f"/v1beta/models/tiny:{method}", {"contents": contents, "generationConfig": config}
    if dialect == "messages":
        return "/v1/messages", {
            **body,
            "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": call.body["max_tokens"],
        }
    return "/v1/responses", {**body, "input": "hi", "max_output_tokens": max(call.body["max_tokens"], 16)}


def _shaped(dialect: str, status: int, content_type: str, text: bytes) -> bool:
    """Return whether an unstreamed response has this dialect's shape. In an engine's own dialect it may be garbled."""
    if status != 200:
        with suppress(orjson.JSONDecodeError):
            payload = orjson.loads(text)
            return isinstance(payload, dict) and "error" in payload
        return dialect in ("chat", "completions", "generate")
    if dialect in ("chat", "completions", "generate"):
        return True
    if dialect == "gemini":
        last = text.strip().rpartition(b"data: ")[2] if content_type == "text/event-stream" else text
        response = orjson.loads(last)
        return "error" in response or all("finishReason" in candidate for candidate in response["candidates"])
    if content_type == "text/event-stream":
        ends = (
            ("message_stop", "error")
            if dialect == "messages"
            else ("response.completed", "response.incomplete", "response.failed", "error")
        )
        return any(b"event: " + end.encode() in text for end in ends)
    payload = orjson.loads(text)
    return payload.get("type") == "message" if dialect == "messages" else payload.get("object") == "response"
