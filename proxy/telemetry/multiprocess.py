"""The metrics of all worker processes, summed by any of them.

The worker that is scraped collects the metrics of the others over Unix sockets, in a folder that only the workers can access.
Counting itself needs no shared memory and no files.

The last response of each worker is stored in the folder. It is used if a worker does not respond, and a worker that replaces
another one adds it to its own counters: Prometheus would interpret a lower sum as a restart from 0.
"""

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, TypeAlias

import orjson
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric

from proxy.telemetry.metrics import START_TIME, Metrics, aggregate
from proxy.telemetry.version_windows import newest

_TIMEOUT_S: Final = 1.0
_WINDOWED: Final = ("tokentape_reward", "tokentape_reward_amount")
_Sample: TypeAlias = tuple[str, tuple[tuple[str, str], ...]]  # name and labels


@dataclass(frozen=True, slots=True)
class WorkerSlot:
    """A worker's number among the workers, and the folder that only they can access."""

    number: int
    folder: Path


@dataclass(frozen=True, slots=True)
class Family:
    """A metric with the value of each sample."""

    name: str
    kind: str
    help: str
    samples: dict[_Sample, float]


class WorkerMetrics:
    """The metrics of this process, or of all workers if it is one of several. `start` in the event loop, then `close`."""

    def __init__(self, registry: CollectorRegistry, metrics: Metrics, slot: WorkerSlot | None = None) -> None:
        self._registry = registry
        self._metrics = metrics
        self._slot = slot
        self._inherited: list[Family] = []
        self._server: asyncio.Server | None = None

    def __repr__(self) -> str:
        return f"<WorkerMetrics of {self._slot or 'this process'}>"

    async def start(self) -> None:
        """Take over the counters of the previous worker with this number, and start to respond to the other workers."""
        if self._slot is not None:
            path = _socket(self._slot)
            self._inherited = _last_response(path)
            for policy, versions in _windows(self._inherited):
                self._metrics.reward_windows.adopt(policy, versions)
            path.unlink(missing_ok=True)
            self._server = await respond_at(path, self._dump)

    async def close(self) -> None:
        """Stop responding to the other workers."""
        if self._server is not None:
            self._server.close()

    async def exposition(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        if self._slot is None:
            self._settle()
            return generate_latest(self._registry)
        own = _socket(self._slot)
        paths = sorted(path for path in self._slot.folder.glob("*.sock") if path != own)
        workers = []
        for path, response in zip(paths, await asyncio.gather(*map(_fetch, paths)), strict=True):
            if response is None:
                self._metrics.workers_missing.inc()
                workers.append(_last_response(path))
            else:
                workers.append(_store(path, response))
        workers.append(_store(own, self._dump()))
        families = summed(workers)
        windows = _windows(families)
        newest_of = {policy: newest(versions for name, versions in windows if name == policy) for policy, _ in windows}
        return _text(_with_windows(families, lambda policy, versions: versions in newest_of[policy]))

    def _dump(self) -> bytes:
        """Return the metrics of this worker, with the counters that it took over, as JSON."""
        self._settle()
        inherited = _with_windows(self._inherited, self._metrics.reward_windows.has)
        families = summed([families_from(self._registry), inherited])
        return encoded(families)

    def _settle(self) -> None:
        with self._metrics.reward_windows.lock:
            self._metrics.reward_windows.settle()


async def respond_at(path: Path, metrics: Callable[[], bytes]) -> asyncio.Server:
    """Respond with `encoded` metrics at a socket in the folder, whose metrics each worker includes."""

    async def respond(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            writer.write(metrics())
            await writer.drain()
        writer.close()

    return await asyncio.start_unix_server(respond, path)


def encoded(families: Iterable[Family]) -> bytes:
    """Return metrics as JSON."""
    return orjson.dumps([[family.name, family.kind, family.help, [*family.samples.items()]] for family in families])


def families_from(registry: CollectorRegistry) -> list[Family]:
    """Return the current metrics of a registry."""
    return [
        Family(
            metric.name,
            metric.type,
            metric.documentation,
            {(sample.name, tuple(sample.labels.items())): sample.value for sample in metric.samples},
        )
        for metric in registry.collect()
    ]


def summed(workers: Iterable[Iterable[Family]]) -> list[Family]:
    """Combine the metrics of several workers: sums, unless a metric is declared otherwise."""
    combined: dict[str, Family] = {}
    for family in (family for families in workers for family in families):
        samples = combined.setdefault(family.name, Family(family.name, family.kind, family.help, {})).samples
        for sample, value in family.samples.items():
            samples[sample] = aggregate(family.name, samples[sample], value) if sample in samples else value
    return list(combined.values())


def _windows(families: Iterable[Family]) -> set[tuple[str, str]]:
    """Return the policies and windows of versions in metrics."""
    labels = (dict(sample[1]) for family in families if family.name in _WINDOWED for sample in family.samples)
    return {(found["policy"], found["versions"]) for found in labels}


def _with_windows(families: Iterable[Family], has: Callable[[str, str], bool]) -> list[Family]:
    """Return the metrics without the windows of versions that are over."""

    def kept(sample: _Sample) -> bool:
        labels = dict(sample[1])
        return has(labels["policy"], labels["versions"])

    return [
        replace(family, samples={sample: value for sample, value in family.samples.items() if kept(sample)})
        if family.name in _WINDOWED
        else family
        for family in families
    ]


def _socket(slot: WorkerSlot) -> Path:
    return slot.folder / f"{slot.number}.sock"


async def _fetch(path: Path) -> bytes | None:
    """Return the metrics of the worker at a socket; None if it does not respond in time."""
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            reader, writer = await asyncio.open_unix_connection(path)
            try:
                return await reader.read() or None
            finally:
                writer.close()
    except (TimeoutError, OSError):
        return None


def _store(path: Path, response: bytes) -> list[Family]:
    """Write a worker's response to a file next to its socket, and parse it."""
    new = path.with_suffix(".new")
    new.write_bytes(response)
    new.replace(path.with_suffix(".json"))
    return _parse(response)


def _last_response(path: Path) -> list[Family]:
    """Return a worker's last counters. Its gauges described a state that is over, except for its start time."""
    try:
        response = path.with_suffix(".json").read_bytes()
    except FileNotFoundError:
        return []
    return [family for family in _parse(response) if family.kind != "gauge" or family.name == START_TIME]


def _parse(response: bytes) -> list[Family]:
    return [
        Family(name, kind, text, {(sample, tuple(map(tuple, labels))): value for (sample, labels), value in samples})
        for name, kind, text, samples in orjson.loads(response)
    ]


def _text(families: Iterable[Family]) -> bytes:
    metrics = []
    for family in families:
        metric = Metric(family.name, family.help, family.kind)
        for (name, labels), value in family.samples.items():
            metric.add_sample(name, dict(labels), value)
        metrics.append(metric)
    registry: Any = SimpleNamespace(collect=lambda: metrics)  # all that the text format needs
    return generate_latest(registry)
