"""The pydantic models of the control API's queries and request bodies."""

from collections.abc import Iterable
from typing import Annotated, Any, Final, Literal, Self, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, FiniteFloat, model_validator

from proxy.api.body import FIRST_FAULT
from proxy.api.requests import Signal, Signals
from proxy.config.engines import EndpointList
from proxy.config.sections import Caps, ContinuationMode
from proxy.errors import BadRequest
from proxy.export import FORMATS
from proxy.export.containers import CONTAINERS
from proxy.rollouts.group import STATUSES as GROUP_STATUSES
from proxy.rollouts.group import Group
from proxy.rollouts.rollout import STATUSES, Rollout, checked_id
from proxy.trajectory.thread_rules import PRESETS, Wanted
from storage.types import MAX_LEASE_MS


def _id(name: str) -> str:
    try:
        return checked_id(name, what="id")
    except BadRequest as error:
        raise ValueError(error.message) from None


def _described(text: str, default: Any = None) -> Any:
    return Field(default, description=text)


def _pattern(text: str) -> str:
    if "\n" in text or not text.strip("*"):
        raise ValueError("a text to ignore is within one line, and has more than *")
    return text


def _preset(name: str) -> str:
    if name not in PRESETS:
        raise ValueError(f"preset {name!r} is unknown; the presets are {', '.join(PRESETS)}")
    return name


Id = Annotated[str, AfterValidator(_id)]
Seconds = Annotated[FiniteFloat, Field(gt=0)]
Members: TypeAlias = Literal["all", "rewarded", "completed"]
Alone: TypeAlias = Literal[
    "given", "none", "step", "vine"
]  # advantages of rollouts that are exported without their groups
InGroup: TypeAlias = Literal[Alone, "grpo", "rloo", "dr_grpo"]
InBatch: TypeAlias = Literal["none", InGroup, "reinforce_pp"]
Count: TypeAlias = Annotated[int, Field(ge=1)]
Index: TypeAlias = Annotated[int, Field(ge=0)]
PageSize: TypeAlias = Annotated[int, Field(ge=1, le=1000)]
Name = Annotated[str, Field(min_length=1, max_length=256)]
Pattern: TypeAlias = Annotated[str, Field(max_length=500), AfterValidator(_pattern)]
Ignored: TypeAlias = Annotated[list[Pattern], Field(max_length=100)]
Presets: TypeAlias = list[Annotated[str, AfterValidator(_preset)]]
Labels: TypeAlias = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=2048)]], Field(min_length=1, max_length=1000)
]
LeaseSeconds = Annotated[FiniteFloat, Field(gt=0, le=MAX_LEASE_MS / 1000)]

MAX_DRAIN_S: Final = 3600
_MAX_SIZE: Final = 1000  # rollouts of a group
_ATTEMPTS: Final = 3
MAX_TOP_K: Final = 100  # likely tokens at each position; vLLM returns 20 unless --max-logprobs is higher


class RequestModel(BaseModel):
    """The parameters of a query, or the fields of a body. Unknown ones are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class SamplingRules(RequestModel):
    """Rules for the sampling parameters of calls: `override` replaces them, `default` fills absent ones, `cap` limits them."""

    override: dict[str, Any] = {}
    default: dict[str, Any] = {}
    cap: Caps = {}


class RolloutLimits(RequestModel):
    """The limits of a rollout; calls beyond them get 429."""

    max_steps: Index | None = None
    max_tokens: Index | None = None


class ReplyTokens(RequestModel):
    """The token annotations of responses, for clients that cannot send X-Reply-Tokens and X-Reply-Ids."""

    tokens: Literal["pieces"] | None = None
    ids: Literal["choices"] | None = None


class PlaybackTerms(RequestModel):
    """The tape that answers the calls of a rollout: the steps of the rollout `of`, those `before` a step or `through` one.

    `on_mismatch`: what other calls get: `branch` (refused before the branch step, sampled from it on), `refuse` or `sample`.
    `ignore`: texts that count as equal, with `*` for any characters within a line; `presets` have those of known agents.
    """

    of: Id
    before: Name | None = None
    through: Name | None = None
    on_mismatch: Literal["branch", "refuse", "sample"] | None = _described(
        "by default branch with before or through, else refuse"
    )
    ignore: Ignored = []
    presets: Presets = []

    @model_validator(mode="after")
    def _branches_at_one_step(self) -> Self:
        if self.before is not None and self.through is not None:
            raise ValueError("set before or through, not both")
        if self.on_mismatch == "branch" and self.before is None and self.through is None:
            raise ValueError("on_mismatch branch needs before or through: the step at which it branches")
        return self


class _Deadlines(RequestModel):
    """When a rollout is finished as `aborted`: at this age, without a call for `idle_s`, or without a first for `start_s`."""

    deadline_s: Seconds | None = None
    idle_s: Seconds | None = None
    start_s: Seconds | None = None


class Terms(_Deadlines):
    """The terms of a rollout. Those of a playback are by default its source's, but for limits, deadlines and metadata."""

    metadata: dict[str, Any] = {}
    model: str | None = None
    sampling: SamplingRules | None = None
    tools: Annotated[list[dict[str, Any]], FIRST_FAULT] = []
    limits: RolloutLimits | None = None
    reply: ReplyTokens | None = None
    continuation: ContinuationMode | None = None
    playback: PlaybackTerms | None = None


class OpenRollout(Terms):
    """`POST /rollouts`."""

    rollout_id: Id | None = None
    group_id: Id | None = None


class Replacement(RequestModel):
    """How often each rollout of a group that fails is opened again.

    With `playback` the new one plays back the one that failed, with `ignore` and `presets` as in `PlaybackTerms`.
    """

    attempts: Annotated[int, Field(ge=0, le=100)] = _ATTEMPTS
    playback: bool = False
    ignore: Ignored = []
    presets: Presets = []


class _Group(_Deadlines):
    group_id: Id | None = None
    over_sample: Annotated[int, Field(ge=0, le=_MAX_SIZE)] = 0
    replace: bool | Annotated[int, Field(ge=0, le=100)] | Replacement = False
    rollout: Terms = Terms()
    metadata: dict[str, Any] = {}

    @model_validator(mode="after")
    def _has_each_deadline_once(self) -> Self:
        for name in _Deadlines.model_fields:
            if getattr(self, name) is not None and getattr(self.rollout, name) is not None:
                raise ValueError(f"{name} is set twice: set it for the group or in rollout")
        return self


class OpenGroup(_Group):
    """`POST /groups`: rollouts with the terms `rollout`; the deadlines are terms of each of them.

    A rollout shares its `deadline_s` with the rollouts that replace it; `groups.idle_s` is the default of `idle_s`.

    `over_sample`: how many more than `size` are opened. `replace`: how often each failed one is opened again; true: 3 times.
    """

    size: Annotated[int, Field(ge=1, le=_MAX_SIZE)]

    @property
    def replacement(self) -> Replacement:
        """How failed rollouts are opened again."""
        if isinstance(self.replace, Replacement):
            return self.replace
        return Replacement(attempts=_ATTEMPTS if self.replace is True else int(self.replace))

    @model_validator(mode="after")
    def _has_at_most(self) -> Self:
        if self.size + self.over_sample > _MAX_SIZE:
            raise ValueError(f"size and over_sample are at most {_MAX_SIZE} together")
        return self


class OpenBranches(_Group):
    """`POST /rollouts/{id}/branches`: a group of `count` playbacks of the rollout `before` a step; null: before the first one.

    The other fields are those of `POST /groups`; `ignore` and `presets` are terms of the playbacks.
    """

    before: Name | None = None
    count: Annotated[int, Field(ge=1, le=_MAX_SIZE)]
    ignore: Ignored = []
    presets: Presets = []

    @model_validator(mode="after")
    def _has_one_playback(self) -> Self:
        if self.rollout.playback is not None:
            raise ValueError("rollout.playback is of the rollout in the path, before the step `before`: omit it")
        return self


class RequeueGroup(RequestModel):
    """`POST /groups/{id}/requeue`: the policy that gets the group in its queue, and the `max_staleness` of its next delivery.

    Default: the only policy that is trained, and the `max_staleness` of the claim.
    """

    policy: str | None = None
    max_staleness: Index | None = None


def _one_of(names: Iterable[str], default: str | None = None) -> Any:
    """Return a parameter with one of these names, which its module defines."""
    return Field(default, json_schema_extra={"enum": list(names)})


class ExportOptions(RequestModel):
    """The options that the queries of exports and claims have in common.

    An option with the name of a field of `Options` or `Fill` sets that field.
    """

    format: str = _one_of(FORMATS, "sequences")
    branches: Literal["all", "one", "longest", "last"] | None = _described(
        "by default all; one for formats with one row per rollout"
    )
    row_weight: Literal["full", "split"] = "full"
    include: Literal["exact", "flagged", "retokenized"] = "exact"
    inherited: Literal["prompt", "masked", "trained"] = _described("tokens that a playback inherited", "prompt")
    max_len: Count | None = None
    overlong: Literal["cut", "drop", "keep", "penalize"] = "cut"
    overlong_buffer: Count | None = None
    prompt_logprob: FiniteFloat | None = _described(
        "logprob of tokens that were not sampled, in place of the format's own"
    )
    advantage: InBatch = "given"
    any_version: bool = _described("advantage=vine: also branches of other policy versions", default=False)
    discount: Annotated[FiniteFloat, Field(gt=0, le=1)] | None = None
    rescore: str | None = _described(
        "also the logprobs of these ids by a scorer now: policy, or one of rescore.scorers"
    )
    rescore_top_k: int = Field(0, ge=0, le=MAX_TOP_K, description="with its most likely tokens")
    threads: Wanted | None = _described("by default `threads.export`, or all")
    pad_id: Index = 0
    prompt_length: Count | None = None
    response_length: Count | None = None


class ExportParams(ExportOptions):
    """The parameters of every export."""

    container: str | None = _one_of(CONTAINERS)
    report: bool = False
    policy: str | None = _described("only steps of this policy; by default of all trained policies")


class ExportRollout(ExportParams):
    """`GET /rollouts/{id}/export`."""

    advantage: Alone = "given"


class RolloutFilter(RequestModel):
    """Which rollouts are listed: by status and group; None matches any."""

    status: str | None = _one_of(STATUSES)
    group_id: str | None = None

    def matches(self, rollout: Rollout) -> bool:
        """Return whether a rollout matches."""
        return self.status in (None, rollout.status) and self.group_id in (None, rollout.group_id)


class _Since(RolloutFilter):
    since: Index | None = _described("unix time in seconds")


class ListRollouts(_Since):
    """`GET /rollouts`."""

    until: Index | None = _described("unix time in seconds")
    policy: str | None = _described("of the rollout's first step")
    limit: PageSize = 100
    cursor: str | None = None

    def matches(self, rollout: Rollout) -> bool:
        """Return whether a rollout matches."""
        return super().matches(rollout) and self.policy in (None, rollout.policy)


class ExportMany(_Since, ExportRollout):
    """`GET /export`."""

    limit: Count | None = None


class Search(RolloutFilter):
    """`GET /search`."""

    q: Annotated[str, Field(min_length=1, max_length=500)]
    limit: Annotated[int, Field(ge=1, le=200)] = 20
    cursor: str | None = None


class ListGroups(RequestModel):
    """`GET /groups`."""

    status: str | None = _one_of(GROUP_STATUSES)
    policy: str | None = None
    totals: bool = _described("whether each group has the totals of its rollouts", default=False)
    limit: PageSize = 100
    cursor: str | None = None


class ListSteps(RequestModel):
    """`GET /rollouts/{id}/steps`."""

    after: Index | None = _described("index of a step")
    limit: PageSize = 100


class ShowTexts(RequestModel):
    """`GET /rollouts/{id}/steps/{step_id}/texts`."""

    choice: Index = 0
    start: Index = _described("index of the first token; prompt and completion are counted together", 0)
    limit: Annotated[int, Field(ge=1, le=2000)] = 500


class ShowTree(RequestModel):
    """`GET /rollouts/{id}/tree`."""

    texts: bool = _described("whether drift is explained with texts", default=True)


class ShowValues(RequestModel):
    """`GET /rollouts/{id}/values`."""

    any_version: bool = _described("also branches of other policy versions than the step's", default=False)


class ShowTraining(RequestModel):
    """`GET /training`."""

    policy: str | None = None
    limit: PageSize = 200


class ShowEvents(RequestModel):
    """`GET /events`."""

    rollout_id: str | None = None


class GroupFilter(RequestModel):
    """The conditions on a group: which members count, how many of them must have rows, and whether rewards must differ.

    `members`: `rewarded` members, `completed` members, or `all`: then each must have what the format requires. By default,
    members without rows or without a required reward are omitted.
    """

    members: Members | None = None
    min_group: Count | None = None
    only_mixed: bool = False

    def least(self, group: Group) -> int:
        """Return how many members of a group must have rows: by default two, because one has no baseline."""
        if self.min_group is not None:
            return self.min_group
        return 1 if group.size is None else min(2, group.size)


class ExportGroup(GroupFilter, ExportParams):
    """`GET /groups/{id}/export`."""

    advantage: InGroup = "given"


class _Lease(RequestModel):
    lease_s: LeaseSeconds = 600

    @property
    def lease_ms(self) -> int:
        """The duration of the lease in milliseconds."""
        return max(1, round(self.lease_s * 1000))


class ClaimBatch(GroupFilter, ExportOptions, _Lease):
    """`POST /batches/claim`. The export options have the same names as in export queries.

    `exact`: exactly `groups` groups or none. `policy`: the policy that is trained; default: the only one that is.
    `reward_s`: how long after a group is complete rewards are waited for; default: `groups.reward_s`, and 0 with `members`.
    `earlier_epochs`: default: `drop` with `max_staleness`, otherwise `groups.earlier_epochs`.

    `instance`: an ID that the process of the consumer made when it started. `heartbeat_s`: how often it will extend the lease;
    once it missed that, a claim of another instance of the consumer takes its batches over, before their leases expire.
    """

    consumer: Id
    instance: Id | None = None
    heartbeat_s: LeaseSeconds | None = None
    policy: str | None = None
    groups: Annotated[int, Field(ge=1, le=1000)] = 1
    wait_s: Annotated[FiniteFloat, Field(ge=0, le=600)] = 0
    order: Literal["oldest", "newest"] = "oldest"
    max_staleness: Index | None = None
    stale: Literal["drop", "keep"] = "drop"
    earlier_epochs: Literal["drop", "take"] | None = None
    exact: bool = False
    reward_s: Annotated[FiniteFloat, Field(ge=0)] | None = None

    @model_validator(mode="after")
    def _has_one_rule_for_earlier_epochs(self) -> Self:
        if self.earlier_epochs == "take" and self.max_staleness is not None:
            raise ValueError("max_staleness cannot be compared with earlier epochs; omit it, or earlier_epochs: take")
        return self


class AckBatch(RequestModel):
    """`POST /batches/{id}/ack`: `delete` also deletes the groups and all their rollouts."""

    delete: bool = False


class ReleaseBatch(RequestModel):
    """`POST /batches/{id}/release`."""


class ExtendBatch(_Lease):
    """`POST /batches/{id}/extend`: the lease lasts `lease_s` from now."""


class PostMismatch(RequestModel):
    """`POST /batches/{id}/mismatch`: the sums of a part of a batch, as `tokentape.mismatch` returns them.

    `rows` are the branches of each rollout in the part.
    `policy` is required if the batch was not claimed: its ID is then a name, and its rollouts were exported.
    """

    rank: Annotated[int, Field(ge=0, le=2**31)] = 0
    policy: Name | None = None
    policy_version: Name
    rows: Annotated[
        dict[Id, Annotated[list[Index], Field(min_length=1, max_length=10_000)]], Field(min_length=1, max_length=20_000)
    ]
    sums: dict[str, Any]


class PutEngines(RequestModel):
    """`PUT /engines`: the new endpoints of calls; null restores the configured endpoints."""

    endpoints: Annotated[EndpointList, Field(min_length=1, max_length=1000)] | None


class PutPolicy(RequestModel):
    """`PUT /policies/{policy}`. A number is stored as its decimal digits.

    A new epoch begins with `new_epoch`, or if `run` is another ID than the last one that was announced.
    """

    version: Name | int
    run: Name | None = None
    new_epoch: bool = False


class Drain(RequestModel):
    """The query of `POST /policies/{policy}/pause`."""

    drain_s: float = Field(0, ge=0, le=MAX_DRAIN_S, description="how long to wait until no call is in flight")


class PausePolicy(RequestModel):
    """`POST /policies/{policy}/pause`: new calls wait until the end of the pause, or are rejected.

    Calls that are in flight after `drain_s` continue, or are aborted at their engines and recorded as partial steps. With
    `resume` they are interrupted at once, and continue after the pause from what was sampled until then.

    With `endpoints` (their labels), only these are held: their calls are resumed at the others.
    """

    mode: Literal["wait", "reject"] = "wait"
    in_flight: Literal["keep", "abort", "resume"] = "keep"
    endpoints: Labels | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.endpoints is not None and (self.in_flight, self.mode) != ("resume", "wait"):
            raise ValueError("endpoints requires in_flight: resume, and mode: wait")
        return self


class ResumePolicy(RequestModel):
    """`POST /policies/{policy}/resume`: the end of the pause, and of the hold of all endpoints.

    With `endpoints`, only these are released. Calls at them have `version` until the next version of the policy is announced;
    `run` and `new_epoch` are as for that.
    """

    endpoints: Labels | None = None
    version: Name | int | None = None
    run: Name | None = None
    new_epoch: bool = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.endpoints is None and (self.version is not None or self.run is not None or self.new_epoch):
            raise ValueError("version, run and new_epoch require endpoints; PUT the version of the policy instead")
        return self


class LoadAdapter(PutPolicy):
    """`POST /policies/{policy}/adapter`: a LoRA adapter, its name as a model, its path at the engines, and its policy version.

    The default name is the only model of the policy.

    Calls that are in flight after `drain_s` prevent the update, or are aborted. With `resume` they are interrupted at once.
    """

    name: Name | None = None
    path: Annotated[str, Field(min_length=1, max_length=4096)]
    mode: Literal["wait", "reject"] = "wait"
    drain_s: Annotated[FiniteFloat, Field(ge=0, le=MAX_DRAIN_S)] = 60
    in_flight: Literal["drain", "abort", "resume"] = "drain"


class PatchRollout(RequestModel):
    """`PATCH /rollouts/{id}`: present fields are set. `step_rewards` maps step IDs to a number, or to one per sampled token.

    `thread_rewards` maps threads to a number.
    """

    reward: Signal | None = None
    step_rewards: dict[str, Signal | Annotated[list[Signal], FIRST_FAULT]] = {}
    thread_rewards: dict[str, Signal] = {}
    advantages: Signal | Annotated[list[Signal], FIRST_FAULT] | Signals | None = None
    metadata: dict[str, Any] | None = None
    continuation: ContinuationMode | None = None


class FinishRollout(RequestModel):
    """`POST /rollouts/{id}/finish`."""

    status: Literal["completed", "failed", "aborted", "truncated"]
    reward: Signal | None = None
    metadata: dict[str, Any] | None = None


class SessionReward(RequestModel):
    """`POST /sessions/{id}/reward_info` and `/complete`: what the task of a session has computed."""

    reward_info: dict[str, Any] | None = None


class DispatchRollout(RequestModel):
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
