"""Commands that fetch rollouts, groups, steps, policies and engines and print them."""

from dataclasses import dataclass, replace
from typing import Any, Final
from urllib.parse import quote

from rich.console import Console
from rich.table import Table
from rich.text import Text

from proxy.cli.api_client import ControlClient, rollout_path
from proxy.cli.console import print_json, print_lines, print_note, print_table
from proxy.cli.export import connected
from proxy.cli.render.rollout import RolloutView, StepView, step_lines
from proxy.cli.render.tables import engines_table, groups_table, members_table, policies_table, rollouts_table
from proxy.clock import SystemClock
from proxy.config.settings import Settings

_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


@dataclass(frozen=True, slots=True)
class ControlAddress:
    """The control API of a running proxy, or settings to open a store with."""

    url: str | None
    settings: Settings | None
    api_key: str | None


async def print_list(
    address: ControlAddress, out: Console, noun: str, limit: int, *, as_json: bool, **filters: str | int | None
) -> None:
    """Print rollouts or groups, newest first. Raises OSError if the request fails."""
    async with connected(address.url, address.settings, address.api_key) as (session, url):
        found, cursor = await ControlClient(session, url).list_items(noun, limit, **filters)
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
    """Print a group and its rollouts. Raises OSError if the request fails."""
    group = await _fetched(address, f"/groups/{quote(group_id, safe='')}")
    if as_json:
        print_json(group)
        return
    _print_table(out, *groups_table([group], out.width, SystemClock().now_ms()))
    print_lines(out, [Text()])
    _print_table(out, *members_table(group["rollouts"], out.width))


async def print_policies(address: ControlAddress, out: Console, *, as_json: bool) -> None:
    """Print all policies. Raises OSError if the request fails."""
    found = await _fetched(address, "/policies")
    if as_json:
        print_json(found)
        return
    _print_table(out, *policies_table(found["policies"], out.width))


async def print_engines(address: ControlAddress, out: Console, *, as_json: bool) -> None:
    """Print the engines, which are checked for it. Raises OSError if the request fails."""
    found = await _fetched(address, "/engines")
    if as_json:
        print_json(found)
        return
    _print_table(out, *engines_table(found["engines"], out.width))


async def _fetched(address: ControlAddress, path: str) -> Any:
    async with connected(address.url, address.settings, address.api_key) as (session, url):
        return await ControlClient(session, url).get(path)


def _print_table(out: Console, table: Table, hidden: list[str]) -> None:
    print_table(out, table)
    if hidden:
        print_note(f"columns not shown: {', '.join(hidden)}", "dim")


async def print_rollout(
    address: ControlAddress, out: Console, rollout_id: str, view: StepView, *, as_json: bool
) -> None:
    """Print a rollout. Raises OSError if a request fails."""
    async with connected(address.url, address.settings, address.api_key) as (session, url):
        client = ControlClient(session, url)
        tree = await client.get(f"{rollout_path(rollout_id)}/tree")
        rollout = await client.get(rollout_path(rollout_id))  # after the tree, which computes the drift
        steps = [step async for step in client.steps(rollout_id)]
        view = await _with_texts(client, steps, view, as_json=as_json)
    if as_json:
        print_json({"rollout": rollout, "tree": tree, "steps": steps})
        return
    print_lines(out, RolloutView(rollout, tree, steps, view).lines(SystemClock().now_ms()))


async def print_step(
    address: ControlAddress, out: Console, rollout_id: str, step_ref: str, view: StepView, *, as_json: bool
) -> None:
    """Print one step, selected by ID or index. Raises OSError if a request fails."""
    async with connected(address.url, address.settings, address.api_key) as (session, url):
        client = ControlClient(session, url)
        step = await _step(client, rollout_id, step_ref)
        view = await _with_texts(client, [step], view, as_json=as_json)
    if as_json:
        print_json(step)
        return
    print_lines(out, step_lines(step, view))


async def _with_texts(client: ControlClient, steps: list[Any], view: StepView, *, as_json: bool) -> StepView:
    return replace(view, texts=await client.texts(steps)) if view.logprobs and not as_json else view


def ago(duration: str) -> int:
    """Return the unix time in seconds of `90s`, `15m`, `2h` or `3d` ago. Raises ValueError."""
    return max(int(SystemClock().now()) - seconds_of(duration), 0)


def seconds_of(duration: str) -> int:
    """Return the seconds of `90s`, `15m`, `2h` or `3d`. Raises ValueError."""
    number, unit = duration[:-1], duration[-1:]
    if unit not in _UNITS or not number.isdecimal():
        raise ValueError(f"invalid duration {duration!r}; use e.g. 90s, 15m, 2h or 3d")
    return int(number) * _UNITS[unit]


async def _step(client: ControlClient, rollout_id: str, step_ref: str) -> Any:
    if not step_ref.isdecimal():
        return await client.get(f"{rollout_path(rollout_id)}/steps/{step_ref}")
    async for step in client.steps(rollout_id, int(step_ref)):
        return step
    raise OSError(f"rollout {rollout_id!r} has no step with index {step_ref}")
