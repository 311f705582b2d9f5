"""Options that several commands share, each with its sentence.

Holds annotated types, and what completes them: `--help` reads them, so nothing heavy is imported.
"""

import re
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Annotated, Final
from urllib.error import URLError
from urllib.request import Request, urlopen

import orjson
import typer


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
