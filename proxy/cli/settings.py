"""The settings of a command: those of the file and the environment, and its options on top."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_settings import SettingsError

from proxy.config.sections import EnginesSettings, StoreSettings
from proxy.config.settings import Settings, load

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
