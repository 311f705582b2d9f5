"""Sampling rules: override, default and cap of the fields of a request."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from proxy.protocols.engines.base import Json

# The client may name the bound on sampled tokens either way; the first of them wins (vLLM 0.32.0).
_BOUNDS = ("max_completion_tokens", "max_tokens")


# What decides which distribution a token was drawn from; recorded with each step: as sent, else the engine's default.
SAMPLING_FIELDS = (
    "temperature", "top_p", "top_k", "min_p", "typical_p", "seed", "n", "max_tokens", "max_completion_tokens",
    "min_tokens", "stop", "stop_token_ids", "ignore_eos", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "logit_bias", "allowed_token_ids", "bad_words", "use_beam_search",
    # A grammar masks the logits before vLLM 0.32 takes its logprobs, raw ones too: they are of what it left.
    "structured_outputs", "response_format", "tool_choice",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sampling:
    """Rules on sampling: `override` wins over the client, `default` yields to it, `cap` bounds numbers from above.

    A cap may be "auto" for the bound on sampled tokens: what the model's window leaves beside the prompt.
    """

    override: Mapping[str, Any] = field(default_factory=dict)
    default: Mapping[str, Any] = field(default_factory=dict)
    cap: Mapping[str, float | Literal["auto"]] = field(default_factory=dict)

    @property
    def caps_by_window(self) -> bool:
        """Whether a bound depends on the prompt's length."""
        return "auto" in self.cap.values()

    def over(self, base: "Sampling") -> "Sampling":
        """These rules on top of more general ones."""
        return Sampling({**base.override, **self.override}, {**base.default, **self.default}, {**base.cap, **self.cap})


def served_as(model: str, models: Mapping[str, str]) -> str | None:
    """What the engine calls the model that is asked for; None if nothing is said of it.

    Its own name goes before the beginning of it with a star behind ("claude-*"), a longer one before a shorter one.
    """
    if model in models:
        return models[model]
    found = [name for name in models if name.endswith("*") and model.startswith(name[:-1])]
    return models[max(found, key=len)] if found else None


def bound_of(sampling: Mapping[str, Any]) -> float | None:
    """The bound on sampled tokens; None if there is none that is a number."""
    bound = next((sampling[name] for name in _BOUNDS if sampling.get(name) is not None), None)
    return bound if isinstance(bound, int | float) else None


def apply_rules(client_sampling: Mapping[str, Any], rules: Sampling, room_left: int | None) -> tuple[Json, set[str]]:
    """What the rules set in a client's sampling, and what they take out of it."""
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
    """The names that mean the same as this one, itself among them."""
    return _BOUNDS if name in _BOUNDS else (name,)


def _cap(body: Json, name: str, bound: float, fields: Json) -> None:
    """Set in `fields` what keeps `name` at or below the bound; a field that is absent is set to the bound."""
    present = [spelling for spelling in _spellings(name) if body.get(spelling) is not None]
    for spelling in present or [name]:
        value = body.get(spelling)
        if value is None or (isinstance(value, int | float) and value > bound):
            fields[spelling] = bound
