"""The Grafana dashboard: its panels, their queries and their descriptions.

`make docs` writes dashboards/tokentape.json, and tests/test_docs.py fails if that file is out of date. `make test-monitoring`
runs every query on a real Prometheus. panels.py has the JSON of Grafana's panels.
"""

from typing import Any, Final

import orjson

from deploy.grafana.panels import DATASOURCE, Panel, Row, graph, heatmap, laid_out, stat, state_timeline, table
from proxy.telemetry.metrics import DECLARED

ALL: Final = 'job=~"$job", instance=~"$instance"'
SCHEMA_VERSION: Final = 39  # Grafana 11.0; later versions migrate it when they load it


def rate(metric: str, by: str = "", more: str = "") -> str:
    """Return the query of a counter's rate per second, summed except for the labels `by`."""
    inner = f"rate(tokentape_{metric}_total{{{ALL}{more}}}[$__rate_interval])"
    return f"sum by ({by}) ({inner})" if by else f"sum({inner})"


def quantile(share: float, metric: str, by: str = "") -> str:
    """Return the query of a histogram's quantile."""
    inner = f"rate(tokentape_{metric}_bucket{{{ALL}}}[$__rate_interval])"
    return f"histogram_quantile({share}, sum by (le{', ' + by if by else ''}) ({inner}))"


def gauge(metric: str, by: str = "", aggregate: str = "sum") -> str:
    """Return the query of a gauge's current value."""
    return f"{aggregate} by ({by}) (tokentape_{metric}{{{ALL}}})" if by else f"{aggregate}(tokentape_{metric}{{{ALL}}})"


def quantiles(title: str, metric: str, description: str = "", **options: Any) -> Panel:
    """Return a panel with p50, p90 and p99 of a duration, by default with the help text of its metric."""
    queries = [(quantile(share, metric), legend) for share, legend in ((0.5, "p50"), (0.9, "p90"), (0.99, "p99"))]
    return graph(title, description or DECLARED[metric].text, "s", *queries, **options)


def quantiles_by_engine(title: str, metric: str) -> Panel:
    """Return a panel with p50 and p99 of a duration, by engine."""
    queries = [
        (quantile(share, metric, "engine"), f"{{{{engine}}}}, {name}") for share, name in ((0.5, "p50"), (0.99, "p99"))
    ]
    return graph(title, DECLARED[metric].text, "s", *queries, width=12)


def process(metric: str) -> str:
    """Return the query of a metric of the process (Linux only)."""
    return f'process_{metric}{{job=~"$job", instance=~"$instance"}}'


def count_rate(metric: str, by: str = "") -> str:
    """Return the query of the rate per second of a histogram's observations."""
    inner = f"rate(tokentape_{metric}_count{{{ALL}}}[$__rate_interval])"
    return f"sum by ({by}) ({inner})" if by else f"sum({inner})"


def mean_reward(by: str = "") -> str:
    """Return the query of the mean of rewards, which may be negative."""
    amount = f"{rate('reward_amount', by, POSITIVE)} - {rate('reward_amount', by, NEGATIVE)}"
    return f"({amount}) / ({count_rate('reward', by)} > 0)"


QUANTILES: Final = ((0.1, "p10"), (0.5, "p50"), (0.9, "p90"))
POSITIVE: Final = ', sign="positive"'
NEGATIVE: Final = ', sign="negative"'
VERSIONS: Final = "policy, versions"
EQUAL: Final = ', rewards="equal"'
COMPLETE: Final = ', status="complete"'
FLAGGED: Final = f'{COMPLETE}, fidelity="flagged"'
REFUSED: Final = ', result="refused"'
FLAGGED_SHARE: Final = f"{rate('steps', more=FLAGGED)} / ({rate('steps', more=COMPLETE)} > 0)"

OVERVIEW = Row("Overview", [
    stat("Calls", "Calls answered per second.", "reqps", rate("calls")),
    stat("In flight", "Calls in flight.", "short", gauge("in_flight_calls")),
    stat("Completion tokens", "Completion tokens recorded per second.", "suffix: /s", rate("completion_tokens")),
    stat("Flagged", "Share of complete steps that are not exact; exports omit them.", "percentunit", FLAGGED_SHARE, limit=0.01),
    stat("Overhead, p99", "Time that calls spend in the proxy and its store.", "s",
         quantile(0.99, "proxy_overhead_seconds"), limit=0.1),
    stat("Healthy endpoints", "Lowest share of healthy endpoints of any replica.", "percentunit",
         f"min(avg by (job, instance) (tokentape_engine_healthy{{{ALL}}}))", limit=1, low=True),
    table("Alerts", "Firing alerts. docs/monitoring.md describes what to do.",
          'ALERTS{alertname=~"TokenTape.+", alertstate="firing"}', ("alertname", "severity", "instance", "engine", "code"),
          width=24, height=5),
])  # fmt: skip

TRAFFIC = Row("Traffic", [
    graph("Calls by status", "Status that the client received; 499 means that the client disconnected.", "reqps",
          (rate("calls", "status"), "{{status}}"), stacked=True),
    graph("Calls by dialect", "Endpoint of the model API that the client called.", "reqps",
          (rate("calls", "dialect"), "{{dialect}}"), stacked=True),
    graph("Errors by code", "Errors of TokenTape in either API, not errors of engines (docs/errors.md).",
          "reqps", (f"{rate('errors', 'code')} > 0", "{{code}}"), stacked=True),
    graph("In flight", "Calls in flight, and how many of them are queued for an endpoint.", "short",
          (gauge("in_flight_calls", "instance"), "{{instance}}"), (gauge("queued_calls"), "queued")),
    quantiles("Call duration", "call_duration_seconds",
              "Time from the arrival of a call to its end. Most of it is spent at the engine."),
    quantiles("Time to first byte", "time_to_first_byte_seconds"),
    graph("Replays and health probes",
          "Stored responses for repeated Idempotency-Keys, and health probes, which are not recorded.",
          "reqps", (rate("idempotent_replays"), "replays"), (rate("health_probes"), "health probes")),
    graph("Calls of playbacks",
          "Answered from the tape, again with the same response, live at an engine, refused, or with their source gone.",
          "reqps", (f"{rate('playback_calls', 'result')} > 0", "{{result}}"), stacked=True),
    graph("Disconnected clients",
          "Clients that disconnected before the end, or were disconnected because they did not read. Their steps are stored.",
          "reqps", (rate("undelivered_steps"), "disconnected"), (rate("stalled_clients"), "stalled")),
])  # fmt: skip

OVERHEAD = Row("Overhead", [
    quantiles("Overhead per call", "proxy_overhead_seconds", limit=0.1),
    heatmap("Distribution of overhead", "Number of calls by overhead.", "s",
            f"sum by (le) (increase(tokentape_proxy_overhead_seconds_bucket{{{ALL}}}[$__rate_interval]))"),
    quantiles("Time in queue", "queue_duration_seconds",
              "Of the calls that were queued because their endpoint reached max_in_flight."),
    graph("Dropped spans", "Spans that were not exported: the collector did not accept them, or too many were waiting.",
          "suffix: /s", (f"{rate('dropped_spans', 'reason')} > 0", "{{reason}}"), width=24),
])  # fmt: skip

TOKENS = Row("Tokens", [
    graph("Completion tokens by engine", "Completion tokens recorded.", "suffix: /s",
          (rate("completion_tokens", "engine"), "{{engine}}"), stacked=True, width=12),
    graph("Prompt tokens by engine",
          "Prompt tokens recorded. Each call counts its whole prompt; the engine read the cached ones from its prefix cache.",
          "suffix: /s", (rate("prompt_tokens", "engine"), "{{engine}}"),
          (rate("cached_prompt_tokens", "engine"), "{{engine}}, cached"), width=12),
])  # fmt: skip

FIDELITY = Row("Fidelity", [
    graph("Steps by fidelity", "Steps stored: exact, flagged, or errors of the engine.", "suffix: /s",
          (rate("steps", "status, fidelity"), "{{status}}, {{fidelity}}"), stacked=True),
    graph("Flagged share", "Share of complete steps that are not exact. An alert fires above 1 %.", "percentunit",
          (FLAGGED_SHARE, "flagged"), limit=0.01),
    graph("Fidelity problems by code", "Reasons for which steps were flagged (docs/fidelity.md).", "suffix: /s",
          (f"{rate('fidelity_problems', 'code')} > 0", "{{code}}"), stacked=True),
    graph("Unexpected losses", "Losses that docs/exactness.md does not list for the engine and its version.",
          "suffix: /s", (f"{rate('unexpected_losses', 'engine, code')} > 0", "{{engine}}: {{code}}")),
    graph("Audits by verdict", "Steps scored again by their engine (audit.sample_rate).", "suffix: /s",
          (rate("audits", "verdict"), "{{verdict}}"), stacked=True),
    graph("Logprob differences", "Absolute difference of recorded and scored logprob, for each audited token.", "none",
          (quantile(0.5, "audit_logprob_difference", "engine"), "{{engine}}, p50"),
          (quantile(0.99, "audit_logprob_difference", "engine"), "{{engine}}, p99")),
])  # fmt: skip

DRIFT = Row("Drift", [
    graph("Drift by kind", "Boundaries where the messages continue and the token ids do not. Each one splits a sequence.",
          "suffix: /s", (f"{rate('drift_boundaries', 'kind')} > 0", "{{kind}}"), stacked=True, width=12),
    graph("Drift per step", "Drift boundaries per complete step. The cause is the agent or the chat template.", "none",
          (f"{rate('drift_boundaries')} / ({rate('steps', more=COMPLETE)} > 0)", "boundaries per step"), width=12),
])  # fmt: skip

CONTINUATION = Row("Continuation", [
    graph("Calls that follow a step, by result", "Continued and unchanged calls are sent by token ids: they extend a sequence.",
          "reqps", (rate("continuations", "result"), "{{result}}"), stacked=True),
    graph("Refused continuations by reason", "Reasons for which calls were sent as they came (docs/continuation.md).", "reqps",
          (f"{rate('continuations', 'reason', REFUSED)} > 0", "{{reason}}"), stacked=True),
    quantiles("Duration of continuations", "continuation_duration_seconds",
              "Time for the engine's renderings before the call is sent."),
    graph("Rollouts in memory", "For rollouts of calls, prepared calls and texts of tokens, in bytes.",
          "bytes", (gauge("rollout_cache_bytes", "instance"), "{{instance}}"),
          (gauge("plan_cache_bytes", "instance"), "prepared calls at {{instance}}"),
          (gauge("text_cache_bytes", "instance"), "texts of tokens at {{instance}}"), width=24),
])  # fmt: skip

STORE = Row("Store", [
    graph("Duration of store operations", "open: before a call; append: before the end of the response is sent.", "s",
          (quantile(0.5, "store_operation_duration_seconds", "operation"), "{{operation}}, p50"),
          (quantile(0.99, "store_operation_duration_seconds", "operation"), "{{operation}}, p99")),
    graph("Failures of store operations", "Each failure is a rejected call or a step that went to the journal.", "suffix: /s",
          (rate("store_operation_failures", "operation"), "{{operation}}")),
    state_timeline("Store, from each replica", "Down after a failed operation, until the store accepts a write.",
                   (gauge("store_up", "instance", "min"), "{{instance}}"), one="up", zero="down"),
    state_timeline("Servers of the store", "Down for a replica at least: calls of this server's rollouts fail.",
                   (gauge("store_server_up", "server", "min"), "{{server}}"), one="up", zero="down"),
    graph("Steps in journals", "Steps that are not in the store yet (store.on_failure: spool).", "short",
          (gauge("journal_steps", "instance"), "{{instance}}")),
    graph("Memory of the store", "Sum over all its servers. There is no limit curve if a server has no limit.", "bytes",
          (gauge("store_memory_bytes", aggregate="max"), "used"),
          (f"{gauge('store_memory_limit_bytes', aggregate='max')} > 0", "limit")),
    graph("Fullest server of the store", "Share of its memory that is used (archive.memory_share).", "percentunit",
          (gauge("store_memory_share", aggregate="max"), "used")),
    state_timeline("Append-only file", "Whether every server of the store keeps one and its last write succeeded.",
                   (gauge("store_aof_ok", "instance", "min"), "seen by {{instance}}"), one="ok", zero="failing"),
])  # fmt: skip

ENGINES = Row("Engines", [
    state_timeline("Endpoints, from each replica", "Ejected after consecutive failures, until a health check succeeds.",
                   (gauge("engine_healthy", "instance, engine", "max"), "{{engine}} from {{instance}}"),
                   one="healthy", zero="ejected"),
    state_timeline("Token ids", "Whether an endpoint returns token ids; steps without them cannot be exported for training.",
                   (gauge("engine_token_ids", "engine", "min"), "{{engine}}"), one="ids", zero="text only"),
    graph("Calls by engine", "Engine that answered the call.", "reqps",
          (rate("calls", "engine"), "{{engine}}"), stacked=True),
    graph("Engine faults", "Failed connections, lost connections and timeouts, of calls and of health checks.", "suffix: /s",
          (rate("engine_faults", "engine, fault"), "{{engine}}: {{fault}}")),
    graph("Failovers and ejections", "Calls retried at another endpoint, and endpoints ejected.", "suffix: /s",
          (rate("failovers", "engine"), "failover from {{engine}}"), (rate("ejections", "engine"), "{{engine}} ejected")),
    graph("Calls that were ended early", "Resumed with what was sampled, restarted from their start, or ended.", "suffix: /s",
          (rate("resumed_calls", "result, reason"), "{{result}} {{reason}}")),
    graph("Tokens of calls that were ended early", "Kept in resumed calls, and lost.", "suffix: /s",
          (rate("cut_tokens", "result"), "{{result}}")),
    quantiles("Wait of resumed calls", "resume_wait_seconds"),
    graph("Queue length", "Calls queued for each endpoint (max_in_flight).", "short",
          (gauge("queued_calls", "engine"), "{{engine}}")),
    table("Detected engines", "Kind and version of each endpoint; auto until its first call.",
          f"max by (engine, kind, version) (tokentape_engine_info{{{ALL}}})", ("engine", "kind", "version")),
    quantiles_by_engine("Call duration by engine", "call_duration_seconds"),
    quantiles_by_engine("Time to first byte by engine", "time_to_first_byte_seconds"),
])  # fmt: skip

ROLLOUTS = Row("Rollouts", [
    graph("Rollouts with calls in flight", "Counted once per worker.", "short",
          (gauge("in_flight_rollouts", "instance"), "{{instance}}")),
    graph("Oldest call", "Age of the oldest call in flight. An alert fires above one hour.", "s",
          (gauge("oldest_call_age_seconds", "instance", "max"), "{{instance}}")),
    graph("Groups by event", "Groups that became complete, claimed by a trainer, done, released or dropped.", "suffix: /s",
          (rate("group_events", "event"), "{{event}}")),
    graph("Groups in the queue", "Complete groups, and claimed ones that are not acknowledged.", "short",
          (gauge("complete_groups", "policy", "max"), "complete: {{policy}}"),
          (gauge("claimed_groups", "policy", "max"), "claimed: {{policy}}")),
    graph("Age of the oldest group", "Time since the oldest unclaimed group is complete. An alert fires above an hour.", "s",
          (gauge("oldest_complete_group_age_seconds", "policy", "max"), "{{policy}}"), limit=3600),
    quantiles("Wait of claims", "claim_wait_seconds"),
    graph("Refused, dropped and redelivered groups",
          "Refused groups remain in the queue and count in each claim (docs/http-api.md). Redelivered: in a batch before.",
          "suffix: /s", (f"{rate('refused_groups', 'policy, reason')} > 0", "refused for {{policy}}: {{reason}}"),
          (f"{rate('dropped_groups', 'policy, reason')} > 0", "dropped for {{policy}}: {{reason}}"),
          (f"{rate('redelivered_groups', 'policy')} > 0", "redelivered for {{policy}}"), width=12),
    graph("Trained tokens with wrong importance ratios",
          "Of claimed groups, by warning (docs/mismatch.md).", "suffix: /s",
          (f"{rate('ratio_warning_tokens', 'policy, warning')} > 0", "{{policy}}: {{warning}}"), width=12),
    graph("Late steps", "Steps that ended after their rollout finished, was deleted (discarded) or expired (restored).",
          "suffix: /s", (rate("late_steps"), "finished"), (rate("discarded_steps"), "deleted"),
          (rate("restored_rollouts"), "expired"), width=8),
    graph("Rollouts past their deadline", "Rollouts finished as aborted because they exceeded deadline_s or idle_s.",
          "suffix: /s", (rate("deadline_rollouts"), "aborted"), width=8),
    graph("Unreadable records", "Reads that omitted a damaged rollout, group or step (docs/http-api.md); the log names it.",
          "suffix: /s", (rate("unreadable", "entity"), "{{entity}}"), width=8),
    graph("Archived rollouts", "Versions of rollouts written to the archive, and sweeps that failed (docs/datasets.md).",
          "suffix: /s", (rate("archived_rollouts"), "archived"), (rate("archive_failures"), "failed"), width=8),
    graph("Archived bytes", "Bytes of files written to the archive.", "Bps", (rate("archived_bytes"), "bytes"), width=8),
    graph("Archive buffers", "Rows that wait to be written (archive.buffer_bytes).", "bytes",
          (gauge("archive_buffer_bytes", "instance"), "{{instance}}"), width=8),
    graph("Age of the archive's backlog", "Time since the oldest rollout was finished that is not archived yet.", "s",
          (f"max(tokentape_archive_oldest_age_seconds{{{ALL}}})", "oldest"), width=8),
])  # fmt: skip

REWARDS = Row("Rewards", [
    graph("Mean reward", "Of the rollouts in claimed groups; a group counts once.", "none",
          (mean_reward(), "mean"), signed=True),
    graph("Mean reward by policy version", "Of windows of ten versions of the oldest token of each group.", "none",
          (mean_reward(VERSIONS), "{{policy}} {{versions}}"), signed=True),
    heatmap("Distribution of rewards", "Number of rollouts by reward.", "none",
            f"sum by (le) (increase(tokentape_reward_bucket{{{ALL}}}[$__rate_interval]))"),
    graph("Mean reward of groups", "Quantiles over groups, from the bounds of the buckets.", "none",
          *((quantile(share, "group_reward_mean"), legend) for share, legend in QUANTILES), signed=True),
    graph("Spread of rewards in groups", "Standard deviation within a group: without a spread there is no advantage.", "none",
          *((quantile(share, "group_reward_spread"), legend) for share, legend in QUANTILES)),
    graph("Groups with equal rewards", "Share of groups that train nothing by themselves. only_mixed drops them.",
          "percentunit", (f"{rate('compared_groups', more=EQUAL)} / ({rate('compared_groups')} > 0)", "equal")),
    graph("Tokens per rollout", "Tokens that were sampled in the rollouts of claimed groups.", "short",
          *((quantile(share, "rollout_tokens"), legend) for share, legend in QUANTILES)),
    graph("Staleness at the claim", "Announced policy version minus the oldest of a group's tokens.", "short",
          *((quantile(share, "claim_staleness"), legend) for share, legend in QUANTILES)),
    graph("Mismatch", "Mean absolute difference of the trainer's logprobs from the recorded ones, of reported parts.",
          "none", *((quantile(share, "mismatch_abs_mean", "policy"), f"{{{{policy}}}}, {name}") for share, name in QUANTILES)),
    graph("Verdicts on mismatches", "Causes of these differences, by batch (docs/mismatch.md).", "suffix: /s",
          (f"{rate('mismatch_verdicts', 'policy, verdict')} > 0", "{{policy}}: {{verdict}}")),
    graph("Epochs of policies", "A new one begins if a run continues from an earlier version; groups from before are dropped.",
          "short", (gauge("policy_epoch", "policy", "max"), "{{policy}}"), width=12),
    graph("Steps of unknown staleness", "Their policy version is not a number.", "suffix: /s",
          (f"{rate('unknown_version_steps', 'policy')} > 0", "{{policy}}"), width=12),
])  # fmt: skip

PROCESS = Row("Process", [
    graph("CPU", "Cores used by a replica, all workers together. One worker uses at most one core.", "none",
          (f"rate({process('cpu_seconds_total')}[$__rate_interval])", "{{instance}}")),
    graph("Memory", "Resident memory of a replica, all workers together.", "bytes",
          (process("resident_memory_bytes"), "{{instance}}")),
    graph("Bytes in flight", "Bytes held by calls in flight. At the limit (agents.max_bytes_in_flight) new calls get 429.",
          "bytes", (gauge("in_flight_bytes", "instance"), "{{instance}}"),
          (gauge("in_flight_limit_bytes", "instance"), "limit of {{instance}}")),
    graph("Connections", "Of clients. Above the limit (agents.max_connections) calls get 429.", "short",
          (gauge("connections", "instance"), "{{instance}}"),
          (gauge("connections_limit", "instance"), "limit of {{instance}}"),
          (gauge("waiting_connections", "instance"), "not accepted by {{instance}}"),
          (gauge("waiting_calls", "instance"), "calls that wait for their start at {{instance}}")),
    graph("File descriptors", "Most of them are connections.", "short",
          (process("open_fds"), "{{instance}}"), (process("max_fds"), "limit of {{instance}}")),
    graph("Workers", "Workers that answered the last scrape, and the rate of those that did not.", "short",
          (gauge("workers", "instance"), "{{instance}}"),
          (rate("workers_missing", "instance"), "missing per second at {{instance}}")),
    graph("Uptime", "Time since the last start of a process of the replica.", "s",
          (f"time() - {process('start_time_seconds')}", "{{instance}}")),
    table("Replicas", "Version of each replica.", f"max by (instance, version) (tokentape_build_info{{{ALL}}})",
          ("instance", "version"), width=12, height=5),
    table("Store server", "Version and durability of the store (store.durability).",
          f"max by (version, durability) (tokentape_store_info{{{ALL}}})", ("version", "durability"), width=12, height=5),
])  # fmt: skip

ROWS: Final = (
    OVERVIEW, TRAFFIC, OVERHEAD, TOKENS, FIDELITY, DRIFT, CONTINUATION, STORE, ENGINES, ROLLOUTS, REWARDS, PROCESS,
)  # fmt: skip


def dashboard() -> dict[str, Any]:
    """Return the dashboard as Grafana's JSON model."""
    return {
        "uid": "tokentape",
        "title": "TokenTape",
        "description": "Calls, tokens, fidelity, store and engines of TokenTape. Generated by `make docs`.",
        "tags": ["tokentape", "llm", "reinforcement-learning"],
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,  # shared crosshair
        "timezone": "browser",
        "time": {"from": "now-1h", "to": "now"},
        "refresh": "15s",
        "templating": {"list": _variables()},
        "annotations": {"list": []},
        "links": [],
        "panels": laid_out(ROWS),
    }


def dashboard_page() -> str:
    """Return the content of dashboards/tokentape.json."""
    return orjson.dumps(dashboard(), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE).decode()


def _variables() -> list[dict[str, Any]]:
    datasource = {
        "name": "datasource",
        "label": "Prometheus",
        "type": "datasource",
        "query": "prometheus",
        "refresh": 1,
    }
    return [
        datasource,
        _label_variable("job", "Job", "label_values(tokentape_build_info, job)"),
        _label_variable("instance", "Replica", 'label_values(tokentape_build_info{job=~"$job"}, instance)'),
    ]


def _label_variable(name: str, label: str, query: str) -> dict[str, Any]:
    """Return a variable with the values of a label: several can be selected, and all are by default."""
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"qryType": 1, "query": query, "refId": f"variable-{name}"},  # 1: label_values
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".+",
        "current": {"text": ["All"], "value": ["$__all"]},
    }
