"""The rules and the dashboard of deploy/, checked without a Prometheus. tests/system/monitoring runs one."""

import re
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry

from deploy.grafana.dashboard import dashboard
from proxy.control.told import FACTS, make_told
from proxy.metrics import make_metrics

ROOT = Path(__file__).parent.parent
RULES = yaml.safe_load((ROOT / "deploy/prometheus/rules.yml").read_text())
ALL_RULES = [rule for group in RULES["groups"] for rule in group["rules"]]
ALERTS = [rule for rule in ALL_RULES if "alert" in rule]
RECORDED = {rule["record"] for rule in ALL_RULES if "record" in rule}
CASES = yaml.safe_load((ROOT / "deploy/prometheus/rules.test.yml").read_text())["tests"]
PANELS = [panel for panel in dashboard()["panels"] if panel["type"] != "row"]
SHOWN = [target["expr"] for panel in PANELS for target in panel["targets"]]
RUNBOOK = (ROOT / "docs/monitoring.md").read_text()


def names_in(expression: str) -> set[str]:
    """The metrics and recorded series that an expression asks for."""
    return {*re.findall(r"\b(?:tokentape_\w+|\w+:tokentape_\w+:\w+)", expression)}


def names_told() -> set[str]:
    """The names of all series that /metrics tells, once everything was counted."""
    names = set()
    for made in [
        *make_metrics(CollectorRegistry()).all(),
        *make_told(CollectorRegistry(), (), dict.fromkeys(FACTS, "0")),
    ]:
        (family,) = made.describe()
        endings = {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum"), "gauge": ("",)}[family.type]
        names |= {family.name + ending for ending in endings}
    return names


def fired(alert: str) -> list[dict[str, str]]:
    """The labels with which an alert fires in its cases."""
    samples = [sample for expected in expectations(alert) for sample in expected["exp_samples"]]
    return [dict(re.findall(r'(\w+)="([^"]*)"', sample["labels"])) for sample in samples]


def expectations(alert: str) -> list[dict]:
    return [one for case in CASES for one in case["promql_expr_test"] if f'alertname="{alert}"' in one["expr"]]


def test_rules_and_panels_ask_for_what_there_is():
    """A metric that is renamed takes its panels and alerts along."""
    asked = {name for expression in [*SHOWN, *(rule["expr"] for rule in ALL_RULES)] for name in names_in(expression)}

    assert set() == asked - names_told() - RECORDED


def test_every_metric_is_shown():
    """What nobody looks at need not be counted."""
    asked = {name for expression in SHOWN for name in names_in(expression)}
    families = {re.sub(r"_(bucket|count|sum)$", "", name) for name in names_told()}

    assert set() == families - {re.sub(r"_bucket$", "", name) for name in asked}


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_an_alert_says_what_to_do(rule):
    """How bad it is, what is wrong, what to do, and where more is said."""
    assert rule["labels"]["severity"] in {"critical", "warning", "info"}
    assert {"summary", "description", "runbook"} == rule["annotations"].keys()
    assert f"docs/monitoring.md#{rule['alert'].lower()}" == rule["annotations"]["runbook"]
    assert f"\n### {rule['alert']}\n" in RUNBOOK


def test_the_runbook_is_of_these_alerts():
    """None that was taken out is still described."""
    assert [rule["alert"] for rule in ALERTS] == re.findall(r"^### (TokenTape\w+)$", RUNBOOK, re.MULTILINE)


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_an_alert_has_cases_for_both(rule):
    """One in which it fires, and one in which it does not."""
    assert fired(rule["alert"])
    assert any(one["exp_samples"] == [] for one in expectations(rule["alert"]))


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_an_alert_names_labels_that_it_has(rule):
    """A label that was summed away would leave a hole in its sentence."""
    named = {*re.findall(r"\$labels\.(\w+)", str(rule["annotations"]))}

    assert named <= {label for labels in fired(rule["alert"]) for label in labels}
