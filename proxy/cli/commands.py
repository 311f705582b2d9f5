"""What commands of the control API do: one request or a few, and a table, a rendering or a line.

Every request that changes something is idempotent, so that a command can be repeated after its response was lost. Each
function raises OSError if a request fails.
"""

import asyncio
import webbrowser
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final
from urllib.parse import quote

from rich.console import Console

from proxy.cli.console import print_json, print_lines, print_note
from proxy.cli.control import Control, ControlAddress, Refused, connected
from proxy.cli.render import RolloutView, StepView, step_lines
from proxy.cli.runner import Answer
from proxy.clock import SystemClock
from tokentape.control_api import path_of

_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


async def listed(control: Control, noun: str, limit: int, **filters: str | int | None) -> Answer:
    """Return rollouts or groups, newest first."""
    page = await control.list_items(noun, limit, **filters)
    if not page[noun]:
        return Answer(page, f"no {noun}" + (" match the filters" if any(filters.values()) else ""))
    more = "" if page["cursor"] is None else f"more than {limit} {noun}; use --limit to list more"
    return Answer(page, more, tables={noun: page[noun]})


async def print_rollout(
    address: ControlAddress, out: Console, rollout_id: str, view: StepView, *, as_json: bool
) -> None:
    """Print a rollout."""
    async with connected(address) as control:
        tree = await control.tree(rollout_id)
        rollout = await control.rollout(rollout_id)  # after the tree, which computes the drift
        steps = [step async for step in control.steps(rollout_id)]
        branches: list[dict[str, Any]] = []
        with suppress(Refused):  # an older proxy
            branches = (await control.send("GET", path_of("rollouts", rollout_id, "branches")))["branches"]
        if view.logprobs and not as_json:
            view = replace(view, texts=await control.texts(steps))
    if as_json:
        print_json({"rollout": rollout, "tree": tree, "steps": steps, "branches": branches})
        return
    print_lines(out, RolloutView(rollout, tree, steps, view, branches).lines())


async def print_step(
    address: ControlAddress, out: Console, rollout_id: str, step_ref: str, view: StepView, *, as_json: bool
) -> None:
    """Print one step, selected by ID or index."""
    async with connected(address) as control:
        step = await _step(control, rollout_id, step_ref)
        if view.logprobs and not as_json:
            view = replace(view, texts=await control.texts([step]))
    if as_json:
        print_json(step)
        return
    print_lines(out, step_lines(step, view))


async def _step(control: Control, rollout_id: str, step_ref: str) -> Any:
    if not step_ref.isdecimal():
        return await control.step(rollout_id, step_ref)
    async for step in control.steps(rollout_id, after=int(step_ref) - 1 if int(step_ref) else None):
        return step
    raise OSError(f"rollout {rollout_id!r} has no step with index {step_ref}")


def ago(duration: str) -> int:
    """Return the unix time in seconds of `90s`, `15m`, `2h` or `3d` ago. Raises ValueError."""
    return max(int(SystemClock().now()) - seconds_of(duration), 0)


def seconds_of(duration: str) -> int:
    """Return the seconds of `90s`, `15m`, `2h` or `3d`. Raises ValueError."""
    number, unit = duration[:-1], duration[-1:]
    if unit not in _UNITS or not number.isdecimal():
        raise ValueError(f"invalid duration {duration!r}; use e.g. 90s, 15m, 2h or 3d")
    return int(number) * _UNITS[unit]


async def open_page(address: ControlAddress, rollout_id: str | None, group_id: str | None) -> None:
    """Open the web page in the browser and print its address."""
    async with connected(address) as control:
        await control.send("GET", "/health")
    kind, name = ("rollout", rollout_id) if rollout_id is not None else ("group", group_id)
    page = f"{str(address.url).rstrip('/')}/ui" + ("" if name is None else f"#/{kind}/{quote(name, safe='')}")
    print(page, flush=True)  # noqa: T201 - the result
    if not await asyncio.to_thread(webbrowser.open, page):
        print_note("no browser found; open this address in one", "dim")
