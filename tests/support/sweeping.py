"""Sweeps of deadlines without HTTP: a clock that tests set, and processes that share a store."""

from itertools import count, islice
from types import SimpleNamespace

from prometheus_client import CollectorRegistry

from proxy.clock import SystemClock
from proxy.rollouts.finishing import Deadlines, Finisher
from proxy.rollouts.playback import Tapes
from proxy.rollouts.rollout import first_due_ms, read_rollout, write_fields
from proxy.telemetry.metrics import make_metrics


class SetClock(SystemClock):
    """A clock; a test sets its Unix time."""

    def __init__(self, ms: int = 1000) -> None:
        self.ms = ms

    def now_ms(self) -> int:
        return self.ms


class Process:
    """The services of one process; each finish that counts the drift of a rollout adds it to `settled`."""

    def __init__(self, store, clock) -> None:
        self.store, self.clock = store, clock
        self.settled: list[str] = []
        self.metrics = make_metrics(CollectorRegistry())
        drift = SimpleNamespace(settle=self.settled.append, complete=lambda rollout: None)
        self.finisher = Finisher(store, clock, self.metrics, drift, Tapes(store))
        self.deadlines = Deadlines(self.finisher)

    @property
    def counted(self) -> int:
        return round(self.metrics.deadline_rollouts._value.get())


async def open_group(store, name: str, size: int, *, now_ms: int = 1000, **terms: float) -> list[str]:
    """Open a group of rollouts with these terms; return their IDs."""
    names = (f"{name}-{number}" for number in count() if store.same_slot(name, f"{name}-{number}"))
    members = list(islice(names, size))
    group = write_fields({"size": size, "members": members})
    rollouts = dict.fromkeys(members, write_fields({**terms, "group_id": name}))
    await store.open_group(name, group, rollouts, now_ms=now_ms, timer_ms=first_due_ms(terms, now_ms))
    return members


async def open_rollout(store, name: str, *, now_ms: int = 1000, **terms: float):
    """Open a rollout with these terms."""
    stored = await store.open(name, write_fields(terms), now_ms=now_ms, timer_ms=first_due_ms(terms, now_ms))
    return read_rollout(stored)


async def timer_count(store) -> int:
    """Return the number of timers, and let all of them expire later."""
    return len(await store.timers.claim(10**5, now_ms=2**53, until_ms=2**53))
