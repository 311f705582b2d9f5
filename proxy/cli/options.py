"""Options that several commands share, each with its sentence.

Holds annotated types, and what completes them: `--help` reads them, so nothing heavy is imported.
"""

import re
from collections.abc import Iterator
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Annotated, Any, Final
from urllib.error import URLError
from urllib.request import Request, urlopen

import orjson
import typer
import yaml
from pydantic import ValidationError
from pydantic_settings import SettingsError

from proxy.config.sections import EnginesSettings, StoreSettings
from proxy.config.settings import Settings, load


def completed(ctx: typer.Context, incomplete: str) -> list[str]:
    """The ids of rollouts that begin so."""

    return rollout_ids(ctx, incomplete)


ConfigFile = Annotated[Path | None, typer.Option("--config", help="YAML file; see config.example.yaml.")]
ProxyUrl = Annotated[str, typer.Option("--url", help="A running proxy's control API.", envvar="TOKENTAPE_URL")]
ProxyKey = Annotated[
    str | None, typer.Option("--api-key", help="A key for the control API.", envvar="TOKENTAPE_API_KEY")
]
StoreUrl = Annotated[
    str | None, typer.Option("--store", help="Or a store that nobody else has open: embedded:PATH, redis://….")
]
AsJson = Annotated[bool, typer.Option("--json", help="JSON on standard output; notes stay on standard error.")]
RolloutId = Annotated[str, typer.Argument(help="The rollout's id.", autocompletion=completed)]
OneRolloutId = Annotated[
    str | None, typer.Argument(help="Only this rollout, its last steps first.", autocompletion=completed)
]

USUAL_URL = "http://127.0.0.1:8400"


_WITHIN_S: Final = 1
_OFFERED: Final = 200
# A shell puts what it completes on the command line as it is: an id that a shell would obey is not offered.
_HARMLESS: Final = re.compile(r"[\w./:@+-]+", re.ASCII)


def rollout_ids(ctx: typer.Context, incomplete: str) -> list[str]:
    """The ids of the newest rollouts that begin so; none if nobody answers at once."""
    url, key = ctx.params.get("url"), ctx.params.get("api_key")
    if not isinstance(url, str) or not url.startswith(("http://", "https://")):
        return []
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        request = Request(f"{url.rstrip('/')}/rollouts?limit={_OFFERED}", headers=headers)  # noqa: S310 - http, as seen
        with urlopen(request, timeout=_WITHIN_S) as answer:  # noqa: S310
            names = [str(rollout["rollout_id"]) for rollout in orjson.loads(answer.read())["rollouts"]]
    except (URLError, OSError, ValueError, KeyError, TypeError):
        return []
    return [name for name in names if name.startswith(incomplete) and _HARMLESS.fullmatch(name)]


_IN_JSON = """lists and objects are JSON, such as TOKENTAPE_AGENTS__API_KEYS='["a-key"]'"""


class WrongSettings(ValueError):
    """Settings that cannot be used; each fault stands on a line of its own."""


def settings_of(
    config: Path | None,
    *,
    engine: list[str] | None = None,
    store: str | None = None,
    insecure: bool = False,
    **said: Any,
) -> Settings:
    """The settings, with what was said on the command line on top. Raises WrongSettings."""
    try:
        _look_at(config)
        given = {name: value for name, value in said.items() if value is not None}
        settings = load(config, **given, **({"insecure": True} if insecure else {}))
        changes: dict[str, Any] = {}
        if engine:
            endpoints = [{"url": url} for url in engine]
            changes["engines"] = EnginesSettings(**{**settings.engines.model_dump(), "endpoints": endpoints})
        if store:
            changes["store"] = StoreSettings(**{**dict(settings.store), "url": store})
        return settings.model_copy(update=changes)
    except ValidationError as error:
        raise WrongSettings("the configuration is not valid:\n" + "\n".join(_faults(error))) from None
    except SettingsError as error:
        raise WrongSettings(f"an environment variable cannot be read ({error}): {_IN_JSON}") from error
    except yaml.YAMLError as error:
        raise WrongSettings(f"{config} is no YAML: {error}") from error
    except (OSError, ValueError) as error:
        raise WrongSettings(f"the configuration cannot be read: {error}") from error


def _look_at(config: Path | None) -> None:
    """Refuse a file of something else than settings. Opened, since the text of one that is read is told with its faults."""
    if config is not None:
        with config.open("rb") as file:
            if not isinstance(yaml.safe_load(file), dict | None):
                sentence = f"{config} holds no settings, such as listen: 127.0.0.1:8400"
                raise ValueError(sentence)  # noqa: TRY004 - of what was typed, and not of a type


def _faults(error: ValidationError) -> Iterator[str]:
    for fault in error.errors():
        name = ".".join(map(str, fault["loc"])) or "settings"
        said = "there is no such setting" if fault["type"] == "extra_forbidden" else fault["msg"]
        yield f"  {name}: {said.removeprefix('Value error, ')}"


def _tell_version(asked: bool) -> None:  # noqa: FBT001 - as typer calls it
    if asked:
        typer.echo(f"tokentape {version_of('tokentape')}")
        raise typer.Exit


def tokentape(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_tell_version, is_eager=True, help="Say which one this is.")
    ] = False,
) -> None:
    """An OpenAI-compatible recording reverse proxy for reinforcement learning."""
