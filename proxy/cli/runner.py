"""Runs a command's coroutine and turns errors into messages and exit codes."""

import asyncio
import os
import sys
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn, cast

import typer

from proxy.cli.console import print_error
from proxy.cli.exit_codes import Exit
from proxy.cli.settings import InvalidSettings
from proxy.upstream.failure_text import failure_text
from storage.errors import StorageError


def run(work: Coroutine[Any, Any, Any], *, on_value_error: Exit = Exit.FAILED) -> Any:
    """Run a coroutine and return its result. Print expected errors and exit with the matching code."""
    try:
        return _runner()(work)
    except BrokenPipeError:  # the reader closed standard output, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python reports the error again at exit
        raise typer.Exit(Exit.DONE) from None
    except InvalidSettings as error:
        fail(str(error), code=Exit.REFUSED)
    except ValueError as error:
        fail(str(error), code=on_value_error)
    except (StorageError, OSError) as error:
        fail(failure_text(error))
    except KeyboardInterrupt:
        raise typer.Exit(Exit.INTERRUPTED) from None


def fail(message: str, *, code: Exit = Exit.FAILED) -> NoReturn:
    """Print an error message and exit."""
    print_error(message)
    raise typer.Exit(code)


def _runner() -> Callable[[Coroutine[Any, Any, Any]], Any]:
    try:
        import uvloop  # noqa: PLC0415 - optional: not available on Windows
    except ImportError:
        return asyncio.run
    return cast("Callable[[Coroutine[Any, Any, Any]], Any]", uvloop.run)
