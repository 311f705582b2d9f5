"""A rollout as the proxy knows it: its terms, its state, and how both lie in the store's fields.

Holds the frozen `Rollout`, read out of a `StoredEntity`, and the names of the fields and marks that carry it. It neither
reads nor writes the store.
"""

import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import orjson

from proxy.errors import BadCall, NotFound
from proxy.protocols.sampling import Sampling
from proxy.rollouts.policy import read_policy
from storage.types import LATE_MARK, Origin, StoredEntity

UNDELIVERED_MARK = "undelivered:"


DELIVERED_MARK = "delivered:"  # its client asked again and got the answer then


RESULT: Final = "osmosis"  # in the metadata: what a rollout server reported, or an agent claims it did
DRIFT_FIELD: Final = "drift"  # counted when the rollout was finished, and completed since
UNEXPLAINED: Final = "unexplained"
FINISHED: Final = ("completed", "failed", "aborted", "truncated")
STATUSES: Final = ("open", "limited", *FINISHED)


@dataclass(frozen=True, slots=True)
class Limits:
    """How much a rollout may take; None: no limit. `deadline_s` counts from its creation."""

    max_steps: int | None = None
    max_tokens: int | None = None
    deadline_s: float | None = None


@dataclass(frozen=True, slots=True)
class CountedDrift:
    """How many places of drift a finished rollout has, by kind, and in how many of its steps they were sought."""

    kinds: Mapping[str, int]
    steps: int

    @property
    def unexplained(self) -> int:
        """How many of them have no kind yet."""
        return self.kinds.get(UNEXPLAINED, 0)

    def knows_more_than(self, before: "CountedDrift") -> bool:
        """Whether this was found in more steps, or in as many with fewer places left unexplained."""
        return (self.steps, -self.unexplained) > (before.steps, -before.unexplained)

    def known_since(self, before: "CountedDrift | None") -> dict[str, int]:
        """Return by kind what was not known before."""
        known = {} if before is None else before.kinds
        more = {kind: count - known.get(kind, 0) for kind, count in self.kinds.items() if kind != UNEXPLAINED}
        return {kind: count for kind, count in more.items() if count > 0}


@dataclass(frozen=True, slots=True)
class Rollout:
    """A rollout as it stands. Times are unix milliseconds.

    `step_rewards` are by step id: a number, or one for each sampled token. `claimed_by` is the first batch that its group was
    in, from which on its rewards stay as they are. `policy_version` is the one announced; a call that opens it is told.
    """

    rollout_id: str
    incarnation: str
    created_ms: int
    touched_ms: int
    status: str = "open"
    finished_ms: int | None = None
    group_id: str | None = None
    model: str | None = None
    reward: float | None = None
    step_rewards: Mapping[str, float | list[float]] = field(default_factory=dict)
    advantages: Any = None
    claimed_by: str | None = None
    policy_version: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    sampling: Sampling = field(default_factory=Sampling)
    tools: tuple[dict[str, Any], ...] = ()
    limits: Limits = field(default_factory=Limits)
    osmosis: Mapping[str, Any] = field(default_factory=dict)  # of its dispatch: server, protocol, state
    result: Mapping[str, Any] | None = None  # that its rollout server reported: status, reward
    reply: Mapping[str, str] = field(default_factory=dict)  # what replies tell of tokens
    counts: Mapping[str, int] = field(default_factory=dict)
    drift: CountedDrift | None = None  # None while nobody counted it
    has_reservation: bool | None = None  # whether a call of it has one; None where any number of steps fits
    origin: Origin = field(default=Origin(0), repr=False, compare=False)  # what the store knew of it, as it was read

    @property
    def is_finished(self) -> bool:
        """Whether it takes no more calls."""
        return self.status in FINISHED

    @property
    def is_drift_known(self) -> bool:
        """Whether the drift of all its steps is counted, and every place of it has its kind."""
        return self.drift is not None and not self.drift.unexplained and self.drift.steps >= self.counts.get("steps", 0)

    @property
    def retries_by_body(self) -> bool:
        """Whether equal bodies are one call and its retries, as in rollouts that a rollout server runs."""
        return bool(self.osmosis)

    @property
    def is_starting(self) -> bool:
        """Whether a rollout server was asked for it that has not named its tools yet."""
        return self.osmosis.get("state") == "starting" and not self.is_finished


@dataclass(frozen=True, slots=True)
class Marks:
    """What was learnt of a rollout's steps after they were stored, or with it: the ids of steps.

    `late`: stored after the rollout was finished.
    """

    undelivered: frozenset[str]
    late: frozenset[str] = frozenset()


def read_rollout(stored: StoredEntity) -> Rollout:
    """The rollout that these fields describe."""
    fields = {name: orjson.loads(value) for name, value in stored.fields.items() if name != "opened_with"}
    sampling = fields.get("sampling") or {}
    return Rollout(
        rollout_id=stored.name,
        incarnation=stored.incarnation,
        created_ms=stored.created_ms,
        touched_ms=stored.touched_ms,
        status=fields.get("status", "open"),
        finished_ms=fields.get("finished_ms"),
        group_id=fields.get("group_id"),
        model=fields.get("model"),
        reward=fields.get("reward"),
        step_rewards=fields.get("step_rewards") or {},
        advantages=fields.get("advantages"),
        claimed_by=fields.get("claimed_by"),
        policy_version=read_policy(stored.announcements),
        metadata=fields.get("metadata") or {},
        sampling=Sampling(**{name: rules or {} for name, rules in sampling.items()}),
        tools=tuple(fields.get("tools") or ()),
        limits=Limits(**(fields.get("limits") or {})),
        osmosis=fields.get("osmosis") or {},
        result=fields.get("result"),
        reply=fields.get("reply") or {},
        counts=stored.counts,
        drift=_drift(fields.get(DRIFT_FIELD), stored.counts.get("steps", 0)),
        has_reservation=stored.has_reservation,
        origin=Origin(stored.created_ms, stored.fields),
    )


def write_fields(values: Mapping[str, Any]) -> dict[str, bytes]:
    """Fields of a rollout as the store keeps them; None means absent and is left out.

    `max_steps` is told to the store as `places` too, which gives them out to calls.
    """
    values = {**values, "places": (values.get("limits") or {}).get("max_steps")}
    return {name: orjson.dumps(value) for name, value in values.items() if value is not None}


def own_metadata(metadata: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the metadata without a reported result, for answers that have many rollouts: a result is up to 64 kB."""
    return {name: value for name, value in metadata.items() if name != RESULT} if RESULT in metadata else metadata


def read_marks(marks: Mapping[str, bytes]) -> Marks:
    """What the marks of a rollout say, by step id."""
    return Marks(
        undelivered=_named(marks, UNDELIVERED_MARK) - _named(marks, DELIVERED_MARK),
        late=_named(marks, LATE_MARK),
    )


def _drift(said: Any, steps: int) -> CountedDrift | None:
    """The drift of a rollout; None where it was counted in steps that are gone, since the rollout expired and is restored."""
    return CountedDrift(**said) if said and said["steps"] <= steps else None


def _named(marks: Mapping[str, bytes], kind: str) -> frozenset[str]:
    """The ids of the steps that have a mark of this kind."""
    return frozenset(name.removeprefix(kind) for name in marks if name.startswith(kind))


MAX_ID_CHARACTERS = 256


_UNPRINTABLE = ("Cc", "Cs")  # control characters; halves of surrogate pairs, which no UTF-8 can carry


def checked_id(name: str, *, what: str = "rollout id") -> str:
    """The id, if it may be one. Raises BadCall."""
    if not 1 <= len(name) <= MAX_ID_CHARACTERS:
        raise BadCall(f"a {what} has 1 to {MAX_ID_CHARACTERS} characters, this one has {len(name)}", param="rollout_id")
    for place, character in enumerate(name):
        if unicodedata.category(character) in _UNPRINTABLE:
            raise BadCall(
                f"a {what} has no control characters, this one has U+{ord(character):04X} at {place}",
                param="rollout_id",
            )
    return name


def no_rollout(name: str) -> NotFound:
    """The error for a rollout that is not there."""
    return NotFound(f"there is no rollout {name!r}", param="rollout_id")
