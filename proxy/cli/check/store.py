"""Checks that the store opens, and reports its warnings and clock."""

import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from proxy.cli.check.engines import check_clock
from proxy.cli.check.finding import Finding
from proxy.clock import Clock
from proxy.config.addresses import without_secrets
from proxy.config.sections import StoreSettings
from proxy.server.app import store_options
from proxy.upstream.failure_text import failure_text
from storage import open_store
from storage.errors import StorageError

_EMBEDDED: Final = "embedded:"
_IN_USE: Final = "is in use by process"  # in the message of storage.embedded.server


async def check_store(settings: StoreSettings, clock: Clock, *, runs: bool = False) -> AsyncIterator[Finding]:
    """Check the store. `runs`: a proxy with this configuration is already running."""
    subject = f"store {without_secrets(settings.url)}"
    try:
        with _url_without_traces(settings.url) as url:
            store = await open_store(url, store_options(settings))
            try:
                ours = clock.now()
                facts, warnings = await store.info(), await store.warnings()
            finally:
                await store.close()
        if url != settings.url:
            facts["servers"] = "not created yet"
    except (StorageError, ValueError, OSError) as error:
        if runs and _IN_USE in str(error):
            fix = "no action is needed if that is the running proxy; GET /ready reports its state"
            yield Finding(subject, "note", str(error), fix)
            return
        yield Finding(subject, "fault", failure_text(error), _fix(settings.url, str(error)))
        return
    for finding in check_clock(subject, float(facts.pop("clock_s")), ours):
        yield finding
    for warning in warnings:
        yield Finding(subject, "fault" if warning.can_lose_data else "note", warning.problem, warning.fix)
    if not any(warning.can_lose_data for warning in warnings):
        yield Finding(subject, "ok", ", ".join(f"{name} {value}" for name, value in facts.items()))


@contextmanager
def _url_without_traces(url: str) -> Iterator[str]:
    """Yield the URL; for an embedded store that does not exist yet, that of a temporary one beside it.

    A start creates the store; a check only finds out whether a start can. Raises OSError if the folder cannot be created.
    """
    path = Path(url.removeprefix(_EMBEDDED)).expanduser()
    if not url.startswith(_EMBEDDED) or os.path.lexists(path):
        yield url
        return
    parent = next(parent for parent in path.absolute().parents if parent.exists())
    with tempfile.TemporaryDirectory(prefix=".tokentape-check-", dir=parent, ignore_cleanup_errors=True) as folder:
        yield f"{_EMBEDDED}{folder}/{path.name}"


def _fix(url: str, seen: str) -> str:
    if seen.startswith("durability"):
        return "change the server configuration, or choose a lower store.durability (see docs/reliability.md)"
    if url.startswith(_EMBEDDED) and _IN_USE not in seen:
        return "choose a path that this user can create and write to (store.url)"
    if url.startswith(_EMBEDDED):
        return "only one process can open an embedded store: stop the other one, or choose another path (store.url)"
    if "auth" in seen.lower() or "NOPERM" in seen or "WRONGPASS" in seen:
        return "set store.username and store.password (TOKENTAPE_STORE__PASSWORD)"
    return "check that the server is running and reachable from here; see store.* in docs/settings.md"
