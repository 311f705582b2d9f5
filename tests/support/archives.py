"""Archives of a store in tests: an archiver of a process, and an importer."""

from collections import Counter

from prometheus_client import CollectorRegistry
from tests.support.forests import make_step

from proxy.clock import SystemClock
from proxy.rollouts.archive.archiver import ArchiveOptions, Archiver
from proxy.rollouts.archive.dataset import Dataset
from proxy.rollouts.archive.importer import Importer
from proxy.telemetry.metrics import make_metrics
from proxy.trajectory.codec import encode
from storage.types import StepWrite

AT_ONCE = {"when": "finished", "older_than_s": 0}


def archiver(store, url, *, clock=None, **options) -> Archiver:
    """Return the archiver of a process, by default of finished rollouts of any age."""
    metrics = make_metrics(CollectorRegistry())
    return Archiver(store, clock or SystemClock(), metrics, Dataset(str(url)), ArchiveOptions(**{**AT_ONCE, **options}))


def importer(store, url) -> Importer:
    """Return an importer of a dataset."""
    return Importer(store, Dataset(str(url)))


async def finished(store, *names: str, steps: int = 0, opened_ms: int = 1000, now_ms: int = 2000) -> dict[str, int]:
    """Store finished rollouts with steps that continue each other; return their versions."""
    for name in names:
        opened = await store.open(name, {}, now_ms=opened_ms)
        known: set[bytes] = set()
        for number in range(steps):
            step = make_step(f"{name}{number:04}", list(range(300 + number)), [7, number])
            record = encode(step, known)
            known |= record.blocks.keys()
            counts = {"steps": 1, "sampled_tokens": 2}
            write = StepWrite(name, opened.incarnation, step.step_id, record.record, record.blocks, counts=counts)
            await store.append(write, now_ms=1500)
        ending = {"status": b'"completed"', "reward": b"0.5", "finished_ms": str(now_ms).encode()}
        await store.update_if(name, ending, expect={}, now_ms=now_ms)
    return dict.fromkeys(names, now_ms)


async def archived_versions(url) -> dict[str, int]:
    """Return the newest version of each rollout in a dataset; each version must be in one file."""
    dataset = Dataset(str(url))
    versions = [item for name in dataset.names() for item in (dataset.versions(name) or {}).items()]
    assert len(versions) == len(set(versions)), "a version is in two files"
    return dict(sorted(versions, key=lambda item: item[1]))


class Died(Exception):
    """The process died at this point."""


def dying(process, verb, number, *, is_after):
    """Let a process die at its call number `number` of an operation, before or after it."""
    calls = Counter()
    place = process._dataset if verb in ("publish", "versions") else None

    def dies(before):
        calls[before] += 1
        if calls[before] == number + 1 and before != is_after:
            raise Died

    if place is not None:
        real = getattr(place, verb)

        def instead(*args):
            dies(True)
            result = real(*args)
            dies(False)
            return result

        setattr(place, verb, instead)
        return
    store = process.store

    class Dying:
        def __getattr__(self, name):
            found = getattr(store, name)
            if name != verb:
                return found

            async def instead(*args, **named):
                dies(True)
                result = await found(*args, **named)
                dies(False)
                return result

            return instead

    process.store = Dying()
