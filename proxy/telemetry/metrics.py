"""Every Prometheus metric of the proxy: name, labels, help text, first values, and how the values of workers become one.

A field of `Metrics` is the metric's name without `tokentape_` and, for counters, without `_total`. Label values come from
closed sets (dialects, configured endpoints, statuses, codes): a client cannot create a label value.

Counters and histograms start at 0 if their labels are known in advance. Prometheus computes increases between two scrapes: it
would not see the first increase of a series that appears with the value 1.
"""

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from operator import add
from typing import Any, Final

import prometheus_client
from prometheus_client import CollectorRegistry, ProcessCollector, disable_created_metrics
from prometheus_client.metrics import MetricWrapperBase

from proxy.continuation.types import REASONS
from proxy.errors import EngineError, ProxyError
from proxy.protocols.engines.base import QUIRK_CODES
from proxy.telemetry.version_windows import OLDER, UNKNOWN, VersionWindows
from proxy.trajectory.drift import KINDS
from proxy.trajectory.ratios import RATIO_WARNINGS
from proxy.trajectory.step import DEFAULT_POLICY, PROBLEMS

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
    "no_value",
    "other_version",
    "no_rows",
    "not_scored",
    "damaged_step",
    "damaged_record",
)
DROP_REASONS: Final = (*_STALE, "equal_rewards", "too_few_members", "no_reward")

# The values of proxy.rollouts.scoring.verdict.Verdict.
VERDICTS: Final = ("aligned", "shifted", "other weights", "wrong tokens")

# The verdicts of proxy.rollouts.mismatch.
MISMATCHES: Final = (
    "shifted", "other_tokens", "truncated_support", "temperature", "stale_endpoint", "boundaries", "heavy_tail", "lag",
    "numeric", "unexplained", "unknown", "too_few",
)  # fmt: skip

# A step with an error has no tokens that could be exact or flagged.
_STEPS: Final = (*product(("complete", "partial"), ("exact", "flagged")), ("error", "error"))
_CONTINUATIONS: Final = (
    *product(("continued",), ("none", "history", "stop_string")),
    ("unchanged", "none"),
    *product(("refused",), REASONS),
)
_OWNERS: Final = (("policy",), ("engine",))


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

    def clear(self) -> None:
        """Remove all series."""
        self._cached.cache_clear()
        super().clear()


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


@dataclass(frozen=True, slots=True)
class _Declared:
    text: str
    labels: tuple[str, ...]
    buckets: tuple[float, ...] = ()
    # The series with these label values, after the policy or the engine, start at 0.
    initial: Iterable[str | tuple[str, ...]] | Callable[[], Iterable[str]] = ()
    workers: Callable[[float, float], float] = add  # combines the values of two workers


def _metric(text: str, *labels: str, **options: Any) -> Any:
    return _Declared(text, labels, **options)


def _subclasses(kind: type[ProxyError]) -> Iterator[Any]:
    for subclass in kind.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


# fmt: off
class Metrics:
    """The metrics of one process.

    `engine` labels are names of endpoints. A call counts for the endpoint to which it was routed last, even if it ended in the
    queue of that endpoint; a request that is rejected before it is routed counts in `errors` only.
    """

    calls: Counter = _metric("Calls answered.", "dialect", "engine", "status")
    errors: Counter = _metric(
        "Requests answered with an error of TokenTape, by code (docs/errors.md).",
        "code", initial=lambda: [error.code for error in _subclasses(ProxyError)],
    )
    in_flight_calls: Gauge = _metric("Calls in flight.")
    oldest_call_age_seconds: Gauge = _metric("Age of the oldest call in flight; 0 if there is none.", workers=max)
    call_duration_seconds: Histogram = _metric(
        "Time from the arrival of a call to its end.", "dialect", "engine", "status", buckets=_SECONDS
    )
    time_to_first_byte_seconds: Histogram = _metric(
        "Time from the arrival of a call to the first byte of the engine's response.",
        "dialect", "engine", "status", buckets=_SECONDS,
    )
    proxy_overhead_seconds: Histogram = _metric(
        "Time that a call spends in the proxy, its queue and its store, not at the engine.",
        "dialect", buckets=_FINE_SECONDS,
    )
    prompt_tokens: Counter = _metric("Prompt tokens recorded.", "engine")
    cached_prompt_tokens: Counter = _metric(
        "Prompt tokens of recorded calls that the engine read from its prefix cache, if it reports them.", "engine"
    )
    completion_tokens: Counter = _metric("Completion tokens recorded.", "engine")
    steps: Counter = _metric("Steps stored, by status and fidelity.", "status", "fidelity", initial=_STEPS)
    fidelity_problems: Counter = _metric(
        "Fidelity problems of stored steps, by code (docs/fidelity.md).", "code", initial=PROBLEMS
    )
    undelivered_steps: Counter = _metric("Stored steps whose client disconnected before the end of the response.")
    late_steps: Counter = _metric("Steps stored after their rollout finished; exports omit them by default.")
    deadline_rollouts: Counter = _metric(
        "Rollouts finished as aborted because they exceeded deadline_s, idle_s or start_s."
    )
    restored_rollouts: Counter = _metric("Expired rollouts (store.ttl_s) that a step restored.")
    discarded_steps: Counter = _metric("Steps discarded because their rollout was deleted during the call.")
    continuations: Counter = _metric(
        "Calls that follow an earlier step, by result (docs/continuation.md) and reason.",
        "result", "reason", initial=_CONTINUATIONS,
    )
    continuation_duration_seconds: Histogram = _metric(
        "Time that the continuation of a call takes before the call is sent.", buckets=(*_FINE_SECONDS, 15, 60)
    )
    idempotent_replays: Counter = _metric(
        "Calls answered with the stored response of an earlier call with the same Idempotency-Key.", "dialect"
    )
    playback_calls: Counter = _metric(
        "Calls of playbacks (docs/playback.md): answered from the tape, again with the same response, or live at an engine; "
        "refused: the tape does not have the call; gone: the source was deleted.",
        "result", initial=("answered", "again", "live", "refused", "gone"),
    )
    health_probes: Counter = _metric(
        "Health probes forwarded to an engine without recording (agents.probes).", "dialect"
    )
    store_operation_duration_seconds: Histogram = _metric(
        "Duration of store operations.", "operation", buckets=_FINE_SECONDS
    )
    store_operation_failures: Counter = _metric(
        "Store operations that failed.", "operation", initial=("open", "append", "mark", "renew", "deadlines")
    )
    # Over workers: a store that one cannot reach is down; an endpoint that one can use is healthy, and has token ids if all get
    # some.
    store_up: Gauge = _metric("1 while all servers of the store are reachable and accept writes, else 0.", workers=min)
    store_server_up: Gauge = _metric(
        "1 while a server that has a part of the store is reachable and accepts writes, else 0.", "server", workers=min
    )
    journal_steps: Gauge = _metric("Steps in the journal that are not in the store yet.")
    engine_faults: Counter = _metric(
        "Failed requests to engines: connection failed, connection lost or timed out.",
        "engine", "fault", initial=lambda: [error.fault for error in _subclasses(EngineError)],
    )
    failovers: Counter = _metric(
        "Calls retried at another endpoint, by the endpoint that failed.", "engine", initial=[()]
    )
    resumed_calls: Counter = _metric(
        "Calls that were ended early, by their engine or for an update of the weights, by result (resumed with what was "
        "sampled, restarted from their start, ended) and by why they were not resumed.", "engine", "result", "reason",
    )
    cut_tokens: Counter = _metric(
        "Sampled tokens of calls that were ended early: kept in the resumed call, or lost.", "result",
        initial=lambda: ["kept", "lost"],
    )
    resume_wait_seconds: Histogram = _metric(
        "Time from the end of a part of a call until its rest can be sent.", buckets=_SECONDS
    )
    ejections: Counter = _metric(
        "Ejections of endpoints after consecutive failures (engines.eject_after).", "engine", initial=[()]
    )
    engine_healthy: Gauge = _metric("0 while an endpoint is ejected, else 1.", "engine", workers=max)
    engine_token_ids: Gauge = _metric(
        "1 if an endpoint returns token ids, as its type does or as its last step shows, else 0.", "engine", workers=min
    )
    queued_calls: Gauge = _metric("Calls in the queue of an endpoint (max_in_flight).", "engine")
    queue_duration_seconds: Histogram = _metric("Time that queued calls spend in the queue.", buckets=_SECONDS)
    unexpected_losses: Counter = _metric(
        "Steps flagged for a loss that docs/exactness.md does not list for their engine, by code.",
        "engine", "code", initial=QUIRK_CODES,
    )
    drift_boundaries: Counter = _metric(
        "Boundaries in finished rollouts where the messages continue and the token ids do not, by kind of drift.",
        "kind", initial=[kind for kind in KINDS if kind != "unexplained"],
    )
    group_events: Counter = _metric(
        "Groups that became complete, claimed, released, done, dropped, requeued.", "policy", "event", initial=_GROUP_EVENTS
    )
    reward: Histogram = _metric(
        "Rewards of claimed groups, each once, by windows of the version of the oldest token. The sum is `reward_amount`.",
        "policy", "versions", buckets=_REWARDS, initial=(UNKNOWN, OLDER),
    )
    reward_amount: Counter = _metric(
        "Sum of the positive rewards of the rollouts in claimed groups, and of the negative ones without their sign.",
        "policy", "versions", "sign", initial=[*product((UNKNOWN, OLDER), _SIGNS)],
    )
    group_reward_mean: Histogram = _metric("Mean reward of claimed groups.", "policy", buckets=_REWARDS, initial=[()])
    group_reward_spread: Histogram = _metric(
        "Population standard deviation of the rewards of claimed groups with at least two rewards.",
        "policy", buckets=_SPREADS, initial=[()],
    )
    compared_groups: Counter = _metric(
        "Claimed groups with at least two rewards, by whether all of these are equal or some are different.",
        "policy", "rewards", initial=("equal", "different"),
    )
    rollout_tokens: Histogram = _metric(
        "Tokens sampled by each rollout in claimed groups.", "policy", buckets=_TOKENS, initial=[()]
    )
    claim_staleness: Histogram = _metric(
        "Announced policy version minus the oldest of a group's tokens of its epoch, when it is claimed; 0 if these are ahead.",
        "policy", buckets=_VERSIONS, initial=[()],
    )
    mismatch_abs_mean: Histogram = _metric(
        "Mean absolute difference of the trainer's logprobs from the recorded ones, of each part of a batch that was reported "
        "(docs/mismatch.md).", "policy", buckets=_LOGPROB_DIFFERENCES, initial=[()],
    )
    mismatch_verdicts: Counter = _metric(
        "Batches with a verdict on their mismatch, each counted once for a verdict, when a report brings it about "
        "(docs/mismatch.md).", "policy", "verdict", initial=MISMATCHES,
    )
    policy_epoch: Gauge = _metric(
        "Announced epoch of the policy: how often a run began from an earlier version.", "policy", initial=[()], workers=max
    )
    unknown_version_steps: Counter = _metric(
        "Stored steps with a policy version that is not a number, so that their staleness is unknown.",
        "policy", initial=[()],
    )
    refused_groups: Counter = _metric(
        "Groups that claims refused, by reason (docs/http-api.md); they remain in the queue, and count in each claim.",
        "policy", "reason", initial=REFUSAL_REASONS,
    )
    dropped_groups: Counter = _metric(
        "Groups that claims dropped, by reason (docs/http-api.md).", "policy", "reason", initial=DROP_REASONS
    )
    ratio_warning_tokens: Counter = _metric(
        "Trained tokens of claimed groups with importance ratios that are wrong by how they were recorded, by warning "
        "(docs/mismatch.md).",
        "policy", "warning", initial=RATIO_WARNINGS,
    )
    redelivered_groups: Counter = _metric(
        "Claimed groups that an earlier batch of the policy had: its lease expired, or it was released or taken over.",
        "policy", initial=[()],
    )
    claim_wait_seconds: Histogram = _metric(
        "Time that claims of batches waited for groups.", "policy", buckets=_SECONDS, initial=[()]
    )
    audits: Counter = _metric(
        "Steps scored again by their engine (audit.sample_rate), by verdict.", "engine", "verdict", initial=VERDICTS
    )
    audit_logprob_difference: Histogram = _metric(
        "Absolute difference of recorded and scored logprob, for each audited token.",
        "engine", buckets=_LOGPROB_DIFFERENCES,
    )
    in_flight_rollouts: Gauge = _metric("Rollouts with a call in flight, counted once per worker.")
    rollout_cache_bytes: Gauge = _metric("Memory for the rollouts of calls (agents.rollout_cache_bytes).")
    plan_cache_bytes: Gauge = _metric("Memory for prepared calls (engines.plan_cache_bytes, for each endpoint).")
    text_cache_bytes: Gauge = _metric("Memory for texts of tokens (engines.text_cache_bytes).")
    in_flight_bytes: Gauge = _metric("Bytes held by calls in flight.")
    in_flight_limit_bytes: Gauge = _metric(
        "Limit of bytes held by calls in flight (agents.max_bytes_in_flight); above it new calls get 429."
    )
    connections: Gauge = _metric("Open connections of clients, waiting for a request or with one.")
    connections_limit: Gauge = _metric("Limit of connections (agents.max_connections); calls on further ones get 429.")
    waiting_connections: Gauge = _metric("Connections that no process serves yet, also those on their way to a worker.")
    waiting_calls: Gauge = _metric("Calls that arrived and wait for their start, which is in the order of their arrival.")
    stalled_clients: Counter = _metric(
        "Clients disconnected because they stopped reading (agents.client_stall_timeout_s)."
    )
    dropped_spans: Counter = _metric(
        "Spans of traces that were not exported, because too many were waiting or the collector did not accept them.",
        "reason", initial=("queue_full", "export_failed"),
    )
    archived_rollouts: Counter = _metric("Versions of rollouts written to the archive (docs/datasets.md).")
    archived_bytes: Counter = _metric("Bytes of files written to the archive.")
    archive_buffer_bytes: Gauge = _metric("Memory for rows that are not compressed yet (archive.buffer_bytes).")
    archive_failures: Counter = _metric("Sweeps of the archive that failed; the next one continues.")
    archive_oldest_age_seconds: Gauge = _metric(
        "Time since the oldest rollout was finished that is not archived yet; 0 if there is none.", workers=max
    )
    unreadable: Counter = _metric(
        "Stored rollouts, groups and steps that a reader omitted because they are unreadable; the log names them.",
        "entity", initial=("rollout", "group", "step"),
    )
    workers: Gauge = _metric("Worker processes included in these metrics.")
    workers_missing: Counter = _metric("Workers that did not respond to a collection of metrics within a second.")
    # fmt: on

    def all(self) -> list[Counter | Gauge | Histogram]:
        """Return every metric."""
        return [getattr(self, name) for name in DECLARED]

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
        self.begin("policy", name)
        self.reward_windows.of(name, "0")

    def begin(self, owner: str = "", *name: str) -> None:
        """Start the initial series of a policy or an engine at 0; without an owner, the series that belong to neither."""
        for metric, declared in DECLARED.items():
            first, initial = declared.labels[:1], declared.initial
            if (owner,) == (first if first in _OWNERS else ("",)):
                for values in initial() if callable(initial) else initial:
                    getattr(self, metric).labels(*name, *((values,) if isinstance(values, str) else values))

    def keep_engines(self, names: Collection[str]) -> None:
        """Remove the series of all engines but these, in every metric with an `engine` label."""
        for name, declared in DECLARED.items():
            labels = declared.labels
            if "engine" in labels:
                metric = getattr(self, name)
                samples = [sample.labels for family in metric.collect() for sample in family.samples]
                for values in {tuple(sample[label] for label in labels) for sample in samples}:
                    if values[labels.index("engine")] not in names:
                        metric.remove(*values)


DECLARED: Final[dict[str, _Declared]] = {
    name: value for name, value in vars(Metrics).items() if isinstance(value, _Declared)
}
for _name in DECLARED:
    delattr(Metrics, _name)  # CPython 3.11 finds an instance's attribute in 17 ns, in 43 if the class has one of this name
START_TIME: Final = "process_start_time_seconds"


def aggregate(name: str, value: float, other: float) -> float:
    """Combine the values of a series from two workers."""
    declared = DECLARED.get(name.removeprefix("tokentape_"))
    return declared.workers(value, other) if declared else max(value, other) if name == START_TIME else value + other


def make_metrics(registry: CollectorRegistry) -> Metrics:
    """Create the metrics and register them."""
    # prometheus_client 0.26 has no such option per registry. A `_created` sample costs a series per label set, in the text
    # format even a family of its own, and process_start_time_seconds already shows restarts.
    disable_created_metrics()  # type: ignore[no-untyped-call]
    metrics = Metrics()
    for name, declared in DECLARED.items():
        options = {"buckets": declared.buckets} if declared.buckets else {}
        kind = Metrics.__annotations__[name]
        setattr(metrics, name, kind(f"tokentape_{name}", declared.text, declared.labels, registry=registry, **options))
    ProcessCollector(registry=registry)  # process_*: on Linux only
    metrics.workers.set(1)
    metrics.store_up.set(1)  # serving starts with a reachable store
    metrics.begin()
    metrics.begin_policy(DEFAULT_POLICY)
    return metrics
