"""Calls of an engine: the same body sent directly, through the proxy, and directly with the injected flags."""

import re
from typing import Any

import aiohttp
import orjson

QUESTION = [{"role": "user", "content": "Count to three."}]
THINKING_OFF = {"chat_template_kwargs": {"enable_thinking": False}}
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add one to a number.",
        "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
    },
}
CALL = r'<tool_call>\n\{"name": "add", "arguments": \{"x": [1-9][0-9]{2}\}\}\n</tool_call>'
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def forced(pattern: str) -> dict[str, Any]:
    """Return the fields of vLLM and of SGLang that make a reply match a regular expression; each ignores the other's."""
    return {"structured_outputs": {"regex": pattern}, "regex": pattern}


_CHAT = {"model": "tiny", "messages": QUESTION, "seed": 7, "max_tokens": 24}
_TEXT = {"model": "tiny", "prompt": "Once upon a time", "seed": 7, "max_tokens": 24}
_FORCED = {"tools": [TOOL], **forced(CALL), "max_tokens": 100}

# name -> (path, body): every shape that an agent's call can have.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, _CHAT),
    "chat greedy": (CHAT, _CHAT | {"temperature": 0}),
    "chat sampled": (CHAT, _CHAT | {"temperature": 0.7, "top_p": 0.9, "top_k": 50}),
    "chat n=3": (CHAT, _CHAT | {"n": 3}),
    "one token": (CHAT, _CHAT | {"max_tokens": 1}),
    "reasoning": (CHAT, _CHAT | {"logit_bias": {"4095": 6.5}, "max_tokens": 60}),
    "no thinking": (CHAT, _CHAT | THINKING_OFF),
    "tool call": (CHAT, _CHAT | _FORCED | THINKING_OFF),
    "tool call after thinking": (CHAT, _CHAT | _FORCED | {"logit_bias": {"4095": 100}}),
    "required tool": (CHAT, _CHAT | {"tools": [TOOL], "tool_choice": "required", "max_tokens": 60} | THINKING_OFF),
    "structured": (CHAT, _CHAT | forced("[a-z]{3} [0-9]{2}") | THINKING_OFF),
    "stop string": (CHAT, _CHAT | {"stop": ["e"]} | THINKING_OFF),
    "logprobs asked": (CHAT, _CHAT | {"logprobs": True, "top_logprobs": 2}),
    "ids asked": (CHAT, _CHAT | {"return_token_ids": True}),
    "tool call, logprobs asked": (CHAT, _CHAT | _FORCED | THINKING_OFF | {"logprobs": True}),
    "extras": (CHAT, _CHAT | {"unknown_field": {"a": [1, 2.5, None]}, "user": "u", "metadata": None}),
    "completions": (COMPLETIONS, _TEXT),
    "completions n=3": (COMPLETIONS, _TEXT | {"n": 3}),
    "two prompts": (COMPLETIONS, _TEXT | {"prompt": ["Once upon", "The quick brown fox"], "n": 2}),
    "ids in": (COMPLETIONS, _TEXT | {"prompt": [46, 77, 306, 1020]}),
    "completions logprobs 0": (COMPLETIONS, _TEXT | {"logprobs": 0}),
    "completions logprobs 2": (COMPLETIONS, _TEXT | {"logprobs": 2}),
    "completions stop": (COMPLETIONS, _TEXT | {"stop": ["e"]}),
    "echo": (COMPLETIONS, _TEXT | {"echo": True}),
}


def flagged(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return the body as a client sends it that requests ids and logprobs itself."""
    logprobs = body.get("logprobs") or (True if path == CHAT else 0)
    return body | {"return_token_ids": True, "logprobs": logprobs}


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
            kept["ids"] += choice.get("token_ids") or []
            logprobs = choice.get("logprobs") or {}
            kept["logprobs"] += [entry["logprob"] for entry in logprobs.get("content") or []]
            kept["logprobs"] += logprobs.get("token_logprobs") or []
            kept["finish_reason"] = choice["finish_reason"] or kept["finish_reason"]
    assert stream or len(responses) == 1
    return found


def _normal(response: Any) -> Any:
    text = orjson.dumps(response).decode()
    text = re.sub(r'"id":"(chatcmpl|cmpl)-[^"]*"', '"id":""', text)
    return orjson.loads(re.sub(r'"created":\d+', '"created":0', text))
