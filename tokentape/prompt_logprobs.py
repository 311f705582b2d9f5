"""The most likely token ids at each position of a prompt, for `ManagedServer.get_logprobs`.

vLLM returns them as `prompt_logprobs` of a call that samples one token. The call runs in a rollout that is deleted
afterwards, so that nothing trains on that token.
"""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

from tokentape.types import RolloutApi

with suppress(ImportError):  # `import tokentape` works without openai; the constructor of ManagedServer raises
    from openai import NOT_GIVEN, AsyncOpenAI

PROMPT_FIELDS: Final = ("prompt", "messages", "input_ids")


def engine_body(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call as engines accept them, without those of Atropos' own servers."""
    body = {name: value for name, value in arguments.items() if name != "split"}  # selects one of Atropos' semaphores
    if "max_new_tokens" in body:
        body["max_tokens"] = body.pop("max_new_tokens")
    return body


async def prompt_logprobs(server: RolloutApi, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """See `ManagedServer.get_logprobs`."""
    body = engine_body(arguments)
    present = [name for name in PROMPT_FIELDS if body.get(name) is not None]
    if len(present) != 1:
        raise ValueError(
            f"get_logprobs requires exactly one of {', '.join(PROMPT_FIELDS)}; got {' and '.join(present) or 'none'}"
        )
    prompt = body.pop(present[0])
    top_k = int(body.pop("top_k", None) or body.pop("top_logprobs", None) or 1)
    model = body.pop("model", NOT_GIVEN)
    body = {"max_tokens": 1, **body, "n": 1, "temperature": 0.0, "top_p": 1.0, "prompt_logprobs": top_k}
    opened = await server.open_rollout(metadata={"purpose": "get_logprobs"})
    try:
        async with AsyncOpenAI(base_url=opened["base_url"], api_key=opened["api_key"]) as agent:
            if present == ["messages"]:
                chat = await agent.chat.completions.with_raw_response.create(
                    model=model, messages=prompt, extra_body=body
                )
                headers, positions = chat.headers, getattr(chat.parse(), "prompt_logprobs", None)
            else:
                raw = await agent.completions.with_raw_response.create(model=model, prompt=prompt, extra_body=body)
                headers, positions = raw.headers, getattr(raw.parse().choices[0], "prompt_logprobs", None)
        step = await server.step(opened["rollout_id"], headers["X-Step-Id"])
    finally:
        await server.delete_rollout(opened["rollout_id"])
    if positions is None or not step["prompt_ids"]:
        raise NotImplementedError(f"engine {step['engine']['name']!r} returns no prompt logprobs")
    return {"prompt_tokens": step["prompt_ids"], **_most_likely(positions, top_k)}


def _most_likely(positions: list[Mapping[str, Mapping[str, float]] | None], top_k: int) -> dict[str, list[list[Any]]]:
    """Return the k most likely ids of each position; vLLM adds the prompt's own id if it is not among them."""
    ranked = [
        sorted(((entry["logprob"], int(token)) for token, entry in (position or {}).items()), reverse=True)[:top_k]
        for position in positions
    ]
    return {
        "prompt_topk_token_ids": [[token for _, token in position] for position in ranked],
        "prompt_topk_logprobs": [[logprob for logprob, _ in position] for position in ranked],
    }
