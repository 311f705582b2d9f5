"""Every query of the dashboard and every rule, asked of a Prometheus that watched a proxy of two workers."""

import pytest

from .conftest import as_shown, panel_expressions, rules_of, selectors_of
from .scene import shows

pytestmark = pytest.mark.timeout(600)  # the first test waits for the whole run


@pytest.mark.parametrize("expression", sorted({*panel_expressions()}))
def test_each_panel_shows_something(seen, expression):
    """No query is empty, or nothing but NaN, after a run in which everything happened once."""
    assert shows(seen.vectors[as_shown(expression)])


@pytest.mark.parametrize("name", [rule["record"] for rule in rules_of("record")])
def test_each_recording_rule_records(seen, name):
    """Under its name, as dashboards and alerts ask for it."""
    assert shows(seen.vectors[name])


@pytest.mark.parametrize("rule", rules_of("alert"), ids=lambda rule: rule["alert"])
def test_each_alert_looks_at_series_that_are_there(seen, rule):
    """Most alerts are quiet on a good day; a matcher that no series meets would keep one quiet for ever."""
    assert selectors_of(rule["expr"])
    for selector in selectors_of(rule["expr"]):
        assert seen.selected[selector], selector


def test_no_rule_fails(seen):
    """Prometheus evaluated each of them, and had no complaint."""
    rules = [rule for group in seen.rules["groups"] for rule in group["rules"]]

    assert len(rules) == len(rules_of("record")) + len(rules_of("alert"))
    assert {"ok"} == {rule["health"] for rule in rules}


def test_the_proxy_was_scraped_with_its_key(seen):
    """As deploy/prometheus/prometheus.yml says: the key is in a file."""
    (target,) = [one for one in seen.targets["activeTargets"] if one["labels"]["job"] == "tokentape"]

    assert ("up", "") == (target["health"], target["lastError"])
