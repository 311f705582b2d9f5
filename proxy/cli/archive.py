"""`tokentape archive` and `tokentape import`: between a store and the Parquet files of a dataset."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any

from prometheus_client import CollectorRegistry

from proxy.cli.console import print_json, print_note
from proxy.clock import SystemClock
from proxy.config.settings import Settings
from proxy.rollouts.archive.archiver import ArchiveOptions, Archiver
from proxy.rollouts.archive.dataset import Dataset
from proxy.telemetry.metrics import make_metrics
from storage import open_store
from storage.redis.store import Store


async def archive(settings: Settings, *, once: bool, as_json: bool) -> None:
    """Archive the rollouts that are due; unless `once`, again at the configured interval.

    Raises:
        ValueError: No URL is configured, or a package is missing.
        OSError: The dataset cannot be read or written.
        StorageError: The store failed.
    """
    chosen = settings.archive
    if chosen.url is None:
        raise ValueError("no dataset: pass --to URL, or set archive.url in the configuration")
    options = ArchiveOptions(chosen.when, chosen.older_than_s, chosen.delete, chosen.rollouts_per_file)
    dataset = Dataset(chosen.url)
    async with _opened(settings) as store:
        archiver = Archiver(store, SystemClock(), make_metrics(CollectorRegistry()), dataset, options)
        _report(asdict(await archiver.sweep()), as_json=as_json)
        while not once:
            await asyncio.sleep(chosen.interval_s)
            _report(asdict(await archiver.sweep()), as_json=as_json)


async def import_dataset(
    settings: Settings, url: str, *, as_json: bool, requeue: bool = False, max_staleness: int | None = None
) -> None:
    """Import the rollouts of a dataset into the store; `requeue`: then put its groups that are done into the queue again.

    Raises:
        ValueError: The dataset is not one of an archive, or a package is missing.
        OSError: The dataset cannot be read.
        StorageError: The store failed.
    """
    from proxy.rollouts.archive.importer import Importer  # only for this

    dataset = Dataset(url)
    async with _opened(settings) as store:
        importer = Importer(store, dataset)
        found = asdict(await importer.run())
    if requeue:
        found["requeued"] = await _requeued(settings, importer.done, max_staleness)
    _report(found, as_json=as_json)


async def _requeued(settings: Settings, done: Sequence[tuple[str, str]], max_staleness: int | None) -> int:
    """Put groups into the queues of their policies; return how many. One that cannot be has a note."""
    from proxy.cli.control import ControlAddress, Refused, connected  # only for this

    count = 0
    async with connected(ControlAddress(None, settings, None)) as control:
        for group, policy in done:
            try:
                await control.requeue_group(group, policy=policy, max_staleness=max_staleness)
                count += 1
            except Refused as refused:
                print_note(f"not requeued: {refused.reason}", "yellow")
    return count


@asynccontextmanager
async def _opened(settings: Settings) -> AsyncIterator[Store]:
    store = await open_store(settings.store.url, settings.store.options())
    try:
        yield store
    finally:
        await store.close()


def _report(found: Mapping[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(found, lines=True)
    else:
        print_note(", ".join(f"{name}: {value}" for name, value in found.items() if name != "oldest_ms"))
