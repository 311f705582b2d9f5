"""Pages that the code prints: settings, metrics, errors, fidelity problems, and the example configuration.

`python -m docs.generate` writes them; `tests/test_docs.py` fails when one is stale.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import yaml
from prometheus_client import CollectorRegistry
from pydantic import BaseModel

from proxy import errors
from proxy.config import Settings
from proxy.metrics import make_metrics
from proxy.trajectory.fidelity import PROBLEMS

HERE = Path(__file__).parent
MADE = "<!-- Made by `make docs`; edit the code instead. -->\n\n"


def pages() -> dict[Path, str]:
    """Every generated file and what it must hold."""
    return {
        HERE / "settings.md": settings_page(),
        HERE / "metrics.md": metrics_page(),
        HERE / "errors.md": errors_page(),
        HERE / "fidelity.md": fidelity_page(),
        HERE.parent / "config.example.yaml": example(),
    }


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
                yield from settings_of(argument, f"{prefix}{name}[].")


def settings_page() -> str:
    """docs/settings.md."""
    rows = [
        f"| `{name}` | {'—' if _is_required(default) else f'`{_plain(default)!r}`'} | {text} |"
        for name, _, default, text in settings_of(Settings)
    ]
    return (
        "# Settings\n\n"
        + MADE
        + "Set them in a YAML file (`--config`), or by environment: `TOKENTAPE_STORE__URL=…` sets "
        "`store.url`.\nThe command line wins over the environment, the environment over the file.\n\n"
        "| setting | default | meaning |\n|---|---|---|\n" + "\n".join(rows) + "\n"
    )


def metrics_page() -> str:
    """docs/metrics.md."""
    rows = [
        f"| `{metric.name}` | {metric.type} | {metric.documentation} |"
        for made in make_metrics(CollectorRegistry()).all()
        for metric in made.describe()
    ]
    return (
        "# Metrics\n\n" + MADE + "At `GET /metrics`. Counters end in `_total` there.\n\n"
        "| name | type | meaning |\n|---|---|---|\n" + "\n".join(rows) + "\n"
    )


def errors_page() -> str:
    """docs/errors.md."""
    kinds = [kind for kind in _tree(errors.ProxyError) if kind.__module__ == errors.__name__]
    rows = [f"| {kind.status} | `{kind.kind}` | `{kind.code}` | {kind.__doc__} |" for kind in kinds]
    return (
        "# Errors\n\n" + MADE + "Errors of the engine reach a client as they came. These are ours; the body has the "
        "dialect's shape.\n\n| status | type | code | meaning |\n|---|---|---|---|\n" + "\n".join(rows) + "\n"
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
    for path, text in pages().items():
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
            print(f"wrote {path.relative_to(HERE.parent)}")
