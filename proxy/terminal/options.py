"""Options that several commands share, each with its sentence.

Holds annotated types, and what completes them: `--help` reads them, so nothing heavy is imported.
"""

from pathlib import Path
from typing import Annotated

import typer


def completed(ctx: typer.Context, incomplete: str) -> list[str]:
    """The ids of rollouts that begin so."""
    from proxy.terminal.completion import rollout_ids  # noqa: PLC0415 - keeps `--help` quick

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
