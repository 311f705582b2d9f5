"""The pydantic models of the control API's request bodies. Unknown fields are rejected, and the error names them."""

from typing import Annotated, Any, Final, Literal, Self, TypeVar

from aiohttp import web
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, FiniteFloat, ValidationError, model_validator

from proxy.api.body import FIRST_FAULT, faults_of, read_bytes
from proxy.api.reward_values import Signal, Signals, read_object
from proxy.config.sections import Caps, ContinuationMode, EndpointList
from proxy.errors import BadRequest, UnprocessableRequest
from proxy.rollouts.rollout import checked_id
from proxy.upstream.concurrency import LARGE_BYTES, off_loop
from storage.types import MAX_LEASE_MS


def _id(name: str) -> str:
    try:
        return checked_id(name, what="id")
    except BadRequest as error:
        raise ValueError(error.message) from None


Id = Annotated[str, AfterValidator(_id)]
Seconds = Annotated[FiniteFloat, Field(gt=0)]

_MAX_SIZE: Final = 1000  # rollouts of a group
_ATTEMPTS: Final = 3
MAX_TOP_K: Final = 100  # likely tokens at each position; vLLM returns 20 unless --max-logprobs is higher
_MAX_NAMED_FAULTS: Final = 5  # of a body: a long list may have one per item
_MAX_BODY_BYTES: Final = 8 * 2**20  # terms and metadata are serialized again for the store and the response


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class SamplingRules(_Body):
    """Rules for the sampling parameters of calls: `override` replaces them, `default` fills absent ones, `cap` limits them."""

    override: dict[str, Any] = {}
    default: dict[str, Any] = {}
    cap: Caps = {}


class RolloutLimits(_Body):
    """The limits of a rollout; calls beyond them get 429."""

    max_steps: Annotated[int, Field(ge=0)] | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _has_no_deadline(cls, limits: Any) -> Any:
        if isinstance(limits, dict) and "deadline_s" in limits:
            raise ValueError("deadline_s is a field of the rollout, beside its limits")
        return limits


class ReplyTokens(_Body):
    """The token annotations of responses, for clients that cannot send X-Reply-Tokens and X-Reply-Ids."""

    tokens: Literal["pieces"] | None = None
    ids: Literal["choices"] | None = None


class _Deadlines(_Body):
    """When a rollout is finished as `aborted`: at this age, without a call for `idle_s`, or without a first for `start_s`."""

    deadline_s: Seconds | None = None
    idle_s: Seconds | None = None
    start_s: Seconds | None = None


class Terms(_Deadlines):
    """The terms of a rollout."""

    metadata: dict[str, Any] = {}
    model: str | None = None
    sampling: SamplingRules | None = None
    tools: Annotated[list[dict[str, Any]], FIRST_FAULT] = []
    limits: RolloutLimits | None = None
    reply: ReplyTokens | None = None
    continuation: ContinuationMode | None = None


class OpenRollout(Terms):
    """`POST /rollouts`."""

    rollout_id: Id | None = None
    group_id: Id | None = None


class OpenGroup(_Deadlines):
    """`POST /groups`: rollouts with the terms `rollout`; the deadlines are terms of each of them.

    `deadline_s` is that of a rollout and of those that replace it, together; `groups.idle_s` is the default of `idle_s`.

    `over_sample`: how many more than `size` are opened. `replace`: how often each failed one is opened again; true: 3 times.
    """

    group_id: Id | None = None
    size: Annotated[int, Field(ge=1, le=_MAX_SIZE)]
    over_sample: Annotated[int, Field(ge=0, le=_MAX_SIZE)] = 0
    replace: bool | Annotated[int, Field(ge=0, le=100)] = False
    rollout: Terms = Terms()
    metadata: dict[str, Any] = {}

    @property
    def attempts(self) -> int:
        """How often a failed rollout is opened again."""
        return _ATTEMPTS if self.replace is True else int(self.replace)

    @model_validator(mode="after")
    def _has_at_most(self) -> Self:
        if self.size + self.over_sample > _MAX_SIZE:
            raise ValueError(f"size and over_sample are at most {_MAX_SIZE} together")
        return self

    @model_validator(mode="after")
    def _has_each_deadline_once(self) -> Self:
        for name in _Deadlines.model_fields:
            if getattr(self, name) is not None and getattr(self.rollout, name) is not None:
                raise ValueError(f"{name} is set twice: set it for the group or in rollout")
        return self


class RequeueGroup(_Body):
    """`POST /groups/{id}/requeue`: the policy into whose queue it is put, and the `max_staleness` of its next delivery.

    Default: the only policy that is trained, and the `max_staleness` of the claim.
    """

    policy: str | None = None
    max_staleness: Annotated[int, Field(ge=0)] | None = None


class ClaimBatch(_Body):
    """`POST /batches/claim`. The export options have the same names as in export queries.

    `exact`: exactly `groups` groups or none. `policy`: the policy that is trained; default: the only one that is.
    `reward_s`: how long after a group is complete rewards are waited for; default: `groups.reward_s`, and 0 with `members`.
    `earlier_epochs`: default: `drop` with `max_staleness`, otherwise `groups.earlier_epochs`.

    `instance`: an ID that the process of the consumer made when it started. `heartbeat_s`: how often it will extend the lease;
    once it missed that, a claim of another instance of the consumer takes its batches over, before their leases expire.
    """

    consumer: Id
    instance: Id | None = None
    heartbeat_s: Annotated[FiniteFloat, Field(gt=0, le=MAX_LEASE_MS / 1000)] | None = None
    policy: str | None = None
    groups: Annotated[int, Field(ge=1, le=1000)] = 1
    wait_s: Annotated[FiniteFloat, Field(ge=0, le=600)] = 0
    lease_s: Annotated[FiniteFloat, Field(gt=0, le=MAX_LEASE_MS / 1000)] = 600
    order: Literal["oldest", "newest"] = "oldest"
    max_staleness: Annotated[int, Field(ge=0)] | None = None
    stale: Literal["drop", "keep"] = "drop"
    earlier_epochs: Literal["drop", "take"] | None = None
    exact: bool = False
    format: str = "sequences"
    advantage: Literal["none", "given", "step", "grpo", "rloo", "dr_grpo", "reinforce_pp"] = "given"
    discount: Annotated[FiniteFloat, Field(gt=0, le=1)] | None = None
    members: Literal["all", "rewarded", "completed"] | None = None
    min_group: Annotated[int, Field(ge=1)] | None = None
    only_mixed: bool = False
    reward_s: Annotated[FiniteFloat, Field(ge=0)] | None = None
    branches: Literal["all", "one", "longest", "last"] | None = None
    threads: Literal["all", "agents", "main"] | None = None
    row_weight: Literal["full", "split"] = "full"
    include: Literal["exact", "flagged", "retokenized"] = "exact"
    max_len: Annotated[int, Field(ge=1)] | None = None
    overlong: Literal["cut", "drop", "keep", "penalize"] = "cut"
    overlong_buffer: Annotated[int, Field(ge=1)] | None = None
    prompt_logprob: FiniteFloat | None = None
    pad_id: Annotated[int, Field(ge=0)] = 0
    prompt_length: Annotated[int, Field(ge=1)] | None = None
    response_length: Annotated[int, Field(ge=1)] | None = None
    rescore: str | None = None
    rescore_top_k: Annotated[int, Field(ge=0, le=MAX_TOP_K)] = 0

    @model_validator(mode="after")
    def _has_one_rule_for_earlier_epochs(self) -> Self:
        if self.earlier_epochs == "take" and self.max_staleness is not None:
            raise ValueError("max_staleness cannot be compared with earlier epochs; omit it, or earlier_epochs: take")
        return self

    @model_validator(mode="before")
    @classmethod
    def _has_no_rewarded(cls, body: Any) -> Any:
        if isinstance(body, dict) and "rewarded" in body:
            raise ValueError(
                "`rewarded` was replaced by `members`: `rewarded` omits members without a reward, `all` refuses a group until "
                "each member has what the format requires"
            )
        return body


class AckBatch(_Body):
    """`POST /batches/{id}/ack`: `delete` also deletes the groups and all their rollouts."""

    delete: bool = False


class ReleaseBatch(_Body):
    """`POST /batches/{id}/release`."""


class ExtendBatch(_Body):
    """`POST /batches/{id}/extend`: the lease lasts `lease_s` from now."""

    lease_s: Annotated[FiniteFloat, Field(gt=0, le=MAX_LEASE_MS / 1000)] = 600


class PutEngines(_Body):
    """`PUT /engines`: the new endpoints of calls; null restores those of the configuration."""

    endpoints: Annotated[EndpointList, Field(min_length=1, max_length=1000)] | None


Version = Annotated[str, Field(min_length=1, max_length=256)] | int
MAX_DRAIN_S = 3600


class PutPolicy(_Body):
    """`PUT /policies/{policy}`. A number is stored as its decimal digits.

    A new epoch begins with `new_epoch`, or if `run` is another ID than the last one that was announced.
    """

    version: Version
    run: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    new_epoch: bool = False


class PausePolicy(_Body):
    """`POST /policies/{policy}/pause`: new calls wait until the end of the pause, or are rejected.

    Calls that are in flight after `drain_s` continue, or are aborted at their engines and recorded as partial steps.
    """

    mode: Literal["wait", "reject"] = "wait"
    in_flight: Literal["keep", "abort"] = "keep"


class LoadAdapter(PutPolicy):
    """`POST /policies/{policy}/adapter`: a LoRA adapter, its name as a model, its path at the engines, and its policy version.

    The default name is the only model of the policy.

    Calls that are in flight after `drain_s` prevent the update, or are aborted.
    """

    name: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    path: Annotated[str, Field(min_length=1, max_length=4096)]
    mode: Literal["wait", "reject"] = "wait"
    drain_s: Annotated[FiniteFloat, Field(ge=0, le=MAX_DRAIN_S)] = 60
    in_flight: Literal["drain", "abort"] = "drain"


class PatchRollout(_Body):
    """`PATCH /rollouts/{id}`: present fields are set. `step_rewards` maps step IDs to a number, or to one per sampled token.

    `thread_rewards` maps threads to a number.
    """

    reward: Signal | None = None
    step_rewards: dict[str, Signal | Annotated[list[Signal], FIRST_FAULT]] = {}
    thread_rewards: dict[str, Signal] = {}
    advantages: Signal | Annotated[list[Signal], FIRST_FAULT] | Signals | None = None
    metadata: dict[str, Any] | None = None
    continuation: ContinuationMode | None = None


class FinishRollout(_Body):
    """`POST /rollouts/{id}/finish`."""

    status: Literal["completed", "failed", "aborted", "truncated"]
    reward: Signal | None = None
    metadata: dict[str, Any] | None = None


class SessionReward(_Body):
    """`POST /sessions/{id}/reward_info` and `/complete`: what the task of a session has computed."""

    reward_info: dict[str, Any] | None = None


class DispatchRollout(_Body):
    """`POST /rollouts/{id}/dispatch`: the rollout server, its protocol, and the request that is sent to it.

    Sampling parameters are `sampling_params` in the synchronous protocol and `completion_params` in the asynchronous one.
    """

    server: str
    protocol: Literal["sync", "async"] = "sync"
    messages: Annotated[list[dict[str, Any]], Field(min_length=1), FIRST_FAULT]
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
                raise ValueError(f"{name} does not exist in the {self.protocol} protocol")
        return self


Read = TypeVar("Read", bound=_Body)


def read_as(model: type[Read], text: bytes) -> Read:
    """Return the body as this model; an empty one as `{}`.

    Raises:
        BadRequest: the body is not a JSON object.
        UnprocessableRequest: a value is not allowed; the message names the first errors.
    """
    body = read_object(text or b"{}")
    try:
        return model.model_validate(body)
    except ValidationError as error:
        faults = faults_of(error)
        messages = [
            f"{'.'.join(map(str, fault['loc'])) or 'body'}: {fault['msg']}" for fault in faults[:_MAX_NAMED_FAULTS]
        ]
        more = [f"and {len(faults) - _MAX_NAMED_FAULTS} more"] if len(faults) > _MAX_NAMED_FAULTS else []
        first = faults[0]["loc"]
        raise UnprocessableRequest("; ".join([*messages, *more]), param=str(first[0]) if first else None) from None


async def body_from(request: web.Request, model: type[Read]) -> Read:
    """Read the body as this model. Raises BadRequest, UnprocessableRequest, and what `read_bytes` raises."""
    text = await read_bytes(request, most=_MAX_BODY_BYTES)
    return await off_loop(len(text), LARGE_BYTES, read_as, model, text)
