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

SCHEMA = {
    "type": "json_schema",
    "json_schema": {
        "name": "answer",
        "schema": {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]},
    },
}
NAMED = {"type": "function", "function": {"name": "add"}}
_ADDED = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"x": 123}'}}
LOOP = [
    *QUESTION,
    {"role": "assistant", "content": None, "tool_calls": [_ADDED]},
    {"role": "tool", "tool_call_id": "c1", "content": "124"},
]

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
    "schema": (CHAT, _CHAT | {"response_format": SCHEMA, "max_tokens": 60} | THINKING_OFF),
    "named tool": (CHAT, _CHAT | {"tools": [TOOL], "tool_choice": NAMED, "max_tokens": 60} | THINKING_OFF),
    "one tool call": (CHAT, _CHAT | _FORCED | THINKING_OFF | {"parallel_tool_calls": False}),
    "tool result": (CHAT, _CHAT | {"messages": LOOP, "tools": [TOOL]} | THINKING_OFF),
    "stop token": (CHAT, _CHAT | {"stop_token_ids": list(range(300, 4000, 7))} | THINKING_OFF),
    "penalties": (CHAT, _CHAT | {"presence_penalty": 1, "frequency_penalty": 0.5, "repetition_penalty": 1.2}),
    "split characters": (CHAT, _CHAT | forced("a🦙🎉") | THINKING_OFF),
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
# Those of fields that only SGLang has.
SGLANG_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "reasoning in content": (CHAT, CASES["reasoning"][1] | {"separate_reasoning": False}),
    "reasoning in one event": (CHAT, CASES["reasoning"][1] | {"stream_reasoning": False}),
    "special tokens": (CHAT, _CHAT | THINKING_OFF | {"skip_special_tokens": False, "logit_bias": {"4089": 6.0}}),
    "untrimmed stop": (CHAT, _CHAT | THINKING_OFF | {"stop": ["e"], "no_stop_trim": True}),
    "meta info asked": (CHAT, _CHAT | {"return_meta_info": True}),
    "cached tokens asked": (CHAT, _CHAT | {"return_cached_tokens_details": True}),
    "prompt ids in": (CHAT, _CHAT | {"input_ids": [46, 77, 306, 1020]}),
}


def repeatable(kind: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return a body that samples the same each time: SGLang ignores seeds without a GPU."""
    return body | {"top_k": 1} if kind == "sglang" else body


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
