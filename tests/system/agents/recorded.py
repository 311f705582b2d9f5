"""The recorded rollout of a program: its steps, its tree, and the audit of its export."""

import io
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson
from rich.console import Console

from proxy.cli.audit import Request, ServerAddress, audit
from proxy.cli.export import ExportRequest


@dataclass(frozen=True, slots=True)
class Recorded:
    """A rollout as the control API returns it, its exported sequences, and the IDs of all rollouts.

    `asides` are the steps of calls beside the main conversation, such as a title; `steps` and `rows` are without them.
    """

    steps: list[dict[str, Any]]
    tree: dict[str, Any]
    rows: list[dict[str, Any]]
    rollouts: list[str]
    asides: list[dict[str, Any]]

    @property
    def complete(self) -> list[dict[str, Any]]:
        """The steps of calls that succeeded."""
        return [step for step in self.steps if step["status"] == "complete"]

    @property
    def inexact(self) -> list[Any]:
        """The fidelity of successful steps that are not exact."""
        return [step["fidelity"] for step in self.complete if not step["fidelity"]["exact"]]

    @property
    def drift(self) -> str:
        """The kinds of drift, sorted."""
        return ", ".join(sorted({boundary["kind"] for boundary in self.tree["drift"]}))

    @property
    def refused(self) -> str:
        """The reasons of the calls that do not continue the ids of an earlier step, sorted."""
        facts = [step["extra"].get("continuation") or {} for step in self.complete]
        return ", ".join(sorted({fact["reason"] for fact in facts if "kept" not in fact and "reason" in fact}))

    @property
    def forks(self) -> str:
        """Why the rollout is more than one sequence; empty if it is one."""
        return "" if len(self.rows) == 1 else self.refused or self.drift or f"{len(self.rows)} conversations"

    @property
    def differing(self) -> int:
        """The number of prompts that were sent as ids and that differ from the template's rendering."""
        return sum("rendered" in (step["extra"].get("continuation") or {}) for step in self.complete)

    @property
    def why(self) -> str:
        """The texts at which prompts depart from the sampled ids."""
        return "\n".join(
            f"{boundary['kind']}: {boundary['expected_text']!r} / {boundary['found_text']!r}"
            for boundary in self.tree["drift"]
        )

    @property
    def is_linear(self) -> bool:
        """Whether each successful call of the main conversation extends the previous one."""
        main = {step["step_id"] for step in self.steps}
        parents = {at: node["parent"] for at, node in enumerate(self.tree["nodes"]) if node["step_id"] in main}
        return list(parents.values()) == [None, *parents][:-1]


async def recorded(http: aiohttp.ClientSession, url: str, rollout: str, aside: str | None = None) -> Recorded:
    """Fetch a rollout from the control API. Calls with `aside` in their request are not of the main conversation."""

    async def fetch(path: str) -> Any:
        async with http.get(url + path) as response:
            assert response.status == 200, await response.text()
            return orjson.loads(await response.read())

    steps = (await fetch(f"/rollouts/{rollout}/steps?limit=1000"))["steps"]
    rollouts = [listed["rollout_id"] for listed in (await fetch("/rollouts?limit=1000"))["rollouts"]]
    rows = (await fetch(f"/rollouts/{rollout}/export?format=sequences"))["rows"]
    asides = [step for step in steps if aside is not None and aside in orjson.dumps(step["request"]).decode()]
    beside = {step["step_id"] for step in asides}
    return Recorded(
        [step for step in steps if step["step_id"] not in beside],
        await fetch(f"/rollouts/{rollout}/tree"),
        [row for row in rows if row["spans"][0]["step_id"] not in beside],
        rollouts,
        asides,
    )


async def scores_as_recorded(source: str | Path, engine_url: str, rollout: str) -> dict[str, Any]:
    """Return the report of `tokentape audit`: the engine scores a rollout's sequences again, read from a proxy or a
    file.
    """
    export = ExportRequest("sequences", (rollout,), None, "exact", "ndjson")
    address = source if isinstance(source, Path) else ServerAddress(source)
    request = Request(
        source=address, export=export, engine=ServerAddress(engine_url), kind=None, model=None, tolerance=0.01,
        logprobs_mode=None, concurrency=2, journal=None, as_json=True,
    )  # fmt: skip
    with redirect_stdout(io.StringIO()) as output:
        await audit(request, Console(file=io.StringIO()), Console(file=io.StringIO()))
    return orjson.loads(output.getvalue())


def is_scored_alike(scored: dict[str, Any]) -> bool:
    """Whether every sequence scores as recorded. `strict` tools constrain sampling and leave nothing to compare."""
    return scored["verdicts"].keys() <= {"aligned", "nothing to compare"} and scored["tokens"] + scored["skipped"] > 0
