"""One run of the scene for all tests: what Prometheus said on a good day, while the store was away, after it, and at the end.

Holds the order of events and what was kept of each; the tests judge it.
"""

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

# Curves that the dashboard leaves out while they are zero, of what does not happen to simulated engines: by metric, the reason.
MAY_BE_ZERO = {"tokentape_new_losses_total": "the simulator loses only what the table says"}

Vector = list[dict[str, Any]]
Alerts = dict[str, list[dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class Seen:
    """What was seen. `vectors` are by expression, of panels and recording rules."""

    good_day: Alerts
    store_away: Alerts
    proxy_down: Alerts
    vectors: dict[str, Vector]
    selected: dict[str, Vector]  # by selector, of alerts
    metrics: str
    rules: Any
    targets: Any


def panel_expressions() -> list[str]:
    """Every query of the dashboard."""
    return [target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", ())]


def rules_of(kind: str) -> list[dict[str, Any]]:
    """Every recording rule (`record`) or every alert (`alert`)."""
    return [rule for group in deployed_rules()["groups"] for rule in group["rules"] if kind in rule]


@pytest.fixture(scope="session")
def binaries() -> Path:
    """The folder of prometheus and promtool."""
    return environment.prometheus()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def seen(binaries, tmp_path_factory) -> Seen:
    """Everything that is asked of Prometheus, in one run."""
    async with playing(tmp_path_factory.mktemp("scene"), binaries) as scene:
        good_day = await scene.until_alert("TokenTapeEndpointEjected", "TokenTapeStepsFlagged")
        await scene.store.end(signal.SIGKILL)
        away = ("TokenTapeStoreAway", "TokenTapeStoreFailing", "TokenTapeSpoolNotEmpty")
        store_away = await scene.until_alert(*away)
        await scene.store.start()
        await scene.store_answers()
        await scene.ask_store("CONFIG SET maxmemory 1gb")
        await scene.until_no_alert("TokenTapeStoreAway", "TokenTapeSpoolNotEmpty")
        expressions = {
            as_shown(one) for one in (*panel_expressions(), *(rule["record"] for rule in rules_of("record")))
        }
        vectors = await scene.shown(expressions)
        selectors = {selector for rule in rules_of("alert") for selector in selectors_of(rule["expr"])}
        selected = {selector: await scene.query(selector) for selector in selectors}
        metrics, rules, targets = await scene.metrics(), await scene.ask("rules"), await scene.ask("targets")
        await scene.proxy.end(signal.SIGTERM)
        proxy_down = await scene.until_alert("TokenTapeDown")
    return Seen(good_day, store_away, proxy_down, vectors, selected, metrics, rules, targets)


def as_shown(expression: str) -> str:
    """An expression that shows something after a run: of what must not happen in it, with the zeros."""
    return expression.removesuffix(" > 0") if any(metric in expression for metric in MAY_BE_ZERO) else expression


def selectors_of(expression: str) -> list[str]:
    """The metrics that an expression looks at, each with its labels: a matcher that meets no series would never fire."""
    return re.findall(r"\b(?:tokentape_|process_|up\b|\w+:)[\w:]*(?:\{[^}]*\})?", expression)
