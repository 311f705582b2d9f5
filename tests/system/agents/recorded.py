"""What a proxy recorded of a program: its steps, their tree, and whether the engine scores it the same.

Holds the reading of the control API and the audit of what is exported. The table is `seen`.
"""

import io
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson
from rich.console import Console

from proxy.audit.command import Place, Request, audit
from proxy.download import Wanted


@dataclass(frozen=True, slots=True)
class Recorded:
    """A rollout as the control API tells it, and the names of all rollouts."""

    steps: list[dict[str, Any]]
    tree: dict[str, Any]
    rollouts: list[str]

    @property
    def complete(self) -> list[dict[str, Any]]:
        """The steps of calls that were answered."""
        return [step for step in self.steps if step["status"] == "complete"]

    @property
    def inexact(self) -> list[Any]:
        """Why steps of answered calls are not exact."""
        return [step["fidelity"] for step in self.complete if not step["fidelity"]["exact"]]

    @property
    def drift(self) -> str:
        """The kinds of drift, in the order of the alphabet."""
        return ", ".join(sorted({one["kind"] for one in self.tree["drift"]}))

    @property
    def why(self) -> str:
        """Where prompts part from what was sampled."""
        return "\n".join(
            f"{one['kind']}: {one['expected_text']!r} / {one['found_text']!r}" for one in self.tree["drift"]
        )

    @property
    def is_linear(self) -> bool:
        """Whether each answered call goes on from the one before it."""
        parents = [node["parent"] for node in self.tree["nodes"]]
        return parents == [None, *range(len(parents) - 1)]


async def recorded(http: aiohttp.ClientSession, url: str, rollout: str) -> Recorded:
    """What became of a rollout."""

    async def told(path: str) -> Any:
        async with http.get(url + path) as answer:
            assert 200 == answer.status, await answer.text()
            return orjson.loads(await answer.read())

    steps = (await told(f"/rollouts/{rollout}/steps?limit=1000"))["steps"]
    every = [each["rollout_id"] for each in (await told("/rollouts?limit=1000"))["rollouts"]]
    return Recorded(steps, await told(f"/rollouts/{rollout}/tree"), every)


async def scores_as_recorded(source: str | Path, engine_url: str, rollout: str) -> dict[str, Any]:
    """What `tokentape audit` says of a rollout's sequences, which the engine scores once more; of a proxy's or a file's."""
    wanted = Wanted("sequences", (rollout,), None, "exact", "ndjson")
    place = source if isinstance(source, Path) else Place(source)
    request = Request(
        source=place, wanted=wanted, engine=Place(engine_url), kind=None, model=None, tolerance=0.01,
        logprobs_mode=None, concurrency=2, journal=None, as_json=True,
    )  # fmt: skip
    with redirect_stdout(io.StringIO()) as said:
        await audit(request, Console(file=io.StringIO()), Console(file=io.StringIO()))
    return orjson.loads(said.getvalue())


def is_scored_alike(scored: dict[str, Any]) -> bool:
    """Whether every sequence scores as it was recorded; tools that are `strict` constrain it, and leave nothing to compare."""
    return scored["verdicts"].keys() <= {"aligned", "nothing to compare"} and scored["tokens"] + scored["left_out"] > 0
