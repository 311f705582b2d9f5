"""What people send to the control face.

Holds the pydantic models of request bodies and their reading: a misspelt field is refused, and the refusal names it.
"""

from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, FiniteFloat, ValidationError, model_validator

from proxy.bodies import read_body
from proxy.errors import BadCall, NotValid
from proxy.naming import checked_id


def _id(name: str) -> str:
    try:
        return checked_id(name, what="id")
    except BadCall as error:
        raise ValueError(error.message) from None


Id = Annotated[str, AfterValidator(_id)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class SamplingRules(_Body):
    """Rules on what agents ask of sampling: `override` wins, `default` yields, `cap` bounds from above."""

    override: dict[str, Any] = {}
    default: dict[str, Any] = {}
    cap: dict[str, FiniteFloat] = {}


class RolloutLimits(_Body):
    """How much a rollout may take; past it calls get 429."""

    max_steps: Annotated[int, Field(ge=0)] | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    deadline_s: Annotated[FiniteFloat, Field(ge=0)] | None = None


class OpenRollout(_Body):
    """`POST /rollouts`."""

    rollout_id: Id | None = None
    group_id: Id | None = None
    metadata: dict[str, Any] = {}
    model: str | None = None
    sampling: SamplingRules | None = None
    tools: list[dict[str, Any]] = []
    limits: RolloutLimits | None = None


class PatchRollout(_Body):
    """`PATCH /rollouts/{id}`: what is given is set; `step_rewards` are by step id."""

    reward: FiniteFloat | None = None
    step_rewards: dict[str, FiniteFloat] = {}
    advantages: FiniteFloat | list[FiniteFloat] | dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None


class FinishRollout(_Body):
    """`POST /rollouts/{id}/finish`."""

    status: Literal["completed", "failed", "aborted", "truncated"]
    reward: FiniteFloat | None = None
    metadata: dict[str, Any] | None = None


class DispatchRollout(_Body):
    """`POST /rollouts/{id}/dispatch`: which server runs the rollout, by which protocol, and what it is told.

    The sampling is called `sampling_params` by the synchronous protocol and `completion_params` by the asynchronous one.
    """

    server: str
    protocol: Literal["sync", "async"] = "sync"
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    sampling_params: dict[str, Any] | None = None
    completion_params: dict[str, Any] | None = None
    max_turns: Annotated[int, Field(ge=1, le=100)] = 10
    max_tokens_total: Annotated[int, Field(ge=1, le=1_000_000)] = 8192
    tool_server_url: str | None = None
    tokenizer_name: str | None = None
    tokenizer_revision: str | None = None
    metadata: dict[str, Any] = {}
    wait: bool = False

    @model_validator(mode="after")
    def _is_of_one_protocol(self) -> Self:
        foreign = {
            "sync": {"completion_params"},
            "async": {"sampling_params", "tokenizer_name", "tokenizer_revision"},
        }[self.protocol]
        for name in sorted(foreign):
            if getattr(self, name) is not None:
                raise ValueError(f"{name} is not known to the {self.protocol} protocol")
        return self


Read = TypeVar("Read", bound=_Body)


def read_as(model: type[Read], text: bytes) -> Read:
    """The body as this model; an empty one as `{}`. Raises BadCall (not JSON) or NotValid (names each field)."""
    body = read_body(text or b"{}")
    try:
        return model.model_validate(body)
    except ValidationError as error:
        told = "; ".join(f"{'.'.join(map(str, one['loc'])) or 'body'}: {one['msg']}" for one in error.errors())
        first = error.errors()[0]["loc"]
        raise NotValid(told, param=str(first[0]) if first else None) from None
