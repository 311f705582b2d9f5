"""A scripted vLLM: each token is a byte of its reply, and a call may end after a given number of tokens."""

import asyncio
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import orjson
from aiohttp import web

REPLY = "The quick brown fox jumps over the lazy dog, and runs away."
PROMPT = [104, 105, 10]
END = 256  # the stop token
_SPLIT = "\N{REPLACEMENT CHARACTER}"


def tokens_of(reply: str) -> list[int]:
    """Return the ids of a whole reply."""
    return [*reply.encode(), END]


def text_of(ids: list[int]) -> str:
    """Return the text of ids, as /detokenize does."""
    return b"".join(b"<|end|>" if token == END else bytes([token]) for token in ids).decode(errors="replace")


@dataclass
class Sampled:
    """One call: its ids, the text that each of them shows, and why it ended."""

    ids: list[int]
    texts: list[str]
    reason: str
    stop: str | None = None
    held_at: int | None = None
    flushed: str = ""  # the text that is withheld for stop strings until the end


class ScriptedEngine:
    """It returns `reply` and a stop token; `ends` has for each of the next calls after how many tokens it ends, and how.

    As vLLM 0.32, it searches for stop strings in the text of a call's own tokens only, and shows a prompt that ends inside a
    character again once the character is complete.

    `has_ids`: it returns token ids and logprobs; without, it is no engine that TokenTape knows.
    `parses`: `<call>NAME ARGUMENTS</call>` in the text of a chat call's own tokens is a tool call, and /derender parses ids.
    """

    def __init__(self, reply: str = REPLY, *, parses: bool = False, has_ids: bool = True) -> None:
        self.reply = reply
        self.has_ids = has_ids
        self.overshoots = 0  # tokens that it samples beyond a limit
        self.parses = parses
        self.ends: list[tuple[int, str] | None] = []
        self.requests: list[dict[str, Any]] = []
        self.held, self.released = asyncio.Event(), asyncio.Event()  # of a stream that is "held", or before its usage
        self.holds_usage = False

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read() or b"{}")
        known = {
            "/version": lambda: {"version": "0.32.0"},
            "/v1/models": lambda: {"object": "list", "data": [{"id": "m", "owned_by": "vllm", "max_model_len": 9999}]},
            "/detokenize": lambda: {"prompt": text_of(body["tokens"])},
            "/tokenize": lambda: {"tokens": PROMPT, "count": len(PROMPT), "max_model_len": 9999},
            "/health": dict,
            "/openapi.json": lambda: {"paths": {"/v1/chat/completions/derender": {}} if self.parses else {}},
            "/v1/chat/completions/derender": lambda: self._derendered(body),
        }
        if not self.has_ids:
            known = {"/health": dict}
        if request.path in known:
            return web.json_response(known[request.path]())
        if not request.path.endswith("/completions"):
            return web.Response(status=404)
        self.requests.append(body)
        is_chat = "chat" in request.path
        own = body.get("prompt")
        given = (body.get("kv_transfer_params") or {}).get("prompt_token_ids")
        prompt = given or (own if isinstance(own, list) else PROMPT)
        sampled = self._sampled(prompt, body)
        number, count = len(self.requests), len(sampled.ids)
        kind = "chat.completion" if is_chat else "text_completion"
        head = {"id": f"c{number}", "object": kind, "created": 1000 + number, "model": "m"}
        usage = {"prompt_tokens": len(prompt), "completion_tokens": count, "total_tokens": len(prompt) + count}
        if body.get("stream"):
            return await self._stream(request, head, prompt, sampled, usage, is_chat=is_chat)
        if sampled.reason == "lost":
            request.transport.close()
            return web.Response()
        text = "".join(sampled.texts) + sampled.flushed
        choice = {"index": 0, **_part(sampled.ids, text, is_chat=is_chat, name="message")}
        choice |= {"finish_reason": sampled.reason, "stop_reason": sampled.stop}
        if is_chat and self.parses:
            choice["message"] = message_of(text)
            if sampled.reason == "stop" and "tool_calls" in choice["message"]:
                choice["finish_reason"] = "tool_calls"
        top = {"prompt_token_ids": prompt} if is_chat else {}
        choice |= {} if is_chat else {"prompt_token_ids": prompt}
        return web.json_response({**head, "choices": [choice], "usage": usage, **top})

    def _derendered(self, body: dict[str, Any]) -> dict[str, Any]:
        (choice,) = body["generate_response"]["choices"]
        return {"choices": [{"index": 0, "message": message_of(text_of(choice["token_ids"]))}]}

    def _sampled(self, prompt: list[int], body: dict[str, Any]) -> Sampled:
        rest = tokens_of(self.reply)[len(prompt) - len(PROMPT) :]
        limit = (body.get("max_tokens") or len(rest)) + self.overshoots
        end = self.ends.pop(0) if self.ends else None
        sampled = Sampled(rest[:limit], [], "stop" if limit >= len(rest) else "length")
        stops = body.get("stop") or []
        withheld = max(map(len, stops), default=1) - 1
        pending, text, shown = bytes(prompt) if text_of(prompt).endswith(_SPLIT) else b"", "", 0
        for at, token in enumerate(sampled.ids):
            if end is not None and at == end[0]:
                if end[1] == "held":
                    sampled.held_at = at
                else:
                    sampled.ids, sampled.reason = sampled.ids[:at], end[1]
                    break
            pending += b"" if token == END else bytes([token])
            if not pending.decode(errors="replace").endswith(_SPLIT):
                text, pending = text + pending.decode(errors="replace"), b""
            stop = next((stop for stop in stops if stop in text), None)
            if stop is not None:
                sampled.ids, sampled.reason, sampled.stop = sampled.ids[: at + 1], "stop", stop
                text = text[: text.index(stop)]
            most = max(len(text) - (0 if stop else withheld), shown)
            sampled.texts.append(text[shown:most])
            shown = most
            if stop is not None:
                break
        sampled.flushed = text[shown:]
        return sampled

    async def _stream(self, request, head, prompt, sampled: Sampled, usage, *, is_chat: bool) -> web.StreamResponse:
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await stream.prepare(request)
        head = {**head, "object": head["object"] + (".chunk" if is_chat else "")}
        reason = sampled.reason

        async def write(choices: list[dict[str, Any]], **fields: Any) -> None:
            if not self.has_ids:
                fields.pop("prompt_token_ids", None)
                hidden = {"token_ids", "logprobs", "prompt_token_ids"}
                choices = [{name: value for name, value in choice.items() if name not in hidden} for choice in choices]
            await stream.write(b"data: " + orjson.dumps({**head, "choices": choices, **fields}) + b"\n\n")

        async def part(ids: list[int], text: str, reason: str | None, **own: Any) -> None:
            fields = _part(ids, text, is_chat=is_chat, name="delta")
            ended = {"finish_reason": reason, "stop_reason": sampled.stop if reason else None}
            await write([{"index": 0, **fields, **ended, **own}])

        if is_chat:
            choice = {
                "index": 0,
                "delta": {"role": "assistant", "content": ""},
                "logprobs": None,
                "finish_reason": None,
            }
            await write([choice], prompt_token_ids=prompt)
        so_far, shown = "", {"content": "", "calls": 0}
        for at, (token, text) in enumerate(zip(sampled.ids, sampled.texts, strict=True)):
            if at == sampled.held_at:
                self.held.set()
                await self.released.wait()
            is_last = at == len(sampled.ids) - 1 and reason in {"stop", "length"}
            own = {} if is_chat or at else {"prompt_token_ids": prompt}
            added = text + (sampled.flushed if is_last else "")
            if is_chat and self.parses:
                so_far += added
                own["delta"] = _deltas(message_of(so_far), shown)
                has_calls = is_last and reason == "stop" and shown["calls"]
                await part([token], "", "tool_calls" if has_calls else reason if is_last else None, **own)
            else:
                await part([token], added, reason if is_last else None, **own)
        if reason == "lost":
            request.transport.close()
            return stream
        if reason == "abort" and (sampled.ids or not is_chat):
            await part([], sampled.flushed, "abort")
        if self.holds_usage:
            self.held.set()
            await self.released.wait()
        await write([], usage=usage, system_fingerprint="f")
        await stream.write(b"data: [DONE]\n\n")
        return stream


def message_of(text: str) -> dict[str, Any]:
    """Return the message of a text, as a parser makes it; the beginning of a tag is withheld."""
    content, *calls = text.split("<call>")
    for length in range(5, 0, -1):
        if content.endswith("<call>"[:length]) and not calls:
            content = content[:-length]
            break
    functions = [call.split("</call>")[0].split(" ", 1) for call in calls if "</call>" in call]
    message: dict[str, Any] = {"role": "assistant", "content": content or None}
    if functions:
        message["tool_calls"] = [
            {"id": f"call-{uuid4()}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for name, arguments in functions
        ]
    return message


def _deltas(message: dict[str, Any], shown: dict[str, Any]) -> dict[str, Any]:
    """Return what a message has more than the one before, as one delta."""
    delta: dict[str, Any] = {}
    content, calls = message["content"] or "", message.get("tool_calls") or []
    if len(content) > len(shown["content"]):
        delta["content"], shown["content"] = content[len(shown["content"]) :], content
    if len(calls) > shown["calls"]:
        delta["tool_calls"] = [{**call, "index": at} for at, call in enumerate(calls) if at >= shown["calls"]]
        shown["calls"] = len(calls)
    return delta


def logprob_of(token: int) -> float:
    """Return the logprob of each token with this id."""
    return -0.001 * token


def _part(ids: list[int], text: str, *, is_chat: bool, name: str) -> dict[str, Any]:
    logprobs = [*map(logprob_of, ids)]
    shown = ["" if (own := text_of([token])).endswith(_SPLIT) else own for token in ids]
    if not is_chat:
        lists = {
            "tokens": shown,
            "token_logprobs": logprobs,
            "text_offset": [0] * len(ids),
            "top_logprobs": [],
        }
        return {"text": text, "logprobs": lists, "token_ids": ids}
    entries = [
        {"token": own, "logprob": logprob, "bytes": [], "top_logprobs": []}
        for own, logprob in zip(shown, logprobs, strict=True)
    ]
    message = ({"content": text} if text else {}) if name == "delta" else {"role": "assistant", "content": text}
    return {name: message, "logprobs": {"content": entries}, "token_ids": ids}
