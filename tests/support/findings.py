"""The findings of `tokentape check`, for one engine or for everything."""

from collections.abc import Mapping

from prometheus_client import CollectorRegistry
from tests.support.fakes import settings_for

from proxy.cli.check import Finding, check_engine, findings
from proxy.telemetry.metrics import make_metrics
from proxy.upstream.client import Upstream


async def all_findings(settings) -> list[Finding]:
    return [finding async for finding in findings(settings)]


async def engine_findings(url: str, listed: dict | None = None, **sections) -> list[Finding]:
    """Return the findings of one engine; the models that it lists are added to `listed`."""
    settings = settings_for(url, **sections)
    upstream = Upstream(settings.engines, make_metrics(CollectorRegistry()))
    try:
        models = {} if listed is None else listed
        return [finding async for finding in check_engine(upstream, upstream.endpoints[0], settings, models)]
    finally:
        await upstream.close()


def graded(found: list[Finding]) -> Mapping[str, list[str]]:
    """Return problems and fixes by grade."""
    by_grade: dict[str, list[str]] = {"ok": [], "note": [], "fault": []}
    for finding in found:
        by_grade[finding.grade].append(f"{finding.subject}: {finding.seen} -> {finding.fix}")
    return by_grade
