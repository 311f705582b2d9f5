"""Whether the store opens, and keeps what it is told.

Holds the looking at the store; what servers say against themselves is `storage.redis.server_info`.
"""

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

_IN_USE: Final = "is in use by process"  # as storage.embedded.server says it


async def check_store(settings: StoreSettings, clock: Clock, *, runs: bool = False) -> AsyncIterator[Finding]:
    """What the store is, and everything by which it may lose rollouts. `runs`: a proxy of this configuration does already."""
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
            yield Finding(
                subject, "note", str(error), "nothing, if that is the proxy which runs: GET /ready tells how it is"
            )
            return
        yield Finding(subject, "fault", str(error), _mend(settings.url, str(error)))
        return
    for finding in check_clock(subject, float(facts.pop("clock_s")), ours):
        yield finding
    for warning in warnings:
        yield Finding(subject, "fault" if warning.can_lose_data else "note", warning.problem, warning.fix)
    if not any(warning.can_lose_data for warning in warnings):
        yield Finding(subject, "ok", ", ".join(f"{name} {value}" for name, value in facts.items()))


def _mend(url: str, seen: str) -> str:
    if seen.startswith("durability"):
        return "set the server so, or ask for less: store.durability (docs/reliability.md says what each keeps)"
    if url.startswith("embedded:") and _IN_USE not in seen:
        return "choose a folder that this user may make and write to (store.url)"
    if url.startswith("embedded:"):
        return "one process at a time has an embedded store: stop the other one, or choose another path (store.url)"
    if "auth" in seen.lower() or "NOPERM" in seen or "WRONGPASS" in seen:
        return "give store.username and store.password, by environment (TOKENTAPE_STORE__PASSWORD)"
    return "is the server running, and reached from here? see store.* in docs/settings.md"
