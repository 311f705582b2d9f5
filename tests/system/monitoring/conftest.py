"""One run of the scene for all tests: normal operation, an outage of the store, recovery, and a stopped proxy."""

import re
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from deploy.grafana.dashboard import dashboard

from . import environment
from .scene import deployed_rules, playing

# Metrics of events that simulated engines do not cause, with the reason. The dashboard hides their curves while they are zero.
MAY_BE_ZERO = {"tokentape_unexpected_losses_total": "the simulator loses only what docs/exactness.md lists"}

Vector = list[dict[str, Any]]
Alerts = dict[str, list[dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class Seen:
    """The results of the run. `vectors` has the results of panels and recording rules, by expression."""

    good_day: Alerts
    store_down: Alerts
    proxy_down: Alerts
    vectors: dict[str, Vector]
    selected: dict[str, Vector]  # by selector of the alerts
    metrics: str
    rules: Any
    targets: Any


def panel_expressions() -> list[str]:
    """Return every query of the dashboard."""
    return [target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", ())]


def rules_by_kind(kind: str) -> list[dict[str, Any]]:
    """Return every recording rule (`record`) or every alert (`alert`)."""
    return [rule for group in deployed_rules()["groups"] for rule in group["rules"] if kind in rule]


@pytest.fixture(scope="session")
def binaries() -> Path:
    """Return the folder of prometheus and promtool."""
    return environment.prometheus()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def seen(binaries, tmp_path_factory) -> Seen:
    """Run the scene once, and return everything that Prometheus shows of it."""
    async with playing(tmp_path_factory.mktemp("scene"), binaries) as scene:
        good_day = await scene.until_alert("TokenTapeEndpointEjected", "TokenTapeStepsFlagged")
        await scene.store.end(signal.SIGKILL)
        outage = ("TokenTapeStoreDown", "TokenTapeStoreFailing", "TokenTapeJournalNotEmpty")
        store_down = await scene.until_alert(*outage)
        await scene.store.start()
        await scene.store_answers()
        await scene.ask_store("CONFIG SET maxmemory 1gb")
        await scene.until_no_alert("TokenTapeStoreDown", "TokenTapeJournalNotEmpty")
        expressions = {
            as_shown(expression)
            for expression in (*panel_expressions(), *(rule["record"] for rule in rules_by_kind("record")))
        }
        vectors = await scene.shown(expressions)
        selectors = {selector for rule in rules_by_kind("alert") for selector in selectors_from(rule["expr"])}
        selected = {selector: await scene.query(selector) for selector in selectors}
        metrics, rules, targets = await scene.metrics(), await scene.ask("rules"), await scene.ask("targets")
        await scene.proxy.end(signal.SIGTERM)
        proxy_down = await scene.until_alert("TokenTapeDown")
    return Seen(good_day, store_down, proxy_down, vectors, selected, metrics, rules, targets)


def as_shown(expression: str) -> str:
    """Return the expression without the filter that hides zeros, for metrics that may be zero after a run."""
    return expression.removesuffix(" > 0") if any(metric in expression for metric in MAY_BE_ZERO) else expression


def selectors_from(expression: str) -> list[str]:
    """Return the selectors of an expression: an alert never fires if its selector matches no series."""
    return re.findall(r"\b(?:tokentape_|process_|up\b|\w+:)[\w:]*(?:\{[^}]*\})?", expression)
