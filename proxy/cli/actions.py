"""`tokentape rollout`, `group`, `policy` and `open`: requests that change one thing, with a line that reports the result.

Every request is idempotent, so that a command whose response was lost can be repeated.
"""

import asyncio
import webbrowser
from collections.abc import Mapping
from http.client import NOT_FOUND
from typing import Any
from urllib.parse import quote

from proxy.cli.api_client import ControlClient, rollout_path
from proxy.cli.console import print_json, print_note
from proxy.cli.export import Refused, connected
from proxy.cli.render.tables import number
from proxy.cli.show import ControlAddress


async def finish_rollout(address: ControlAddress, rollout_id: str, body: Mapping[str, Any], *, as_json: bool) -> None:
    """Finish a rollout. Fields that are None are omitted. Raises OSError if the request fails."""
    finished = await _send(address, "POST", f"{rollout_path(rollout_id)}/finish", _present(body))
    replacement = finished.get("replaced_by")
    note = f"; replaced by {replacement['rollout_id']!r}" if replacement else ""
    _report(f"rollout {rollout_id!r}: {finished['status']}{_rewarded(finished)}{note}", finished, as_json=as_json)


async def reward_rollout(address: ControlAddress, rollout_id: str, body: Mapping[str, Any], *, as_json: bool) -> None:
    """Set rewards of a rollout, its steps or threads. Fields that are None are omitted. Raises OSError if the request fails."""
    rewarded = await _send(address, "PATCH", rollout_path(rollout_id), _present(body))
    steps = f", {len(rewarded['step_rewards'])} steps with a reward" if rewarded["step_rewards"] else ""
    count = len(rewarded.get("thread_rewards", ()))
    threads = f", {count} thread{'s' * (count > 1)} with a reward" if count else ""
    _report(
        f"rollout {rollout_id!r}: {rewarded['status']}{_rewarded(rewarded)}{steps}{threads}", rewarded, as_json=as_json
    )


async def delete_rollout(address: ControlAddress, rollout_id: str, *, as_json: bool) -> None:
    """Delete a rollout; report whether it existed, since the response does not. Raises OSError if the request fails."""
    path, exists = rollout_path(rollout_id), True
    try:
        await _send(address, "GET", path)
    except Refused as refused:
        exists = refused.status != NOT_FOUND  # a rollout that cannot be read can be deleted
    if exists:
        await _send(address, "DELETE", path)
    what = "deleted" if exists else "does not exist; nothing was deleted"
    _report(f"rollout {rollout_id!r}: {what}", {"rollout_id": rollout_id, "deleted": exists}, as_json=as_json)


async def requeue_group(address: ControlAddress, group_id: str, body: Mapping[str, Any], *, as_json: bool) -> None:
    """Put a group into the queue again. Fields that are None are omitted. Raises OSError if the request fails."""
    path = f"/groups/{quote(group_id, safe='')}/requeue"
    queued = await _send(address, "POST", path, _present(body))
    _report(f"group {group_id!r}: {queued['status']}", queued, as_json=as_json)


async def set_policy(address: ControlAddress, policy: str, body: Mapping[str, Any], *, as_json: bool) -> None:
    """Announce the version of a policy. Fields that are None are omitted. Raises OSError if the request fails."""
    announced = await _send(address, "PUT", _policy_path(policy), _present(body))
    epoch = f", epoch {announced['epoch']}" if announced.get("epoch") else ""
    if "warning" in announced and not as_json:
        print_note(announced["warning"], "yellow")
    _report(f"policy {policy!r}: version {announced['version']}{epoch}", announced, as_json=as_json)


async def pause_policy(
    address: ControlAddress, policy: str, body: Mapping[str, Any], drain_s: float, *, as_json: bool
) -> bool:
    """Pause the calls of a policy and return whether none is in flight. Raises OSError if the request fails."""
    paused = await _send(address, "POST", f"{_policy_path(policy)}/pause", body, drain_s=drain_s)
    state = "no calls in flight" if paused["drained"] else f"{paused['in_flight']} calls in flight"
    _report(f"policy {policy!r}: {_pause(paused['mode'])}, {state}", paused, as_json=as_json)
    return bool(paused["drained"])


async def resume_policy(address: ControlAddress, policy: str, *, as_json: bool) -> None:
    """Resume the calls of a policy. Raises OSError if the request fails."""
    resumed = await _send(address, "POST", f"{_policy_path(policy)}/resume", {})
    _report(f"policy {policy!r}: {_pause(resumed['mode'])}", resumed, as_json=as_json)


async def open_page(url: str, rollout_id: str | None, group_id: str | None) -> None:
    """Open the web page in the browser and print its address. Raises OSError if no proxy responds there."""
    async with connected(url, None, None) as (session, base_url):
        await ControlClient(session, base_url).get("/health")
    kind, name = ("rollout", rollout_id) if rollout_id is not None else ("group", group_id)
    page = f"{base_url}/ui" + ("" if name is None else f"#/{kind}/{quote(name, safe='')}")
    print(page, flush=True)  # noqa: T201 - the result
    if not await asyncio.to_thread(webbrowser.open, page):
        print_note("no browser found; open this address in one", "dim")


async def _send(address: ControlAddress, method: str, path: str, body: Any = None, **query: Any) -> Any:
    async with connected(address.url, address.settings, address.api_key) as (session, url):
        return await ControlClient(session, url).send(method, path, body, **query)


def _report(line: str, response: Any, *, as_json: bool) -> None:
    print_json(response) if as_json else print_note(line)


def _present(body: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if value is not None}


def _rewarded(rollout: Mapping[str, Any]) -> str:
    return "" if rollout["reward"] is None else f", reward {number(rollout['reward'])}"


def _pause(mode: str | None) -> str:
    return {None: "calls are sent", "wait": "new calls wait", "reject": "new calls are rejected"}.get(mode, str(mode))


def _policy_path(policy: str) -> str:
    return f"/policies/{quote(policy, safe='')}"
