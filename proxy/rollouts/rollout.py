"""Rollouts: their values, when they are due, how the store represents them, and what this process remembers of them.

Every reader of stored fields of rollouts, groups and batches uses this module. Bytes that do not decode raise one error,
`Damaged`: readers of one entity respond with it, readers of many omit the entity and name it (docs/decisions/026).
"""

import asyncio
import math
import time
import unicodedata
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Annotated, Any, Final, Literal, NamedTuple, TypedDict, TypeVar

import msgspec
import orjson
from msgspec import Struct, structs

from proxy.continuation.turns import Turns
from proxy.continuation.types import Mode
from proxy.errors import BadRequest, Damaged, NotFound
from proxy.protocols.json_texts import KnownPrompt, LongText
from proxy.protocols.sampling import NO_RULES, Sampling
from proxy.telemetry.logs import LOG
from proxy.telemetry.metrics import Metrics
from proxy.trajectory.blocks import KnownBlocks
from proxy.trajectory.drift import Endings
from proxy.trajectory.step import DEFAULT_POLICY, Step
from proxy.trajectory.tape import Tape
from storage.types import LATE_MARK, Announcement, Origin, StoredEntity

E = TypeVar("E")
T = TypeVar("T")

LARGEST: Final = 3.4028234663852886e38  # of float32, in which trainers have rewards and advantages

Number = int | Annotated[float, msgspec.Meta(ge=-LARGEST, le=LARGEST)]
Seconds = Annotated[int, msgspec.Meta(gt=0)] | Annotated[float, msgspec.Meta(gt=0)]
Milliseconds = Annotated[int, msgspec.Meta(ge=0, le=253_402_300_799_999)]  # until the end of the year 9999
Count = Annotated[int, msgspec.Meta(ge=0)]

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
_BRACKETS: Final = 200  # JSON with fewer has fewer levels than orjson writes
_ERRORS: Final = (ValueError, TypeError, RecursionError)  # msgspec's errors are a ValueError
_LOG_INTERVAL_S: Final = 60
_BYTES_PER_ROLLOUT: Final = 3000  # an estimate: the objects of a rollout without its own fields
_BYTES_PER_TURNS: Final = 2000  # an estimate: the objects of a rollout without turns
_BYTES_PER_BLOCK: Final = 120  # of its name in a set
_WEIGHT_OF_FIELDS: Final = 4  # an estimate: bytes of memory for each byte of a stored field and its value


def parsed(text: bytes) -> Any:
    """Return the value of JSON that can be written as JSON again. Raises one of the errors of `damage_of`."""
    value = orjson.loads(text)
    if text.count(b"[") + text.count(b"{") > _BRACKETS:
        orjson.dumps(value)
    return value


def read_fields(stored: StoredEntity, kind: type[T], entity: str, **known: Any) -> T:
    """Return a `kind`, a struct, of the stored fields that it declares and the `known` values. Raises Damaged.

    A field that is null in the store has its default.
    """
    declared = _declared(kind)  # type: ignore[arg-type]  # classes are hashable
    try:
        if stored.damage is not None:
            raise ValueError(stored.damage)
        stored.name.encode()  # JSON has no lone surrogates
        for name, text in stored.fields.items():
            if name in declared and name not in known:
                try:
                    value = orjson.loads(text)
                    if text.count(b"[") + text.count(b"{") > _BRACKETS:
                        orjson.dumps(value)  # as `parsed`
                except _ERRORS as error:
                    raise ValueError(f"field {name!r} is no JSON that can be read: {error}") from None
                if value is not None:
                    known[name] = value
        return msgspec.convert(known, kind)
    except _ERRORS as error:  # as `damage_of`, which takes longer to enter; each call reads its rollout
        raise _damaged(entity, stored.name, error) from None


def marked(marks: Mapping[str, bytes], kind: str) -> frozenset[str]:
    """Return the IDs that have a mark of this kind, which is its prefix."""
    return frozenset(name.removeprefix(kind) for name in marks if name.startswith(kind))


@contextmanager
def damage_of(entity: str, name: str) -> Iterator[None]:
    """Raise Damaged for this entity if its stored bytes are not the declared values."""
    try:
        yield
    except _ERRORS as error:
        raise _damaged(entity, name, error) from None


def _damaged(entity: str, name: str, error: Exception) -> Damaged:
    shown = name.encode(errors="backslashreplace").decode()
    why = str(error).replace("`$.", "`")
    message = f"The stored {entity} {shown!r} is unreadable: {why}. Delete it, or correct it in the store."
    return Damaged(message, entity=entity, name=shown)


def value_or(otherwise: T, text: bytes, kind: Any, entity: str | None = None, name: str = "") -> Any | T:
    """Return a value of JSON; `otherwise` if it is unreadable, which is logged for this `entity`."""
    try:
        return msgspec.json.decode(text, type=kind)
    except _ERRORS as error:
        if entity is not None:
            _log_damage(_damaged(entity, name, error))
        return otherwise


def announced_value(announcement: Announcement, kind: Any, name: str, otherwise: T) -> Any | T:
    """Return an announced value; `otherwise`, and a log line, if it is unreadable: calls continue without it."""
    return value_or(otherwise, announcement.value, kind, "announcement", name)


def of_policy(name: str, policy: str) -> str:
    """Return the name that a field, an announcement or a process has for one policy: the name alone for the default one."""
    return name if policy == DEFAULT_POLICY else f"{name}:{policy}"


def split_policy(name: str) -> tuple[str, str]:
    """Return the parts of a name that `of_policy` returned."""
    kind, _, policy = name.partition(":")
    return kind, policy or DEFAULT_POLICY


def check_numbers(value: Any) -> Any:
    """Return a value of any depth in which every number is within the range of float32. Raises ValueError."""
    pending: list[Any] = [value]
    while pending:
        inner = pending.pop()
        if isinstance(inner, Mapping):
            pending.extend(inner.values())
        elif isinstance(inner, list):
            pending.extend(inner)
        elif isinstance(inner, int | float) and not -LARGEST <= inner <= LARGEST:
            raise ValueError(f"every number must be finite and within the range of float32 (±{LARGEST:.8g})")
    return value


def read_each(
    found: Iterable[T | None], read: Callable[[T], E], metrics: Metrics
) -> tuple[list[E], list[dict[str, str]]]:
    """Return the entities that exist and that `read` can read, and the entries that name those that it cannot."""
    entities: list[E] = []
    damaged: list[Damaged] = []
    for stored in found:
        try:
            entities += [] if stored is None else [read(stored)]
        except Damaged as damage:
            damaged.append(damage)
    return entities, left_out(damaged, metrics)


def left_out(damaged: Iterable[Damaged], metrics: Metrics) -> list[dict[str, str]]:
    """Log and count what a reader of many omits; return the entries that name it in the response."""
    entries = []
    for damage in damaged:
        metrics.unreadable.labels(damage.entity).inc()
        _log_damage(damage)
        entries.append({"group_id" if damage.entity == "group" else "rollout_id": damage.name, "why": damage.message})
    return entries


def _log_damage(damage: Damaged) -> None:
    """Log what cannot be read, once a minute: a page may read it every second."""
    _log(damage.entity, damage.name, damage.message, time.monotonic() // _LOG_INTERVAL_S)


@lru_cache(maxsize=1024)
def _log(entity: str, name: str, message: str, _minute: float) -> None:
    LOG.error("Omitted by a reader: %s", message, extra={"fields": {"entity": entity, "name": name}})


@lru_cache
def _declared(kind: Any) -> frozenset[str]:
    return frozenset(kind.__struct_encode_fields__)


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
    relying: str | tuple[ClaimId, ...] = msgspec.field(default=(), name="claimed_by")  # see `claims`
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
    # The members of its group that failed and in place of which it is; not stored.
    replaces: frozenset[str] = frozenset()
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
    return read_each(found, read_rollout, metrics)


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


@dataclass(slots=True, eq=False)
class KnownTurns:
    """The turns of a rollout; the lock is held while they are changed or searched.

    `pending`: steps to add, with their indexes: mostly the newest one, and `pending_bytes` their memory. `count`: the number of
    steps that were added or are pending, without a gap.
    """

    turns: Turns = field(default_factory=Turns)
    pending: list[tuple[int, Step]] = field(default_factory=list)
    pending_bytes: int = 0
    count: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class LoadedTape:
    """A tape, shared by the playbacks of a process that have the same source. The lock is held while its blocks are read."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.lock = asyncio.Lock()


@dataclass(slots=True, eq=False)
class Played:
    """What a process knows of a playback: its tape, and the steps of it that are used, in order.

    A step that is being stored has its task. `delivered` and `undelivered`: of these, those whose client is known to have
    received the response, or not.
    """

    loaded: LoadedTape
    used: dict[str, "asyncio.Task[Any] | None"]
    delivered: set[str] = field(default_factory=set)
    undelivered: set[str] = field(default_factory=set)
    replies: frozenset[bytes] | None = None  # the digests of the messages that continue the step `through`

    @property
    def tape(self) -> Tape:
        """The tape."""
        return self.loaded.tape


@dataclass(slots=True, eq=False)
class LiveRollout:
    """One incarnation of a rollout: as it was read last, and the number of its `calls` in flight.

    `blocks`: the names of its blocks that are stored. `large_work` is held while a large response is parsed or a large step
    encoded. Of the newest call: `prompt`, its ids, and `text`, its body if that is long. `known`: the turns that calls
    continue, None if there are none in memory. `endings`: of its latest steps. `size`: the approximate memory in bytes.
    """

    rollout: Rollout
    calls: int = 0
    blocks: KnownBlocks = field(default_factory=KnownBlocks)
    large_work: asyncio.Lock = field(default_factory=asyncio.Lock)
    prompt: KnownPrompt | None = None
    text: LongText | None = None
    known: KnownTurns | None = None
    played: Played | None = None  # of a playback
    endings: Endings = field(default_factory=Endings)
    size: int = 0


class LiveRollouts:
    """The rollouts with calls in flight or lately used, of at most `max_bytes` together.

    Above, those that were not used for the longest time are forgotten; a call that has one in use keeps it. `busy` has calls
    in flight.
    """

    def __init__(self, max_bytes: int, metrics: Metrics) -> None:
        self.busy: set[LiveRollout] = set()
        self._max_bytes = max_bytes
        self._size = 0
        self._of: OrderedDict[str, LiveRollout] = OrderedDict()
        metrics.rollout_cache_bytes.set_function(lambda: self._size)
        metrics.in_flight_rollouts.set_function(lambda: len({live.rollout.rollout_id for live in self.busy}))

    def __repr__(self) -> str:
        return f"<LiveRollouts {len(self._of)}, {len(self.busy)} busy, {self._size} bytes>"

    def get(self, rollout_id: str) -> LiveRollout | None:
        """Return a rollout, which counts as used now; None if it is not known."""
        live = self._of.get(rollout_id)
        if live is not None:
            self._of.move_to_end(rollout_id)
        return live

    def note(self, stored: StoredEntity) -> LiveRollout:
        """Return the LiveRollout of a rollout that was read just now; a new one for another incarnation. Raises Damaged.

        If the stored fields did not change since the last read, the parsed values are reused.
        """
        live = self._of.get(stored.name)
        if live is not None and live.rollout.incarnation == stored.incarnation:
            self._of.move_to_end(stored.name)
            before = live.rollout
            is_known = before.origin.fields == stored.fields and before.created_ms == stored.created_ms
            if is_known and DRIFT_FIELD not in stored.fields and stored.damage is None:  # it depends on the counts
                live.rollout = structs.replace(
                    before, touched_ms=stored.touched_ms, counts=stored.counts, has_reservation=stored.has_reservation
                )
                return live
            live.rollout = read_rollout(stored)
        else:
            rollout = read_rollout(stored)
            if live is not None:
                self._size -= live.size
            live = self._of[stored.name] = LiveRollout(rollout)
        self.keep(live)
        return live

    def keep(self, live: LiveRollout) -> None:
        """Count the memory of a rollout that has changed, and forget others above the limit."""
        if self._of.get(live.rollout.rollout_id) is not live:
            return  # forgotten meanwhile
        blocks, prompt, text, known = live.blocks, live.prompt, live.text, live.known
        size = _BYTES_PER_ROLLOUT + _BYTES_PER_BLOCK * len(blocks) + blocks.chain_bytes + live.endings.size
        for value in live.rollout.origin.fields.values():
            size += _WEIGHT_OF_FIELDS * len(value)
        if prompt is not None:
            size += len(prompt.text) + len(prompt.ids) * prompt.ids.itemsize
        if text is not None:
            size += text.size
        if live.played is not None:
            size += live.played.tape.size
        if known is not None:
            turns = known.turns
            size += _BYTES_PER_TURNS + turns.size + turns.conversations.newest.size + known.pending_bytes
        self._size += size - live.size
        live.size = size
        while self._size > self._max_bytes:
            _, forgotten = self._of.popitem(last=False)
            self._size -= forgotten.size
