"""The metrics. tests/api/test_health.py checks that they count what happens."""

import re
from typing import get_args

import prometheus_client
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics

from proxy.rollouts.scoring.verdict import Verdict
from proxy.telemetry.metrics import DECLARED, VERDICTS, Histogram, make_metrics


def test_each_registry_has_its_own_metrics():
    """Metrics are not global: two proxies can run in one process."""
    one, two = CollectorRegistry(), CollectorRegistry()
    make_metrics(one).undelivered_steps.inc()
    make_metrics(two)

    assert b"tokentape_undelivered_steps_total 1.0" in generate_latest(one)
    assert b"tokentape_undelivered_steps_total 0.0" in generate_latest(two)


def test_a_metric_is_named_after_its_field():
    """The name has the prefix tokentape_, and the help text is one sentence."""
    metrics = make_metrics(CollectorRegistry())

    for name in DECLARED:
        (metric,) = getattr(metrics, name).describe()
        assert metric.name == f"tokentape_{name}"
        assert re.fullmatch(r"[A-Z0-9].*[^.]\.", metric.documentation), metric.name


def test_durations_and_sizes_end_in_their_unit():
    """Histograms observe seconds or tokens, except differences of logprobs, rewards and versions, which have no unit."""
    units = {
        metric.name: metric.name.rsplit("_", 1)[-1]
        for collector in make_metrics(CollectorRegistry()).all()
        for metric in collector.describe()
        if metric.type == "histogram"
    }

    bare = (
        "audit_logprob_difference",
        "reward",
        "group_reward_mean",
        "group_reward_spread",
        "claim_staleness",
        "mismatch_abs_mean",
    )

    assert {unit for name, unit in units.items() if name.removeprefix("tokentape_") not in bare} == {
        "seconds",
        "tokens",
    }


@pytest.mark.parametrize("expose", [generate_latest, generate_openmetrics], ids=["text", "OpenMetrics"])
def test_there_are_no_created_series(expose):
    """This holds for both formats, for counters and histograms, with labels and without."""
    registry = CollectorRegistry()
    metrics = make_metrics(registry)
    metrics.begin("engine", "e")
    metrics.call_duration_seconds.labels("chat", "e", "200").observe(1)
    text = expose(registry).decode()

    assert 'tokentape_call_duration_seconds_count{dialect="chat",engine="e",status="200"} 1.0' in text
    assert "_created" not in text


def test_counters_with_known_labels_start_at_zero():
    """Prometheus does not see the increase of a series that starts at 1."""
    registry = CollectorRegistry()
    make_metrics(registry).begin("engine", "e")
    text = generate_latest(registry).decode()

    assert 'tokentape_steps_total{fidelity="flagged",status="complete"} 0.0' in text
    assert 'tokentape_fidelity_problems_total{code="no_token_ids"} 0.0' in text
    assert 'tokentape_errors_total{code="overloaded"} 0.0' in text
    assert 'tokentape_store_operation_failures_total{operation="append"} 0.0' in text
    assert 'tokentape_drift_boundaries_total{kind="retokenized"} 0.0' in text
    assert 'tokentape_continuations_total{reason="none",result="continued"} 0.0' in text
    assert 'tokentape_continuations_total{reason="none",result="unchanged"} 0.0' in text
    assert 'tokentape_continuations_total{reason="history",result="refused"} 0.0' in text
    assert 'tokentape_ejections_total{engine="e"} 0.0' in text
    assert 'tokentape_engine_faults_total{engine="e",fault="timeout"} 0.0' in text
    assert 'tokentape_unexpected_losses_total{code="no_prompt_ids",engine="e"} 0.0' in text
    assert 'tokentape_audits_total{engine="e",verdict="wrong tokens"} 0.0' in text
    for versions in ("0-9", "10-19", "older", "unknown"):
        assert f'tokentape_reward_count{{policy="default",versions="{versions}"}} 0.0' in text
    assert 'tokentape_compared_groups_total{policy="default",rewards="equal"} 0.0' in text


def test_the_store_is_up_at_first():
    """A proxy serves once its store is reachable; the gauge falls when an operation fails."""
    registry = CollectorRegistry()
    make_metrics(registry)

    assert registry.get_sample_value("tokentape_store_up") == 1.0


def test_the_series_of_a_removed_engine_are_dropped():
    """This holds for counters, gauges and histograms with any other labels."""
    registry = CollectorRegistry()
    metrics = make_metrics(registry)
    for engine in ("kept", "removed"):
        metrics.begin("engine", engine)
        metrics.engine_healthy.labels(engine).set(1)
        metrics.calls.labels("chat", engine, "200").inc()
        for histogram in (metrics.call_duration_seconds, metrics.time_to_first_byte_seconds):
            histogram.labels("chat", engine, "200").observe(1)
            histogram.labels("completions", engine, "429").observe(1)
    metrics.keep_engines({"kept"})
    text = generate_latest(registry).decode()

    assert 'engine="removed"' not in text
    assert 'tokentape_time_to_first_byte_seconds_count{dialect="completions",engine="kept",status="429"} 1.0' in text


def test_the_verdict_labels_are_the_verdicts_of_audits():
    """The metrics do not import the audit, so the values are listed twice."""
    assert get_args(Verdict) == VERDICTS


@given(st.lists(st.floats(allow_nan=False)))
def test_a_histogram_has_the_buckets_and_the_sum_of_prometheus_client(values):
    """Ours searches its buckets by halves."""
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    bounds = (-1, 0, 0.5, 1, 10)
    mine = Histogram("h", "text", buckets=bounds, registry=ours)
    original = prometheus_client.Histogram("h", "text", buckets=bounds, registry=theirs)
    for value in (*values, *bounds):
        mine.observe(value)
        original.observe(value)

    assert generate_latest(theirs) == generate_latest(ours)
