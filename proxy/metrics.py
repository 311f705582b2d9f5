"""Every Prometheus metric, made once on a given registry.

Holds names, labels and one sentence each, and nothing that measures. Labels come from closed sets (dialects, endpoints
of the configuration, statuses, problem codes): nothing a client can type becomes a label. Each is in docs/metrics.md.
"""

from dataclasses import dataclass, fields

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_FINE_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1, 5)


@dataclass(frozen=True, slots=True)
class Metrics:
    """All metrics of one process."""

    calls: Counter
    in_flight: Gauge
    duration: Histogram
    first_byte: Histogram
    added_latency: Histogram
    prompt_tokens: Counter
    sampled_tokens: Counter
    steps: Counter
    problems: Counter
    undelivered: Counter
    store_latency: Histogram
    store_failures: Counter
    upstream_faults: Counter
    open_rollouts: Gauge

    def all(self) -> list[Counter | Gauge | Histogram]:
        """Each of them."""
        return [getattr(self, field.name) for field in fields(self)]


def make_metrics(registry: CollectorRegistry) -> Metrics:
    """The metrics, registered."""
    return Metrics(
        calls=Counter(
            "tokentape_calls", "Calls answered.", ["dialect", "engine", "status"], registry=registry
        ),
        in_flight=Gauge("tokentape_calls_in_flight", "Calls being answered now.", registry=registry),
        duration=Histogram(
            "tokentape_call_seconds", "From a call's arrival to its end.", ["dialect"], buckets=_SECONDS, registry=registry
        ),
        first_byte=Histogram(
            "tokentape_first_byte_seconds",
            "From a call's arrival to the engine's first byte.",
            ["dialect"],
            buckets=_SECONDS,
            registry=registry,
        ),
        added_latency=Histogram(
            "tokentape_added_seconds",
            "Time a call spent in the proxy and its store rather than at the engine.",
            ["dialect"],
            buckets=_FINE_SECONDS,
            registry=registry,
        ),
        prompt_tokens=Counter("tokentape_prompt_tokens", "Prompt ids recorded.", ["engine"], registry=registry),
        sampled_tokens=Counter("tokentape_sampled_tokens", "Sampled ids recorded.", ["engine"], registry=registry),
        steps=Counter(
            "tokentape_steps", "Steps stored, by status and whether they are exact.", ["status", "fidelity"],
            registry=registry,
        ),
        problems=Counter(
            "tokentape_fidelity_problems", "Steps flagged, by code (docs/fidelity.md).", ["code"], registry=registry
        ),
        undelivered=Counter(
            "tokentape_undelivered", "Stored steps whose client left before the end was written.", registry=registry
        ),
        store_latency=Histogram(
            "tokentape_store_seconds", "Time of a store verb.", ["verb"], buckets=_FINE_SECONDS, registry=registry
        ),
        store_failures=Counter("tokentape_store_failures", "Store verbs that failed.", ["verb"], registry=registry),
        upstream_faults=Counter(
            "tokentape_upstream_faults", "Engines that could not be reached, broke off or fell silent.",
            ["engine", "fault"],
            registry=registry,
        ),
        open_rollouts=Gauge(
            "tokentape_open_rollouts", "Rollouts of this process with a call in flight.", registry=registry
        ),
    )  # fmt: skip
