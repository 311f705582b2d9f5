"""What commands share: exit codes, running a coroutine, settings, addresses, errors of usage, and options.

Each function imports what it needs when it runs, so that `--help` and shell completion are fast.
"""

import asyncio
import inspect
import os
import re
import sys
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from enum import IntEnum
from functools import partial, wraps
from http.client import HTTPException
from importlib.metadata import version as version_of
from inspect import Parameter
from logging import NullHandler
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple, NoReturn, Self, TypeVar
from urllib.request import Request, urlopen

import orjson
import typer
from typer.core import TyperCommand, TyperGroup

from proxy.cli.running import DEFAULT_URL, url_of_commands

if TYPE_CHECKING:
    from rich.console import Console

    from proxy.cli.control import Control, ControlAddress
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
    FAILED = 1, "Failure. Standard error has the error message. Of `diff`: the rollouts differ."
    MISUSED = 2, "Invalid command line. Nothing was executed. Of `diff`: also failure."
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


def run(work: Coroutine[Any, Any, Any], *, on_failure: Exit = Exit.FAILED, on_value_error: Exit | None = None) -> Any:
    """Run a coroutine and return its result. Print expected errors and exit with the matching code."""
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
    except KeyboardInterrupt:
        raise typer.Exit(Exit.INTERRUPTED) from None
    except (OSError, ClientError) as error:
        _fail_with(error, on_failure)
    except _other_errors() as error:  # called only for an error: the imports take as long as a command
        from proxy.cli.settings import InvalidSettings

        code = on_value_error if on_value_error and isinstance(error, ValueError) else on_failure
        _fail_with(error, Exit.REFUSED if isinstance(error, InvalidSettings) else code)


def _other_errors() -> tuple[type[Exception], ...]:
    from storage.errors import StorageError

    return (ValueError, StorageError)


def _fail_with(error: Exception, code: Exit) -> NoReturn:
    from proxy.errors import failure_text

    fail(failure_text(error), code=code)


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


def address_of(url: str | None, store: str | None, api_key: str | None) -> "ControlAddress":
    """Return the control API at a URL, or of a store that this command opens; by default of the proxy that runs here."""
    from proxy.cli.control import ControlAddress

    if store is None:
        return ControlAddress(url or url_of_commands(), None, api_key)
    return ControlAddress(None, settings_of(None, store=store, listen="127.0.0.1:0"), None)


TIMEOUT_S: Final = 1
MAX_COMPLETIONS: Final = 200
# Shells insert completions unquoted, so IDs with shell metacharacters are not offered.
_SAFE: Final = re.compile(r"[\w./:@+-]+", re.ASCII)


def rollout_ids(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the newest rollout IDs with this prefix; none if the control API does not respond within TIMEOUT_S."""
    url, key = ctx.params.get("url") or url_of_commands(), ctx.params.get("api_key")
    if not url.startswith(("http://", "https://")):
        return []
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        request = Request(f"{url.rstrip('/')}/rollouts?limit={MAX_COMPLETIONS}", headers=headers)  # noqa: S310 - the scheme is checked above
        with urlopen(request, timeout=TIMEOUT_S) as response:  # noqa: S310
            names = [str(rollout["rollout_id"]) for rollout in orjson.loads(response.read())["rollouts"]]
    except (HTTPException, OSError, ValueError, KeyError, TypeError):  # HTTPException: of a URL that has a password
        return []
    return [name for name in names if name.startswith(incomplete) and _SAFE.fullmatch(name)]


ConfigFile = Annotated[Path | None, typer.Option("--config", help="YAML file with settings; see config.example.yaml.")]
ProxyUrl = Annotated[
    str | None,
    typer.Option(
        "--url",
        help=f"Control API of a running proxy; default the only one that this user runs here, or {DEFAULT_URL}.",
        envvar="TOKENTAPE_URL",
    ),
]
ProxyKey = Annotated[str | None, typer.Option("--api-key", help="Control API key.", envvar="TOKENTAPE_API_KEY")]
StoreUrl = Annotated[
    str | None,
    typer.Option(
        "--store", help="Read this store (embedded:PATH, redis://…) directly; no other process may have it open."
    ),
]
EngineKey = Annotated[str | None, typer.Option(help="Engine API key.", envvar="TOKENTAPE_ENGINE_API_KEY")]
EngineUrls = Annotated[list[str] | None, typer.Option("--engine", help="Base URL of an engine; repeatable.")]
Insecure = Annotated[bool, typer.Option("--insecure", help="Allow an address or a control API without API keys.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON to standard output.")]
RolloutId = Annotated[str, typer.Argument(help="Rollout ID.", autocompletion=rollout_ids)]
GroupId = Annotated[str, typer.Argument(help="Group ID.")]
PolicyName = Annotated[str, typer.Option("--policy", help="Name of the policy.")]
OptionalRolloutId = Annotated[
    str | None,
    typer.Argument(help="Follow only this rollout, starting with its last steps.", autocompletion=rollout_ids),
]


_F = TypeVar("_F", bound=Callable[..., Any])


class Answer(NamedTuple):
    """What a verb received, and what is printed of it without --json: lines and tables, and a note to standard error."""

    response: Any
    note: str = ""
    lines: Sequence[str] = ()
    tables: Mapping[str, Sequence[Mapping[str, Any]]] = {}
    code: Exit = Exit.DONE
    is_json: bool = False  # it has no other form


async def print_answer(
    address: "ControlAddress",
    body: "Callable[[Control], Awaitable[Answer]]",
    *,
    as_json: bool,
    out: "Console | None" = None,
) -> Exit:
    """Run a verb, print its answer, and return its exit code."""
    from rich.text import Text

    from proxy.cli.console import output, print_json, print_lines, print_note, print_table, visible
    from proxy.cli.control import connected
    from proxy.cli.render import table
    from tokentape.transport import LOG

    LOG.addHandler(NullHandler())  # commands print the warnings of responses
    async with connected(address) as control:
        answer = await body(control)
    if as_json or answer.is_json:
        print_json(answer.response)
        return answer.code
    out = output() if out is None else out
    print_lines(out, (Text(visible(line)) for line in answer.lines))
    for position, (noun, rows) in enumerate(answer.tables.items()):
        print_lines(out, [Text()] if position or answer.lines else [])
        made, hidden = table(noun, rows, out.width)
        print_table(out, made)
        if hidden:
            print_note(f"columns not shown: {', '.join(hidden)}", "dim")
    if isinstance(answer.response, dict) and "warning" in answer.response:
        print_note(answer.response["warning"], "yellow")
    if answer.note:
        print_note(answer.note)
    return answer.code


def _without_values(params: list[Any]) -> list[Any]:
    """Let the help show flags as `--json`; typer (0.29) shows `--json <bool>`, also for its own flags."""
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""
    return params


class _Command(TyperCommand):
    def get_params(self, ctx: Any) -> list[Any]:
        return _without_values(super().get_params(ctx))


class _Group(TyperGroup):
    def get_params(self, ctx: Any) -> list[Any]:
        return _without_values(super().get_params(ctx))


class Commands(typer.Typer):
    """A typer application that shows flags without values in its help."""

    def __init__(self, **options: Any) -> None:
        super().__init__(cls=_Group, **options)

    def command(self, name: str | None = None, **options: Any) -> Callable[[_F], _F]:
        """Return the decorator of a command."""
        return super().command(name, **{"cls": _Command, **options})

    def verb(self, name: str, *, store: bool = False, **options: Any) -> Callable[[_F], _F]:
        """Return the decorator of a command that is a coroutine function of the control API and of its own options.

        It returns an `Answer`. `--url`, `--api-key` and `--json` are added, with `store` also `--store`.
        """
        common = {"url": ProxyUrl, "store": StoreUrl, "api_key": ProxyKey, "as_json": AsJson}
        if not store:
            del common["store"]

        def register(body: _F) -> _F:
            @wraps(body)
            def command(
                url: str | None, api_key: str | None, *, as_json: bool, store: str | None = None, **given: Any
            ) -> None:
                code = run(print_answer(address_of(url, store, api_key), partial(body, **given), as_json=as_json))
                if code:
                    raise typer.Exit(code)

            _, *own = inspect.signature(body).parameters.values()
            own += (
                Parameter(each, Parameter.KEYWORD_ONLY, default=False if each == "as_json" else None, annotation=kind)
                for each, kind in common.items()
            )
            command.__signature__ = inspect.Signature(own)  # type: ignore[attr-defined]
            command.__annotations__ = {each.name: each.annotation for each in own}
            self.command(name, **options)(command)
            return body

        return register


def _print_version(requested: bool) -> None:  # noqa: FBT001 - typer calls it this way
    if requested:
        typer.echo(f"tokentape {version_of('tokentape')}")
        raise typer.Exit


def tokentape(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """An OpenAI-compatible recording reverse proxy for reinforcement learning."""
