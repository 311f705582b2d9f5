"""Every Prometheus metric of the proxy: name, labels and help text.

A field of `Metrics` is the metric's name without `tokentape_` and, for counters, without `_total`. Label values come from
closed sets (dialects, configured endpoints, statuses, codes): a client cannot create a label value.

Counters and histograms whose labels are known in advance start at 0. Prometheus computes increases between two scrapes, so it
would not see the first increase of a series that appears with the value 1.
"""

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from typing import Any, Final

import prometheus_client
from prometheus_client import CollectorRegistry, ProcessCollector, disable_created_metrics
from prometheus_client.metrics import MetricWrapperBase

from proxy.continuation.types import REASONS
from proxy.errors import EngineError, ProxyError
from proxy.protocols.engines.quirks import QUIRK_CODES
from proxy.telemetry.version_windows import OLDER, UNKNOWN, VersionWindows
from proxy.trajectory.drift_kinds import KINDS
from proxy.trajectory.fidelity import PROBLEMS
from proxy.trajectory.step import DEFAULT_POLICY

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_FINE_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5)
_REWARDS = (-100, -10, -5, -2, -1, -0.75, -0.5, -0.25, -0.01, 0, 0.25, 0.5, 0.75, 0.99, 1, 2, 5, 10, 100)
_SPREADS = (0, 0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2, 5, 10, 100)
_TOKENS = (0, 64, 256, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144)
_VERSIONS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128)
_LOGPROB_DIFFERENCES = (1e-5, 1e-4, 1e-3, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10)

_SIGNS: Final = ("positive", "negative")

_GROUP_EVENTS: Final = ("complete", "claimed", "released", "done", "dropped", "requeued")

# Why claims refuse or drop groups: the codes of their responses.
_STALE: Final = ("stale", "earlier_epoch", "unknown_version")
REFUSAL_REASONS: Final = (
    *_STALE,
    "later_epoch",
    "forked",
    "format",
    "no_reward",
    "reward_pending",
    "no_advantage",
    "no_rows",
    "not_scored",
    "damaged_step",
    "damaged_record",
)
DROP_REASONS: Final = (*_STALE, "equal_rewards", "too_few_members", "no_reward")

# The values of proxy.rollouts.scoring.verdict.Verdict.
VERDICTS: Final = ("aligned", "shifted", "other weights", "wrong tokens")


class _WithCachedLabels(MetricWrapperBase):
    """Finds the series of label values in a cache: prometheus_client (0.26) takes a lock and converts the values each time."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if self._labelnames and not self._labelvalues:  # not a series
            self._cached = lru_cache(maxsize=None)(super().labels)
            self.labels = self._cached  # type: ignore[method-assign]

    def remove(self, *labelvalues: Any) -> None:
        """Remove the series of these label values."""
        self._cached.cache_clear()
        super().remove(*labelvalues)


class Counter(_WithCachedLabels, prometheus_client.Counter):
    """A counter with cached labels, that does not check for each increase whether it has values for them."""

    def inc(self, amount: float = 1) -> None:  # type: ignore[override]  # without exemplars
        """Increase the counter."""
        self._value.inc(amount)


class Gauge(_WithCachedLabels, prometheus_client.Gauge):
    """A gauge with cached labels."""


class Histogram(_WithCachedLabels, prometheus_client.Histogram):
    """A histogram with cached labels, that searches its buckets by halves."""

    def observe(self, amount: float) -> None:  # type: ignore[override]  # without exemplars
        """Count a value."""
        self._sum.inc(amount)
        self._buckets[bisect_left(self._upper_bounds, amount)].inc(1)


@dataclass(frozen=True)
class Metrics:
    """The metrics of one process.

    `engine` labels are names of endpoints. A call counts for the endpoint to which it was routed last, even if it ended in the
    queue of that endpoint; a request that is rejected before it is routed counts in `errors` only.
    """

    calls: Counter
    errors: Counter
    in_flight_calls: Gauge
    oldest_call_age_seconds: Gauge
    call_duration_seconds: Histogram
    time_to_first_byte_seconds: Histogram
    proxy_overhead_seconds: Histogram
    prompt_tokens: Counter
    cached_prompt_tokens: Counter
    completion_tokens: Counter
    steps: Counter
    fidelity_problems: Counter
    undelivered_steps: Counter
    late_steps: Counter
    deadline_rollouts: Counter
    restored_rollouts: Counter
    discarded_steps: Counter
    continuations: Counter
    continuation_duration_seconds: Histogram
    idempotent_replays: Counter
    health_probes: Counter
    store_operation_duration_seconds: Histogram
    store_operation_failures: Counter
    store_up: Gauge
    journal_steps: Gauge
    engine_faults: Counter
    failovers: Counter
    ejections: Counter
    engine_healthy: Gauge
    engine_token_ids: Gauge
    queued_calls: Gauge
    queue_duration_seconds: Histogram
    unexpected_losses: Counter
    drift_boundaries: Counter
    group_events: Counter
    reward: Histogram
    reward_amount: Counter
    group_reward_mean: Histogram
    group_reward_spread: Histogram
    compared_groups: Counter
    rollout_tokens: Histogram
    claim_staleness: Histogram
    policy_epoch: Gauge
    unknown_version_steps: Counter
    refused_groups: Counter
    dropped_groups: Counter
    redelivered_groups: Counter
    claim_wait_seconds: Histogram
    audits: Counter
    audit_logprob_difference: Histogram
    in_flight_rollouts: Gauge
    rollout_cache_bytes: Gauge
    in_flight_bytes: Gauge
    in_flight_limit_bytes: Gauge
    stalled_clients: Counter
    dropped_spans: Counter
    archived_rollouts: Counter
    archived_bytes: Counter
    archive_failures: Counter
    archive_oldest_age_seconds: Gauge
    unreadable: Counter
    workers: Gauge
    workers_missing: Counter

    def all(self) -> list[Counter | Gauge | Histogram]:
        """Return every metric."""
        return [getattr(self, field.name) for field in fields(self)]

    @cached_property
    def reward_windows(self) -> VersionWindows:
        """The windows of policy versions that rewards have."""
        signed = [(self.reward_amount, (sign,)) for sign in _SIGNS]
        families: list[tuple[Counter | Histogram, tuple[str, ...]]] = [(self.reward, ()), *signed]

        def begin(policy: str, versions: str) -> None:
            for metric, more in families:
                metric.labels(policy, versions, *more)

        def end(policy: str, versions: str) -> None:
            for metric, more in families:
                metric.remove(policy, versions, *more)

        return VersionWindows(begin, end)

    def begin_policy(self, name: str) -> None:
        """Start the metrics of a policy at 0, rewards in the window of the first versions."""
        for metric in (
            self.group_reward_mean,
            self.group_reward_spread,
            self.rollout_tokens,
            self.claim_staleness,
            self.claim_wait_seconds,
            self.redelivered_groups,
            self.policy_epoch,
            self.unknown_version_steps,
        ):
            metric.labels(name)
        for counter, values in (
            (self.compared_groups, ("equal", "different")),
            (self.group_events, _GROUP_EVENTS),
            (self.refused_groups, REFUSAL_REASONS),
            (self.dropped_groups, DROP_REASONS),
        ):
            for value in values:
                counter.labels(name, value)
        for versions in (UNKNOWN, OLDER):
            self.reward.labels(name, versions)
            for sign in _SIGNS:
                self.reward_amount.labels(name, versions, sign)
        self.reward_windows.of(name, "0")

    def begin_engine(self, name: str) -> None:
        """Start the counters of an engine's failures at 0."""
        for metric in (self.failovers, self.ejections):
            metric.labels(name)
        for fault in _subclasses(EngineError):
            self.engine_faults.labels(name, fault.fault)
        for code in QUIRK_CODES:
            self.unexpected_losses.labels(name, code)
        for verdict in VERDICTS:
            self.audits.labels(name, verdict)

    def keep_engines(self, names: Collection[str]) -> None:
        """Remove the series of all engines but these, in every metric with an `engine` label."""
        for field, (_, _, labels) in _METRICS.items():
            if "engine" in labels:
                metric = getattr(self, field)
                samples = [sample.labels for family in metric.collect() for sample in family.samples]
                for values in {tuple(sample[label] for label in labels) for sample in samples}:
                    if values[labels.index("engine")] not in names:
                        metric.remove(*values)


# By field of `Metrics`: the kind (a histogram by its buckets), the help text and the labels.
_METRICS: dict[str, tuple[type[Counter] | type[Gauge] | tuple[float, ...], str, tuple[str, ...]]] = {
    "calls": (Counter, "Calls answered.", ("dialect", "engine", "status")),
    "errors": (Counter, "Requests answered with an error of TokenTape, by code (docs/errors.md).", ("code",)),
    "in_flight_calls": (Gauge, "Calls in flight.", ()),
    "oldest_call_age_seconds": (Gauge, "Age of the oldest call in flight; 0 if there is none.", ()),
    "call_duration_seconds": (
        _SECONDS, "Time from the arrival of a call to its end.", ("dialect", "engine", "status")
    ),
    "time_to_first_byte_seconds": (
        _SECONDS, "Time from the arrival of a call to the first byte of the engine's response.",
        ("dialect", "engine", "status"),
    ),
    "proxy_overhead_seconds": (
        _FINE_SECONDS, "Time that a call spends in the proxy, its queue and its store, not at the engine.", ("dialect",)
    ),
    "prompt_tokens": (Counter, "Prompt tokens recorded.", ("engine",)),
    "cached_prompt_tokens": (
        Counter, "Prompt tokens of recorded calls that the engine read from its prefix cache, if it reports them.", ("engine",)
    ),
    "completion_tokens": (Counter, "Completion tokens recorded.", ("engine",)),
    "steps": (Counter, "Steps stored, by status and fidelity.", ("status", "fidelity")),
    "fidelity_problems": (Counter, "Fidelity problems of stored steps, by code (docs/fidelity.md).", ("code",)),
    "undelivered_steps": (Counter, "Stored steps whose client disconnected before the end of the response.", ()),
    "late_steps": (Counter, "Steps stored after their rollout finished; exports omit them by default.", ()),
    "deadline_rollouts": (Counter, "Rollouts finished as aborted because they exceeded deadline_s, idle_s or start_s.", ()),
    "restored_rollouts": (Counter, "Expired rollouts (store.ttl_s) that a step restored.", ()),
    "discarded_steps": (Counter, "Steps discarded because their rollout was deleted during the call.", ()),
    "idempotent_replays": (
        Counter, "Calls answered with the stored response of an earlier call with the same Idempotency-Key.", ("dialect",)
    ),
    "health_probes": (Counter, "Health probes forwarded to an engine without recording (agents.probes).", ("dialect",)),
    "store_operation_duration_seconds": (_FINE_SECONDS, "Duration of store operations.", ("operation",)),
    "store_operation_failures": (Counter, "Store operations that failed.", ("operation",)),
    "store_up": (Gauge, "1 while the store is reachable and accepts writes, else 0.", ()),
    "journal_steps": (Gauge, "Steps in the journal that are not in the store yet.", ()),
    "engine_faults": (
        Counter, "Failed requests to engines: connection failed, connection lost or timed out.", ("engine", "fault")
    ),
    "continuations": (
        Counter, "Calls that follow an earlier step, by result (docs/continuation.md) and reason.", ("result", "reason"),
    ),
    "continuation_duration_seconds": (
        (*_FINE_SECONDS, 15, 60), "Time that the continuation of a call takes before the call is sent.", ()
    ),
    "failovers": (Counter, "Calls retried at another endpoint, by the endpoint that failed.", ("engine",)),
    "ejections": (
        Counter, "Ejections of endpoints after consecutive failures (engines.eject_after).", ("engine",)
    ),
    "engine_healthy": (Gauge, "0 while an endpoint is ejected, else 1.", ("engine",)),
    "engine_token_ids": (
        Gauge, "1 if an endpoint returns token ids, as its type does or as its last step shows, else 0.", ("engine",)
    ),
    "queued_calls": (Gauge, "Calls in the queue of an endpoint (max_in_flight).", ("engine",)),
    "queue_duration_seconds": (_SECONDS, "Time that queued calls spend in the queue.", ()),
    "unexpected_losses": (
        Counter, "Steps flagged for a loss that docs/exactness.md does not list for their engine, by code.",
        ("engine", "code"),
    ),
    "drift_boundaries": (
        Counter, "Boundaries in finished rollouts where the messages continue and the token ids do not, by kind of drift.",
        ("kind",),
    ),
    "group_events": (Counter, "Groups that became complete, claimed, released, done, dropped, requeued.", ("policy", "event")),
    "reward": (
        _REWARDS,
        "Rewards of claimed groups, each once, by windows of the version of the oldest token. The sum is `reward_amount`.",
        ("policy", "versions"),
    ),
    "reward_amount": (
        Counter, "Sum of the positive rewards of the rollouts in claimed groups, and of the negative ones without their sign.",
        ("policy", "versions", "sign"),
    ),
    "group_reward_mean": (_REWARDS, "Mean reward of claimed groups.", ("policy",)),
    "group_reward_spread": (
        _SPREADS, "Population standard deviation of the rewards of claimed groups with at least two rewards.", ("policy",)
    ),
    "compared_groups": (
        Counter, "Claimed groups with at least two rewards, by whether all of these are equal or some are different.",
        ("policy", "rewards"),
    ),
    "rollout_tokens": (_TOKENS, "Tokens sampled by each rollout in claimed groups.", ("policy",)),
    "claim_staleness": (
        _VERSIONS,
        "Announced policy version minus the oldest of a group's tokens of its epoch, when it is claimed; 0 if these are ahead.",
        ("policy",),
    ),
    "policy_epoch": (Gauge, "Announced epoch of the policy: how often a run began from an earlier version.", ("policy",)),
    "unknown_version_steps": (
        Counter, "Stored steps with a policy version that is not a number, so that their staleness is unknown.", ("policy",)
    ),
    "refused_groups": (
        Counter, "Groups that claims refused, by reason (docs/http-api.md); they remain in the queue, and count in each claim.",
        ("policy", "reason"),
    ),
    "dropped_groups": (Counter, "Groups that claims dropped, by reason (docs/http-api.md).", ("policy", "reason")),
    "redelivered_groups": (
        Counter, "Claimed groups that an earlier batch of the policy had: its lease expired, or it was released or taken over.",
        ("policy",),
    ),
    "claim_wait_seconds": (_SECONDS, "Time that claims of batches waited for groups.", ("policy",)),
    "audits": (Counter, "Steps scored again by their engine (audit.sample_rate), by verdict.", ("engine", "verdict")),
    "audit_logprob_difference": (
        _LOGPROB_DIFFERENCES, "Absolute difference of recorded and scored logprob, for each audited token.", ("engine",)
    ),
    "in_flight_rollouts": (Gauge, "Rollouts with a call in flight, counted once per worker.", ()),
    "rollout_cache_bytes": (
        Gauge, "Memory for the rollouts of calls (agents.rollout_cache_bytes).", ()
    ),
    "in_flight_bytes": (Gauge, "Bytes held by calls in flight.", ()),
    "in_flight_limit_bytes": (
        Gauge, "Limit of bytes held by calls in flight (agents.max_bytes_in_flight); above it new calls get 429.", ()
    ),
    "stalled_clients": (Counter, "Clients disconnected because they stopped reading (agents.client_stall_timeout_s).", ()),
    "dropped_spans": (
        Counter, "Spans of traces that were not exported, because too many were waiting or the collector did not accept them.",
        ("reason",),
    ),
    "archived_rollouts": (Counter, "Versions of rollouts written to the archive (docs/datasets.md).", ()),
    "archived_bytes": (Counter, "Bytes of files written to the archive.", ()),
    "archive_failures": (Counter, "Sweeps of the archive that failed; the next one continues.", ()),
    "archive_oldest_age_seconds": (
        Gauge, "Time since the oldest rollout was finished that is not archived yet; 0 if there is none.", ()
    ),
    "unreadable": (
        Counter, "Stored rollouts, groups and steps that a reader omitted because they are unreadable; the log names them.",
        ("entity",),
    ),
    "workers": (Gauge, "Worker processes included in these metrics.", ()),
    "workers_missing": (Counter, "Workers that did not respond to a collection of metrics within a second.", ()),
}  # fmt: skip

# Metrics whose labels are known in advance. A step with an error has no tokens that could be exact or flagged.
_INITIAL_LABELS: Final[dict[str, tuple[tuple[str, ...], ...]]] = {
    "steps": (
        *((status, fidelity) for status in ("complete", "partial") for fidelity in ("exact", "flagged")), ("error", "error")
    ),
    "fidelity_problems": tuple((code,) for code in PROBLEMS),
    "store_operation_failures": (("open",), ("append",), ("mark",), ("renew",), ("deadlines",)),
    "continuations": (
        *(("continued", reason) for reason in ("none", "history", "stop_string")),
        ("unchanged", "none"),
        *(("refused", reason) for reason in REASONS),
    ),
    "drift_boundaries": tuple((kind,) for kind in KINDS if kind != "unexplained"),
    "dropped_spans": (("queue_full",), ("export_failed",)),
    "unreadable": (("rollout",), ("group",), ("step",)),
}  # fmt: skip

START_TIME: Final = "process_start_time_seconds"

# How the values of several workers become one, for gauges that are not summed (docs/workers.md). A store that one worker cannot
# reach counts as down; an endpoint that one worker can use counts as healthy; one without ids at one worker has none.
AGGREGATION: Final[dict[str, Callable[[float, float], float]]] = {
    "tokentape_policy_epoch": max,
    "tokentape_store_up": min,
    "tokentape_engine_healthy": max,
    "tokentape_engine_token_ids": min,
    "tokentape_oldest_call_age_seconds": max,
    "tokentape_archive_oldest_age_seconds": max,
    START_TIME: max,
}


def make_metrics(registry: CollectorRegistry) -> Metrics:
    """Create the metrics and register them."""
    # prometheus_client 0.26 has no such option per registry. A `_created` sample costs a series per label set, in the text
    # format even a family of its own, and process_start_time_seconds already shows restarts.
    disable_created_metrics()  # type: ignore[no-untyped-call]
    made: dict[str, Any] = {}
    for field, (kind, text, labels) in _METRICS.items():
        if isinstance(kind, tuple):
            made[field] = Histogram(f"tokentape_{field}", text, labels, buckets=kind, registry=registry)
        else:
            made[field] = kind(f"tokentape_{field}", text, labels, registry=registry)
    ProcessCollector(registry=registry)  # process_*: on Linux only
    made["workers"].set(1)
    made["store_up"].set(1)  # serving starts with a reachable store
    for error in _subclasses(ProxyError):
        made["errors"].labels(error.code)
    for field, initial_labels in _INITIAL_LABELS.items():
        for values in initial_labels:
            made[field].labels(*values)
    metrics = Metrics(**made)
    metrics.begin_policy(DEFAULT_POLICY)
    return metrics


def _subclasses(kind: type[ProxyError]) -> Iterator[Any]:
    for subclass in kind.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)
