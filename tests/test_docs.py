"""Generated pages are up to date, and documents contain what the code defines. Hand-written pages: tests/test_pages.py."""

from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry

from docs.generate import pages, settings_of
from proxy.config.settings import Settings
from proxy.telemetry.metrics import make_metrics

ROOT = Path(__file__).parent.parent
PAGES = pages()


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_generated_pages_are_up_to_date(path):
    """`make docs` changes no file."""
    assert PAGES[path] == path.read_text()


def test_the_example_configuration_has_every_setting_with_its_default():
    example = yaml.safe_load((ROOT / "config.example.yaml").read_text())

    assert Settings().model_dump(mode="json") == example


def test_every_setting_has_a_description():
    assert [name for name, _, _, description in settings_of(Settings) if not description] == []


def test_every_metric_is_documented():
    """By its name in /metrics."""
    page = (ROOT / "docs" / "metrics.md").read_text()
    metrics = [metric for collector in make_metrics(CollectorRegistry()).all() for metric in collector.describe()]
    names = [metric.name + ("_total" if metric.type == "counter" else "") for metric in metrics]

    assert [name for name in names if f"`{name}`" not in page] == []


def test_decisions_have_at_most_30_lines_and_end_with_what_would_change_them():
    decisions = sorted((ROOT / "docs" / "decisions").glob("*.md"))

    assert decisions
    for decision in decisions:
        lines = decision.read_text().strip().splitlines()
        assert len(lines) <= 30, decision
        assert lines[-1].startswith("We would change our mind if "), decision
