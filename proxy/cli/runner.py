"""What commands share: exit codes, running a coroutine, loading settings, the control API's address, and errors of usage.

Each function imports what it needs when it runs, so that `--help` and shell completion are fast.
"""

import asyncio
import os
import sys
from collections.abc import Callable, Coroutine
from contextlib import suppress
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self

import typer

if TYPE_CHECKING:
    from proxy.cli.control import ControlAddress
    from proxy.config.settings import Settings


class Exit(IntEnum):
    """The exit code of a command."""

    meaning: str

    def __new__(cls, code: int, meaning: str) -> Self:
        """Create an exit code with its description."""
        member = int.__new__(cls, code)
        member._value_ = code
        member.meaning = meaning
        return member

    DONE = 0, "Success. `serve`, `simulate` and `tail` also exit with 0 on SIGINT or SIGTERM."
    FAILED = 1, "Failure. Standard error has the error message."
    MISUSED = 2, "Invalid command line. Nothing was executed."
    FOUND = (
        3,
        "Success, but `check`, `audit` or `certify` found a fault, or calls are in flight after `policy pause --drain-s`.",
    )
    UNTRAINABLE = 4, "Success, but `check` or `certify` found that an engine returns no token IDs, and no other fault."
    ADDRESS_IN_USE = (
        5,
        "Success, but `check` found that another program uses an address to listen on, and no other fault.",
    )
    REFUSED = 78, "The configuration is invalid. A restart cannot help (EX_CONFIG; see deploy/tokentape.service)."
    INTERRUPTED = 130, "Interrupted by Ctrl-C."


def run(work: Coroutine[Any, Any, Any], *, on_value_error: Exit = Exit.FAILED) -> Any:
    """Run a coroutine and return its result. Print expected errors and exit with the matching code."""
    from proxy.cli.settings import InvalidSettings
    from proxy.upstream.http_client import failure_text
    from storage.errors import StorageError
    from tokentape.transport import ClientError

    run_loop: Callable[[Coroutine[Any, Any, Any]], Any] = asyncio.run
    with suppress(ImportError):  # not available on Windows
        import uvloop

        run_loop = uvloop.run
    try:
        return run_loop(work)
    except BrokenPipeError:  # the reader closed standard output, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python reports the error again at exit
        raise typer.Exit(Exit.DONE) from None
    except InvalidSettings as error:
        fail(str(error), code=Exit.REFUSED)
    except ValueError as error:
        fail(str(error), code=on_value_error)
    except (StorageError, OSError) as error:
        fail(failure_text(error))
    except ClientError as error:
        fail(str(error))
    except KeyboardInterrupt:
        raise typer.Exit(Exit.INTERRUPTED) from None


def fail(message: str, *, code: Exit = Exit.FAILED) -> NoReturn:
    """Print an error message and exit."""
    from proxy.cli.console import print_error

    print_error(message)
    raise typer.Exit(code)


def usage_error(sentence: str) -> NoReturn:
    """Exit because the command line is invalid."""
    fail(sentence, code=Exit.MISUSED)


def settings_of(config: Path | None, **overrides: Any) -> "Settings":
    """Load the settings; exit with `REFUSED` if they are invalid."""
    from proxy.cli.settings import InvalidSettings, load_settings

    try:
        return load_settings(config, **overrides)
    except InvalidSettings as error:
        fail(str(error), code=Exit.REFUSED)


def address_of(url: str, store: str | None, api_key: str | None) -> "ControlAddress":
    """Return the control API at a URL, or of a store that this command opens."""
    from proxy.cli.control import ControlAddress

    if store is None:
        return ControlAddress(url, None, api_key)
    return ControlAddress(None, settings_of(None, store=store, listen="127.0.0.1:0"), None)
