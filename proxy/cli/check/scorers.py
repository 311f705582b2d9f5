"""Checks that each scorer of `rescore.scorers` is reachable and can score token ids."""

from collections.abc import AsyncIterator

from proxy.cli.check.finding import Finding
from proxy.config.settings import Settings
from proxy.errors import ProxyError
from proxy.rollouts.scoring.rescoring import POLICY
from proxy.server.app import scoring_engines
from proxy.telemetry.metrics import Metrics
from proxy.upstream import Upstream


async def check_scorers(settings: Settings, upstream: Upstream, metrics: Metrics) -> AsyncIterator[Finding]:
    """Check one engine of each scorer. `upstream` has the engines of calls, which have checks of their own."""
    for name, engines in scoring_engines(settings, upstream, metrics).items():
        if name == POLICY:
            continue
        subject = f"scorer {name}"
        try:
            yield Finding(subject, "ok", f"scores token ids with {await engines.find_model()!r}")
        except ProxyError as error:
            yield Finding(subject, "fault", error.message, f"fix rescore.scorers.{name}, or its engine")
        finally:
            await engines.upstream.close()
