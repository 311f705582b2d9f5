"""Rollouts: their values, and how the store's fields and marks represent them."""

import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, TypedDict

import orjson
from msgspec import Struct

from proxy.continuation.types import Mode
from proxy.errors import BadRequest, Damaged, NotFound
from proxy.protocols.sampling import NO_RULES, Sampling
from proxy.rollouts.stored_fields import (
    Count,
    Milliseconds,
    Number,
    Seconds,
    check_numbers,
    damage_of,
    left_out,
    read_fields,
    values_of,
)
from proxy.telemetry.metrics import Metrics
from proxy.trajectory.step import DEFAULT_POLICY
from storage.types import LATE_MARK, Origin, StoredEntity

UNDELIVERED_MARK = "undelivered:"


DELIVERED_MARK = "delivered:"  # a retry of its client got the stored response


RESULT: Final = "osmosis"  # in the metadata: the result that a rollout server or an agent reported
DEADLINE: Final = "deadline"  # the reason of rollouts that exceeded `deadline_s`, `idle_s` or `start_s`
SURPLUS: Final = "surplus"  # the reason of rollouts that their over-sampled group does not need
DRIFT_FIELD: Final = "drift"  # counted when the rollout is finished, and completed later
TASK_FIELD: Final = "task"  # the first words of the first call
BEGAN_FIELD: Final = "began_ms"  # when the first call was received
HTTP_COUNT: Final = "http_"  # and an HTTP status: the number of failed calls with it
UNEXPLAINED: Final = "unexplained"
FINISHED: Final = ("completed", "failed", "aborted", "truncated")
STATUSES: Final = ("open", "limited", *FINISHED)


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a rollout; None: unlimited."""

    max_steps: int | None = None
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class CountedDrift:
    """The number of drift boundaries of a finished rollout by kind, and the number of steps searched."""

    kinds: Mapping[str, int]
    steps: int

    @property
    def unexplained(self) -> int:
        """The number of boundaries without a kind."""
        return self.kinds.get(UNEXPLAINED, 0)

    def knows_more_than(self, before: "CountedDrift") -> bool:
        """Return whether this covers more steps, or as many with fewer unexplained boundaries."""
        return (self.steps, -self.unexplained) > (before.steps, -before.unexplained)

    def known_since(self, before: "CountedDrift | None") -> dict[str, int]:
        """Return by kind the boundaries that were not counted before."""
        known = {} if before is None else before.kinds
        more = {kind: count - known.get(kind, 0) for kind, count in self.kinds.items() if kind != UNEXPLAINED}
        return {kind: count for kind, count in more.items() if count > 0}


class ClaimId(NamedTuple):
    """A claim of groups for a policy, and the ID of its batch."""

    policy: str
    batch_id: str


_NO_LIMITS: Final = Limits()


class Rollout(Struct, frozen=True):
    """A rollout. Times are Unix milliseconds.

    `step_rewards` are by step ID: a number, or one for each sampled token; `thread_rewards` by thread. `claims` rely on its
    rewards, which are frozen then (see `freezing`). `reason` is why TokenTape finished the rollout itself. `deadline_s` and
    `start_s`, the time until its first call, count from its creation, `idle_s` from its last call (see `deadlines`).
    """

    rollout_id: str
    incarnation: str
    created_ms: int
    touched_ms: int
    status: str = "open"
    reason: str | None = None
    finished_ms: int | None = None
    group_id: str | None = None
    model: str | None = None
    reward: float | None = None
    step_rewards: Mapping[str, float | Sequence[float]] = {}
    thread_rewards: Mapping[str, float] = {}
    thread_advantages: Mapping[str, float] = {}  # estimated for an export, and not stored
    advantages: Any = None
    claims: tuple[ClaimId, ...] = ()
    metadata: Mapping[str, Any] = {}
    sampling: Sampling = NO_RULES
    tools: tuple[dict[str, Any], ...] = ()
    limits: Limits = _NO_LIMITS
    deadline_s: float | None = None
    idle_s: float | None = None
    start_s: float | None = None
    is_over_sampled: bool = False  # its group may not need it
    osmosis: Mapping[str, Any] = {}  # of its dispatch: server, protocol, state
    result: Mapping[str, Any] | None = None  # reported by its rollout server: status, reward
    reply: Mapping[str, str] = {}  # which token fields responses have
    continuation: Mode | None = None  # None: the configured mode
    task: str | None = None  # the first words of its first call
    began_ms: int | None = None  # when its first call was received
    counts: Mapping[str, int] = {}
    drift: CountedDrift | None = None  # None until it is counted
    has_reservation: bool | None = None  # of the call that opened it; None without a limit of steps
    origin: Origin = Origin(0)  # its fields in the store when it was read

    @property
    def errors(self) -> dict[str, int]:
        """The number of failed calls by the HTTP status that the engine responded with."""
        return {name[len(HTTP_COUNT) :]: count for name, count in self.counts.items() if name.startswith(HTTP_COUNT)}

    @property
    def is_finished(self) -> bool:
        """Whether the rollout is finished."""
        return self.status in FINISHED

    @property
    def quiet_s(self) -> float | None:
        """How long it can be without a touch while its calls are in flight; None without a limit."""
        return self.start_s if self.idle_s is None and self.began_ms is None else self.idle_s

    @property
    def claimed_by(self) -> str | None:
        """The batch of the first claim that relies on its rewards."""
        return self.claims[0].batch_id if self.claims else None

    @property
    def is_drift_known(self) -> bool:
        """Whether the drift of all steps is counted, and every boundary has a kind."""
        return self.drift is not None and not self.drift.unexplained and self.drift.steps >= self.counts.get("steps", 0)

    @property
    def is_starting(self) -> bool:
        """Whether it waits for the tools from its rollout server."""
        return self.osmosis.get("state") == "starting" and not self.is_finished


@dataclass(frozen=True, slots=True)
class Marks:
    """The IDs of steps that are marked as undelivered, or as late (stored after the rollout was finished)."""

    undelivered: frozenset[str]
    late: frozenset[str] = frozenset()


class _SamplingFields(Struct):
    override: dict[str, Any] | None = None
    default: dict[str, Any] | None = None
    cap: dict[str, Number | Literal["auto"]] | None = None


class _LimitFields(Struct):  # development versions stored others, too
    max_steps: Count | None = None
    max_tokens: Count | None = None


class _DispatchFields(TypedDict):
    server: str
    protocol: str
    asked: str
    state: str


class _ResultFields(TypedDict):
    status: str
    reward: Number | None


class _Fields(Struct):
    """The fields of a rollout in the store. Names and types bind data: other values make the rollout unreadable."""

    status: Literal["open", "limited", "completed", "failed", "aborted", "truncated"] | None = None
    reason: str | None = None
    finished_ms: Milliseconds | None = None
    group_id: str | None = None
    model: str | None = None
    reward: Number | None = None
    step_rewards: dict[str, Number | list[Number]] | None = None
    thread_rewards: dict[str, Number] | None = None
    advantages: Number | list[Any] | dict[str, Any] | None = None
    claimed_by: str | list[tuple[str, str]] | None = None
    metadata: dict[str, Any] | None = None
    sampling: _SamplingFields | None = None
    tools: list[dict[str, Any]] | None = None
    limits: _LimitFields | None = None
    places: Count | None = None  # `limits.max_steps`, for the store
    deadline_s: Seconds | None = None
    idle_s: Seconds | None = None
    start_s: Seconds | None = None
    is_over_sampled: bool | None = None
    osmosis: _DispatchFields | None = None
    result: _ResultFields | None = None
    reply: dict[str, str] | None = None
    continuation: Mode | None = None
    task: str | None = None
    began_ms: Milliseconds | None = None
    drift: CountedDrift | None = None


def read_rollout(stored: StoredEntity) -> Rollout:
    """Return the rollout from its stored fields. Raises Damaged."""
    fields = read_fields(stored, _Fields, "rollout")
    if isinstance(fields.advantages, list | dict):
        with damage_of("rollout", stored.name):
            check_numbers(fields.advantages)
    rules, limits = fields.sampling, fields.limits
    return Rollout(
        rollout_id=stored.name,
        incarnation=stored.incarnation,
        created_ms=stored.created_ms,
        touched_ms=stored.touched_ms,
        status=fields.status or "open",
        reason=fields.reason,
        finished_ms=fields.finished_ms,
        group_id=fields.group_id,
        model=fields.model,
        reward=fields.reward,
        step_rewards=fields.step_rewards or {},
        thread_rewards=fields.thread_rewards or {},
        advantages=fields.advantages,
        claims=() if fields.claimed_by is None else _claims(fields.claimed_by),
        metadata=fields.metadata or {},
        sampling=NO_RULES if rules is None else Sampling(rules.override or {}, rules.default or {}, rules.cap or {}),
        tools=tuple(fields.tools or ()),
        limits=_NO_LIMITS if limits is None else Limits(limits.max_steps, limits.max_tokens),
        deadline_s=fields.deadline_s,
        idle_s=fields.idle_s,
        start_s=fields.start_s,
        is_over_sampled=fields.is_over_sampled or False,
        osmosis=fields.osmosis or {},
        result=fields.result,
        reply=fields.reply or {},
        continuation=fields.continuation,
        task=fields.task,
        began_ms=fields.began_ms,
        counts=stored.counts,
        drift=None if fields.drift is None else _drift(fields.drift, stored.counts.get("steps", 0)),
        has_reservation=stored.has_reservation,
        origin=Origin(stored.created_ms, stored.fields),
    )


def read_rollouts(found: Iterable[StoredEntity | None], metrics: Metrics) -> tuple[list[Rollout], list[dict[str, str]]]:
    """Return the rollouts that exist and can be read, and the entries that name those that cannot."""
    rollouts: list[Rollout] = []
    damaged: list[Damaged] = []
    for stored in found:
        try:
            rollouts += [] if stored is None else [read_rollout(stored)]
        except Damaged as damage:
            damaged.append(damage)
    return rollouts, left_out(damaged, metrics)


class _ClaimFields(Struct):
    claimed_by: str | list[tuple[str, str]] | None = None


def read_claims(stored: StoredEntity) -> tuple[ClaimId, ...]:
    """Return the claims that rely on a rollout's rewards, also if other fields are damaged. Raises Damaged."""
    with damage_of("rollout", stored.name):
        claimed_by = values_of(stored.fields, _ClaimFields).claimed_by
    return () if claimed_by is None else _claims(claimed_by)


def write_fields(values: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the stored fields of a rollout; None values are omitted.

    `max_steps` is also the field `places`, from which the store leases reservations to calls.
    """
    values = {**values, "places": (values.get("limits") or {}).get("max_steps")}
    return {name: orjson.dumps(value) for name, value in values.items() if value is not None}


def own_metadata(metadata: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the metadata without a reported result, for responses with many rollouts: a result has up to 64 kB."""
    return {name: value for name, value in metadata.items() if name != RESULT} if RESULT in metadata else metadata


def read_marks(marks: Mapping[str, bytes]) -> Marks:
    """Return the marks of a rollout's steps."""
    return Marks(
        undelivered=_named(marks, UNDELIVERED_MARK) - _named(marks, DELIVERED_MARK),
        late=_named(marks, LATE_MARK),
    )


def _claims(stored: str | list[tuple[str, str]]) -> tuple[ClaimId, ...]:
    if isinstance(stored, str):
        return (ClaimId(DEFAULT_POLICY, stored),)
    return tuple(ClaimId(policy, batch_id) for policy, batch_id in stored)


def write_claims(claims: Sequence[ClaimId]) -> dict[str, bytes | None]:
    """Return the stored field of the claims: absent without any, and the ID of its batch for one of the default policy."""
    if not claims:
        return {"claimed_by": None}
    is_plain = len(claims) == 1 and claims[0].policy == DEFAULT_POLICY
    return {"claimed_by": orjson.dumps(claims[0].batch_id if is_plain else list(map(list, claims)))}


def _drift(counted: CountedDrift, steps: int) -> CountedDrift | None:
    """Return the drift of a rollout; None if it was counted in steps that are gone because the rollout expired."""
    return counted if counted.steps <= steps else None


def _named(marks: Mapping[str, bytes], kind: str) -> frozenset[str]:
    """Return the IDs of the steps with a mark of this kind."""
    return frozenset(name.removeprefix(kind) for name in marks if name.startswith(kind))


MAX_ID_CHARACTERS = 256


_UNPRINTABLE = ("Cc", "Cs")  # control characters; surrogates, which UTF-8 cannot encode


def checked_id(name: str, *, what: str = "rollout id") -> str:
    """Return the ID if it is valid. Raises BadRequest."""
    if not 1 <= len(name) <= MAX_ID_CHARACTERS:
        raise BadRequest(
            f"A {what} must have 1 to {MAX_ID_CHARACTERS} characters, not {len(name)}.", param="rollout_id"
        )
    if name.isascii() and name.isprintable():
        return name
    for position, character in enumerate(name):
        if unicodedata.category(character) in _UNPRINTABLE:
            raise BadRequest(
                f"A {what} must not contain control characters, such as U+{ord(character):04X} at index {position}.",
                param="rollout_id",
            )
    return name


def no_rollout(name: str) -> NotFound:
    """Return the error for a rollout that does not exist."""
    return NotFound(f"Rollout {name!r} not found.", param="rollout_id")
