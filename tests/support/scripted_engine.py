"""A scripted vLLM: each token is the code of a character, and a call may end after a given number of tokens."""

import asyncio
from typing import Any

import orjson
from aiohttp import web

REPLY = "The quick brown fox jumps over the lazy dog, and runs away."
PROMPT = [104, 105, 10]


class ScriptedEngine:
    """It returns `reply` and a stop token; `ends` has for each of the next calls after how many tokens it ends, and how."""

    def __init__(self, reply: str = REPLY) -> None:
        self.reply = reply
        self.ends: list[tuple[int, str] | None] = []
        self.requests: list[dict[str, Any]] = []
        self.held, self.released = asyncio.Event(), asyncio.Event()  # of a stream that is "held"

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read() or b"{}")
        known = {
            "/version": lambda: {"version": "0.32.0"},
            "/v1/models": lambda: {"object": "list", "data": [{"id": "m", "owned_by": "vllm", "max_model_len": 9999}]},
            "/detokenize": lambda: {"prompt": "".join(map(chr, body["tokens"]))},
            "/tokenize": lambda: {"tokens": PROMPT, "count": len(PROMPT), "max_model_len": 9999},
            "/health": dict,
        }
        if request.path in known:
            return web.json_response(known[request.path]())
        if not request.path.endswith("/completions"):
            return web.Response(status=404)
        self.requests.append(body)
        return await self._respond(request, body, is_chat="chat" in request.path)

    async def _respond(self, request: web.Request, body: dict[str, Any], *, is_chat: bool) -> web.StreamResponse:
        own = body.get("prompt")
        given = (body.get("kv_transfer_params") or {}).get("prompt_token_ids")
        prompt = given or (own if isinstance(own, list) else PROMPT)
        rest = [*map(ord, self.reply)][len(prompt) - len(PROMPT) :]
        limit = body.get("max_tokens") or len(rest)
        count, reason = min(limit, len(rest)), "stop" if limit >= len(rest) else "length"
        end = self.ends.pop(0) if self.ends else None
        held_at = end[0] if end is not None and end[1] == "held" else None
        if end is not None and held_at is None and end[0] < count:
            count, reason = end
        ids = rest[:count]
        number = len(self.requests)
        kind = "chat.completion" if is_chat else "text_completion"
        head = {"id": f"c{number}", "object": kind, "created": 1000 + number, "model": "m"}
        usage = {"prompt_tokens": len(prompt), "completion_tokens": count, "total_tokens": len(prompt) + count}
        if body.get("stream"):
            return await self._stream(request, head, prompt, ids, reason, usage, is_chat=is_chat, held_at=held_at)
        if reason == "lost":
            request.transport.close()
            return web.Response()
        choice = {
            "index": 0,
            **_part(ids, is_chat=is_chat, name="message"),
            "finish_reason": reason,
            "stop_reason": None,
        }
        top = {"prompt_token_ids": prompt} if is_chat else {}
        choice |= {} if is_chat else {"prompt_token_ids": prompt}
        return web.json_response({**head, "choices": [choice], "usage": usage, **top})

    async def _stream(
        self, request, head, prompt, ids, reason, usage, *, is_chat: bool, held_at: int | None
    ) -> web.StreamResponse:
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await stream.prepare(request)
        head = {**head, "object": head["object"] + (".chunk" if is_chat else "")}

        async def write(choices: list[dict[str, Any]], **fields: Any) -> None:
            await stream.write(b"data: " + orjson.dumps({**head, "choices": choices, **fields}) + b"\n\n")

        if is_chat:
            delta = {"role": "assistant", "content": ""}
            await write(
                [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}], prompt_token_ids=prompt
            )
        for at, token in enumerate(ids):
            if at == held_at:
                self.held.set()
                await self.released.wait()
            is_last = at == len(ids) - 1 and reason in {"stop", "length"}
            own = {} if is_chat or at else {"prompt_token_ids": prompt}
            part = _part([token], is_chat=is_chat, name="delta")
            await write(
                [{"index": 0, **part, "finish_reason": reason if is_last else None, "stop_reason": None, **own}]
            )
        if reason == "lost":
            request.transport.close()
            return stream
        if reason == "abort" and (ids or not is_chat):
            await write(
                [
                    {
                        "index": 0,
                        **_part([], is_chat=is_chat, name="delta"),
                        "finish_reason": "abort",
                        "stop_reason": None,
                    }
                ]
            )
        await write([], usage=usage, system_fingerprint="f")
        await stream.write(b"data: [DONE]\n\n")
        return stream


def _part(ids: list[int], *, is_chat: bool, name: str) -> dict[str, Any]:
    text, logprobs = "".join(map(chr, ids)), [-0.001 * token for token in ids]
    if not is_chat:
        lists = {"tokens": [*text], "token_logprobs": logprobs, "text_offset": [0] * len(ids), "top_logprobs": []}
        return {"text": text, "logprobs": lists, "token_ids": ids}
    entries = [
        {"token": chr(token), "logprob": logprob, "bytes": [token], "top_logprobs": []}
        for token, logprob in zip(ids, logprobs, strict=True)
    ]
    message = (
        {"content": text}
        if name == "delta" and ids
        else {}
        if name == "delta"
        else {"role": "assistant", "content": text}
    )
    return {name: message, "logprobs": {"content": entries}, "token_ids": ids}
