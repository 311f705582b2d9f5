"""Files that are generated: pages of commands, settings, metrics, errors, fidelity, formats, shapes, routes, the client's
classes and decisions; the dashboard, the example configuration, and the blocking client (tokentape/sync_client.py).

`python -m docs.generate` writes them; `tests/test_docs.py` fails when one is stale.
"""

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from textwrap import indent
from typing import Any, get_args, get_origin

import yaml
from prometheus_client import CollectorRegistry
from pydantic import BaseModel

from deploy.grafana.dashboard import dashboard_page
from docs.cli import cli_page
from docs.client_reference import client_page
from docs.exactness import exactness_page
from docs.formats import formats_page
from docs.generate_sync_client import TARGET as SYNC_CLIENT
from docs.generate_sync_client import sync_client
from docs.routes import api_page
from proxy import errors
from proxy.api.health import STORE_GAUGES, make_info_metrics
from proxy.config.settings import Settings
from proxy.telemetry.metrics import make_metrics
from proxy.trajectory.fidelity import PROBLEMS

HERE = Path(__file__).parent
DEPLOY = HERE.parent / "deploy"
MADE = "<!-- Made by `make docs`; edit the code instead. -->\n\n"


def pages() -> dict[Path, str]:
    """Every generated file and what it must hold."""
    return {
        HERE / "cli.md": cli_page(MADE),
        HERE / "settings.md": settings_page(),
        HERE / "metrics.md": metrics_page(),
        HERE / "errors.md": errors_page(),
        HERE / "fidelity.md": fidelity_page(),
        HERE / "exactness.md": exactness_page(MADE),
        HERE / "formats.md": formats_page(MADE),
        HERE / "shapes.md": shapes_page(),
        HERE / "api.md": api_page(MADE),
        HERE / "client-reference.md": client_page(MADE),
        HERE / "decisions.md": decisions_page(),
        SYNC_CLIENT: sync_client(),
        HERE.parent / "config.example.yaml": example(),
        HERE.parent / "deploy/grafana/dashboards/tokentape.json": dashboard_page(),
        DEPLOY / "kubernetes" / "monitoring" / "prometheusrule.yaml": prometheus_rule(),
    }


def prometheus_rule() -> str:
    """The rules of deploy/prometheus as the Prometheus operator takes them: line by line the same, further in."""
    rules = (DEPLOY / "prometheus" / "rules.yml").read_text()
    return (
        "# Made by `make docs` of deploy/prometheus/rules.yml; edit that instead.\n"
        "apiVersion: monitoring.coreos.com/v1\nkind: PrometheusRule\n"
        "metadata:\n  name: tokentape\n  labels: {app.kubernetes.io/name: tokentape}\nspec:\n" + indent(rules, "  ")
    )


def settings_of(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str, Any, str]]:
    """Each setting: its dotted name, type, default and description."""
    for name, field in model.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from settings_of(inner, f"{prefix}{name}.")
            continue
        yield f"{prefix}{name}", str(inner), field.get_default(call_default_factory=True), field.description or ""
        for argument in get_args(inner):
            if isinstance(argument, type) and issubclass(argument, BaseModel):
                yield from settings_of(argument, f"{prefix}{name}{'.NAME' if get_origin(inner) is dict else '[]'}.")


def settings_page() -> str:
    """docs/settings.md."""
    rows = [
        f"| `{name}` | {'—' if _is_required(default) else f'`{_plain(default)!r}`'} | {text} |"
        for name, _, default, text in settings_of(Settings)
    ]
    return (
        "# Settings\n\n"
        + MADE
        + "Set them in a YAML file (`--config FILE`) or with environment variables: `TOKENTAPE_STORE__URL=…` sets "
        "`store.url`.\nThe command line has precedence over the environment, and the environment over the file. "
        "Names that\nend in `_s` are in seconds, names that end in `_bytes` in bytes.\n\n"
        "| setting | default | meaning |\n|---|---|---|\n" + "\n".join(rows) + "\n"
    )


def metrics_page() -> str:
    """docs/metrics.md."""
    collectors = [
        *make_metrics(CollectorRegistry()).all(),
        *make_info_metrics(CollectorRegistry(), (), dict.fromkeys(STORE_GAUGES, "0")),
    ]
    rows = [
        f"| `{metric.name}{'_total' if metric.type == 'counter' else ''}` | {metric.type} "
        f"| {', '.join(f'`{label}`' for label in collector._labelnames)} | {metric.documentation} |"  # noqa: SLF001 - not public
        for collector in collectors
        for metric in collector.describe()
    ]
    return (
        "# Metrics\n\n"
        + MADE
        + "Look up here what a metric at `GET /metrics` means. With control keys configured, the "
        "endpoint requires one.\n\n"
        "- `engine` is the name of an endpoint. A call counts for the endpoint to which it was routed last, even if it ended "
        "in the queue\n  of that endpoint. A request that is rejected before it is routed counts in `tokentape_errors_total` "
        "only.\n"
        "- `status` is the HTTP status that the client received; 499 means that the client disconnected.\n"
        "- There are no `_created` series. On Linux, `/metrics` also has the `process_*` metrics of the Prometheus client "
        "library.\n\n"
        "Alerts and the dashboard: [monitoring](monitoring.md).\n\n"
        "| name | type | labels | meaning |\n|---|---|---|---|\n" + "\n".join(rows) + "\n"
    )


def errors_page() -> str:
    """docs/errors.md."""
    kinds = [kind for kind in _tree(errors.ProxyError) if kind.__module__ == errors.__name__]
    rows = [f"| {kind.status} | `{kind.kind}` | `{kind.code}` | {kind.__doc__} |" for kind in kinds]
    return (
        "# Errors\n\n" + MADE + "Errors that an engine returns are forwarded unchanged. The errors below are "
        "TokenTape's own; the body has the shape of the dialect. On the model API, errors of engines, of the store and of "
        "the proxy have no details: the log has them under the step id or error id in the message.\n\n"
        "| status | type | code | meaning |\n"
        "|---|---|---|---|\n" + "\n".join(rows) + "\n"
    )


def fidelity_page() -> str:
    """docs/fidelity.md."""
    rows = [f"| `{code}` | {text} |" for code, text in PROBLEMS.items()]
    return (
        "# Fidelity\n\n"
        + MADE
        + "A step without any of these problems is *exact*. One with a problem is kept, counted "
        "in `/metrics`, and left out of\nexports unless `include=flagged` asks for it.\n\n"
        "| code | meaning |\n|---|---|\n" + "\n".join(rows) + "\n"
    )


def shapes_page() -> str:
    """docs/shapes.md, from the very table that tests/trajectory/test_shapes.py asserts."""
    support = str(HERE.parent / "tests" / "support")
    if support not in sys.path:
        sys.path.append(support)
    shapes = import_module("shapes").SHAPES
    numbers = ("nodes", "roots", "leaves", "superseded", "sequences", "trained", "total")
    rows = [
        f"| {shape.name} | {shape.meaning} | {_told(shape.paths)} | {_told(shape.rows)} | "
        + " | ".join(f"{getattr(shape.counted, number):,}" for number in numbers)
        + " |"
        for shape in shapes
    ]
    return (
        "# Shapes of rollouts\n\n"
        + MADE
        + "What a rollout of each shape comes to. Calls are called `a`, `b`, … as their names sort; `a.1` is the second "
        "choice of `a`.\nThe tree is told by its paths, one to each leaf. A call in brackets is context in that sequence, "
        "and trained in another: over\nall sequences each sampled token is trained once. A superseded leaf was replaced by a "
        "retry and is in no sequence. *Trained* and\n*total* count the tokens of all sequences together.\n\n"
        f"| shape | what happens | tree | sequences | {' | '.join(numbers)} |\n"
        f"|---|---|---|---|{'---:|' * len(numbers)}\n" + "\n".join(rows) + "\n"
    )


def decisions_page() -> str:
    """docs/decisions.md: the first line and the last of each."""
    rows = []
    for decision in sorted((HERE / "decisions").glob("*.md")):
        lines = decision.read_text().strip().splitlines()
        change = lines[-1].removeprefix("We would change our mind if ")
        rows.append(f"| [{lines[0].removeprefix('# ')}](decisions/{decision.name}) | {change} |")
    return (
        "# Decisions\n\n"
        + MADE
        + "Where a contract was silent or wrong, what was decided, and why; each in a page.\n\n"
        "| decision | we would change our mind if … |\n|---|---|\n" + "\n".join(rows) + "\n"
    )


def _told(paths: tuple[str, ...]) -> str:
    """Paths, each on a line of its own; of a long one, its ends."""
    told = (path.split() for path in paths)
    return "<br>".join(" → ".join(calls if len(calls) < 10 else [*calls[:2], "…", calls[-1]]) for calls in told)


def example() -> str:
    """config.example.yaml: the defaults in full."""
    text = yaml.safe_dump(Settings().model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    return "# Every setting with its default. What each means: docs/settings.md.\n" + text


def _tree(kind: type[errors.ProxyError]) -> Iterator[type[errors.ProxyError]]:
    for below in kind.__subclasses__():
        yield below
        yield from _tree(below)


def _is_required(default: Any) -> bool:
    return type(default).__name__ == "PydanticUndefinedType"


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


if __name__ == "__main__":
    SYNC_CLIENT.write_text(sync_client())  # before the pages, which import it
    for path, text in pages().items():
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
            print(f"wrote {path.relative_to(HERE.parent)}")
