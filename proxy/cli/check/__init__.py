"""`tokentape check`: reports problems of the configuration, the machine, the store and the engines, and how to fix them.

The checks change nothing. They generate one or two tokens with each engine.

    machine  listen addresses, open files, the journal, API keys, the store
    engines  token IDs and logprobs, the clock, missing flags; models of aliases, tokenizers, scorers; wrong engine URLs
"""

from collections.abc import AsyncIterator
from dataclasses import asdict
from logging import NullHandler
from typing import Final

from prometheus_client import CollectorRegistry
from rich.console import Console
from rich.text import Text

from proxy.cli.check.engines import check_aliases, check_engine, check_scorers, check_tokenizer, untrainable
from proxy.cli.check.machine import Finding, check_keys, check_listening, check_store, proxy_runs
from proxy.cli.console import print_json, print_lines, visible, visible_lines
from proxy.cli.runner import Exit
from proxy.cli.settings import InvalidSettings
from proxy.clock import SystemClock
from proxy.config.settings import Settings
from proxy.telemetry.logs import LOG
from proxy.telemetry.metrics import make_metrics
from proxy.upstream import Upstream

__all__ = ["Finding", "findings", "print_findings", "refused"]


async def findings(settings: Settings) -> AsyncIterator[Finding]:
    """Run all checks in the order of a start and yield their results."""
    runs = await proxy_runs(settings)
    for finding in [*check_listening(settings, runs=runs), *check_keys(settings)]:
        yield finding
    async for finding in check_store(settings.store, SystemClock(), runs=runs):
        yield finding
    if not settings.engines.endpoints:
        yield Finding("engines", "ok", "none configured; `serve` starts the simulator")
        return
    listed: dict[str, list[str]] = {}
    graded: list[Finding] = []
    metrics = make_metrics(CollectorRegistry())
    upstream = Upstream(settings.engines, metrics)
    try:
        for endpoint in upstream.endpoints:
            async for finding in check_engine(upstream, endpoint, settings, listed):
                graded.append(finding)
                yield finding
            if endpoint.settings.tokenizer:
                yield await check_tokenizer(endpoint.settings)
        async for finding in check_scorers(settings, upstream, metrics):
            yield finding
    finally:
        await upstream.close()
    if (fault := untrainable(graded, len(upstream.endpoints))) is not None:
        yield fault
    for finding in check_aliases(settings.models, listed):
        yield finding


_MARKS: Final = {"ok": ("ok  ", "green"), "note": ("note", "yellow"), "fault": ("FAIL", "bold red")}


async def print_findings(found: AsyncIterator[Finding], out: Console, *, as_json: bool) -> Exit:
    """Print the findings and return the exit code: DONE without faults, their code if they share one, else FOUND."""
    LOG.addHandler(NullHandler())  # findings repeat its messages about unreachable engines
    collected: list[Finding] = []
    async for finding in found:
        collected.append(finding)
        if not as_json:
            _print(finding, out)
    codes = {finding.exit_code for finding in collected if finding.grade == "fault"}
    code = Exit.FOUND if len(codes) > 1 else next(iter(codes), Exit.DONE)
    if as_json:
        print_json({"well": not codes, "exit_code": code, "findings": [asdict(finding) for finding in collected]})
    return code


async def refused(error: InvalidSettings) -> AsyncIterator[Finding]:
    """Yield a fault for each invalid setting."""
    for name, problem in error.faults:
        yield Finding(name or "configuration", "fault", problem, "see docs/settings.md for all settings")


def _print(finding: Finding, out: Console) -> None:
    first, *more = visible_lines(finding.seen)
    lines = [Text.assemble(_MARKS[finding.grade], " ", (visible(finding.subject), "bold"), ": ", first)]
    lines += [Text(f"     {line}") for line in more]
    lines += [Text(f"     -> {visible(finding.fix)}")] if finding.fix else []
    print_lines(out, lines, indent=8)
