"""The section of the scorers: engines that return the logprobs of recorded token ids for exports and claims."""

from typing import Annotated, TypeAlias

from pydantic import AfterValidator, Field

from proxy.config.policies import POLICY_NAME
from proxy.config.sections import EndpointList, Section

_POLICY = "policy"  # the name of the policy's own engines


class ScorerSettings(Section):
    """One scorer, for example a teacher. It receives no calls of agents."""

    endpoints: Annotated[EndpointList, Field(min_length=1)] = Field(
        description="Its engines (vLLM or SGLang), with the fields of engines.endpoints. All of them serve the same weights."
    )
    model: Annotated[str, Field(min_length=1)] | None = Field(
        None, description="Name of its model at the engines. Default: the first one that an engine lists."
    )
    version: Annotated[str, Field(min_length=1)] | None = Field(
        None,
        description="Version of its weights. Change it with the weights: scores are cached by it, and only with it.",
    )


def _check(scorers: dict[str, ScorerSettings]) -> dict[str, ScorerSettings]:
    """Raise ValueError for an invalid or reserved name."""
    for name in scorers:
        if name == _POLICY or not POLICY_NAME.fullmatch(name):
            raise ValueError(
                f"invalid scorer name {name!r}: use up to 64 letters, digits, '.', '_' and '-', no sign first, and not "
                f"{_POLICY!r}, which is the name of the policy's own engines"
            )
    return scorers


ScorerTable: TypeAlias = Annotated[dict[str, ScorerSettings], AfterValidator(_check)]


class RescoreSettings(Section):
    """Logprobs of recorded token ids by an engine now, in exports and claims with `rescore`."""

    scorers: ScorerTable = Field({}, description="Engines that only score, by name, for example a teacher.")
    timeout_s: float = Field(
        300, gt=0, description="Maximum seconds of a scoring request, with its time in the queue of the engine."
    )
    max_in_flight: int | None = Field(
        None,
        ge=1,
        description="Maximum number of rows that one process has each scorer score at the same time. Default: 8, and 1 at "
        "each engine that lists LoRA adapters.",
    )
    cache_s: int = Field(86_400, ge=1, description="Seconds for which the store keeps scores.")
    cache_bytes: int = Field(
        2**29, ge=0, description="Maximum bytes of all scores in the store; the oldest are removed."
    )
