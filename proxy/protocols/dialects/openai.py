"""OpenAI's chat completions and legacy completions, forwarded without translation."""

from collections.abc import Mapping
from typing import Any

from proxy.protocols.accumulators import ChatAccumulator, CompletionsAccumulator
from proxy.protocols.dialects.base import Dialect, DialectName, ResponseOptions, is_on, requested_of


class Chat(Dialect):
    """`POST /v1/chat/completions`: one prompt, `n` choices."""

    name: DialectName = "chat"
    accumulator = ChatAccumulator
    prompt_field = "messages"

    def response_options(self, body: Mapping[str, Any]) -> ResponseOptions:
        """Read the options; `logprobs` is a boolean."""
        return requested_of(body, body, logprobs=is_on(body.get("logprobs")))


class Completions(Dialect):
    """`POST /v1/completions`: a text, ids, or a list of either; choice index = prompt index times n + sample index."""

    name: DialectName = "completions"
    accumulator = CompletionsAccumulator
    prompt_field = "prompt"

    def response_options(self, body: Mapping[str, Any]) -> ResponseOptions:
        """Read the options; `logprobs` is a number, and 0 requests the sampled token's own."""
        return requested_of(body, body, logprobs=body.get("logprobs") is not None, prompts=prompt_count(body))

    def prompt_ids(self, body: Mapping[str, Any]) -> list[list[int]] | None:
        """Return one list of ids, or several; None if the engine is to truncate them (vLLM's `truncate_prompt_tokens`)."""
        prompt = body.get("prompt")
        if not isinstance(prompt, list) or not prompt or body.get("truncate_prompt_tokens") is not None:
            return None
        if type(prompt[0]) is int:
            return [prompt]
        return prompt if all(isinstance(ids, list) and ids and type(ids[0]) is int for ids in prompt) else None


def prompt_count(body: Mapping[str, Any]) -> int | None:
    """Return the number of prompts in the body; None for an invalid one, which the engine refuses."""
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return 1
    if not isinstance(prompt, list) or not prompt:
        return None
    return 1 if isinstance(prompt[0], int) else len(prompt)
