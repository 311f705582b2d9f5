"""vLLM's generate endpoint, tokens in and tokens out, forwarded without translation.

vLLM 0.32.0 serves it with `--enable-scale-out`, and otherwise returns 403 with an error in OpenAI's format, which is forwarded.

Verified there, streamed and unstreamed: the sampled `token_ids` are always returned, in both output modes. `return_token_ids`
adds the ids of the prompt (streamed: keys of the first chunk, absent without it). Logprobs are returned if
`sampling_params.logprobs` is not null; 0 requests the sampled token's own.
"""

from collections.abc import Collection, Mapping
from typing import Any

from proxy.protocols.accumulators import GenerateAccumulator
from proxy.protocols.dialects.base import (
    DialectName,
    OpenAIBodies,
    ResponseOptions,
    is_on,
    requested_usage,
    sample_count,
)

_BOUND = "max_completion_tokens"  # of the other dialects; vLLM's SamplingParams accept only `max_tokens`


class Generate(OpenAIBodies):
    """`POST /inference/v1/generate`: one prompt of ids, `sampling_params.n` choices."""

    name: DialectName = "generate"
    accumulator = GenerateAccumulator
    prompt_field = "token_ids"

    def response_options(self, body: Mapping[str, Any]) -> ResponseOptions:
        """Read the options; `token_ids` refers to the prompt's ids: the sampled ones are always returned."""
        sampling = self.sampling(body)
        samples = sample_count(sampling)
        return ResponseOptions(
            token_ids=is_on(body.get("return_token_ids")),
            logprobs=sampling.get("logprobs") is not None,
            usage=requested_usage(body)[0],
            samples=samples,
            choices=samples,
        )

    def sampling(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the `sampling_params` object, in which the bound on tokens has one name only."""
        params = body.get("sampling_params")
        return {name: value for name, value in params.items() if name != _BOUND} if isinstance(params, dict) else {}

    def prompt_ids(self, body: Mapping[str, Any]) -> list[list[int]] | None:
        """Return the prompt's ids; None if image placeholders lengthen them (`features`), or the engine is to truncate them."""
        ids = body.get("token_ids")
        is_changed = body.get("features") is not None or self.sampling(body).get("truncate_prompt_tokens") is not None
        return [ids] if isinstance(ids, list) and not is_changed else None

    def place_sampling(
        self, body: Mapping[str, Any], fields: Mapping[str, Any], unset: Collection[str]
    ) -> tuple[dict[str, Any], set[str]]:
        """Return a new `sampling_params` object. A body without one remains unchanged: the engine refuses it."""
        params = body.get("sampling_params")
        if not isinstance(params, dict) or not (fields or unset):
            return {}, set()
        changes = {name: value for name, value in fields.items() if name != _BOUND}
        if _BOUND in fields:
            changes["max_tokens"] = fields[_BOUND]
        unchanged = {name: value for name, value in params.items() if name not in unset}
        return {"sampling_params": {**unchanged, **changes}}, set()
