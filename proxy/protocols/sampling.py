"""Sampling rules: override, default and cap of the fields of a request."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

Json = dict[str, Any]

# Both names of the bound on completion tokens are valid; the first wins (vLLM 0.32.0).
_BOUNDS = ("max_completion_tokens", "max_tokens")


# The parameters that determine the distribution of a token; recorded with each step: as sent, else the engine's default.
SAMPLING_FIELDS = (
    "temperature", "top_p", "top_k", "min_p", "typical_p", "seed", "n", "max_tokens", "max_completion_tokens",
    "min_tokens", "stop", "stop_token_ids", "ignore_eos", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "logit_bias", "allowed_token_ids", "bad_words", "use_beam_search", "thinking_token_budget",
    # A grammar masks the logits before vLLM 0.32 and SGLang 0.5.23 compute logprobs, raw ones included.
    "structured_outputs", "response_format", "tool_choice",
    # Fields of SGLang only.
    "regex", "ebnf", "json_schema", "structural_tag", "stop_regex", "custom_logit_processor",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling rules: `override` replaces the client's values, `default` fills in absent ones, `cap` limits numbers.

    A cap on completion tokens may be "auto": the space that the prompt leaves in the context window.
    """

    override: Mapping[str, Any] = field(default_factory=dict)
    default: Mapping[str, Any] = field(default_factory=dict)
    cap: Mapping[str, int | float | Literal["auto"]] = field(default_factory=dict)

    def over(self, base: "Sampling") -> "Sampling":
        """Return these rules on top of more general rules."""
        if not (self.override or self.default or self.cap):
            return base
        return Sampling({**base.override, **self.override}, {**base.default, **self.default}, {**base.cap, **self.cap})


NO_RULES: Final = Sampling()  # of rollouts without rules


def served_as(model: str, models: Mapping[str, str]) -> str | None:
    """Return the engine's name for a requested model; None if no name is configured.

    An exact name takes precedence over a prefix with a star ("claude-*"), a longer prefix over a shorter one.
    """
    if model in models:
        return models[model]
    found = [name for name in models if name.endswith("*") and model.startswith(name[:-1])]
    return models[max(found, key=len)] if found else None


def engine_model(body: Mapping[str, Any], models: Mapping[str, str], rules: Sampling) -> str | None:
    """Return the engine's name of the model that is sent for a body; None if the sent body has no model."""
    model = body.get("model")
    named = (served_as(model, models) or model) if isinstance(model, str) else None
    if model is None:
        named = rules.default.get("model")
    sent = rules.override.get("model", named)
    return sent if isinstance(sent, str) else None


def bound_of(sampling: Mapping[str, Any]) -> float | None:
    """Return the bound on completion tokens; None if no bound is a number."""
    bound = next((sampling[name] for name in _BOUNDS if sampling.get(name) is not None), None)
    return bound if isinstance(bound, int | float) else None


def apply_rules(client_sampling: Mapping[str, Any], rules: Sampling, room_left: int | None) -> tuple[Json, set[str]]:
    """Return what the rules set in a client's sampling parameters, and what they remove."""
    fields: Json = {}
    unset: set[str] = set()
    for name, value in rules.default.items():
        if all(client_sampling.get(spelling) is None for spelling in _spellings(name)):
            fields[name] = value
    for name, value in rules.override.items():
        spellings = _spellings(name)
        for winning in spellings[: spellings.index(name)]:
            fields.pop(winning, None)
            unset |= {winning} & client_sampling.keys()
        fields[name] = value
    for name, bound in rules.cap.items():
        kept = {**{k: v for k, v in client_sampling.items() if k not in unset}, **fields}
        if bound != "auto":
            _cap(kept, name, bound, fields)
        elif room_left is not None and bound_of(kept) is not None:
            _cap(kept, name, room_left, fields)
    return fields, unset


def _spellings(name: str) -> tuple[str, ...]:
    return _BOUNDS if name in _BOUNDS else (name,)


def _cap(body: Json, name: str, bound: float, fields: Json) -> None:
    """Set in `fields` what keeps `name` at or below the bound; an absent field is set to the bound."""
    present = [spelling for spelling in _spellings(name) if body.get(spelling) is not None]
    for spelling in present or [name]:
        value = body.get(spelling)
        if value is None or (isinstance(value, int | float) and value > bound):
            fields[spelling] = bound
