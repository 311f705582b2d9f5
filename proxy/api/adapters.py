"""Forms: calls in another system's shape, each read as a call that engines know, and answered in its own shape again.

Holds what every form does and where forms come in. What a form's fields mean is in the file of its system.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeAlias

from proxy.protocols.dialects.translation import Ways
from proxy.protocols.exchange import Outcome
from proxy.protocols.plan import Plan
from proxy.trajectory.step import Step


class Form(Protocol):
    """One call that came in another system's shape. `endpoint` is where it is sent, `body` what it says there."""

    @property
    def endpoint(self) -> str:
        """Where an engine is asked."""
        ...

    @property
    def body(self) -> dict[str, Any]:
        """The call in the dialect of that endpoint."""
        ...

    @property
    def tells_logprobs(self) -> bool:
        """Whether the client's answer has logprobs: then they are asked for, whatever is configured."""
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


ReadForm: TypeAlias = Callable[[str, Mapping[str, Any], Ways], Form | None]  # of an endpoint and a body
