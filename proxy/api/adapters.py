"""Adapters: calls in another shape, each read as a call that engines know, and answered in its own shape again."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self, TypeAlias

from proxy.protocols.dialects.base import ErrorDialect
from proxy.protocols.dialects.translation import TranslationOptions
from proxy.protocols.exchange import Outcome
from proxy.protocols.plan import Plan
from proxy.trajectory.step import Step


class CallAdapter(Protocol):
    """One call that came in another shape. `endpoint` is where it is sent, `body` its request there."""

    @property
    def endpoint(self) -> str:
        """Where an engine is asked."""
        ...

    @property
    def body(self) -> dict[str, Any]:
        """The call in the dialect of that endpoint."""
        ...

    @property
    def returns_logprobs(self) -> bool:
        """Whether the client's answer has logprobs: then they are asked for, whatever is configured."""
        ...

    @property
    def retries_by_body(self) -> bool:
        """Whether two calls of a rollout with equal bodies are one call and its retry, though no key says so."""
        ...

    @property
    def needs_steps(self) -> bool:
        """Whether the rollout's earlier steps are needed to answer the call."""
        ...

    def with_steps(self, steps: Sequence[Step]) -> Self:
        """Return the adapter with the rollout's earlier steps."""
        ...

    def native(self, models: Mapping[str, str], kind: str | None) -> dict[str, Any]:
        """The body for an engine of this kind (None: unknown). Raises NotValid where such an engine cannot answer it."""
        ...

    def recorded(self, plan: Plan) -> Plan:
        """The plan of that body, saying what was changed of the one that came."""
        ...

    def reshape(self, outcome: Outcome) -> Outcome:
        """The end as the client reads it. Errors stay the engine's own."""
        ...

    def answer(self, step: Step) -> bytes | None:
        """The answer of a step in the client's shape; None if it has none that is whole."""
        ...


# Reads the body of a call to an endpoint; None if the body has the endpoint's own shape. Raises NotValid.
ReadAdapter: TypeAlias = Callable[[str, Mapping[str, Any], TranslationOptions], CallAdapter | None]


@dataclass(frozen=True, slots=True)
class CallRoute:
    """An endpoint that samples: the dialect of its errors, and the adapters that may read its bodies, tried in order."""

    errors: ErrorDialect
    adapters: tuple[ReadAdapter, ...] = ()

    def read(self, endpoint: str, body: Mapping[str, Any], ways: TranslationOptions) -> CallAdapter | None:
        """Return the adapter of a body; None if the body has the endpoint's own shape. Raises NotValid."""
        for read in self.adapters:
            if (adapter := read(endpoint, body, ways)) is not None:
                return adapter
        return None
