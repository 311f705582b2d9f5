"""OpenAI's legacy completions: native, so nothing is translated."""

from collections.abc import Collection, Mapping
from typing import Any

from proxy.errors import ProxyError
from proxy.protocols.accumulators import Accumulator, CompletionsAccumulator
from proxy.protocols.dialects.base import DialectName, ResponseOptions, is_on, openai_error, samples_of, wants_usage


class Completions:
    """`POST /v1/completions`: a text, ids, or a list of either; choice index = prompt index times n + sample index."""

    name: DialectName = "completions"

    def response_options(self, body: Mapping[str, Any]) -> ResponseOptions:
        """`logprobs` is a number here, and 0 asks for the sampled token's own."""
        samples = samples_of(body)
        prompts = prompts_of(body)
        return ResponseOptions(
            token_ids=is_on(body.get("return_token_ids")),
            logprobs=body.get("logprobs") is not None,
            usage=wants_usage(body),
            samples=samples,
            choices=samples * prompts if samples and prompts else None,
        )

    def sampling(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """On the body's top level."""
        return body

    def prompt_ids(self, body: Mapping[str, Any]) -> list[list[int]] | None:
        """One list of ids, or several; unless the engine is to cut them (vLLM's `truncate_prompt_tokens`)."""
        prompt = body.get("prompt")
        if not isinstance(prompt, list) or not prompt or body.get("truncate_prompt_tokens") is not None:
            return None
        if type(prompt[0]) is int:
            return [prompt]
        return prompt if all(isinstance(one, list) and one and type(one[0]) is int for one in prompt) else None

    def place_sampling(
        self, body: Mapping[str, Any], fields: Mapping[str, Any], unset: Collection[str]
    ) -> tuple[dict[str, Any], set[str]]:
        """On the body's top level."""
        return dict(fields), set(unset)

    def accumulator(self) -> Accumulator:
        """Chunks of `text_completion`."""
        return CompletionsAccumulator()

    def error(self, error: ProxyError) -> bytes:
        """OpenAI's shape."""
        return openai_error(error)

    def status(self, error: ProxyError) -> int:
        """Its own."""
        return error.status


def prompts_of(body: Mapping[str, Any]) -> int | None:
    """How many prompts the body holds; None if we cannot tell (then the engine will say what is wrong)."""
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return 1
    if not isinstance(prompt, list) or not prompt:
        return None
    return 1 if isinstance(prompt[0], int) else len(prompt)
