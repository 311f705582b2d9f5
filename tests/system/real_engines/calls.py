"""Calls of an engine: the same body sent directly, through the proxy, and directly with the injected flags."""

import re
from typing import Any

import aiohttp
import orjson

from proxy.cli.certify.shapes import (
    CALL,
    CHAT,
    COMPLETIONS,
    END_OF_TEXT,
    END_OF_THINKING,
    END_OF_TURN,
    QUESTION,
    SHAPES,
    THINKING_OFF,
    TOOL,
)

__all__ = ["CALL", "CASES", "CHAT", "COMPLETIONS", "QUESTION", "THINKING_OFF", "TOOL"]

# name -> (path, body): the shapes that `tokentape certify` sends to vLLM in both framings, for the tiny model.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    shape.name: (
        shape.path,
        shape.body_for("vllm", "tiny", {END_OF_THINKING: 4095, END_OF_TURN: 4089, END_OF_TEXT: 4087}),
    )
    for shape in SHAPES
    if shape.is_for("vllm") and shape.path in (CHAT, COMPLETIONS)
    if shape.treatment == "compared" and len(shape.modes) == 2
}


def forced(pattern: str) -> dict[str, Any]:
    """Return the fields of vLLM and of SGLang that make a reply match a regular expression; each ignores the other's."""
    return {"structured_outputs": {"regex": pattern}, "regex": pattern}


def flagged(kind: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return the body as a client sends it that requests ids and logprobs itself; SGLang's must not be streamed."""
    logprobs = body.get("logprobs") or (True if path == CHAT else int(kind == "sglang"))
    more = {"return_meta_info": True} if kind == "sglang" and path == CHAT else {}
    return body | {"return_token_ids": True, "logprobs": logprobs} | more


async def post(http: aiohttp.ClientSession, url: str, body: dict[str, Any], *, stream: bool) -> tuple[int, list[Any]]:
    """Return the status, and the response or the chunks, without the fields that differ between any two runs."""
    async with http.post(url, json=body | ({"stream": True} if stream else {})) as response:
        text = await response.read()
    if not stream or response.content_type == "application/json":
        return response.status, [_normal(orjson.loads(text))]
    payloads = [line.removeprefix(b"data: ") for line in text.split(b"\n\n") if line]
    assert payloads[-1] == b"[DONE]"
    return response.status, [_normal(orjson.loads(payload)) for payload in payloads[:-1]]


def sampled(responses: list[Any], *, stream: bool) -> dict[int, dict[str, Any]]:
    """Return ids, logprobs and finish reason of each choice, parsed without the proxy's code."""
    found: dict[int, dict[str, Any]] = {}
    for response in responses:
        for choice in response["choices"]:
            kept = found.setdefault(choice["index"], {"ids": [], "logprobs": [], "finish_reason": None})
            kept["ids"] += choice.get("token_ids") or choice.get("response_token_ids") or []
            logprobs = choice.get("logprobs") or {}
            kept["logprobs"] += [entry["logprob"] for entry in logprobs.get("content") or []]
            kept["logprobs"] += logprobs.get("token_logprobs") or []
            kept["finish_reason"] = choice["finish_reason"] or kept["finish_reason"]
    assert stream or len(responses) == 1
    return found


def _normal(response: Any) -> Any:
    text = orjson.dumps(response).decode()
    text = re.sub(r'"id":"((chatcmpl|cmpl|call)[-_][^"]*|[0-9a-f]{32})"', '"id":""', text)
    text = re.sub(r'"([a-z_0-9]+_(latency|throughput|time|ts))":[0-9.e-]+', r'"\1":0', text)
    return orjson.loads(re.sub(r'"created":\d+', '"created":0', text))
