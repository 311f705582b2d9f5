"""A tape in place of an engine: a store of its own with the rollouts of a file, and what an engine answers besides calls."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from proxy.clock import SystemClock
from proxy.config.engines import EndpointSettings, RescoreSettings
from proxy.config.sections import ArchiveSettings, AuditSettings, StoreSettings
from proxy.config.settings import Settings
from proxy.rollouts.archive.dataset import Dataset
from proxy.rollouts.archive.importer import Importer
from proxy.rollouts.archive.tape_file import import_rollout, read_tape_file
from proxy.rollouts.rollout import read_rollout
from proxy.rollouts.steps import read_steps
from proxy.server.listener import simulating
from proxy.simulator.options import Options
from storage import open_store
from storage.redis.store import Store

_WINDOW = 2**20  # tokens; the engine that was recorded may have had any


@asynccontextmanager
async def with_tapes(settings: Settings, file: str) -> AsyncIterator[tuple[Settings, Store]]:
    """Yield the settings and the store of a proxy that answers calls from the rollouts of a file. The store is temporary.

    Its engine is the simulator, which answers health probes, counts tokens and lists the models of the tapes.

    Raises:
        ValueError: The file has no rollouts, or the settings are those of several processes.
        OSError: The file cannot be read.
    """
    if settings.workers != 1:
        raise ValueError("tape.file requires workers: 1")
    with TemporaryDirectory(prefix="tokentape-", ignore_cleanup_errors=True) as folder:
        kept = StoreSettings(url=f"embedded:{folder}/store")
        store = await open_store(kept.url, kept.options())
        try:
            await _import(store, file)
            models = await _models(store)
            async with simulating("127.0.0.1:0", Options(models[0], _WINDOW)) as url:
                engines = settings.engines.model_copy(
                    update={"endpoints": [EndpointSettings(url=url, name="tape", kind="vllm")]}
                )
                changes = {
                    "engines": engines,
                    "store": kept,
                    "models": {**dict.fromkeys(models[1:], models[0]), **settings.models},
                    "agents": settings.agents.model_copy(update={"unnamed_rollouts": "new"}),
                    "archive": ArchiveSettings(),
                    "audit": AuditSettings(),
                    "rescore": RescoreSettings(),
                }
                yield settings.model_copy(update=changes), store
        finally:
            await store.close()


async def _import(store: Store, file: str) -> None:
    """Bring the rollouts of a file, or of an archive, into the store. Raises OSError, ValueError."""
    if file.endswith(".parquet") or "://" in file or await asyncio.to_thread(Path(file).is_dir):
        if not (await Importer(store, Dataset(file)).run()).rollouts:
            raise ValueError(f"{file} has no rollouts")
        return
    now_ms = SystemClock().now_ms()
    for rollout in await asyncio.to_thread(read_tape_file, Path(file)):
        await import_rollout(store, rollout, now_ms)


async def _models(store: Store) -> list[str]:
    """Return the names of the models of all calls, those of engines first."""
    asked, served = dict[str, None](), dict[str, None]()
    async for name in store.names():
        stored = await store.get(name)
        assert stored is not None
        for step in await read_steps(store, read_rollout(stored), whole=False):
            asked |= {} if step.model_asked is None else {step.model_asked: None}
            served |= {} if step.model_served is None else {step.model_served: None}
    return list(served | asked) or ["simulated"]
