"""The rules and the dashboard of deploy/, checked without a Prometheus. tests/system/monitoring runs one."""

import re
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry
from tests.support.pages import anchors_of

from deploy.grafana.dashboard import dashboard
from proxy.api.health import STORE_GAUGES, make_info_metrics
from proxy.telemetry.metrics import make_metrics

ROOT = Path(__file__).parent.parent.parent
RULES = yaml.safe_load((ROOT / "deploy/prometheus/rules.yml").read_text())
ALL_RULES = [rule for group in RULES["groups"] for rule in group["rules"]]
ALERTS = [rule for rule in ALL_RULES if "alert" in rule]
RECORDED = {rule["record"] for rule in ALL_RULES if "record" in rule}
CASES = yaml.safe_load((ROOT / "deploy/prometheus/rules.test.yml").read_text())["tests"]
PANELS = [panel for panel in dashboard()["panels"] if panel["type"] != "row"]
SHOWN = [target["expr"] for panel in PANELS for target in panel["targets"]]
RUNBOOK = ROOT / "docs/monitoring.md"
RUNBOOK_URL = "https://github.com/tokentape/tokentape/blob/main/docs/monitoring.md"


def names_in(expression: str) -> set[str]:
    """Return the metrics and recorded series that an expression uses."""
    return {*re.findall(r"\b(?:tokentape_\w+|\w+:tokentape_\w+:\w+)", expression)}


def exposed_names() -> set[str]:
    """Return the names of all series that /metrics can have."""
    names = set()
    for collector in [
        *make_metrics(CollectorRegistry()).all(),
        *make_info_metrics(CollectorRegistry(), (), dict.fromkeys(STORE_GAUGES, "0"), {}),
    ]:
        (family,) = collector.describe()
        suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum"), "gauge": ("",)}[family.type]
        names |= {family.name + suffix for suffix in suffixes}
    return names


def fired(alert: str) -> list[dict[str, str]]:
    """Return the labels with which an alert fires in its cases."""
    samples = [sample for expected in expectations(alert) for sample in expected["exp_samples"]]
    return [dict(re.findall(r'(\w+)="([^"]*)"', sample["labels"])) for sample in samples]


def expectations(alert: str) -> list[dict]:
    return [test for case in CASES for test in case["promql_expr_test"] if f'alertname="{alert}"' in test["expr"]]


def test_rules_and_panels_use_existing_metrics():
    used = {name for expression in [*SHOWN, *(rule["expr"] for rule in ALL_RULES)] for name in names_in(expression)}

    assert used - exposed_names() - RECORDED == set()


def test_every_metric_is_on_the_dashboard():
    """A metric that no panel shows is not needed."""
    used = {name for expression in SHOWN for name in names_in(expression)}
    families = {re.sub(r"_(bucket|count|sum)$", "", name) for name in exposed_names()}

    assert families - {re.sub(r"_bucket$", "", name) for name in used} == set()


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_an_alert_has_a_severity_a_description_and_a_runbook(rule):
    """The runbook URL has an existing anchor of docs/monitoring.md."""
    assert rule["labels"]["severity"] in {"critical", "warning", "info"}
    assert rule["annotations"].keys() == {"summary", "description", "runbook_url"}
    page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
    assert (RUNBOOK_URL, rule["alert"].lower()) == (page, anchor)
    assert anchor in anchors_of(RUNBOOK)


def test_the_runbook_describes_these_alerts_in_their_order():
    """A removed alert is removed from the page too."""
    assert [rule["alert"] for rule in ALERTS] == re.findall(r"^### (TokenTape\w+)$", RUNBOOK.read_text(), re.MULTILINE)


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_an_alert_has_a_case_that_fires_and_one_that_does_not(rule):
    """The cases are in rules.test.yml."""
    assert fired(rule["alert"])
    assert any(test["exp_samples"] == [] for test in expectations(rule["alert"]))


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_an_annotation_uses_only_labels_of_its_alert(rule):
    """A label that an aggregation removes would be empty in the text."""
    named = {*re.findall(r"\$labels\.(\w+)", str(rule["annotations"]))}

    assert named <= {label for labels in fired(rule["alert"]) for label in labels}
