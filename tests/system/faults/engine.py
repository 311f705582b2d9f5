"""A minimal engine: `python engine.py PORT LOG`. It serves vLLM's chat API and logs what it samples.

The message selects the response: `UID MODE AT`. MODE is whole, hang, garbage, refuse or cut; AT is the index of the
event. A line of the log is written before the first byte of the response.
"""

import asyncio
import sys
from pathlib import Path
from random import Random

import orjson
from aiohttp import web

PROMPT = list(range(40, 60))
SAMPLED = 12


def sampled(uid: str) -> tuple[list[int], list[float]]:
    """Return the ids and logprobs of a call. They are unique, so that no two calls can be confused."""
    dice = Random(uid)
    return [dice.randrange(1, 50_000) for _ in range(SAMPLED)], [
        -dice.randrange(1, 2**16) / 2**12 for _ in range(SAMPLED)
    ]


def logprob_entries(pairs) -> dict:
    return {"content": [{"token": f"t{i}", "logprob": lp, "bytes": [116], "top_logprobs": []} for i, lp in pairs]}


def unstreamed_response(uid: str) -> bytes:
    ids, logprobs = sampled(uid)
    choice = {
        "index": 0, "message": {"role": "assistant", "content": uid}, "finish_reason": "length", "token_ids": ids,
        "logprobs": logprob_entries(zip(ids, logprobs, strict=True)),
    }  # fmt: skip
    usage = {"prompt_tokens": len(PROMPT), "completion_tokens": SAMPLED, "total_tokens": len(PROMPT) + SAMPLED}
    response = {"id": uid, "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}
    return orjson.dumps(response | {"prompt_token_ids": PROMPT})


def events(uid: str) -> list[bytes]:
    head = {"id": uid, "object": "chat.completion.chunk", "created": 1, "model": "m"}
    ids, logprobs = sampled(uid)
    role = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    chunks = [head | {"choices": [role], "prompt_token_ids": PROMPT}]
    for at, (token, logprob) in enumerate(zip(ids, logprobs, strict=True)):
        choice = {"index": 0, "delta": {"content": f"t{token} "}, "logprobs": logprob_entries([(token, logprob)])}
        finish = "length" if at == SAMPLED - 1 else None
        chunks.append(head | {"choices": [choice | {"finish_reason": finish, "token_ids": [token]}]})
    usage = {"prompt_tokens": len(PROMPT), "completion_tokens": SAMPLED, "total_tokens": len(PROMPT) + SAMPLED}
    chunks.append(head | {"choices": [], "usage": usage})  # as the proxy always requests it
    return [b"data: " + orjson.dumps(event) + b"\n\n" for event in chunks] + [b"data: [DONE]\n\n"]


def make_app(log: Path) -> web.Application:
    journal = log.open("ab", buffering=0)

    async def chat(request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        uid, mode, at = body["messages"][-1]["content"].split()
        if mode == "refuse":
            return web.json_response({"error": {"message": "overloaded", "type": "x", "code": 503}}, status=503)
        journal.write(uid.encode() + b"\n")
        parts = events(uid) if body.get("stream") else [unstreamed_response(uid)[:200], unstreamed_response(uid)[200:]]
        kind = "text/event-stream; charset=utf-8" if body.get("stream") else "application/json"
        response = web.StreamResponse(headers={"Content-Type": kind})
        for number in range(len(parts)):
            if number == int(at) % len(parts) and mode != "whole":
                if mode == "hang":
                    await asyncio.sleep(3600)
                if mode == "cut":
                    request.transport.abort()
                    return response
                if mode == "garbage":
                    parts[number] = b"data: {\x00\xff not json\n\n"
            if not response.prepared:
                await response.prepare(request)
            await response.write(parts[number])
            await asyncio.sleep(0.002)
        await response.write_eof()
        return response

    async def known(request: web.Request) -> web.Response:
        return web.json_response({"version": "0.32.0"} if request.path == "/version" else {"status": "ok"})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    app.router.add_get("/version", known)
    app.router.add_get("/health", known)
    return app


if __name__ == "__main__":
    web.run_app(
        make_app(Path(sys.argv[2])), host="127.0.0.1", port=int(sys.argv[1]), print=None, handler_cancellation=True
    )
