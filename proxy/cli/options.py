"""Options that several commands share, their class, and shell completion of rollout IDs.

`--help` and completion import this module, so it imports nothing slow.
"""

import re
from collections.abc import Callable
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar
from urllib.error import URLError
from urllib.request import Request, urlopen

import orjson
import typer
from typer.core import TyperCommand, TyperGroup

TIMEOUT_S: Final = 1
MAX_COMPLETIONS: Final = 200
# Shells insert completions unquoted, so IDs with shell metacharacters are not offered.
_SAFE: Final = re.compile(r"[\w./:@+-]+", re.ASCII)


def rollout_ids(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the newest rollout IDs with this prefix; none if the control API does not respond within TIMEOUT_S."""
    url, key = ctx.params.get("url"), ctx.params.get("api_key")
    if not isinstance(url, str) or not url.startswith(("http://", "https://")):
        return []
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        request = Request(f"{url.rstrip('/')}/rollouts?limit={MAX_COMPLETIONS}", headers=headers)  # noqa: S310 - the scheme is checked above
        with urlopen(request, timeout=TIMEOUT_S) as response:  # noqa: S310
            names = [str(rollout["rollout_id"]) for rollout in orjson.loads(response.read())["rollouts"]]
    except (URLError, OSError, ValueError, KeyError, TypeError):
        return []
    return [name for name in names if name.startswith(incomplete) and _SAFE.fullmatch(name)]


ConfigFile = Annotated[Path | None, typer.Option("--config", help="YAML file with settings; see config.example.yaml.")]
ProxyUrl = Annotated[str, typer.Option("--url", help="Control API of a running proxy.", envvar="TOKENTAPE_URL")]
ProxyKey = Annotated[str | None, typer.Option("--api-key", help="Control API key.", envvar="TOKENTAPE_API_KEY")]
StoreUrl = Annotated[
    str | None,
    typer.Option(
        "--store", help="Read this store (embedded:PATH, redis://…) directly; no other process may have it open."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON to standard output.")]
RolloutId = Annotated[str, typer.Argument(help="Rollout ID.", autocompletion=rollout_ids)]
GroupId = Annotated[str, typer.Argument(help="Group ID.")]
PolicyName = Annotated[str, typer.Option("--policy", help="Name of the policy.")]
OptionalRolloutId = Annotated[
    str | None,
    typer.Argument(help="Follow only this rollout, starting with its last steps.", autocompletion=rollout_ids),
]


_F = TypeVar("_F", bound=Callable[..., Any])


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


DEFAULT_URL = "http://127.0.0.1:8400"


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
