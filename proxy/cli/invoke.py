"""What commands share: running a coroutine, loading settings, the control API's address, and errors of usage.

Each function imports what it needs when it runs, so that `--help` and shell completion are fast.
"""

from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from proxy.cli.exit_codes import Exit

if TYPE_CHECKING:
    from proxy.cli.show import ControlAddress
    from proxy.config.settings import Settings


def run(work: Coroutine[Any, Any, Any], *, on_value_error: Exit = Exit.FAILED) -> Any:
    """Run a coroutine and return its result; exit with a message if it fails."""
    from proxy.cli import runner  # noqa: PLC0415 - keeps `--help` fast

    return runner.run(work, on_value_error=on_value_error)


def usage_error(sentence: str) -> NoReturn:
    """Exit because the command line is invalid."""
    from proxy.cli.runner import fail  # noqa: PLC0415 - keeps `--help` fast

    fail(sentence, code=Exit.MISUSED)


def settings_of(config: Path | None, **overrides: Any) -> "Settings":
    """Load the settings; exit with `REFUSED` if they are invalid."""
    from proxy.cli.settings import InvalidSettings, load_settings  # noqa: PLC0415 - keeps `--help` fast

    try:
        return load_settings(config, **overrides)
    except InvalidSettings as error:
        from proxy.cli.runner import fail  # noqa: PLC0415

        fail(str(error), code=Exit.REFUSED)


def address_of(url: str, store: str | None, api_key: str | None) -> "ControlAddress":
    """Return the control API at a URL, or of a store that this command opens."""
    from proxy.cli.show import ControlAddress  # noqa: PLC0415 - keeps `--help` fast

    if store is None:
        return ControlAddress(url, None, api_key)
    return ControlAddress(None, settings_of(None, store=store, listen="127.0.0.1:0"), None)
