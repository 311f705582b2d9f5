"""One function a route of the control face: what is asked of it.

Holds paths, bodies and queries, written once for both clients; not the sending. What is None is not said.
"""

from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import quote
from uuid import uuid4

from proxy.client.asking import Ask, ClientError

_LARGEST: Final = 3.4028234663852886e38  # of float32, as trainers keep rewards
NDJSON: Final = {"Accept": "application/x-ndjson"}


def open_rollout(rollout_id: str | None, terms: Mapping[str, Any]) -> Ask:
    """`POST /rollouts`. The id is made here where none is given, so that asking again opens nothing twice."""
    return Ask("POST", "/rollouts", said({"rollout_id": rollout_id or uuid4().hex, **terms}))


def rollout(rollout_id: str, method: str = "GET") -> Ask:
    """`GET` or `DELETE /rollouts/{id}`."""
    return Ask(method, f"/rollouts/{named(rollout_id)}")


def patch_rollout(rollout_id: str, changes: Mapping[str, Any]) -> Ask:
    """`PATCH /rollouts/{id}`. Raises ClientError for a reward or advantage that the proxy would not keep."""
    for name in ("reward", "step_rewards", "advantages"):
        check_signal(name, changes.get(name))
    return Ask("PATCH", f"/rollouts/{named(rollout_id)}", said(changes))


def finish_rollout(rollout_id: str, body: Mapping[str, Any]) -> Ask:
    """`POST /rollouts/{id}/finish`. Raises ClientError for a reward that the proxy would not keep."""
    check_signal("reward", body.get("reward"))
    return Ask("POST", f"/rollouts/{named(rollout_id)}/finish", said(body))


def step(rollout_id: str, step_id: str) -> Ask:
    """`GET /rollouts/{id}/steps/{step_id}`."""
    return Ask("GET", f"/rollouts/{named(rollout_id)}/steps/{named(step_id)}")


def steps(rollout_id: str, after: int | None, limit: int) -> Ask:
    """`GET /rollouts/{id}/steps`, one page."""
    return Ask("GET", f"/rollouts/{named(rollout_id)}/steps", query=query(after=after, limit=limit))


def tree(rollout_id: str) -> Ask:
    """`GET /rollouts/{id}/tree`."""
    return Ask("GET", f"/rollouts/{named(rollout_id)}/tree")


def listing(noun: str, filters: Mapping[str, Any], cursor: str | None) -> Ask:
    """`GET /rollouts` or `GET /groups`, one page."""
    return Ask("GET", f"/{noun}", query=query(**filters, cursor=cursor))


def export(of: str, options: Mapping[str, Any]) -> Ask:
    """`GET {of}/export`, as lines."""
    return Ask("GET", f"{of}/export", query=query(**options), headers=NDJSON)


def open_group(group_id: str | None, terms: Mapping[str, Any]) -> Ask:
    """`POST /groups`. The id is made here where none is given, so that asking again opens nothing twice."""
    return Ask("POST", "/groups", said({"group_id": group_id or uuid4().hex, **terms}))


def group(group_id: str, method: str = "GET") -> Ask:
    """`GET` or `DELETE /groups/{id}`."""
    return Ask(method, f"/groups/{named(group_id)}")


def claim(wanted: Mapping[str, Any]) -> Ask:
    """`POST /batches/claim`, which may wait for `wait_s`."""
    return Ask("POST", "/batches/claim", said(wanted), wait_s=wanted.get("wait_s") or 0.0)


def settle(batch_id: str, verb: str, body: Mapping[str, Any]) -> Ask:
    """`POST /batches/{id}/{verb}`: ack, release or extend."""
    return Ask("POST", f"/batches/{named(batch_id)}/{verb}", said(body))


def put_policy(version: str | int) -> Ask:
    """`PUT /policy`."""
    return Ask("PUT", "/policy", {"version": version})


def pause(mode: str, drain_s: float) -> Ask:
    """`POST /policy/pause`, which may wait for `drain_s`."""
    return Ask("POST", "/policy/pause", {"mode": mode}, query(drain_s=drain_s or None), wait_s=drain_s)


def check_signal(name: str, given: Any) -> None:
    """Raise ClientError unless every number of a reward or advantage is finite and within the range of float32.

    Checked before it is sent: where NaN is written to JSON as null, it would remove a reward.
    """
    pending = [given]
    while pending:
        value = pending.pop()
        if isinstance(value, Mapping):
            pending.extend(value.values())
        elif isinstance(value, list | tuple):
            pending.extend(value)
        elif isinstance(value, int | float) and not -_LARGEST <= value <= _LARGEST:
            message = f"{name}: every number must be finite and within the range of float32 (±{_LARGEST:.8g})"
            raise ClientError(message, type="invalid_request_error", code="not_valid", param=name)


def named(name: str) -> str:
    """An id as it stands in a path; one of dots alone would be taken for a folder."""
    return quote(name, safe="").replace(".", "%2E") if set(name) == {"."} else quote(name, safe="")


def said(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body without what is None."""
    return {name: value for name, value in body.items() if value is not None}


def query(**options: Any) -> dict[str, str]:
    """The options as a query has them."""
    return {
        name: str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in options.items()
        if value is not None
    }
