"""What `list`, `show`, `rollout`, `group`, `policy`, `engines` and `open` do: one request or a few, and a table or a line.

Every request that changes something is idempotent, so that a command can be repeated after its response was lost. Each
function raises OSError if a request fails.
"""

import asyncio
import webbrowser
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from http.client import NOT_FOUND
from logging import NullHandler
from typing import Any, Final
from urllib.parse import quote

from rich.console import Console
from rich.table import Table
from rich.text import Text

from proxy.cli.console import print_json, print_lines, print_note, print_table
from proxy.cli.control import Control, ControlAddress, Refused, connected
from proxy.cli.render import RolloutView, StepView, step_lines
from proxy.cli.tables import engines_table, groups_table, members_table, number, policies_table, rollouts_table
from proxy.clock import SystemClock
from tokentape.transport import LOG

_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
Request = Callable[[Control], Awaitable[Any]]


async def print_list(
    address: ControlAddress, out: Console, noun: str, limit: int, *, as_json: bool, **filters: str | int | None
) -> None:
    """Print rollouts or groups, newest first."""
    async with connected(address) as control:
        found, cursor = await control.list_items(noun, limit, **filters)
    if as_json:
        print_json({noun: found, "cursor": cursor})
        return
    if not found:
        print_note(f"no {noun}" + (" match the filters" if any(filters.values()) else ""))
        return
    build = rollouts_table if noun == "rollouts" else groups_table
    _print_table(out, *build(found, out.width, SystemClock().now_ms()))
    if cursor is not None:
        print_note(f"more than {limit} {noun}; use --limit to list more", "dim")


async def print_group(address: ControlAddress, out: Console, group_id: str, *, as_json: bool) -> None:
    """Print a group and its rollouts."""
    group = await _requested(address, lambda control: control.group(group_id), as_json=as_json)
    if not as_json:
        _print_table(out, *groups_table([group], out.width, SystemClock().now_ms()))
        print_lines(out, [Text()])
        _print_table(out, *members_table(group["rollouts"], out.width))


async def print_policies(address: ControlAddress, out: Console, *, as_json: bool) -> None:
    """Print all policies."""
    found = await _requested(address, Control.policies, as_json=as_json)
    if not as_json:
        _print_table(out, *policies_table(found["policies"], out.width))


async def print_engines(address: ControlAddress, out: Console, *, as_json: bool) -> None:
    """Print the engines, which are checked for it."""
    found = await _requested(address, lambda control: control.send("GET", "/engines"), as_json=as_json)
    if not as_json:
        _print_table(out, *engines_table(found["engines"], out.width))


async def _requested(address: ControlAddress, request: Request, *, as_json: bool) -> Any:
    """Return the response to a request; with `as_json`, print it."""
    LOG.addHandler(NullHandler())  # commands print the warnings of responses
    async with connected(address) as control:
        response = await request(control)
    if as_json:
        print_json(response)
    return response


def _print_table(out: Console, table: Table, hidden: list[str]) -> None:
    print_table(out, table)
    if hidden:
        print_note(f"columns not shown: {', '.join(hidden)}", "dim")


async def print_rollout(
    address: ControlAddress, out: Console, rollout_id: str, view: StepView, *, as_json: bool
) -> None:
    """Print a rollout."""
    async with connected(address) as control:
        tree = await control.tree(rollout_id)
        rollout = await control.rollout(rollout_id)  # after the tree, which computes the drift
        steps = [step async for step in control.steps(rollout_id)]
        if view.logprobs and not as_json:
            view = replace(view, texts=await control.texts(steps))
    if as_json:
        print_json({"rollout": rollout, "tree": tree, "steps": steps})
        return
    print_lines(out, RolloutView(rollout, tree, steps, view).lines(SystemClock().now_ms()))


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


async def finish_rollout(address: ControlAddress, rollout_id: str, body: Mapping[str, Any], *, as_json: bool) -> None:
    """Finish a rollout. Fields that are None are omitted."""

    def line(finished: Mapping[str, Any]) -> str:
        replacement = finished.get("replaced_by")
        return _rewarded(finished) + (f"; replaced by {replacement['rollout_id']!r}" if replacement else "")

    await _change(address, lambda control: control.finish_rollout(rollout_id, **body), line, as_json=as_json)


async def reward_rollout(address: ControlAddress, rollout_id: str, body: Mapping[str, Any], *, as_json: bool) -> None:
    """Set rewards of a rollout, its steps or threads. Fields that are None are omitted."""

    def line(rewarded: Mapping[str, Any]) -> str:
        steps = f", {len(rewarded['step_rewards'])} steps with a reward" if rewarded["step_rewards"] else ""
        count = len(rewarded.get("thread_rewards", ()))
        threads = f", {count} thread{'s' * (count > 1)} with a reward" if count else ""
        return f"{_rewarded(rewarded)}{steps}{threads}"

    await _change(address, lambda control: control.patch_rollout(rollout_id, **body), line, as_json=as_json)


async def delete_rollout(address: ControlAddress, rollout_id: str, *, as_json: bool) -> None:
    """Delete a rollout; report whether it existed, since the response does not."""

    async def delete(control: Control) -> Any:
        exists = True
        try:
            await control.rollout(rollout_id)
        except Refused as refused:
            exists = refused.status != NOT_FOUND  # a rollout that cannot be read can be deleted
        if exists:
            await control.delete_rollout(rollout_id)
        return {"rollout_id": rollout_id, "deleted": exists}

    def line(found: Mapping[str, Any]) -> str:
        return f"rollout {rollout_id!r}: {'deleted' if found['deleted'] else 'does not exist; nothing was deleted'}"

    await _change(address, delete, line, as_json=as_json)


async def requeue_group(address: ControlAddress, group_id: str, body: Mapping[str, Any], *, as_json: bool) -> None:
    """Put a group into the queue again. Fields that are None are omitted."""
    await _change(
        address,
        lambda control: control.requeue_group(group_id, **body),
        lambda queued: f"group {group_id!r}: {queued['status']}",
        as_json=as_json,
    )


async def set_policy(address: ControlAddress, policy: str, body: Mapping[str, Any], *, as_json: bool) -> None:
    """Announce the version of a policy. Fields that are None are omitted."""

    def line(announced: Mapping[str, Any]) -> str:
        epoch = f", epoch {announced['epoch']}" if announced.get("epoch") else ""
        return f"policy {policy!r}: version {announced['version']}{epoch}"

    await _change(address, lambda control: control.put_policy(policy=policy, **body), line, as_json=as_json)


async def pause_policy(
    address: ControlAddress, policy: str, body: Mapping[str, Any], drain_s: float, *, as_json: bool
) -> bool:
    """Pause the calls of a policy and return whether none is in flight."""

    def line(paused: Mapping[str, Any]) -> str:
        state = "no calls in flight" if paused["drained"] else f"{paused['in_flight']} calls in flight"
        return f"policy {policy!r}: {_mode(paused)}, {state}"

    paused = await _change(
        address, lambda control: control.pause(policy=policy, drain_s=drain_s, **body), line, as_json=as_json
    )
    return bool(paused["drained"])


async def resume_policy(address: ControlAddress, policy: str, *, as_json: bool) -> None:
    """Resume the calls of a policy."""
    await _change(
        address,
        lambda control: control.resume(policy=policy),
        lambda resumed: f"policy {policy!r}: {_mode(resumed)}",
        as_json=as_json,
    )


async def _change(
    address: ControlAddress, request: Request, line: Callable[[Mapping[str, Any]], str], *, as_json: bool
) -> Any:
    """Send a request that changes something, and print the line for its response; return the response."""
    response = await _requested(address, request, as_json=as_json)
    if not as_json:
        if "warning" in response:
            print_note(response["warning"], "yellow")
        print_note(line(response))
    return response


def _rewarded(rollout: Mapping[str, Any]) -> str:
    reward = "" if rollout["reward"] is None else f", reward {number(rollout['reward'])}"
    return f"rollout {rollout['rollout_id']!r}: {rollout['status']}{reward}"


def _mode(policy: Mapping[str, Any]) -> str:
    mode = policy["mode"]
    return {None: "calls are sent", "wait": "new calls wait", "reject": "new calls are rejected"}.get(mode, str(mode))


async def open_page(url: str, rollout_id: str | None, group_id: str | None) -> None:
    """Open the web page in the browser and print its address."""
    async with connected(ControlAddress(url, None, None)) as control:
        await control.send("GET", "/health")
    kind, name = ("rollout", rollout_id) if rollout_id is not None else ("group", group_id)
    page = f"{control.url}/ui" + ("" if name is None else f"#/{kind}/{quote(name, safe='')}")
    print(page, flush=True)  # noqa: T201 - the result
    if not await asyncio.to_thread(webbrowser.open, page):
        print_note("no browser found; open this address in one", "dim")
