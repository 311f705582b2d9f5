"""`tokentape archive` and `tokentape import`: between a store and the Parquet files of a dataset."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict

from prometheus_client import CollectorRegistry

from proxy.cli.console import print_json, print_note
from proxy.clock import SystemClock
from proxy.config.settings import Settings
from proxy.rollouts.archive.archiver import Archived, ArchiveOptions, Archiver
from proxy.rollouts.archive.dataset import Dataset
from proxy.rollouts.archive.importer import Imported, Importer
from proxy.server.app import store_options
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
        _report(await archiver.sweep(), as_json=as_json)
        while not once:
            await asyncio.sleep(chosen.interval_s)
            _report(await archiver.sweep(), as_json=as_json)


async def import_dataset(settings: Settings, url: str, *, as_json: bool) -> None:
    """Import the rollouts of a dataset into the store.

    Raises:
        ValueError: The dataset is not one of an archive, or a package is missing.
        OSError: The dataset cannot be read.
        StorageError: The store failed.
    """
    dataset = Dataset(url)
    async with _opened(settings) as store:
        _report(await Importer(store, dataset).run(), as_json=as_json)


@asynccontextmanager
async def _opened(settings: Settings) -> AsyncIterator[Store]:
    store = await open_store(settings.store.url, store_options(settings.store))
    try:
        yield store
    finally:
        await store.close()


def _report(found: Archived | Imported, *, as_json: bool) -> None:
    if as_json:
        print_json(asdict(found), lines=True)
    else:
        print_note(", ".join(f"{name}: {value}" for name, value in asdict(found).items() if name != "oldest_ms"))
