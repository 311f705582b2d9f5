"""The fields of stored rollouts, groups and batches as values of their declared types.

Every reader uses this module. Bytes that do not decode raise one error, `Damaged`: readers of one entity respond with it,
readers of many omit the entity and name it (docs/decisions/026).
"""

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Annotated, Any, Final, TypeVar

import msgspec
import orjson

from proxy.errors import Damaged
from proxy.telemetry.logs import LOG
from proxy.telemetry.metrics import Metrics
from proxy.trajectory.step import DEFAULT_POLICY
from storage.types import Announcement, StoredEntity

T = TypeVar("T")

LARGEST: Final = 3.4028234663852886e38  # of float32, in which trainers have rewards and advantages

Number = int | Annotated[float, msgspec.Meta(ge=-LARGEST, le=LARGEST)]
Seconds = Annotated[int, msgspec.Meta(gt=0)] | Annotated[float, msgspec.Meta(gt=0)]
Milliseconds = Annotated[int, msgspec.Meta(ge=0, le=253_402_300_799_999)]  # until the end of the year 9999
Count = Annotated[int, msgspec.Meta(ge=0)]

_BRACKETS: Final = 200  # JSON with fewer has fewer levels than orjson writes
_ERRORS: Final = (ValueError, TypeError, RecursionError)  # msgspec's errors are a ValueError
_LOG_INTERVAL_S: Final = 60


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
