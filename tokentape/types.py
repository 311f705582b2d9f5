"""The JSON of responses as TypedDicts.

Fields have the names of the control API. JSON of other systems (requests, responses, metadata, rows of a format) is
`dict[str, Any]`. Times are Unix milliseconds.
"""

from typing import Any, Literal, NotRequired, TypedDict

FinishStatus = Literal["completed", "failed", "aborted", "truncated"]
ContinuationMode = Literal["off", "faithful", "append"]


class _Rollout(TypedDict):
    rollout_id: str
    group_id: str | None
    base_url: str
    model: str | None
    sampling: dict[str, Any]
    tools: list[dict[str, Any]] | None
    limits: dict[str, Any] | None
    deadline_s: float | None
    idle_s: float | None
    start_s: float | None
    reply: dict[str, str] | None
    continuation: NotRequired[ContinuationMode]
    metadata: dict[str, Any]
    status: str
    created_ms: int


class OpenedRollout(_Rollout):
    """The response to opening a rollout: `base_url` for agents, and an `api_key` that is valid for this rollout only."""

    api_key: str


class Change(TypedDict):
    """A change of a rollout: a stored step, or another change, for which `index` and `step_id` are null."""

    rollout_id: str
    index: int | None
    step_id: str | None


class Rollout(_Rollout):
    """A rollout: open, completed, failed, aborted, truncated or limited; `counts` of steps and tokens.

    `reason` is "deadline" if it was finished because it exceeded `deadline_s`, `idle_s` or `start_s`. `policy` is the policy of
    the first step, null before it and if 0.1.0 recorded it. `warning` of a change is why it has no effect.
    """

    reason: str | None
    policy: str | None
    task: str | None
    counts: dict[str, int]
    errors: dict[str, int]
    drift: dict[str, Any]
    reward: float | None
    step_rewards: dict[str, float | list[float]]
    thread_rewards: NotRequired[dict[str, float]]
    advantages: Any
    began_ms: int | None
    touched_ms: int
    finished_ms: int | None
    claimed_by: str | None
    warning: NotRequired[str]


class Choice(TypedDict):
    """One completion: `ids` and `logprobs` have equal lengths if the step is exact; a logprob is null if it is NaN."""

    index: int
    prompt: int
    ids: list[int]
    logprobs: list[float | None]
    finish_reason: str | None
    stop_reason: str | int | None
    spans: list[dict[str, Any]]


class Fidelity(TypedDict):
    """Whether a step is exact; if not, the problem codes and a sentence for each."""

    exact: bool
    problems: list[str]
    why: list[str]


class Step(TypedDict):
    """One recorded call. `prompt_ids` is null if the call had several prompts; they are in `prompts`."""

    step_id: str
    rollout_id: str
    index: int
    dialect: str
    endpoint: str
    engine: dict[str, Any]
    model: dict[str, Any]
    request: dict[str, Any]
    sent: dict[str, Any]
    response: dict[str, Any] | None
    prompt_ids: list[int] | None
    prompts: NotRequired[list[list[int]]]
    choices: list[Choice]
    usage: dict[str, Any] | None
    sampling: dict[str, Any]
    timing: dict[str, Any]
    status: str
    reason: str | None
    delivered: bool
    late: bool
    reward: float | None
    policy_version: str | None
    policy_version_end: str | None
    policy_epoch: NotRequired[int]
    fidelity: Fidelity
    extra: dict[str, Any]


class Rescored(TypedDict):
    """The engine that scored a row, the name of its model, and the version of its weights if it is known."""

    engine: str
    model: str | None
    policy_version: str | None


class BranchPoint(TypedDict):
    """Where a row leaves what a playback inherited: the last step before its first live token, and the rollout that sampled it.

    `tokens` is how many tokens before the first live one were sampled in inherited steps.
    """

    of: str
    step_id: str
    tokens: int


class RowFacts(TypedDict):
    """The rollout and the steps of one row of a batch.

    `step_ids` are the steps that the row trains. `reward` is the thread's own if one is set, else the rollout's. `advantage` is
    null unless the rollout has exactly one (not one per step or per token). `weight` is 1/n for a rollout of n rows.
    `raw_reward` is the reward before the penalty of `overlong=penalize`. `rescored` is what scored the row, with `rescore`.
    `thread` is present if `threads` was requested. `branch` is where a row of a playback leaves what it inherited.
    """

    rollout_id: str
    step_ids: list[str]
    reward: float | None
    advantage: float | None
    weight: float
    raw_reward: NotRequired[float | None]
    rescored: NotRequired[Rescored]
    thread: NotRequired[str]
    branch: NotRequired[BranchPoint]


class ClaimedGroup(TypedDict):
    """A group of a batch.

    `policy_version` is the oldest version of its tokens in their earliest epoch, `policy_epoch`; `staleness` is how far it is
    behind the announced one, null if that is unknown or the epoch is another one.
    `data` is the group in the claimed format. `rows` has an entry for each row of `data`, in the same order: for each item
    of a list, for each entry of the lists of an object, for each rollout in Marin's groups. `rollouts`, `rewards` and
    `advantages` have an entry for each rollout that has rows. `skipped` lists the other members by `rollout_id`, with the
    reason (`why`), and the steps that no row trains by `step_id`. `delivery` is 1, or more if the group was in an earlier
    batch, of `previous_consumer`: it may have trained on it. A group that was requeued has the number of its requeues, and
    of the acknowledgements before (`acked`): if that is not 0, it was trained before.
    """

    group_id: str
    delivery: int
    previous_consumer: str | None
    policy_version: str | None
    policy_epoch: int
    staleness: int | None
    complete_ms: int | None
    metadata: dict[str, Any]
    rollouts: list[str]
    rewards: list[float | None]
    advantages: list[Any] | None
    rows: list[RowFacts]
    skipped: list[dict[str, Any]]
    data: Any
    requeued: NotRequired[int]
    acked: NotRequired[int]


class BatchResult(TypedDict):
    """The groups of a batch after an ack, a release or an extension; `lost` lists those that another consumer has claimed.

    `kept` lists those that an ack did not delete because another policy still has them in its queue.
    """

    batch_id: str
    lost: list[str]
    acked: NotRequired[list[str]]
    kept: NotRequired[list[str]]
    released: NotRequired[list[str]]
    held: NotRequired[list[str]]
    lease_ms: NotRequired[int]
