"""Every Prometheus metric, made once on a given registry.

Holds names, labels and one sentence each, and nothing that measures. Labels come from closed sets (dialects, endpoints
of the configuration, statuses, problem codes): nothing a client can type becomes a label. Each is in docs/metrics.md.

Where the labels of a counter are known from the start, it begins at 0: Prometheus cannot see the first rise of a series that
comes into being with it, and the first flagged step is the one to be told of.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, fields
from typing import Any, Final, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

from proxy.audit.verdict import Verdict
from proxy.engines.losses import LOST
from proxy.errors import EngineFault, ProxyError
from proxy.trajectory.fidelity import PROBLEMS
from proxy.trajectory.kinds import KINDS

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_FINE_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5)
_DIFFERENCES = (1e-5, 1e-4, 1e-3, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10)


@dataclass(frozen=True, slots=True)
class Metrics:
    """All metrics of one process."""

    calls: Counter
    errors: Counter
    in_flight: Gauge
    oldest_call: Gauge
    duration: Histogram
    first_byte: Histogram
    added_latency: Histogram
    prompt_tokens: Counter
    sampled_tokens: Counter
    steps: Counter
    problems: Counter
    undelivered: Counter
    late: Counter
    restored: Counter
    deleted: Counter
    given_again: Counter
    probes: Counter
    store_latency: Histogram
    store_failures: Counter
    store_away: Gauge
    spooled: Gauge
    upstream_faults: Counter
    failovers: Counter
    ejections: Counter
    healthy: Gauge
    queued: Gauge
    queue: Histogram
    new_losses: Counter
    drift: Counter
    groups: Counter
    audits: Counter
    audit_difference: Histogram
    open_rollouts: Gauge
    held_bytes: Gauge
    held_bytes_bound: Gauge
    stalled: Counter
    workers: Gauge
    left_out: Counter

    def all(self) -> list[Counter | Gauge | Histogram]:
        """Each of them."""
        return [getattr(self, field.name) for field in fields(self)]

    def begin_engine(self, name: str) -> None:
        """Let the counters of what may go wrong with an engine begin."""
        for metric in (self.failovers, self.ejections):
            metric.labels(name)
        for kind in _tree(EngineFault):
            self.upstream_faults.labels(name, kind.fault)
        for code in LOST:
            self.new_losses.labels(name, code)
        for verdict in get_args(Verdict):
            self.audits.labels(name, verdict)

    def keep_engines(self, names: Collection[str]) -> None:
        """Forget every engine but these, in all metrics that tell engines apart."""
        for field, (_, _, _, labels) in _METRICS.items():
            if "engine" in labels:
                metric = getattr(self, field)
                samples = [sample.labels for family in metric.collect() for sample in family.samples]
                for values in {tuple(sample[label] for label in labels) for sample in samples}:
                    if values[labels.index("engine")] not in names:
                        metric.remove(*values)


# By field of `Metrics`: its kind (a histogram by its buckets), name, sentence and labels.
_METRICS: dict[str, tuple[type[Counter] | type[Gauge] | tuple[float, ...], str, str, tuple[str, ...]]] = {
    "calls": (Counter, "calls", "Calls answered.", ("dialect", "engine", "status")),
    "errors": (Counter, "errors", "Requests answered with an error of ours, by code (docs/errors.md).", ("code",)),
    "in_flight": (Gauge, "calls_in_flight", "Calls being answered now.", ()),
    "oldest_call": (Gauge, "oldest_call_seconds", "How long the oldest call in flight has been; 0 if none is.", ()),
    "duration": (_SECONDS, "call_seconds", "From a call's arrival to its end.", ("dialect",)),
    "first_byte": (
        _SECONDS, "first_byte_seconds", "From a call's arrival to the engine's first byte.", ("dialect",)
    ),
    "added_latency": (
        _FINE_SECONDS, "added_seconds", "Time a call spent in the proxy and its store rather than at the engine.",
        ("dialect",),
    ),
    "prompt_tokens": (Counter, "prompt_tokens", "Prompt ids recorded.", ("engine",)),
    "sampled_tokens": (Counter, "sampled_tokens", "Sampled ids recorded.", ("engine",)),
    "steps": (Counter, "steps", "Steps stored, by status and whether they are exact.", ("status", "fidelity")),
    "problems": (Counter, "fidelity_problems", "Steps flagged, by code (docs/fidelity.md).", ("code",)),
    "undelivered": (Counter, "undelivered", "Stored steps whose client left before the end was written.", ()),
    "late": (Counter, "late", "Steps stored after their rollout was finished; in no export by default.", ()),
    "restored": (
        Counter, "restored_rollouts", "Rollouts that had expired (store.ttl_s) and were restored by a step.", ()
    ),
    "deleted": (Counter, "steps_of_deleted", "Steps not stored because their rollout was deleted meanwhile.", ()),
    "given_again": (
        Counter, "given_again", "Calls answered with a stored answer, for their Idempotency-Key.", ("dialect",)
    ),
    "probes": (Counter, "probes", "Health probes passed on unrecorded (agents.probes).", ("dialect",)),
    "store_latency": (_FINE_SECONDS, "store_seconds", "Time of a store verb.", ("verb",)),
    "store_failures": (Counter, "store_failures", "Store verbs that failed.", ("verb",)),
    "store_away": (Gauge, "store_away", "1 while the store is known to be away, else 0.", ()),
    "spooled": (Gauge, "spooled_steps", "Steps in the journal that the store has not taken yet.", ()),
    "upstream_faults": (
        Counter, "upstream_faults", "Engines that could not be reached, broke off or fell silent.", ("engine", "fault")
    ),
    "failovers": (Counter, "failovers", "Calls that went on to the next endpoint, by the one that failed.", ("engine",)),
    "ejections": (Counter, "ejections", "Endpoints passed over after faults in a row (engines.eject_after).", ("engine",)),
    "healthy": (Gauge, "engine_healthy", "0 while an endpoint is passed over, else 1.", ("engine",)),
    "queued": (Gauge, "queued_calls", "Calls that wait for their turn at an endpoint (max_in_flight).", ("engine",)),
    "queue": (_SECONDS, "queue_seconds", "How long calls waited that had to.", ()),
    "new_losses": (
        Counter, "new_losses",
        "Steps flagged for what their engine was not known to lose (docs/exactness.md), by code.", ("engine", "code"),
    ),
    "audits": (Counter, "audits", "Steps scored again by the server (audit.sample_rate).", ("engine", "verdict")),
    "audit_difference": (
        _DIFFERENCES, "audit_difference", "|recorded - scored logprob| of each token scored again.", ("engine",)
    ),
    "drift": (
        Counter, "drift", "Boundaries of finished rollouts where messages went on and ids did not, once their kind is known.",
        ("kind",),
    ),
    "groups": (Counter, "groups", "Groups that became complete, claimed, released, done or dropped.", ("event",)),
    "open_rollouts": (Gauge, "open_rollouts", "Rollouts with a call in flight, counted once at each worker that has one.", ()),
    "held_bytes": (Gauge, "held_bytes", "Bytes that calls in flight hold (agents.max_bytes_in_flight).", ()),
    "held_bytes_bound": (Gauge, "held_bytes_bound", "Bytes that they may hold; over it new calls get 429.", ()),
    "stalled": (Counter, "stalled_clients", "Clients cut because they read nothing (agents.client_stall_timeout_s).", ()),
    "workers": (Gauge, "workers", "Processes that these numbers are of (workers).", ()),
    "left_out": (
        Counter, "workers_left_out", "Workers that did not answer within a second when metrics were asked for.", ()
    ),
}  # fmt: skip

# Counters whose labels are known from the start. A step that is an error has no tokens to be exact or flagged.
_BEGINNINGS: Final[dict[str, tuple[tuple[str, ...], ...]]] = {
    "steps": (
        *((status, fidelity) for status in ("complete", "partial") for fidelity in ("exact", "flagged")), ("error", "error")
    ),
    "problems": tuple((code,) for code in PROBLEMS),
    "store_failures": (("open",), ("append",), ("mark",), ("renew",)),
    "drift": tuple((kind,) for kind in KINDS if kind != "unexplained"),
    "groups": (("complete",), ("claimed",), ("released",), ("done",), ("dropped",)),
}  # fmt: skip

START: Final = "process_start_time_seconds"

# Several workers' metrics are added up (docs/workers.md), but for these gauges: what one of them knows, holds for all; of
# the oldest call and of the last start the largest is the answer.
LARGEST: Final = frozenset(
    {
        "tokentape_store_away",
        "tokentape_engine_healthy",
        "tokentape_oldest_call_seconds",
        START,
    }
)


def make_metrics(registry: CollectorRegistry) -> Metrics:
    """The metrics, registered."""
    made: dict[str, Any] = {}
    for field, (kind, name, text, labels) in _METRICS.items():
        if isinstance(kind, tuple):
            made[field] = Histogram(f"tokentape_{name}", text, labels, buckets=kind, registry=registry)
        else:
            made[field] = kind(f"tokentape_{name}", text, labels, registry=registry)
    ProcessCollector(registry=registry)  # what Linux tells of this process
    made["workers"].set(1)
    for kind_of_error in _tree(ProxyError):
        made["errors"].labels(kind_of_error.code)
    for field, beginnings in _BEGINNINGS.items():
        for values in beginnings:
            made[field].labels(*values)
    return Metrics(**made)


def _tree(kind: type[ProxyError]) -> Iterator[Any]:
    """The kinds of errors below a kind."""
    for below in kind.__subclasses__():
        yield below
        yield from _tree(below)
