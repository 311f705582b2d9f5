"""vLLM's `/inference/v1/generate`: a prompt of ids in, ids out.

Shapes are those of the cassettes `scale_out/generate*` and `abort/generate_midflight_version`, recorded from vLLM 0.32.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal

from pydantic import Field, TypeAdapter
from pydantic.dataclasses import dataclass as validated

from proxy.simulator.distribution import Prefix, prefix_from
from proxy.simulator.errors import invalid_value
from proxy.simulator.generation import Token
from proxy.simulator.model import GenerationOptions, Model
from proxy.simulator.options import Options
from proxy.simulator.prompts import vllm_max_tokens
from proxy.simulator.requests import Body, CommonFields, check_logprobs, read_common, read_fields
from proxy.simulator.weights import WeightVersions, experts_as_npy
from proxy.simulator.wire import Head, JsonObject, event, usage

_DEFAULT_MAX_TOKENS: Final = 16  # of vLLM's SamplingParams
# Fields of `CommonFields` that are outside `sampling_params`.
_TOP_LEVEL: Final = ("model", "stream", "stream_options", "request_id")


@validated(frozen=True, slots=True)
class GenerateRequest:
    """The fields that only this endpoint has."""

    token_ids: list[Annotated[int, Field(ge=0)]]
    sampling_params: dict[str, Any]
    return_token_ids: bool | None = None
    output_mode: Literal["tokens", "text"] = "tokens"

    @property
    def logprobs(self) -> int | None:
        """The number of alternatives; None: no logprobs."""
        count = self.sampling_params.get("logprobs")
        return count if isinstance(count, int) else None


_GENERATE: Final = TypeAdapter(GenerateRequest)


def read_generate(body: Body, options: Options) -> tuple[GenerateRequest, CommonFields]:
    """Return the fields of a request; raises RequestError for a value that is not allowed."""
    fields = read_fields(_GENERATE, body)
    top_level: Body = {key: body[key] for key in _TOP_LEVEL if key in body}
    common = read_common({**fields.sampling_params, **top_level}, options)
    check_logprobs(fields.logprobs, "logprobs", "sample")
    return fields, common


def generation_options(
    fields: GenerateRequest, common: CommonFields, model: Model, options: Options
) -> GenerationOptions:
    """Return how to generate the choices.

    Raises:
        RequestError: an id is outside the vocabulary, or the prompt is empty or does not fit into the context window.
    """
    if not fields.token_ids:
        raise invalid_value("The prompt must not be empty.", "token_ids")
    model.check_ids(fields.token_ids)
    requested = _DEFAULT_MAX_TOKENS if common.max_tokens is None else common.max_tokens
    max_tokens = vllm_max_tokens(len(fields.token_ids), requested, common, options)
    return GenerationOptions(max_tokens, fields.logprobs or 0)


@dataclass(slots=True)
class GenerateResponse:
    """A response of this endpoint; see `wire.Response`."""

    fields: GenerateRequest
    common: CommonFields
    model: Model
    engine_options: Options
    head: Head
    options: GenerationOptions
    versions: WeightVersions
    _ids: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        self._ids = [[] for _ in range(self.common.choices)]

    @property
    def prompts(self) -> Sequence[tuple[Prefix, GenerationOptions]]:
        """The one prompt."""
        return [(prefix_from(self.fields.token_ids), self.options)]

    def opening_events(self) -> list[bytes]:
        """Return no events: there is no role."""
        return []

    def token_events(self, index: int, token: Token) -> list[bytes]:
        """Return the chunk of one token; the first chunk of the stream has the prompt's ids."""
        first = not any(self._ids)
        self._ids[index].append(token.id)
        counted = {"prompt_tokens_details": None, "completion_tokens_details": None}
        count = usage(len(self.fields.token_ids), len(self._ids[index]), **counted)
        chunk: JsonObject = {"request_id": self.head.id, "usage": count if self.common.continuous_usage else None}
        if first and self.fields.return_token_ids:
            chunk["prompt_token_ids"] = self.fields.token_ids
        choice = self._choice(index, [token], self._ids[index])
        return [event(chunk | {"output_mode": self.fields.output_mode, "choices": [choice]})]

    def closing_events(self) -> list[bytes]:
        """Return the usage chunk, if it is requested."""
        if not self.common.include_usage:
            return []
        total = usage(len(self.fields.token_ids), sum(map(len, self._ids)))
        chunk: JsonObject = {"usage": total, "output_mode": self.fields.output_mode, "choices": []}
        return [event({"request_id": self.head.id, **chunk})]

    def body(self, choices: Sequence[Sequence[Token]]) -> JsonObject:
        """Return the body of the response that is not streamed."""
        prompt, alternatives = self.fields.token_ids, self.common.prompt_logprobs
        return {
            "request_id": self.head.id,
            "model": self.head.model,
            "created": self.head.created_s,
            "usage": usage(
                len(prompt), sum(map(len, choices)), prompt_tokens_details=None, completion_tokens_details=None
            ),
            "prompt_logprobs": None if alternatives is None else self.model.prompt_logprobs(prompt, alternatives),
            "prompt_token_id_logprobs": None,
            "prompt_token_ids": prompt if self.fields.return_token_ids else None,
            "mm_placeholders": None,
            "metrics": None,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "output_mode": self.fields.output_mode,
            "choices": [self._choice(index, tokens, [t.id for t in tokens]) for index, tokens in enumerate(choices)],
        }

    def _choice(self, index: int, tokens: Sequence[Token], sampled_ids: Sequence[int]) -> JsonObject:
        """Return a choice with these tokens; experts and weight versions, which need all ids so far, are in its last chunk."""
        ended = tokens[-1].finish_reason is not None
        experts = self.engine_options.routed_experts and ended
        choice: JsonObject = {
            "index": index,
            "finish_reason": tokens[-1].finish_reason,
            "stop_reason": tokens[-1].stop_reason,
            "token_ids": [token.id for token in tokens],
            "routed_experts": experts_as_npy([*self.fields.token_ids, *sampled_ids]) if experts else None,
            "sampling_mask": [_sampling_mask(token) for token in tokens] if self.engine_options.sampling_mask else None,
            "weight_versions": self.versions.spans(len(sampled_ids)) if ended else None,
        }
        if self.fields.output_mode == "text":
            choice["text"] = "".join(token.text for token in tokens)
        choice["logprobs"] = self._logprobs(tokens)
        return choice

    def _logprobs(self, tokens: Sequence[Token]) -> JsonObject | None:
        if self.fields.logprobs is None:
            return None
        entry = _text_entry if self.fields.output_mode == "text" else _id_entry
        return {"content": [entry(token, self.fields.logprobs) for token in tokens]}


def _id_entry(token: Token, alternatives: int) -> Mapping[str, Any]:
    """Return a token's logprob by ids; vLLM truncates the alternatives, which begin with the token itself, to at least one."""
    distribution = token.distribution
    ids = list(dict.fromkeys([token.id, *distribution.top(alternatives)]))[: max(alternatives, 1)]
    entries = [{"token_id": i, "logprob": distribution.logprob(i), "rank": distribution.rank(i)} for i in ids]
    return {**entries[0], "top_logprobs": entries}


def _text_entry(token: Token, alternatives: int) -> Mapping[str, Any]:
    """Return the same by strings."""
    entries = [
        {"token": entry.string, "logprob": entry.logprob, "bytes": list(entry.string.encode())}
        for entry in token.logprobs[: max(alternatives, 1)]
    ]
    return {**entries[0], "top_logprobs": entries}


def _sampling_mask(token: Token) -> list[int]:
    """Return the ids that could have been sampled: here the likely ones and the token itself."""
    return sorted({*token.distribution.likely, token.id})
