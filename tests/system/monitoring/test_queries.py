"""Every query of the dashboard and every rule, evaluated by a Prometheus that scraped a proxy of two workers."""

import pytest

from .conftest import as_shown, panel_expressions, rules_by_kind, selectors_from
from .scene import shows

pytestmark = pytest.mark.timeout(600)  # the first test runs the scene


@pytest.mark.parametrize("expression", sorted({*panel_expressions()}))
def test_each_panel_shows_data(seen, expression):
    """No query is empty or only NaN after a run in which everything happened once."""
    assert shows(seen.vectors[as_shown(expression)])


@pytest.mark.parametrize("name", [rule["record"] for rule in rules_by_kind("record")])
def test_each_recording_rule_records(seen, name):
    """Under the name that dashboards and alerts use."""
    assert shows(seen.vectors[name])


@pytest.mark.parametrize("rule", rules_by_kind("alert"), ids=lambda rule: rule["alert"])
def test_each_selector_of_an_alert_matches_a_series(seen, rule):
    """An alert never fires if its selector matches nothing."""
    assert selectors_from(rule["expr"])
    for selector in selectors_from(rule["expr"]):
        assert seen.selected[selector], selector


def test_no_rule_fails(seen):
    """Prometheus evaluated each of them without an error."""
    rules = [rule for group in seen.rules["groups"] for rule in group["rules"]]

    assert len(rules) == len(rules_by_kind("record")) + len(rules_by_kind("alert"))
    assert {rule["health"] for rule in rules} == {"ok"}


def test_the_proxy_was_scraped_with_its_key(seen):
    """From the file that deploy/prometheus/prometheus.yml names."""
    (target,) = [target for target in seen.targets["activeTargets"] if target["labels"]["job"] == "tokentape"]

    assert (target["health"], target["lastError"]) == ("up", "")
