"""`tokentape check`: what is wrong with a configuration and what it needs, and how to mend it.

Each file looks at one subject, with functions that give findings; nothing is changed, and what is asked of an engine samples a
token or two.

    finding    [pure] one thing looked at
    listening  addresses and ports, open files, the spool's folder
    keys       [pure] keys that are missing, weak, or good for what they should not be
    stores     whether the store opens, and keeps what it is told
    engines    whether an engine gives ids and logprobs, and what it was started without
    addresses  where the engine is, if it is not where the configuration says
    models     aliases that name nothing, tokenizers that cannot be loaded
    clocks     [pure] clocks that differ from ours
"""

from collections.abc import AsyncIterator
from dataclasses import asdict
from logging import NullHandler
from typing import Final

from prometheus_client import CollectorRegistry
from rich.console import Console
from rich.text import Text

from proxy.cli.check.engines import check_engine
from proxy.cli.check.finding import Finding
from proxy.cli.check.keys import check_keys
from proxy.cli.check.models import check_aliases, check_tokenizer
from proxy.cli.check.network import check_listening, proxy_runs
from proxy.cli.check.store import check_store
from proxy.cli.console import print_json, print_lines, visible, visible_lines
from proxy.clock import SystemClock
from proxy.config.settings import Settings
from proxy.telemetry.logs import LOG
from proxy.telemetry.metrics import make_metrics
from proxy.upstream import Upstream

__all__ = ["Finding", "findings"]


async def findings(settings: Settings) -> AsyncIterator[Finding]:
    """Look at everything, in the order in which a start needs it."""
    runs = await proxy_runs(settings)
    for finding in [*check_listening(settings, runs=runs), *check_keys(settings)]:
        yield finding
    async for finding in check_store(settings.store, SystemClock(), runs=runs):
        yield finding
    if not settings.engines.endpoints:
        yield Finding("engines", "ok", "none configured; serve will start the simulator")
        return
    listed: dict[str, list[str]] = {}
    upstream = Upstream(settings.engines, make_metrics(CollectorRegistry()))
    try:
        for endpoint in upstream.endpoints:
            async for finding in check_engine(upstream, endpoint, settings, listed):
                yield finding
            if endpoint.settings.tokenizer:
                yield await check_tokenizer(endpoint.settings)
    finally:
        await upstream.close()
    for finding in check_aliases(settings.models, listed):
        yield finding


_MARKS: Final = {"ok": ("ok  ", "green"), "note": ("note", "yellow"), "fault": ("FAIL", "bold red")}


async def print_findings(found: AsyncIterator[Finding], out: Console, *, as_json: bool) -> bool:
    """Print each finding; whether none is a fault."""
    LOG.addHandler(NullHandler())  # what it says of an engine that is away, a finding says better
    findings: list[Finding] = []
    async for finding in found:
        findings.append(finding)
        if not as_json:
            _print(finding, out)
    is_well = all(finding.grade != "fault" for finding in findings)
    if as_json:
        print_json({"well": is_well, "findings": [asdict(finding) for finding in findings]})
    return is_well


async def one(finding: Finding) -> AsyncIterator[Finding]:
    """A finding that ends the looking."""
    yield finding


def _print(finding: Finding, out: Console) -> None:
    first, *more = visible_lines(finding.seen)
    lines = [Text.assemble(_MARKS[finding.grade], " ", (visible(finding.subject), "bold"), ": ", first)]
    lines += [Text(f"     {line}") for line in more]
    lines += [Text(f"     -> {visible(finding.mend)}")] if finding.mend else []
    print_lines(out, lines, indent=8)
