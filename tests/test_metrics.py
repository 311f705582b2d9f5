"""The metrics. That they count what happens: control/test_system.py."""

from prometheus_client import CollectorRegistry, generate_latest

from proxy.metrics import make_metrics


def test_two_registries_have_metrics_of_their_own():
    """Nothing is global: a process may hold two proxies."""
    one, two = CollectorRegistry(), CollectorRegistry()
    make_metrics(one).undelivered.inc()
    make_metrics(two)

    assert b"tokentape_undelivered_total 1.0" in generate_latest(one)
    assert b"tokentape_undelivered_total 0.0" in generate_latest(two)


def test_every_metric_is_ours_by_name():
    """And says what it is."""
    made = make_metrics(CollectorRegistry()).all()
    described = [metric for each in made for metric in each.describe()]

    assert all(metric.name.startswith("tokentape_") and metric.documentation for metric in described)
