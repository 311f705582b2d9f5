"""What `tokentape check` finds, of an engine alone or of everything."""

from collections.abc import Mapping

from fakes import settings_for
from prometheus_client import CollectorRegistry

from proxy.cli.check import Finding, findings
from proxy.cli.check.engines import check_engine
from proxy.telemetry.metrics import make_metrics
from proxy.upstream import Upstream


async def of_all(settings) -> list[Finding]:
    return [finding async for finding in findings(settings)]


async def of_engine(url: str, listed: dict | None = None, **said) -> list[Finding]:
    """What is found of one engine; the models that it lists are added to `listed`."""
    settings = settings_for(url, **said)
    upstream = Upstream(settings.engines, make_metrics(CollectorRegistry()))
    try:
        known = {} if listed is None else listed
        return [finding async for finding in check_engine(upstream, upstream.endpoints[0], settings, known)]
    finally:
        await upstream.close()


def graded(found: list[Finding]) -> Mapping[str, list[str]]:
    """What was seen, and how to mend it, by grade."""
    told: dict[str, list[str]] = {"ok": [], "note": [], "fault": []}
    for finding in found:
        told[finding.grade].append(f"{finding.subject}: {finding.seen} -> {finding.mend}")
    return told
