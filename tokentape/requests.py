"""One function per route of the control API: method, path, query and body, written once for both clients.

A field whose value is None is not sent.
"""

from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import quote
from uuid import uuid4

from tokentape.transport import NOT_VALID, ClientError, Request

MAX_FLOAT32: Final = 3.4028234663852886e38  # trainers keep rewards as float32
ABORT_TIMEOUT_S: Final = 10.0  # of the proxy
LOAD_TIMEOUT_S: Final = 1200.0  # twice that of the proxy, which may have to restore the previous adapter
NDJSON: Final = {"Accept": "application/x-ndjson"}


def open_rollout(rollout_id: str | None, options: Mapping[str, Any]) -> Request:
    """`POST /rollouts`. An id is made here if there is none, so that a retry opens nothing twice."""
    return Request("POST", "/rollouts", without_none({"rollout_id": rollout_id or uuid4().hex, **options}))


def rollout(rollout_id: str, method: str = "GET") -> Request:
    """`GET` or `DELETE /rollouts/{id}`."""
    return Request(method, f"/rollouts/{quote_id(rollout_id)}")


def patch_rollout(rollout_id: str, changes: Mapping[str, Any]) -> Request:
    """`PATCH /rollouts/{id}`. Raises ClientError if a reward or an advantage is not valid."""
    for name in ("reward", "step_rewards", "thread_rewards", "advantages"):
        check_float32(name, changes.get(name))
    return Request("PATCH", f"/rollouts/{quote_id(rollout_id)}", without_none(changes))


def finish_rollout(rollout_id: str, body: Mapping[str, Any]) -> Request:
    """`POST /rollouts/{id}/finish`. Raises ClientError if the reward is not valid."""
    check_float32("reward", body.get("reward"))
    return Request("POST", f"/rollouts/{quote_id(rollout_id)}/finish", without_none(body))


def step(rollout_id: str, step_id: str) -> Request:
    """`GET /rollouts/{id}/steps/{step_id}`."""
    return Request("GET", f"/rollouts/{quote_id(rollout_id)}/steps/{quote_id(step_id)}")


def steps(rollout_id: str, after: int | None, limit: int) -> Request:
    """`GET /rollouts/{id}/steps`, one page."""
    return Request("GET", f"/rollouts/{quote_id(rollout_id)}/steps", query=query_from(after=after, limit=limit))


def tree(rollout_id: str, *, texts: bool | None) -> Request:
    """`GET /rollouts/{id}/tree`."""
    return Request("GET", f"/rollouts/{quote_id(rollout_id)}/tree", query=query_from(texts=texts))


def listing(noun: str, filters: Mapping[str, Any], cursor: str | None) -> Request:
    """`GET /rollouts` or `GET /groups`, one page."""
    return Request("GET", f"/{noun}", query=query_from(**filters, cursor=cursor))


def export_rollout(rollout_id: str, options: Mapping[str, Any]) -> Request:
    """`GET /rollouts/{id}/export` as NDJSON."""
    return Request("GET", f"/rollouts/{quote_id(rollout_id)}/export", query=query_from(**options), headers=NDJSON)


def export_group(group_id: str, options: Mapping[str, Any]) -> Request:
    """`GET /groups/{id}/export` as NDJSON."""
    return Request("GET", f"/groups/{quote_id(group_id)}/export", query=query_from(**options), headers=NDJSON)


def export(options: Mapping[str, Any]) -> Request:
    """`GET /export` as NDJSON."""
    return Request("GET", "/export", query=query_from(**options), headers=NDJSON)


def open_group(group_id: str | None, options: Mapping[str, Any]) -> Request:
    """`POST /groups`. An id is made here if there is none, so that a retry opens nothing twice."""
    return Request("POST", "/groups", without_none({"group_id": group_id or uuid4().hex, **options}))


def group(group_id: str, method: str = "GET") -> Request:
    """`GET` or `DELETE /groups/{id}`."""
    return Request(method, f"/groups/{quote_id(group_id)}")


def requeue_group(group_id: str, body: Mapping[str, Any]) -> Request:
    """`POST /groups/{id}/requeue`."""
    return Request("POST", f"/groups/{quote_id(group_id)}/requeue", without_none(body))


def events(rollout_id: str | None) -> Request:
    """`GET /events`, whose response does not end."""
    return Request("GET", "/events", query=query_from(rollout_id=rollout_id))


def claim_batch(body: Mapping[str, Any]) -> Request:
    """`POST /batches/claim`, which waits for up to `wait_s`."""
    return Request("POST", "/batches/claim", without_none(body), wait_s=body.get("wait_s") or 0.0)


def ack_batch(batch_id: str, *, delete: bool | None) -> Request:
    """`POST /batches/{id}/ack`."""
    return Request("POST", f"/batches/{quote_id(batch_id)}/ack", without_none({"delete": delete}))


def release_batch(batch_id: str) -> Request:
    """`POST /batches/{id}/release`."""
    return Request("POST", f"/batches/{quote_id(batch_id)}/release", {})


def extend_batch(batch_id: str, lease_s: float) -> Request:
    """`POST /batches/{id}/extend`."""
    return Request("POST", f"/batches/{quote_id(batch_id)}/extend", {"lease_s": lease_s})


def policies() -> Request:
    """`GET /policies`."""
    return Request("GET", "/policies")


def policy(policy: str | None) -> Request:
    """`GET /policies/{policy}`."""
    return Request("GET", _policy_path(policy))


def put_policy(version: str | int, policy: str | None, run: str | None, *, new_epoch: bool) -> Request:
    """`PUT /policies/{policy}`."""
    body = {"version": version, "run": run, "new_epoch": new_epoch or None}
    return Request("PUT", _policy_path(policy), without_none(body))


def pause(mode: str, drain_s: float, in_flight: str, policy: str | None) -> Request:
    """`POST /policies/{policy}/pause`, which waits for up to `drain_s`, and then until aborted calls have ended."""
    is_kept = in_flight == "keep"
    body = {"mode": mode} if is_kept else {"mode": mode, "in_flight": in_flight}
    wait_s = drain_s if is_kept else drain_s + ABORT_TIMEOUT_S
    return Request("POST", f"{_policy_path(policy)}/pause", body, query_from(drain_s=drain_s or None), wait_s=wait_s)


def load_adapter(body: Mapping[str, Any], policy: str | None) -> Request:
    """`POST /policies/{policy}/adapter`, which waits for up to `drain_s`, and then until all engines loaded the adapter."""
    path = f"{_policy_path(policy)}/adapter"
    return Request("POST", path, without_none(body), wait_s=body["drain_s"] + LOAD_TIMEOUT_S)


def resume(policy: str | None) -> Request:
    """`POST /policies/{policy}/resume`."""
    return Request("POST", f"{_policy_path(policy)}/resume")


def _policy_path(policy: str | None) -> str:
    """Return the path of a policy; None is the policy `default`."""
    return "/policy" if policy is None else f"/policies/{quote_id(policy)}"


def check_float32(name: str, signal: Any) -> None:
    """Raise ClientError unless every number in a reward or an advantage is finite and within the range of float32.

    This is checked before the request is sent because JSON encodes NaN as null, which removes a reward.
    """
    pending = [signal]
    while pending:
        value = pending.pop()
        if isinstance(value, Mapping):
            pending.extend(value.values())
        elif isinstance(value, list | tuple):
            pending.extend(value)
        elif isinstance(value, int | float) and not -MAX_FLOAT32 <= value <= MAX_FLOAT32:
            message = f"{name}: every number must be finite and within the range of float32 (±{MAX_FLOAT32:.8g})"
            raise ClientError(message, type="invalid_request_error", code=NOT_VALID, param=name)


def quote_id(name: str) -> str:
    """Quote an id for a path; one of dots alone would be read as a folder."""
    return quote(name, safe="").replace(".", "%2E") if set(name) == {"."} else quote(name, safe="")


def without_none(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body without fields that are None."""
    return {name: value for name, value in body.items() if value is not None}


def query_from(**options: Any) -> dict[str, str]:
    """Return options as query parameters; booleans are `true` and `false`."""
    return {
        name: str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in options.items()
        if value is not None
    }
