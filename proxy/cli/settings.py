"""Loads the settings of a command from the file and the environment, with command line overrides."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_settings import SettingsError

from proxy.config.settings import Settings, load
from proxy.errors import failure_text

_IN_JSON = """lists and objects must be JSON, e.g. TOKENTAPE_AGENTS__API_KEYS='["a-key"]'"""


class InvalidSettings(ValueError):
    """The settings are invalid. `faults` are the names of settings with the problems; the message has one line for each.

    A name is empty if the file or the environment cannot be read.
    """

    def __init__(self, message: str, faults: Sequence[tuple[str, str]] = ()) -> None:
        lines = [f"  {name}: {problem}" if name else f"  {problem}" for name, problem in faults]
        super().__init__("\n".join([message, *lines]))
        self.faults = faults or [("", message)]


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
        if insecure:
            values["insecure"] = True
        if engine:
            values["engines"] = {"endpoints": [{"url": url} for url in engine]}
        if store:
            values["store"] = {"url": store}
        return load(config, **values)  # sections are merged with the environment and the file
    except ValidationError as error:
        raise InvalidSettings("invalid configuration:", list(_faults(error))) from None
    except SettingsError as error:
        raise InvalidSettings(f"cannot read an environment variable ({error}): {_IN_JSON}") from error
    except yaml.YAMLError as error:
        raise InvalidSettings(f"{config} is not valid YAML: {error}") from error
    except OSError as error:
        raise InvalidSettings(f"cannot read the configuration: {failure_text(error)}") from error
    except ValueError as error:
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


def _faults(error: ValidationError) -> Iterator[tuple[str, str]]:
    """Yield the name of each setting that is invalid, and the problem."""
    for detail in error.errors():
        name = ".".join(map(str, detail["loc"])) or detail.get("ctx", {}).get("setting", "")
        message = "unknown setting" if detail["type"] == "extra_forbidden" else detail["msg"]
        yield name, message.removeprefix("Value error, ")
