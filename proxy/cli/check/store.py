"""Checks that the store opens, and reports its warnings and clock."""

from collections.abc import AsyncIterator
from typing import Final

from proxy.cli.check.engines import check_clock
from proxy.cli.check.finding import Finding
from proxy.clock import Clock
from proxy.config.addresses import without_secrets
from proxy.config.sections import StoreSettings
from proxy.server.app import store_options
from storage import open_store
from storage.errors import StorageError

_IN_USE: Final = "is in use by process"  # in the message of storage.embedded.server


async def check_store(settings: StoreSettings, clock: Clock, *, runs: bool = False) -> AsyncIterator[Finding]:
    """Check the store. `runs`: a proxy with this configuration is already running."""
    subject = f"store {without_secrets(settings.url)}"
    try:
        store = await open_store(settings.url, store_options(settings))
        try:
            ours = clock.now()
            facts, warnings = await store.info(), await store.warnings()
        finally:
            await store.close()
    except (StorageError, ValueError, OSError) as error:
        if runs and _IN_USE in str(error):
            fix = "no action is needed if that is the running proxy; GET /ready reports its state"
            yield Finding(subject, "note", str(error), fix)
            return
        yield Finding(subject, "fault", str(error), _fix(settings.url, str(error)))
        return
    for finding in check_clock(subject, float(facts.pop("clock_s")), ours):
        yield finding
    for warning in warnings:
        yield Finding(subject, "fault" if warning.can_lose_data else "note", warning.problem, warning.fix)
    if not any(warning.can_lose_data for warning in warnings):
        yield Finding(subject, "ok", ", ".join(f"{name} {value}" for name, value in facts.items()))


def _fix(url: str, seen: str) -> str:
    if seen.startswith("durability"):
        return "change the server configuration, or choose a lower store.durability (see docs/reliability.md)"
    if url.startswith("embedded:") and _IN_USE not in seen:
        return "choose a path that this user can create and write to (store.url)"
    if url.startswith("embedded:"):
        return "only one process can open an embedded store: stop the other one, or choose another path (store.url)"
    if "auth" in seen.lower() or "NOPERM" in seen or "WRONGPASS" in seen:
        return "set store.username and store.password (TOKENTAPE_STORE__PASSWORD)"
    return "check that the server is running and reachable from here; see store.* in docs/settings.md"
