"""Adapters of calls in another format: the call is converted to an engine's format, and its response converted back."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self, TypeAlias

from proxy.protocols.dialects.base import ErrorDialect
from proxy.protocols.dialects.translation import TranslationOptions
from proxy.protocols.exchange import Outcome
from proxy.protocols.plan import Plan
from proxy.trajectory.step import Step


class CallAdapter(Protocol):
    """A call in another format. `endpoint` is the engine's endpoint, `body` the request for it.

    `own`: the endpoints that take the client's body unchanged, by kind of engine. There the call is not adapted.
    """

    @property
    def own(self) -> Mapping[str, str]:
        """The endpoints that take the client's body, by kind of engine."""
        ...

    @property
    def request(self) -> Mapping[str, Any]:
        """The client's body."""
        ...

    @property
    def endpoint(self) -> str:
        """The engine's endpoint."""
        ...

    @property
    def body(self) -> dict[str, Any]:
        """The body in the dialect of that endpoint."""
        ...

    @property
    def returns_logprobs(self) -> bool:
        """Whether the client's response has logprobs: then they are requested regardless of the configuration."""
        ...

    @property
    def retries_by_body(self) -> bool:
        """Whether a call with the same body as an earlier one of its rollout is a retry of it, without an idempotency key."""
        ...

    @property
    def needs_steps(self) -> bool:
        """Whether the response requires the rollout's earlier steps."""
        ...

    def with_steps(self, steps: Sequence[Step]) -> Self:
        """Return the adapter with the rollout's earlier steps."""
        ...

    def native(self, models: Mapping[str, str], kind: str | None) -> dict[str, Any]:
        """Return the body for an engine of this kind (None: unknown). Raises UnprocessableRequest if it cannot serve it."""
        ...

    def recorded(self, plan: Plan) -> Plan:
        """Return the plan with the changes of this adapter to the client's body, for the record."""
        ...

    def reshape(self, outcome: Outcome) -> Outcome:
        """Return the end of the call in the client's format. Errors of the engine are unchanged."""
        ...

    def answer(self, step: Step) -> bytes | None:
        """Return the response of a step in the client's format; None if the step has no complete response."""
        ...


def adapter_of(adapter: CallAdapter | None, step: Step) -> CallAdapter | None:
    """Return the adapter if it was applied to the call of a step."""
    return None if adapter is None or step.endpoint in adapter.own.values() else adapter


# Reads the body of a call to an endpoint; None if the body has the endpoint's own shape. Raises UnprocessableRequest.
ReadAdapter: TypeAlias = Callable[[str, Mapping[str, Any], TranslationOptions], CallAdapter | None]


@dataclass(frozen=True, slots=True)
class CallRoute:
    """An endpoint that samples: the dialect of its errors, and its adapters, which are tried in order."""

    errors: ErrorDialect
    adapters: tuple[ReadAdapter, ...] = ()

    def read(self, endpoint: str, body: Mapping[str, Any], options: TranslationOptions) -> CallAdapter | None:
        """Return the adapter of a body; None if the body has the endpoint's own format. Raises UnprocessableRequest."""
        for read in self.adapters:
            if (adapter := read(endpoint, body, options)) is not None:
                return adapter
        return None
