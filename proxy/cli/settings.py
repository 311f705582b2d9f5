"""Loads the settings of a command from the file and the environment, with command line overrides."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_settings import SettingsError

from proxy.config.sections import EnginesSettings, StoreSettings
from proxy.config.settings import Settings, load

_IN_JSON = """lists and objects must be JSON, e.g. TOKENTAPE_AGENTS__API_KEYS='["a-key"]'"""


class InvalidSettings(ValueError):
    """The settings are invalid. The message has one line per error."""


def load_settings(
    config: Path | None,
    *,
    engine: list[str] | None = None,
    store: str | None = None,
    insecure: bool = False,
    **overrides: Any,
) -> Settings:
    """Return the settings with the command line overrides applied.

    Raises:
        InvalidSettings: The file or an environment variable cannot be read, or a value is invalid.
    """
    try:
        _validate_file(config)
        values = {name: value for name, value in overrides.items() if value is not None}
        settings = load(config, **values, **({"insecure": True} if insecure else {}))
        changes: dict[str, Any] = {}
        if engine:
            endpoints = [{"url": url} for url in engine]
            changes["engines"] = EnginesSettings(**{**settings.engines.model_dump(), "endpoints": endpoints})
        if store:
            changes["store"] = StoreSettings(**{**dict(settings.store), "url": store})
        return settings.model_copy(update=changes)
    except ValidationError as error:
        raise InvalidSettings("invalid configuration:\n" + "\n".join(_errors(error))) from None
    except SettingsError as error:
        raise InvalidSettings(f"cannot read an environment variable ({error}): {_IN_JSON}") from error
    except yaml.YAMLError as error:
        raise InvalidSettings(f"{config} is not valid YAML: {error}") from error
    except (OSError, ValueError) as error:
        raise InvalidSettings(f"cannot read the configuration: {error}") from error


def _validate_file(config: Path | None) -> None:
    """Reject a file that is not a YAML mapping.

    It parses the open file, not its text: PyYAML's errors quote the text of a string, which may contain keys.
    """
    if config is not None:
        with config.open("rb") as file:
            if not isinstance(yaml.safe_load(file), dict | None):
                message = f"{config} is not a mapping of settings, e.g. listen: 127.0.0.1:8400"
                raise ValueError(message)  # noqa: TRY004 - about the user's input, not about a type


def _errors(error: ValidationError) -> Iterator[str]:
    for detail in error.errors():
        name = ".".join(map(str, detail["loc"])) or "settings"
        message = "unknown setting" if detail["type"] == "extra_forbidden" else detail["msg"]
        yield f"  {name}: {message.removeprefix('Value error, ')}"
