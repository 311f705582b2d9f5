"""What the proxy answers, as types.

Holds the shapes that both clients give back: the JSON of the control face as it came, nothing renamed. Other people's JSON
(requests, responses, metadata, rows of a format) stays `dict[str, Any]`. Times are unix milliseconds.
"""

from typing import Any, NotRequired, TypedDict


class Opened(TypedDict):
    """What opening a rollout answers: where agents reach it (`base_url`), and the key that opens only it."""

    rollout_id: str
    group_id: str | None
    base_url: str
    api_key: str
    model: str | None
    sampling: dict[str, Any]
    tools: list[dict[str, Any]] | None
    limits: dict[str, Any] | None
    reply: dict[str, str] | None
    metadata: dict[str, Any]
    status: str
    created_ms: int


class Rollout(TypedDict):
    """A rollout: open, completed, failed, aborted, truncated or limited; `counts` of steps and tokens."""

    rollout_id: str
    group_id: str | None
    base_url: str
    model: str | None
    sampling: dict[str, Any]
    tools: list[dict[str, Any]] | None
    limits: dict[str, Any] | None
    reply: dict[str, str] | None
    metadata: dict[str, Any]
    status: str
    counts: dict[str, int]
    drift: dict[str, Any]
    reward: float | None
    step_rewards: dict[str, float | list[float]]
    advantages: Any
    created_ms: int
    touched_ms: int
    finished_ms: int | None
    claimed_by: str | None


class Choice(TypedDict):
    """What was sampled: as many ids as logprobs where the step is exact; null where a logprob is not a number."""

    index: int
    prompt: int
    ids: list[int]
    logprobs: list[float | None]
    finish_reason: str | None
    stop_reason: str | int | None
    spans: list[dict[str, Any]]


class Fidelity(TypedDict):
    """Whether a step is exact, and if not: the codes, and a sentence for each."""

    exact: bool
    problems: list[str]
    why: list[str]


class Step(TypedDict):
    """One recorded call. `prompt_ids` is null where the call had several prompts: then `prompts` has them."""

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
    fidelity: Fidelity
    extra: dict[str, Any]


class RowFacts(TypedDict):
    """What a row of a batch or an export is made of.

    `step_ids` are the steps whose sampled tokens are trained in the row. `reward` is the rollout's; `advantage` is null
    unless the rollout has exactly one (not one for each step or token).
    """

    rollout_id: str
    step_ids: list[str]
    reward: float | None
    advantage: float | None


class ClaimedGroup(TypedDict):
    """A group of a batch.

    `data` is the group in the format that was claimed, and `rows` has an entry for each row in it, in the same order: for
    each item of a list, for each entry of the lists of an object, for each rollout within Marin's groups. `rollouts`,
    `rewards` and `advantages` have an entry for each rollout that has rows. `skipped` names the other members by their
    `rollout_id`, with the reason (`why`), and the steps that no row trains by their `step_id`.
    """

    group_id: str
    policy_version: str | None
    complete_ms: int | None
    metadata: dict[str, Any]
    rollouts: list[str]
    rewards: list[float | None]
    advantages: list[Any] | None
    rows: list[RowFacts]
    skipped: list[dict[str, str]]
    data: Any


class Settled(TypedDict):
    """What became of a batch's groups; `lost` are those whose lease ran out and that somebody else holds."""

    batch_id: str
    lost: list[str]
    acked: NotRequired[list[str]]
    released: NotRequired[list[str]]
    held: NotRequired[list[str]]
    lease_ms: NotRequired[int]
