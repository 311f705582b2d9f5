"""The likeliest ids at each place of a prompt, as `ManagedServer.get_logprobs` tells them.

Holds the asking and the reading of vLLM's `prompt_logprobs`. It samples one token that nobody wants, so it happens in a
rollout of its own, which is deleted.
"""

from collections.abc import Mapping
from typing import Any

from openai import NOT_GIVEN, AsyncOpenAI

from proxy.client.awaiting import AsyncClient

_GIVEN = ("prompt", "messages", "input_ids")


def engine_terms(body: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call as an engine takes them: without those that are for Atropos' own servers alone."""
    terms = {name: value for name, value in body.items() if name != "split"}  # which of two limits it counts against
    if "max_new_tokens" in terms:
        terms["max_tokens"] = terms.pop("max_new_tokens")
    return terms


async def score(server: AsyncClient, asked: Mapping[str, Any]) -> dict[str, Any]:
    """See `ManagedServer.get_logprobs`."""
    body = engine_terms(asked)
    given = [name for name in _GIVEN if body.get(name) is not None]
    if len(given) != 1:
        raise ValueError(f"get_logprobs scores one of {', '.join(_GIVEN)}; {' and '.join(given) or 'none'} given")
    scored = body.pop(given[0])
    top_k = int(body.pop("top_k", None) or body.pop("top_logprobs", None) or 1)
    model = body.pop("model", NOT_GIVEN)
    body = {"max_tokens": 1, **body, "n": 1, "temperature": 0.0, "top_p": 1.0, "prompt_logprobs": top_k}
    opened = await server.open_rollout(metadata={"purpose": "get_logprobs"})
    try:
        async with AsyncOpenAI(base_url=opened["base_url"], api_key=opened["api_key"]) as agent:
            if given == ["messages"]:
                chat = await agent.chat.completions.with_raw_response.create(
                    model=model, messages=scored, extra_body=body
                )
                headers, told = chat.headers, getattr(chat.parse(), "prompt_logprobs", None)
            else:
                raw = await agent.completions.with_raw_response.create(model=model, prompt=scored, extra_body=body)
                headers, told = raw.headers, getattr(raw.parse().choices[0], "prompt_logprobs", None)
        step = await server.step(opened["rollout_id"], headers["X-Step-Id"])
    finally:
        await server.delete_rollout(opened["rollout_id"])
    if told is None or not step["prompt_ids"]:
        raise NotImplementedError(f"the engine {step['engine']['name']!r} tells no logprobs of prompts")
    return {"prompt_tokens": step["prompt_ids"], **_likeliest(told, top_k)}


def _likeliest(told: list[Mapping[str, Mapping[str, float]] | None], top_k: int) -> dict[str, list[list[Any]]]:
    """The k likeliest at each place: vLLM tells the prompt's own id too, where it is not among them."""
    places = [
        sorted(((entry["logprob"], int(token)) for token, entry in (place or {}).items()), reverse=True)[:top_k]
        for place in told
    ]
    return {
        "prompt_topk_token_ids": [[token for _, token in place] for place in places],
        "prompt_topk_logprobs": [[logprob for logprob, _ in place] for place in places],
    }
