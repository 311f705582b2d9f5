"""`tokentape list` and `tokentape show`: what there is, fetched and printed.

Holds what the two commands do. How things look is in `tables`, `rollout` and `step`.
"""

from dataclasses import dataclass, replace
from typing import Any, Final

from rich.console import Console

from proxy.cli.api_client import ControlClient, path_of
from proxy.cli.console import print_json, print_lines, print_table, remark
from proxy.cli.export import connected
from proxy.cli.render.rollout import Picture, StepView, alone
from proxy.cli.render.tables import groups_table, rollouts_table
from proxy.clock import SystemClock
from proxy.config.settings import Settings

_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


@dataclass(frozen=True, slots=True)
class ControlAddress:
    """Whose rollouts: those of a running proxy, or, with settings, of a store that nobody else has open."""

    url: str | None
    settings: Settings | None
    api_key: str | None


async def print_list(
    place: ControlAddress, out: Console, noun: str, limit: int, *, as_json: bool, **filters: str | int | None
) -> None:
    """Print rollouts or groups, newest first. Raises OSError with a sentence."""
    async with connected(place.url, place.settings, place.api_key) as (session, url):
        found, cursor = await ControlClient(session, url).listed(noun, limit, **filters)
    if as_json:
        print_json({noun: found, "cursor": cursor})
        return
    if not found:
        remark(f"there are no {noun} here" + (" that are so" if any(filters.values()) else ""))
        return
    made = rollouts_table if noun == "rollouts" else groups_table
    table, hidden = made(found, out.width, SystemClock().now_ms())
    print_table(out, table)
    if hidden:
        remark(f"no room for: {', '.join(hidden)}", "dim")
    if cursor is not None:
        remark(f"there are more than {limit}: --limit", "dim")


async def print_rollout(place: ControlAddress, out: Console, rollout_id: str, view: StepView, *, as_json: bool) -> None:
    """Print a rollout. Raises OSError with a sentence."""
    async with connected(place.url, place.settings, place.api_key) as (session, url):
        client = ControlClient(session, url)
        tree = await client.get(f"{path_of(rollout_id)}/tree")
        rollout = await client.get(path_of(rollout_id))  # after its tree, which completes what is known of its drift
        steps = [step async for step in client.steps(rollout_id)]
        view = await _told_texts(client, steps, view, as_json=as_json)
    if as_json:
        print_json({"rollout": rollout, "tree": tree, "steps": steps})
        return
    print_lines(out, Picture(rollout, tree, steps, view).lines(SystemClock().now_ms()))


async def print_step(
    place: ControlAddress, out: Console, rollout_id: str, named: str, view: StepView, *, as_json: bool
) -> None:
    """Print one step, named by its id or its index. Raises OSError with a sentence."""
    async with connected(place.url, place.settings, place.api_key) as (session, url):
        client = ControlClient(session, url)
        step = await _step(client, rollout_id, named)
        view = await _told_texts(client, [step], view, as_json=as_json)
    if as_json:
        print_json(step)
        return
    print_lines(out, alone(step, view))


async def _told_texts(client: ControlClient, steps: list[Any], view: StepView, *, as_json: bool) -> StepView:
    """The view with the texts of tokens, where they are wanted."""
    return replace(view, texts=await client.texts(steps)) if view.logprobs and not as_json else view


def ago(said: str) -> int:
    """The unix second that was `90s`, `15m`, `2h` or `3d` ago. Raises ValueError."""
    number, unit = said[:-1], said[-1:]
    if unit not in _UNITS or not number.isdecimal():
        raise ValueError(f"{said!r} is no length of time such as 90s, 15m, 2h or 3d")
    return max(int(SystemClock().now()) - int(number) * _UNITS[unit], 0)


async def _step(client: ControlClient, rollout_id: str, named: str) -> Any:
    if not named.isdecimal():
        return await client.get(f"{path_of(rollout_id)}/steps/{named}")
    async for step in client.steps(rollout_id, int(named)):
        return step
    raise OSError(f"the rollout {rollout_id!r} has no step with the index {named}")
