"""The dashboard: which panels there are, what each asks of Prometheus, and what it says of itself.

`make docs` writes it to dashboards/tokentape.json, and tests/test_docs.py fails when that is stale. `make test-monitoring` asks
every query of a real Prometheus. It must hold no JSON of Grafana's: that is panels.py's.
"""

from typing import Any, Final

import orjson

from deploy.grafana.panels import DATASOURCE, Panel, Row, graph, heat, laid_out, number, states, table

ALL: Final = 'job=~"$job", instance=~"$instance"'
SCHEMA_VERSION: Final = 39  # Grafana 11.0's; later ones read it and bring it up to theirs


def rate(metric: str, by: str = "", more: str = "") -> str:
    """So many a second, summed up but for some labels."""
    inner = f"rate(tokentape_{metric}_total{{{ALL}{more}}}[$__rate_interval])"
    return f"sum by ({by}) ({inner})" if by else f"sum({inner})"


def quantile(share: float, metric: str, by: str = "") -> str:
    """What so large a share of the observations is below."""
    inner = f"rate(tokentape_{metric}_bucket{{{ALL}}}[$__rate_interval])"
    return f"histogram_quantile({share}, sum by (le{', ' + by if by else ''}) ({inner}))"


def now(metric: str, by: str = "", kind: str = "sum") -> str:
    """A gauge of all of them."""
    return f"{kind} by ({by}) (tokentape_{metric}{{{ALL}}})" if by else f"{kind}(tokentape_{metric}{{{ALL}}})"


def quantiles(title: str, description: str, metric: str, **how: Any) -> Panel:
    """Three quantiles of a duration."""
    told = [(quantile(share, metric), legend) for share, legend in ((0.5, "p50"), (0.9, "p90"), (0.99, "p99"))]
    return graph(title, description, "s", *told, **how)


def of_process(metric: str) -> str:
    """What Linux tells of each process."""
    return f'process_{metric}{{job=~"$job", instance=~"$instance"}}'


OF_WHOLE: Final = ', status="complete"'
OF_FLAGGED: Final = f'{OF_WHOLE}, fidelity="flagged"'
FLAGGED_SHARE: Final = f"{rate('steps', more=OF_FLAGGED)} / ({rate('steps', more=OF_WHOLE)} > 0)"

OVERVIEW = Row("Now", [
    number("Calls", "Calls answered in a second.", "reqps", rate("calls")),
    number("In flight", "Calls being answered.", "short", now("calls_in_flight")),
    number("Sampled tokens", "Sampled ids recorded in a second.", "suffix: /s", rate("sampled_tokens")),
    number("Flagged", "Share of whole answers that are not exact, and so not exported.", "percentunit", FLAGGED_SHARE,
           limit=0.01),
    number("Added, p99", "What one call in a hundred exceeds in the proxy and its store.", "s",
           quantile(0.99, "added_seconds"), limit=0.1),
    number("Endpoints that answer", "The least share of endpoints that a replica has not ejected.", "percentunit",
           f"min(avg by (job, instance) (tokentape_engine_healthy{{{ALL}}}))", limit=1, low=True),
    table("Alerts", "What fires now (docs/monitoring.md says what to do).",
          'ALERTS{alertname=~"TokenTape.+", alertstate="firing"}', ("alertname", "severity", "instance", "engine", "code"),
          width=24, height=5),
])  # fmt: skip

TRAFFIC = Row("Traffic", [
    graph("Calls by status", "As their clients saw them; 499 is a client that left.", "reqps",
          (rate("calls", "status"), "{{status}}"), stacked=True),
    graph("Calls by dialect", "Which of the model API's routes they came by.", "reqps",
          (rate("calls", "dialect"), "{{dialect}}"), stacked=True),
    graph("Errors of ours by code", "Requests that got an error which is not an engine's (docs/errors.md), on either API.",
          "reqps", (f"{rate('errors', 'code')} > 0", "{{code}}"), stacked=True),
    graph("In flight", "Calls being answered, and of these the ones that wait for their turn at an endpoint.", "short",
          (now("calls_in_flight", "instance"), "{{instance}}"), (now("queued_calls"), "of these queued")),
    quantiles("Duration of calls", "From a call's arrival to its end; most of it is the engine's.", "call_seconds"),
    quantiles("Time to first byte", "From a call's arrival to the engine's first byte.", "first_byte_seconds"),
    graph("Answered beside the usual way", "Stored answers given again for their Idempotency-Key, and health probes.", "reqps",
          (rate("given_again"), "given again"), (rate("probes"), "probes"), width=12),
    graph("Clients that did not get their end",
          "Clients that left, and those cut for reading nothing. Their steps are stored all the same.", "reqps",
          (rate("undelivered"), "left before the end"),
          (rate("stalled_clients"), "cut (agents.client_stall_timeout_s)"), width=12),
])  # fmt: skip

ADDED = Row("Latency added", [
    quantiles("Added to a call", "The time that a call spent here rather than at its engine, waiting for its turn included.",
              "added_seconds", limit=0.1),
    heat("Added, as it is spread", "How many calls were given how much.", "s",
         f"sum by (le) (increase(tokentape_added_seconds_bucket{{{ALL}}}[$__rate_interval]))"),
    quantiles("Waits for a turn", "Of the calls that had to wait, since their endpoint had max_in_flight.", "queue_seconds"),
])  # fmt: skip

TOKENS = Row("Tokens", [
    graph("Sampled tokens by engine", "Ids that engines sampled and steps have.", "suffix: /s",
          (rate("sampled_tokens", "engine"), "{{engine}}"), stacked=True, width=12),
    graph("Prompt tokens by engine", "Ids of prompts that steps have; a conversation's prompt counts with each of its calls.",
          "suffix: /s", (rate("prompt_tokens", "engine"), "{{engine}}"), stacked=True, width=12),
])  # fmt: skip

FIDELITY = Row("Fidelity", [
    graph("Steps by fidelity", "Steps stored: exact, flagged, or errors of the engine.", "suffix: /s",
          (rate("steps", "status, fidelity"), "{{status}}, {{fidelity}}"), stacked=True),
    graph("Flagged share of whole answers", "Over 1 % an alert begins.", "percentunit", (FLAGGED_SHARE, "flagged"), limit=0.01),
    graph("Problems by code", "Why steps were flagged (docs/fidelity.md).", "suffix: /s",
          (f"{rate('fidelity_problems', 'code')} > 0", "{{code}}"), stacked=True),
    graph("Losses that nobody knew of", "Flags that the engine's version was not known to bring (docs/exactness.md).",
          "suffix: /s", (f"{rate('new_losses', 'engine, code')} > 0", "{{engine}}: {{code}}")),
    graph("Audits by verdict", "Steps that their engine scored again (audit.sample_rate).", "suffix: /s",
          (rate("audits", "verdict"), "{{verdict}}"), stacked=True),
    graph("Differences that audits found", "|recorded - scored logprob| of each token scored again.", "none",
          (quantile(0.5, "audit_difference", "engine"), "{{engine}}, p50"),
          (quantile(0.99, "audit_difference", "engine"), "{{engine}}, p99")),
])  # fmt: skip

DRIFT = Row("Drift by kind", [
    graph("Drift", "Boundaries in finished rollouts where messages went on and ids did not; each splits a sequence.",
          "suffix: /s", (f"{rate('drift', 'kind')} > 0", "{{kind}}"), stacked=True, width=12),
    graph("Boundaries for each step", "How often that happens. It is the agent's doing, or the chat template's.", "none",
          (f"{rate('drift')} / ({rate('steps', more=OF_WHOLE)} > 0)", "boundaries per whole answer"), width=12),
])  # fmt: skip

STORE = Row("Store", [
    graph("Time of a verb", "open: before a call; append: before its end is shown.", "s",
          (quantile(0.5, "store_seconds", "verb"), "{{verb}}, p50"),
          (quantile(0.99, "store_seconds", "verb"), "{{verb}}, p99")),
    graph("Failures by verb", "Each is a call refused, or a step that went to the journal.", "suffix: /s",
          (rate("store_failures", "verb"), "{{verb}}")),
    states("The store, from each replica", "Away: a verb failed, and no write has been taken since.",
           (now("store_away", "instance", "max"), "{{instance}}"), one="away", zero="there", one_is_good=False),
    graph("Steps in journals", "With store.on_failure: spool they wait there until the store is back.", "short",
          (now("spooled_steps", "instance"), "{{instance}}")),
    graph("Memory of the store", "Of all its servers. There is no bound if there is no such curve.", "bytes",
          (now("store_memory_bytes", kind="max"), "taken"), (f"{now('store_memory_bound_bytes', kind='max')} > 0", "bound")),
    states("Append-only file", "Whether each server of the store keeps one and wrote it well last.",
           (now("store_file_written", "instance", "min"), "as {{instance}} sees it"), one="written", zero="not written",
           one_is_good=True),
])  # fmt: skip

ENGINES = Row("Engines", [
    states("Endpoints, from each replica", "Ejected: passed over after faults in a row, until a check is good.",
           (now("engine_healthy", "instance, engine", "max"), "{{engine}} from {{instance}}"), one="called", zero="ejected",
           one_is_good=True),
    graph("Calls by engine", "Where calls were answered in the end.", "reqps",
          (rate("calls", "engine"), "{{engine}}"), stacked=True),
    graph("Faults", "Not reached, broken off, or silent; of calls and of checks.", "suffix: /s",
          (rate("upstream_faults", "engine, fault"), "{{engine}}: {{fault}}")),
    graph("Failovers and ejections", "Calls that went on to the next endpoint; endpoints passed over.", "suffix: /s",
          (rate("failovers", "engine"), "failed over from {{engine}}"), (rate("ejections", "engine"), "{{engine}} ejected")),
    graph("Queue of each endpoint", "Calls that wait for their turn (max_in_flight).", "short",
          (now("queued_calls", "engine"), "{{engine}}")),
    table("What they are", "As they were found out; auto is one that nobody has called yet.",
          f"max by (engine, kind, version) (tokentape_engine_info{{{ALL}}})", ("engine", "kind", "version")),
])  # fmt: skip

ROLLOUTS = Row("Rollouts", [
    graph("Rollouts with a call in flight", "Counted once at each worker that has a call of theirs.", "short",
          (now("open_rollouts", "instance"), "{{instance}}")),
    graph("Oldest call", "For how long the call has been in flight that has been longest. Over an hour an alert begins.", "s",
          (now("oldest_call_seconds", "instance", "max"), "{{instance}}")),
    graph("Groups", "What becomes of groups: complete, claimed by a trainer, and then done or released.", "suffix: /s",
          (rate("groups", "event"), "{{event}}")),
    graph("Steps that ended late", "After their rollout was finished, deleted (not stored) or expired (which restores it).",
          "suffix: /s", (rate("late"), "finished"), (rate("steps_of_deleted"), "deleted"),
          (rate("restored_rollouts"), "expired"), width=24),
])  # fmt: skip

PROCESS = Row("Process", [
    graph("CPU", "Cores that a replica uses, its workers together. A worker cannot use more than one.", "none",
          (f"rate({of_process('cpu_seconds_total')}[$__rate_interval])", "{{instance}}")),
    graph("Memory", "Resident memory, its workers together.", "bytes",
          (of_process("resident_memory_bytes"), "{{instance}}")),
    graph("Bytes of calls in flight", "Over the bound (agents.max_bytes_in_flight) new calls get 429.", "bytes",
          (now("held_bytes", "instance"), "{{instance}}"), (now("held_bytes_bound", "instance"), "bound of {{instance}}")),
    graph("File descriptors", "Connections are most of them.", "short",
          (of_process("open_fds"), "{{instance}}"), (of_process("max_fds"), "most of {{instance}}")),
    graph("Workers", "How many answered when metrics were asked for, and how many were left out.", "short",
          (now("workers", "instance"), "{{instance}}"),
          (rate("workers_left_out", "instance"), "left out by {{instance}}, a second")),
    graph("Time since the last start", "Of each replica's youngest process. A saw's teeth are restarts.", "s",
          (f"time() - {of_process('start_time_seconds')}", "{{instance}}")),
    table("Replicas", "Which version answers where.", f"max by (instance, version) (tokentape_build_info{{{ALL}}})",
          ("instance", "version"), width=12, height=5),
    table("Store", "What its servers are, and when a step counts as stored (store.durability).",
          f"max by (version, durability) (tokentape_store_info{{{ALL}}})", ("version", "durability"), width=12, height=5),
])  # fmt: skip

ROWS: Final = (OVERVIEW, TRAFFIC, ADDED, TOKENS, FIDELITY, DRIFT, STORE, ENGINES, ROLLOUTS, PROCESS)


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana reads it."""
    return {
        "uid": "tokentape",
        "title": "TokenTape",
        "description": "Calls, tokens, fidelity, store and engines of the recording proxy. Made by `make docs`.",
        "tags": ["tokentape", "llm", "reinforcement-learning"],
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,  # one cross-hair through all panels
        "timezone": "browser",
        "time": {"from": "now-1h", "to": "now"},
        "refresh": "15s",
        "templating": {"list": _variables()},
        "annotations": {"list": []},
        "links": [],
        "panels": laid_out(ROWS),
    }


def dashboard_page() -> str:
    """dashboards/tokentape.json."""
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
        _labels_of("job", "Job", "label_values(tokentape_build_info, job)"),
        _labels_of("instance", "Replica", 'label_values(tokentape_build_info{job=~"$job"}, instance)'),
    ]


def _labels_of(name: str, label: str, query: str) -> dict[str, Any]:
    """A choice among the values of a label: some, or all, which is what one finds chosen."""
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"qryType": 1, "query": query, "refId": f"variable-{name}"},  # 1: by the values of a label
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".+",
        "current": {"text": ["All"], "value": ["$__all"]},
    }
