"""The engines that only score rows, from the settings."""

from proxy.config.settings import Settings
from proxy.rollouts.scoring.engines import ScoringEngines, ScoringLimits
from proxy.rollouts.scoring.rescoring import POLICY
from proxy.telemetry.metrics import Metrics
from proxy.upstream import Upstream


def scoring_engines(settings: Settings, policy: Upstream, metrics: Metrics) -> dict[str, ScoringEngines]:
    """Return the scorers by name: `policy`, with the engines of calls, and those of `rescore.scorers`.

    The caller closes the upstreams of the latter. They have the limits of `engines`, apart from the timeout of a read.
    """
    chosen = settings.rescore
    limits = ScoringLimits(chosen.timeout_s, chosen.max_in_flight, settings.engines.max_attempts)
    scorers = {POLICY: ScoringEngines(policy, limits, is_policy=True)}
    for name, scorer in chosen.scorers.items():
        engines = settings.engines.model_copy(update={"endpoints": scorer.endpoints, "read_timeout_s": None})
        upstream = Upstream(engines, metrics)
        scorers[name] = ScoringEngines(upstream, limits, model=scorer.model, version=scorer.version)
    return scorers
