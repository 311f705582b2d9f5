"""A command's work, run to its end.

Holds the event loop of the commands, and the one place where failures become exit codes.
"""

import asyncio
import os
import sys
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn, cast

import typer

from proxy.cli.console import complain
from proxy.cli.exit_codes import Exit
from storage.errors import StorageError


def run(work: Coroutine[Any, Any, Any]) -> Any:
    """Run to the end, and give back what came of it; failures that have a sentence are told by it."""
    try:
        return _runner()(work)
    except BrokenPipeError:  # whoever read standard output has seen enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains of it at its end
        raise typer.Exit(Exit.DONE) from None
    except (StorageError, ValueError, OSError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        raise typer.Exit(Exit.INTERRUPTED) from None


def fail(sentence: str, *, code: Exit = Exit.FAILED) -> NoReturn:
    """Say what was wrong, and end."""
    complain(sentence)
    raise typer.Exit(code)


def _runner() -> Callable[[Coroutine[Any, Any, Any]], Any]:
    """uvloop's, where there is one."""
    try:
        import uvloop  # noqa: PLC0415 - optional: not there on Windows
    except ImportError:
        return asyncio.run
    return cast("Callable[[Coroutine[Any, Any, Any]], Any]", uvloop.run)
