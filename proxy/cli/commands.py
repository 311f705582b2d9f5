"""What commands of the control API do: one request or a few, and a table, a rendering or a line.

Every request that changes something is idempotent, so that a command can be repeated after its response was lost. Each
function raises OSError if a request fails.
"""

import asyncio
import webbrowser
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from http.client import NOT_FOUND
from logging import NullHandler
from typing import Any, Final
from urllib.parse import quote

from rich.console import Console
from rich.text import Text

from proxy.cli.console import print_json, print_lines, print_note, print_table, visible
from proxy.cli.control import Control, ControlAddress, Refused, connected
from proxy.cli.render import RolloutView, StepView, number, step_lines, table
from proxy.clock import SystemClock
from tokentape.control_api import path_of
from tokentape.transport import LOG

_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_MODES: Final = {None: "calls are sent", "wait": "new calls wait", "reject": "new calls are rejected"}


async def read(
    address: ControlAddress,
    request: Callable[[Control], Awaitable[Any]],
    print_response: Callable[[Any], None],
    *,
    as_json: bool,
) -> Any:
    """Send a request, print its response by this function or as JSON, and return it."""
    LOG.addHandler(NullHandler())  # commands print the warnings of responses
    async with connected(address) as control:
        response = await request(control)
    if as_json:
        print_json(response)
    else:
        print_response(response)
    return response


async def change(
    address: ControlAddress,
    request: Callable[[Control], Awaitable[Any]],
    line: Callable[[Mapping[str, Any]], str],
    *,
    as_json: bool,
) -> Any:
    """Send a request that changes something, print the line for its response, and return it."""

    def print_line(response: Mapping[str, Any]) -> None:
        if "warning" in response:
            print_note(response["warning"], "yellow")
        print_note(line(response))

    return await read(address, request, print_line, as_json=as_json)


async def print_list(
    address: ControlAddress, out: Console, noun: str, limit: int, *, as_json: bool, **filters: str | int | None
) -> None:
    """Print rollouts or groups, newest first."""

    def print_page(page: Mapping[str, Any]) -> None:
        if not page[noun]:
            print_note(f"no {noun}" + (" match the filters" if any(filters.values()) else ""))
            return
        print_rows(out, noun, page)
        if page["cursor"] is not None:
            print_note(f"more than {limit} {noun}; use --limit to list more", "dim")

    await read(address, lambda control: control.list_items(noun, limit, **filters), print_page, as_json=as_json)


def print_rows(out: Console, noun: str, response: Mapping[str, Any]) -> None:
    """Print the objects in a response as a table that fits the console."""
    made, hidden = table(noun, response[noun], out.width)
    print_table(out, made)
    if hidden:
        print_note(f"columns not shown: {', '.join(hidden)}", "dim")


def print_group(out: Console, group: Mapping[str, Any]) -> None:
    """Print a group and its rollouts."""
    print_rows(out, "groups", {"groups": [group]})
    print_lines(out, [Text()])
    print_rows(out, "members", {"members": group["rollouts"]})


def print_mismatch(out: Console, found: Mapping[str, Any]) -> None:
    """Print the verdicts of a batch's mismatch, and the means of its tokens by what is known of them."""
    for verdict in found["verdicts"]:
        of = "" if verdict["of"] is None else f" ({verdict['of']})"
        print_lines(out, [Text(visible(f"{verdict['verdict']}{of}: {verdict['why']}"))])
    sequences = found["sequences"]
    if sequences["rows"]:
        ratios = f"log of the ratio: mean {sequences['mean']:.3g}, absolute {sequences['abs_mean']:.3g}"
        print_lines(out, [Text(f"{sequences['rows']} rows, {ratios}")])
    print_lines(out, [Text()])
    rows = [
        {"dimension": dimension, "value": value, **means}
        for dimension, cells in found["cells"].items()
        for value, means in sorted(cells.items())
    ]
    print_rows(out, "cells", {"cells": rows})


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


async def delete(control: Control, rollout_id: str) -> dict[str, Any]:
    """Delete a rollout; report whether it existed, since the response does not."""
    exists = True
    try:
        await control.rollout(rollout_id)
    except Refused as refused:
        exists = refused.status != NOT_FOUND  # a rollout that cannot be read can be deleted
    if exists:
        await control.delete_rollout(rollout_id)
    return {"rollout_id": rollout_id, "deleted": exists}


def deletion_line(found: Mapping[str, Any]) -> str:
    """Return whether a rollout was deleted."""
    result = "deleted" if found["deleted"] else "does not exist; nothing was deleted"
    return f"rollout {found['rollout_id']!r}: {result}"


def rollout_line(rollout: Mapping[str, Any]) -> str:
    """Return the status and the reward of a rollout, and what replaces it."""
    reward = "" if rollout["reward"] is None else f", reward {number(rollout['reward'])}"
    replacement = rollout.get("replaced_by")
    replaced = f"; replaced by {replacement['rollout_id']!r}" if replacement else ""
    return f"rollout {rollout['rollout_id']!r}: {rollout['status']}{reward}{replaced}"


def branches_line(group: Mapping[str, Any]) -> str:
    """Return the rollouts of a group of branches."""
    return f"group {group['group_id']!r}: {', '.join(repr(rollout['rollout_id']) for rollout in group['rollouts'])}"


def rewards_line(rollout: Mapping[str, Any]) -> str:
    """Return the status of a rollout, and what has rewards."""
    steps = f", {len(rollout['step_rewards'])} steps with a reward" if rollout["step_rewards"] else ""
    count = len(rollout.get("thread_rewards", ()))
    threads = f", {count} thread{'s' * (count > 1)} with a reward" if count else ""
    return f"{rollout_line(rollout)}{steps}{threads}"


def mode_line(policy: Mapping[str, Any]) -> str:
    """Return what happens to the calls of a policy, and after a pause how many are in flight."""
    mode = _MODES.get(policy["mode"], str(policy["mode"]))
    if policy.get("held"):
        mode += f", {', '.join(policy['held'])} held"
    if "drained" not in policy:
        return mode
    return f"{mode}, " + ("no calls in flight" if policy["drained"] else f"{policy['in_flight']} calls in flight")


async def open_page(url: str, rollout_id: str | None, group_id: str | None) -> None:
    """Open the web page in the browser and print its address."""
    async with connected(ControlAddress(url, None, None)) as control:
        await control.send("GET", "/health")
    kind, name = ("rollout", rollout_id) if rollout_id is not None else ("group", group_id)
    page = f"{control.url}/ui" + ("" if name is None else f"#/{kind}/{quote(name, safe='')}")
    print(page, flush=True)  # noqa: T201 - the result
    if not await asyncio.to_thread(webbrowser.open, page):
        print_note("no browser found; open this address in one", "dim")
