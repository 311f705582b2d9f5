"""Answers of vLLM's `/inference/v1/generate`: one prompt of ids in, ids out, as vLLM 0.32 writes them.

Holds the fields, the prompt and the answers of that endpoint; it must not hold sockets. Shapes are those of the
cassettes `scale_out/generate*` and `abort/generate_midflight_version`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal

from pydantic import Field, TypeAdapter
from pydantic.dataclasses import dataclass as checked

from proxy.simulator.distribution import Prefix, prefix_of
from proxy.simulator.errors import bad_value
from proxy.simulator.generation import Token
from proxy.simulator.model import Manner, Model
from proxy.simulator.options import Options
from proxy.simulator.prompts import room_for
from proxy.simulator.requests import Body, Common, check_logprobs, read_common, read_fields
from proxy.simulator.weights import Versions, as_npy
from proxy.simulator.wire import Answer, Head, event, usage

_DEFAULT_MAX_TOKENS: Final = 16  # of vLLM's SamplingParams
# What a body says outside of `sampling_params` and chat says in one place with them.
_BESIDE: Final = ("model", "stream", "stream_options", "request_id")


@checked(frozen=True, slots=True)
class Generate:
    """What only this endpoint has."""

    token_ids: list[Annotated[int, Field(ge=0)]]
    sampling_params: dict[str, Any]
    return_token_ids: bool | None = None
    output_mode: Literal["tokens", "text"] = "tokens"

    @property
    def logprobs(self) -> int | None:
        """How many alternatives to tell; None: no logprobs at all."""
        count = self.sampling_params.get("logprobs")
        return count if isinstance(count, int) else None


_GENERATE: Final = TypeAdapter(Generate)


def read_generate(body: Body, options: Options) -> tuple[Generate, Common]:
    """The fields of a request, checked."""
    asked = read_fields(_GENERATE, body)
    beside: Body = {key: body[key] for key in _BESIDE if key in body}
    common = read_common({**asked.sampling_params, **beside}, options)
    check_logprobs(asked.logprobs, "logprobs", "sample")
    return asked, common


def generate_prompt(asked: Generate, common: Common, model: Model, options: Options) -> Manner:
    """Plan the reply; refuses ids that are no tokens, and what does not fit the model's window."""
    if not asked.token_ids:
        raise bad_value("The prompt must not be empty.", "token_ids")
    model.check_ids(asked.token_ids)
    max_tokens = _DEFAULT_MAX_TOKENS if common.max_tokens is None else common.max_tokens
    return Manner(room_for(len(asked.token_ids), max_tokens, common, options), asked.logprobs or 0)


@dataclass(slots=True)
class GenerateReply:
    """One such answer in the making; see `wire.Reply`."""

    asked: Generate
    common: Common
    model: Model
    options: Options
    head: Head
    manner: Manner
    versions: Versions
    _ids: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        self._ids = [[] for _ in range(self.common.samples)]

    @property
    def prompts(self) -> Sequence[tuple[Prefix, Manner]]:
        """The one prompt."""
        return [(prefix_of(self.asked.token_ids), self.manner)]

    def opening(self) -> list[bytes]:
        """Nothing: there is no role."""
        return []

    def events(self, index: int, token: Token) -> list[bytes]:
        """The chunk of one token; the first of all tells the prompt."""
        first = not any(self._ids)
        self._ids[index].append(token.id)
        chunk: Answer = {"request_id": self.head.id, "usage": None}
        if first and self.asked.return_token_ids:
            chunk["prompt_token_ids"] = self.asked.token_ids
        choice = self._choice(index, [token], self._ids[index])
        return [event(chunk | {"output_mode": self.asked.output_mode, "choices": [choice]})]

    def closing(self) -> list[bytes]:
        """The usage chunk, if it was asked for."""
        if not self.common.include_usage:
            return []
        counted = usage(len(self.asked.token_ids), sum(map(len, self._ids)))
        told: Answer = {"usage": counted, "output_mode": self.asked.output_mode, "choices": []}
        return [event({"request_id": self.head.id, **told})]

    def whole(self, choices: Sequence[Sequence[Token]]) -> Answer:
        """The answer that is not streamed."""
        prompt, asked = self.asked.token_ids, self.common.prompt_logprobs
        return {
            "request_id": self.head.id,
            "model": self.head.model,
            "created": self.head.created_s,
            "usage": usage(
                len(prompt), sum(map(len, choices)), prompt_tokens_details=None, completion_tokens_details=None
            ),
            "prompt_logprobs": None if asked is None else self.model.prompt_logprobs(prompt, asked),
            "prompt_token_id_logprobs": None,
            "prompt_token_ids": prompt if self.asked.return_token_ids else None,
            "mm_placeholders": None,
            "metrics": None,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "output_mode": self.asked.output_mode,
            "choices": [self._choice(index, tokens, [t.id for t in tokens]) for index, tokens in enumerate(choices)],
        }

    def _choice(self, index: int, tokens: Sequence[Token], so_far: Sequence[int]) -> Answer:
        """These tokens of a choice; what is of the whole choice comes with its end."""
        ended = tokens[-1].finish_reason is not None
        experts = self.options.routed_experts and ended
        choice: Answer = {
            "index": index,
            "finish_reason": tokens[-1].finish_reason,
            "stop_reason": tokens[-1].stop_reason,
            "token_ids": [token.id for token in tokens],
            "routed_experts": as_npy([*self.asked.token_ids, *so_far]) if experts else None,
            "sampling_mask": [_mask(token) for token in tokens] if self.options.sampling_mask else None,
            "weight_versions": self.versions.spans(len(so_far)) if ended else None,
        }
        if self.asked.output_mode == "text":
            choice["text"] = "".join(token.text for token in tokens)
        choice["logprobs"] = self._logprobs(tokens)
        return choice

    def _logprobs(self, tokens: Sequence[Token]) -> Answer | None:
        if self.asked.logprobs is None:
            return None
        told = _as_text if self.asked.output_mode == "text" else _as_ids
        return {"content": [told(token, self.asked.logprobs) for token in tokens]}


def _as_ids(token: Token, alternatives: int) -> Mapping[str, Any]:
    """A token's logprob by ids; vLLM cuts the alternatives, which begin with the token itself, and keeps one."""
    ids = list(dict.fromkeys([token.id, *token.odds.best(alternatives)]))[: max(alternatives, 1)]
    scores = [{"token_id": i, "logprob": token.odds.logprob(i), "rank": token.odds.rank(i)} for i in ids]
    return {**scores[0], "top_logprobs": scores}


def _as_text(token: Token, alternatives: int) -> Mapping[str, Any]:
    """The same by strings."""
    scores = [
        {"token": score.string, "logprob": score.logprob, "bytes": list(score.string.encode())}
        for score in token.scores[: max(alternatives, 1)]
    ]
    return {**scores[0], "top_logprobs": scores}


def _mask(token: Token) -> list[int]:
    """The ids that could have been sampled: a made-up choice, the likely ones and the token itself."""
    return sorted({*token.odds.likely, token.id})
