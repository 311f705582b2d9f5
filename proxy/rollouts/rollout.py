"""Rollouts: their values, when they are due, and how the store's fields and marks represent them."""

import math
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, TypedDict

import orjson
from msgspec import Struct, field, structs

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
    marked,
    read_fields,
)
from proxy.telemetry.metrics import Metrics
from proxy.trajectory.step import DEFAULT_POLICY
from storage.types import LATE_MARK, Origin, StoredEntity

UNDELIVERED_MARK: Final = "undelivered:"
DELIVERED_MARK: Final = "delivered:"  # a retry of its client got the stored response
RESULT: Final = "osmosis"  # in the metadata: the result that a rollout server or an agent reported
DEADLINE: Final = "deadline"  # the reason of rollouts that exceeded `deadline_s`, `idle_s` or `start_s`
SURPLUS: Final = "surplus"  # the reason of rollouts that their over-sampled group does not need
DRIFT_FIELD: Final = "drift"  # counted when the rollout is finished, and completed later
TASK_FIELD: Final = "task"  # the first words of the first call
BEGAN_FIELD: Final = "began_ms"  # when the first call was received
POLICY_FIELD: Final = "policy"  # of the first step; rollouts are listed by it
HTTP_COUNT: Final = "http_"  # and an HTTP status: the number of failed calls with it
UNEXPLAINED: Final = "unexplained"
FINISHED: Final = ("completed", "failed", "aborted", "truncated")
STATUSES: Final = ("open", "limited", *FINISHED)
_MIN_IDLE_S: Final = 1.0  # shorter values of `idle_s` and `start_s` act as this one
MAX_ID_CHARACTERS: Final = 256
_NEVER_MS: Final = 2**52  # later than any time of a rollout, and exact as the score of a sorted set
_DEADLINES: Final = ("deadline_s", "idle_s", "start_s")
_DISPATCH: Final = ("server", "protocol", "asked", "state")
_UNPRINTABLE: Final = ("Cc", "Cs")  # control characters; surrogates, which UTF-8 cannot encode


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a rollout; None: unlimited. Development versions stored others, too."""

    max_steps: Count | None = None
    max_tokens: Count | None = None


class CountedDrift(Struct, frozen=True):
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


class _Result(TypedDict):
    status: str
    reward: Number | None


class Playback(Struct, frozen=True):
    """What answers the calls of a playback: the first `end` steps of the rollout `of`, which are its tape.

    `answerable` of them can be answered again. Calls are sampled from the branch step on: the step `before`, or the first one
    that continues the step `through`.
    """

    of: str
    incarnation: str  # of that rollout
    end: Count
    answerable: Count
    on_mismatch: Literal["branch", "refuse", "sample"]
    before: str | None = None
    through: str | None = None
    ignore: tuple[str, ...] = ()  # patterns of texts that count as equal, see `tape`


class Mismatch(Struct, frozen=True):
    """The refused calls of a playback: how many, and how the first one differs from its tape."""

    count: Count
    first: Mapping[str, Any]


_NO_LIMITS: Final = Limits()


class Rollout(Struct, frozen=True):
    """A rollout. Times are Unix milliseconds.

    The fields from `status` on are stored under these names with these types, so both bind data: other values make the rollout
    unreadable. `deadline_s` and `start_s` (the time until its first call) count from its creation, `idle_s` from its last call.
    """

    rollout_id: str
    incarnation: str
    created_ms: int
    touched_ms: int
    status: Literal["open", "limited", "completed", "failed", "aborted", "truncated"] = "open"
    reason: str | None = None  # why TokenTape finished it itself
    finished_ms: Milliseconds | None = None
    group_id: str | None = None
    model: str | None = None
    reward: Number | None = None
    step_rewards: Mapping[str, Number | list[Number]] = {}  # by step ID: one for the step, or for each sampled token
    thread_rewards: Mapping[str, Number] = {}
    advantages: Number | list[Any] | dict[str, Any] | None = None
    relying: str | tuple[ClaimId, ...] = field(default=(), name="claimed_by")  # see `claims`
    metadata: Mapping[str, Any] = {}
    sampling: Sampling = NO_RULES
    tools: tuple[dict[str, Any], ...] = ()
    limits: Limits = _NO_LIMITS
    places: Count | None = None  # `limits.max_steps`, for the store
    deadline_s: Seconds | None = None
    idle_s: Seconds | None = None
    start_s: Seconds | None = None
    is_over_sampled: bool = False  # its group may not need it
    osmosis: Mapping[str, Any] = {}  # its dispatch to a rollout server, with the texts `_DISPATCH`
    result: _Result | None = None  # reported by its rollout server
    reply: Mapping[str, str] = {}  # which token fields responses have
    continuation: Mode | None = None  # None: the configured mode
    task: str | None = None  # the first words of its first call
    began_ms: Milliseconds | None = None  # when its first call was received
    policy: str | None = None  # of its first step
    drift: CountedDrift | None = None  # None until it is counted
    playback: Playback | None = None
    has_branched: bool = False  # a playback has reached its branch step
    mismatch: Mismatch | None = None
    thread_advantages: Mapping[str, float] = {}  # estimated for an export, and not stored
    replaces: frozenset[str] = (
        frozenset()
    )  # the members of its group that failed and in place of which it is; not stored
    counts: Mapping[str, int] = {}
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
    def is_inherited(self) -> bool:
        """Whether all of its steps are inherited, not of what it replaces: its reward is none of the policy."""
        return 0 < self.counts.get("steps", 0) <= self.counts.get("inherited", 0) and not self.replaces

    @property
    def quiet_s(self) -> float | None:
        """How long it can be without a touch while its calls are in flight; None without a limit."""
        quiet_s = self.start_s if self.idle_s is None and self.began_ms is None else self.idle_s
        return None if quiet_s is None else max(quiet_s, _MIN_IDLE_S)

    @property
    def claims(self) -> tuple[ClaimId, ...]:
        """The claims that rely on its rewards, which are frozen while there is one."""
        return (ClaimId(DEFAULT_POLICY, self.relying),) if isinstance(self.relying, str) else self.relying

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

    @property
    def due_ms(self) -> int | None:
        """The time at which it is finished, while it is open, if no call begins before; None if it has no deadline.

        Until its first step it is not idle before `start_s` is over. Its first call touches it before there is a step.
        """
        times: list[float] = [] if self.deadline_s is None else [self.created_ms + 1000 * self.deadline_s]
        if self.quiet_s is not None:
            quiet_ms = self.touched_ms + 1000 * self.quiet_s
            if self.start_s is not None and self.began_ms is None:
                start_ms = self.created_ms + 1000 * self.start_s
                quiet_ms = start_ms if self.touched_ms == self.created_ms else max(quiet_ms, start_ms)
            times.append(quiet_ms)
        return math.ceil(min(*times, _NEVER_MS)) if times else None

    def next_look_ms(self, now_ms: int) -> int | None:
        """Return when an open rollout may be due; None if it has no deadline.

        Its first call can come at any time, and it may be idle before `start_s` is over.
        """
        due = self.due_ms
        if due is None or self.idle_s is None or self.began_ms is not None or self.quiet_s is None:
            return due
        return min(due, math.ceil(min(now_ms + 1000 * self.quiet_s, _NEVER_MS)))

    def deadlines_left(self, now_ms: int) -> dict[str, float] | None:
        """Return the deadlines of a rollout that is opened in place of this one; None if nothing is left of `deadline_s`."""
        deadlines = {name: value for name in _DEADLINES if (value := getattr(self, name)) is not None}
        if self.deadline_s is not None:
            deadlines["deadline_s"] = self.deadline_s - (now_ms - self.created_ms) / 1000
            if deadlines["deadline_s"] <= 0:
                return None
        return deadlines


def is_past_deadline(rollout: Rollout, now_ms: int) -> bool:
    """Return whether an open rollout is older than `deadline_s`."""
    is_past = rollout.deadline_s is not None and rollout.created_ms + 1000 * rollout.deadline_s <= now_ms
    return is_past and not rollout.is_finished


def deadlines_of(terms: Mapping[str, Any], *, idle_s: float | None, start_s: float) -> dict[str, float]:
    """Return the deadlines with which a rollout is opened; these are the defaults of `idle_s` and, with it, of `start_s`."""
    given = {name: terms[name] for name in _DEADLINES if terms.get(name) is not None}
    if idle_s is not None:
        given.setdefault("idle_s", idle_s)
    return {**({"start_s": start_s} if "idle_s" in given else {}), **given}


def first_due_ms(terms: Mapping[str, Any], now_ms: int) -> int | None:
    """Return `next_look_ms` of a rollout that is opened now with these terms."""
    deadlines: dict[str, Any] = {name: terms.get(name) for name in _DEADLINES}
    return Rollout("", "", now_ms, now_ms, **deadlines).next_look_ms(now_ms)


@dataclass(frozen=True, slots=True)
class Marks:
    """The IDs of steps that are marked as undelivered, or as late (stored after the rollout was finished)."""

    undelivered: frozenset[str]
    late: frozenset[str] = frozenset()


def read_rollout(stored: StoredEntity) -> Rollout:
    """Return the rollout from its stored fields. Raises Damaged."""
    rollout = read_fields(
        stored,
        Rollout,
        "rollout",
        rollout_id=stored.name,
        incarnation=stored.incarnation,
        created_ms=stored.created_ms,
        touched_ms=stored.touched_ms,
        thread_advantages={},
        replaces=frozenset(),
        counts=stored.counts,
        has_reservation=stored.has_reservation,
        origin=Origin(stored.created_ms, stored.fields),
    )
    has_dispatch = stored.fields.get("osmosis", b"null") != b"null"
    if isinstance(rollout.advantages, list | dict) or rollout.sampling.cap or has_dispatch:
        with damage_of("rollout", stored.name):
            check_numbers([rollout.advantages, rollout.sampling.cap])
            if has_dispatch and not all(isinstance(rollout.osmosis.get(key), str) for key in _DISPATCH):
                raise ValueError(f"`osmosis` must have the texts {', '.join(_DISPATCH)}")
    if rollout.drift is not None and rollout.drift.steps > rollout.counts.get("steps", 0):
        return structs.replace(rollout, drift=None)  # it was counted in steps that are gone because the rollout expired
    return rollout


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


def read_claims(stored: StoredEntity) -> tuple[ClaimId, ...]:
    """Return the claims that rely on a rollout's rewards, also if other fields are damaged. Raises Damaged."""
    fields = {name: value for name, value in stored.fields.items() if name == "claimed_by"}
    return read_rollout(structs.replace(stored, fields=fields, damage=None)).claims


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
        undelivered=marked(marks, UNDELIVERED_MARK) - marked(marks, DELIVERED_MARK),
        late=marked(marks, LATE_MARK),
    )


def write_claims(claims: Sequence[ClaimId]) -> dict[str, bytes | None]:
    """Return the stored field of the claims: absent without any, and the ID of its batch for one of the default policy."""
    if not claims:
        return {"claimed_by": None}
    is_plain = len(claims) == 1 and claims[0].policy == DEFAULT_POLICY
    return {"claimed_by": orjson.dumps(claims[0].batch_id if is_plain else list(map(list, claims)))}


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
