"""The methods of both clients, one for each route of the control API, over any transport."""

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from importlib import import_module
from typing import Any, Final, Literal, cast
from urllib.parse import quote
from uuid import uuid4

from tokentape.batches import Batch, claim_batches, without_numbers
from tokentape.transport import (
    LOG,
    MAX_WAIT_S,
    ClientError,
    LineBuffer,
    Request,
    Transport,
    Wait,
    parse_json,
    require,
    retry_delay,
)
from tokentape.types import BatchResult, Change, FinishStatus, OpenedRollout, Rollout, Step

MAX_FLOAT32: Final = 3.4028234663852886e38  # trainers keep rewards as float32
NOT_VALID: Final = "unprocessable_request"
NOT_FOUND: Final = 404
ABORT_TIMEOUT_S: Final = 10.0  # of the proxy
LOAD_TIMEOUT_S: Final = 1200.0  # twice the proxy's, which may have to restore the previous adapter
MAX_VERSION: Final = 256  # characters
STILL_PAUSED: Final = "Calls are still paused; POST {path} ends the pause."
NOT_ANNOUNCED: Final = (
    "The update was made and its version was not announced: calls stay paused until put_policy(version) and resume()."
)
NOT_ANNOUNCED_ROLLING: Final = (
    "The update was made and its version was not announced: each endpoint has it as its own. Call put_policy(version)."
)
STILL_HELD: Final = "Endpoint {label} is still held: no call is sent to it. POST {path} with endpoints releases it."
CONNECTED: Final = b": following"  # the first line of the response of /events
DATA: Final = b"data: "
MIN_DELAY_S: Final = 0.25  # between two connections; it doubles until a change is received
MAX_DELAY_S: Final = 10.0
# The options of an export that select the tokens that it trains.
_SELECTING: Final = ("branches", "include", "inherited", "max_len", "overlong", "overlong_buffer", "policy", "threads")
_DIGITS: Final = 18

InFlight = Literal["drain", "abort", "continue", "resume"]
_OF_PAUSE: Final[Mapping[str, Literal["keep", "abort", "resume"]]] = {
    "drain": "keep", "abort": "abort", "continue": "keep", "resume": "resume",
}  # fmt: skip


class ControlApi:
    """The control API at `url`: each request is sent up to `attempts` times by a transport. Every failure is a ClientError."""

    def __init__(self, url: str, transport: Transport, attempts: int) -> None:
        self.url = url
        self.transport = transport
        self._instance = uuid4().hex
        self._max_attempts = attempts
        self._warned: set[str] = set()  # warnings of claims that were logged

    async def close(self) -> None:
        """Close the connections."""
        await self.transport.close()

    async def send(
        self, method: str, path: str, /, body: Mapping[str, Any] | None = None, *, wait_s: float = 0.0, **query: Any
    ) -> Any:
        """Send a request to any route; return the JSON of the response, or None if it has no body.

        Fields of `body` and `query` that are None are not sent. `wait_s` is how long the proxy may wait before it responds.
        """
        sent = None if body is None else {name: value for name, value in body.items() if value is not None}
        request = Request(method, path, sent, query_from(query), wait_s=wait_s)
        content = b"".join([part async for part in self._parts(request)])
        return parse_json(content, self.url + path) if content else None

    async def open_rollout(self, /, rollout_id: str | None = None, **options: Any) -> OpenedRollout:
        """Open a rollout; the same options again return the same rollout.

        Options: `group_id`, `metadata`, `model`, `sampling` ({override, default, cap}), `tools`, `limits` ({max_steps,
        max_tokens}), `deadline_s`, `idle_s` and `start_s` (it is finished as `aborted` at this age, without a call in flight
        for so long, or without a first call), `continuation` ("off", "faithful", "append"), `playback` ({of, before, through,
        on_mismatch, ignore, presets}: the rollout that answers its calls). Pass `base_url` and `api_key` of the response to the
        agent.
        """
        # The ID is made here, so that a repeated request opens none twice.
        body = {"rollout_id": rollout_id or uuid4().hex, **options}
        return cast("OpenedRollout", await self.send("POST", "/rollouts", body))

    async def rollout(self, rollout_id: str) -> Rollout:
        """Return the rollout: status, counts, reward, times."""
        return cast("Rollout", await self.send("GET", path_of("rollouts", rollout_id)))

    def rollouts(
        self, *, status: str | None = None, group_id: str | None = None, since: int | None = None, page: int = 100
    ) -> AsyncGenerator[Rollout, None]:
        """Iterate over all rollouts, newest first, `page` per request. `since` is in Unix seconds."""
        return self._pages("/rollouts", "cursor", status=status, group_id=group_id, since=since, limit=page)

    async def patch_rollout(self, /, rollout_id: str, **changes: Any) -> Rollout:
        """Set `reward`, `step_rewards`, `thread_rewards`, `advantages`, `metadata` or `continuation`; others are unchanged.

        `warning` of the result, which is logged, is why a reward has no effect: the group was dropped before.
        """
        for name in ("reward", "step_rewards", "thread_rewards", "advantages"):
            _check_float32(name, changes.get(name))
        patched = cast("Rollout", await self.send("PATCH", path_of("rollouts", rollout_id), changes))
        if "warning" in patched:
            LOG.warning("rollout %r: %s", rollout_id, patched["warning"])
        return patched

    async def finish_rollout(
        self,
        rollout_id: str,
        status: FinishStatus = "completed",
        *,
        reward: float | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Rollout:
        """Finish the rollout: it accepts no more calls. The same request again changes nothing."""
        _check_float32("reward", reward)
        body = {"status": status, "reward": reward, "metadata": metadata}
        return cast("Rollout", await self.send("POST", path_of("rollouts", rollout_id, "finish"), body))

    async def delete_rollout(self, rollout_id: str) -> None:
        """Delete the rollout and its steps; one that does not exist is no error."""
        await self.send("DELETE", path_of("rollouts", rollout_id))

    async def step(self, rollout_id: str, step_id: str) -> Step:
        """Return one recorded step; the `X-Step-Id` header of a response has its id."""
        return cast("Step", await self.send("GET", path_of("rollouts", rollout_id, "steps", step_id)))

    def steps(self, rollout_id: str, *, after: int | None = None, page: int = 100) -> AsyncGenerator[Step, None]:
        """Iterate over the recorded steps in the order in which they were stored, `page` per request.

        `after` is the index of the step after which to begin.
        """
        return self._pages(path_of("rollouts", rollout_id, "steps"), "after", after=after, limit=page)

    async def tree(self, rollout_id: str, *, texts: bool | None = None) -> dict[str, Any]:
        """Return the tree of steps, their spans, threads and drift; `texts=False`: drift is not explained with a tokenizer."""
        return cast("dict[str, Any]", await self.send("GET", path_of("rollouts", rollout_id, "tree"), texts=texts))

    async def events(self, rollout_id: str | None = None) -> AsyncGenerator[Change | None, None]:
        """Follow the changes of all rollouts or of one, without end; None after each connection.

        Changes are not repeated: at None, read the rollouts. A lost connection is opened again, for up to two hours; meanwhile
        its error is logged every 30 s. Raises ClientError if the first connection fails, or for an error that does not pass, as
        401.
        """
        request = Request("GET", "/events", query=query_from({"rollout_id": rollout_id}))
        delay_s = MIN_DELAY_S
        was_connected = False
        outage: Wait | None = None
        while True:
            try:
                async with aclosing(self._stream(request, bytes)) as lines:
                    async for line in lines:
                        if line == CONNECTED:
                            was_connected, outage = True, None
                            yield None
                        elif line.startswith(DATA):
                            delay_s = MIN_DELAY_S
                            yield parse_json(line.removeprefix(DATA), f"{self.url}/events")
            except ClientError as error:
                outage = Wait(MAX_WAIT_S) if outage is None else outage
                if not was_connected or not error.may_pass or not outage.left_s:
                    raise
                if not outage.until_log_s:
                    outage.log(f"a connection: {error}")
            await self.transport.sleep(delay_s)
            delay_s = min(2 * delay_s, MAX_DELAY_S)

    def export_rollout(
        self, /, rollout_id: str, format: str = "sequences", **options: Any
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Stream the rows of one rollout in a trainer's format. Options are the query parameters of the route."""
        return self._rows(path_of("rollouts", rollout_id, "export"), format=format, **options)

    def export_group(
        self, /, group_id: str, format: str = "sequences", **options: Any
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Stream the rows of one group in a trainer's format."""
        return self._rows(path_of("groups", group_id, "export"), format=format, **options)

    def export(self, /, format: str = "sequences", **options: Any) -> AsyncGenerator[dict[str, Any], None]:
        """Stream the rows of many rollouts, newest rollout first. Options include `status`, `group_id`, `since`, `limit`."""
        return self._rows("/export", format=format, **options)

    async def open_group(  # noqa: PLR0913 - each parameter is a named option
        self,
        size: int,
        *,
        group_id: str | None = None,
        rollout: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
        deadline_s: float | None = None,
        idle_s: float | None = None,
        start_s: float | None = None,
        over_sample: int | None = None,
        replace: bool | int | Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Open a group and its `size` rollouts, each with the options `rollout`, `idle_s` and `start_s`, atomically.

        `deadline_s` is the limit of each rollout and of those that replace it, together. By default a rollout is aborted that
        has no call for `groups.idle_s` of the settings, or no first call for `groups.start_s`.

        `over_sample` opens this many more; the group is complete once `size` rollouts have a reward. `replace` opens a rollout
        that fails again, at most this many times (True: 3); `replaced_by` of its finish has the new one. With
        {"playback": True, "attempts": 3} that one plays back the failed one as far as it went.

        Returns {group_id, size, status, rollouts: [{rollout_id, base_url, api_key, …}]}. The same options again return the
        same group.
        """
        body = {
            "group_id": group_id or uuid4().hex,  # made here, so that a repeated request opens nothing twice
            "size": size,
            "over_sample": over_sample,
            "replace": replace,
            "rollout": rollout,
            "metadata": metadata,
            "deadline_s": deadline_s,
            "idle_s": idle_s,
            "start_s": start_s,
        }
        return cast("dict[str, Any]", await self.send("POST", "/groups", body))

    async def branches(
        self, /, rollout_id: str, before: str | None, count: int, *, group_id: str | None = None, **options: Any
    ) -> dict[str, Any]:
        """Open a group of `count` rollouts that repeat a rollout up to a step, and are sampled from it on.

        `before` is the id of the step; None: the first one. Options: `ignore` and `presets` (texts that count as equal), and
        those of `open_group`. Returns what `open_group` returns: run the same agent in each rollout, from its start.
        """
        body = {"group_id": group_id or uuid4().hex, "before": before, "count": count, **options}
        return cast("dict[str, Any]", await self.send("POST", path_of("rollouts", rollout_id, "branches"), body))

    async def values(self, rollout_id: str, *, any_version: bool | None = None) -> list[dict[str, Any]]:
        """Return the value of the state before each step that has branches: their mean reward, number and deviation.

        Raises ClientError (409) if branches were sampled by another policy version than the step, unless `any_version`.
        """
        answer = await self.send("GET", path_of("rollouts", rollout_id, "values"), any_version=any_version)
        return cast("list[dict[str, Any]]", answer["values"])

    async def group(self, group_id: str) -> dict[str, Any]:
        """Return the group: its members, their rewards and statuses, and whether it is complete."""
        return cast("dict[str, Any]", await self.send("GET", path_of("groups", group_id)))

    def groups(self, *, status: str | None = None, page: int = 100) -> AsyncGenerator[dict[str, Any], None]:
        """Iterate over all groups, `page` per request."""
        return self._pages("/groups", "cursor", status=status, limit=page)

    async def requeue_group(
        self, group_id: str, *, max_staleness: int | None = None, policy: str | None = None
    ) -> dict[str, Any]:
        """Put a group that was dropped or acknowledged into the queue again; one that is queued is unchanged.

        Its next delivery has `max_staleness` instead of the claim's, and `requeued` and `acked` (how often its batches
        were acknowledged before): a group that was acknowledged is trained again. Raises ClientError (409) while it is open
        or claimed.
        """
        body = {"max_staleness": max_staleness, "policy": policy}
        return cast("dict[str, Any]", await self.send("POST", path_of("groups", group_id, "requeue"), body))

    async def delete_group(self, group_id: str) -> None:
        """Delete the group and its rollouts; one that does not exist is no error."""
        await self.send("DELETE", path_of("groups", group_id))

    async def claim_batch(
        self, /, *, consumer: str, groups: int, policy: str | None = None, **options: Any
    ) -> dict[str, Any]:
        """Claim up to `groups` complete groups that no other consumer has claimed: {batch_id, groups, rows, …}.

        `policy` is required if several policies are trained; each of them claims a group independently of the others.
        Options: `format`, `threads`, `wait_s`, `lease_s`, `exact`, `members`, `min_group`, `max_staleness` and the other fields
        of the route. Acknowledge the batch or extend its lease before the lease expires; otherwise another consumer can claim
        its groups. With `heartbeat_s` it is extended so often: another client with the same `consumer` takes the batch over
        once that was missed. `waiting`, `refused`, `dropped` and `reasons` of the response are groups that are not in it.
        `warnings`, which are logged once for each reason, are of tokens with importance ratios that are wrong.
        """
        body = {"consumer": consumer, "groups": groups, "policy": policy, "instance": self._instance, **options}
        wait_s = options.get("wait_s") or 0.0
        claimed = cast("dict[str, Any]", await self.send("POST", "/batches/claim", body, wait_s=wait_s))
        for warning in claimed.get("warnings", ()):
            if (reason := f"{warning['code']}: {without_numbers(warning['why'])}") not in self._warned:
                self._warned.add(reason)
                text = "%d of %d trained tokens have wrong importance ratios (%s): %s. To fix it: %s"
                LOG.warning(text, *(warning[name] for name in ("tokens", "of", "code", "why", "fix")))
        return claimed

    async def ack_batch(self, batch_id: str, *, delete: bool | None = None) -> BatchResult:
        """Acknowledge a batch; `delete` deletes its rollouts. `lost` lists groups that another consumer has claimed.

        `kept` lists groups that are not deleted because another policy still has them in its queue.
        """
        return cast("BatchResult", await self.send("POST", path_of("batches", batch_id, "ack"), {"delete": delete}))

    async def release_batch(self, batch_id: str) -> BatchResult:
        """Release a batch: other consumers can claim its groups."""
        return cast("BatchResult", await self.send("POST", path_of("batches", batch_id, "release"), {}))

    async def extend_batch(self, batch_id: str, *, lease_s: float) -> BatchResult:
        """Set the lease of a batch to `lease_s` from now; `lost` as for `ack_batch`."""
        extended = await self.send("POST", path_of("batches", batch_id, "extend"), {"lease_s": lease_s})
        return cast("BatchResult", extended)

    async def mismatch(
        self,
        /,
        batch: Any,
        rows: Sequence[Any],
        logprobs: Sequence[Any],
        *,
        policy_version: str | int,
        rank: int = 0,
        policy: str | None = None,
        cut: bool = False,
        **options: Any,
    ) -> dict[str, Any]:
        """Report how a trainer's logprobs of rows of a batch (or its ID) differ from the recorded ones; return the verdicts.

        `rows` are rows of format `sequences`, entries of `rows` of claimed groups, or {rollout_id, branch} (the ID alone for
        the only row of a rollout); what they lack is read from the server, with the `options` of their export. `policy` names
        a batch that was not claimed, of rollouts that were exported: `batch` is then any name.

        `tokentape.mismatch` describes the other arguments, and computes what is sent: about 20 kB. Each rank reports its own
        rows, each row once; a repeated report counts once. Raises ValueError for a row that is not of the batch.
        """
        require("numpy", user="mismatch", requirement="numpy>=2")
        sums = import_module("tokentape.mismatch_sums")
        shared = {name: getattr(batch, "options", {}).get(name) for name in _SELECTING}
        options = {**shared, "policy": policy or shared["policy"], **options}
        known = {name: [row async for row in self.export_rollout(name, **options)] for name in sums.elsewhere(rows)}
        located = sums.located(batch, rows, known)
        batch_id, body = sums.report(
            batch, located, logprobs, policy_version=policy_version, rank=rank, policy=policy, cut=cut
        )
        return cast("dict[str, Any]", await self.send("POST", path_of("batches", batch_id, "mismatch"), body))

    async def batch_mismatch(self, batch_id: str) -> dict[str, Any]:
        """Return the sums of all parts of a batch's mismatch, their means by cell, and the verdicts."""
        return cast("dict[str, Any]", await self.send("GET", path_of("batches", batch_id, "mismatch")))

    def batches(
        self,
        /,
        *,
        consumer: str,
        groups: int,
        policy: str | None = None,
        wait_s: float | None = None,
        lease_s: float = 60.0,
        stall_s: float | None = 60.0,
        **options: Any,
    ) -> AsyncGenerator[Batch, None]:
        """Iterate over batches of up to `groups` complete groups; the lease of each is extended while the body runs.

        `policy` is required if several policies are trained.

            async for batch in client.batches(consumer="trainer-0", groups=4, format="trl"):
                train(batch.groups)

        A batch is acknowledged when the loop continues, or by `await batch.ack()`. After an exception, a `break` or when the
        generator is closed it is released, so that no group is lost: call `ack` before a `break`. What a wait lacks is logged
        every 30 s, and the reason why groups are refused or dropped once per reason. The loop ends when no group is
        available for `wait_s`. Without `wait_s` it raises ClientError (`code` is `wait_timeout`) after two hours; `math.inf`
        waits without a limit.

        A client that was started again with the name of one that died takes its batches over after 40 s at most; consumers
        that run at the same time need different names.

        Raises ClientError (`code` is `groups_refused`) if claims refuse every complete group for `stall_s`, or at once if the
        reason is `branches=one` or the format; never if `stall_s` is None.
        """
        options = {**options, "policy": policy, "wait_s": wait_s, "lease_s": lease_s, "stall_s": stall_s}
        return claim_batches(self, consumer=consumer, groups=groups, **options)

    async def policies(self) -> dict[str, Any]:
        """Return the policies with their models, announced versions and pauses."""
        return cast("dict[str, Any]", await self.send("GET", "/policies"))

    async def policy(self, policy: str | None = None) -> dict[str, Any]:
        """Return the announced {version, epoch, run} of a policy (None: `default`), for steps of engines that report none."""
        return cast("dict[str, Any]", await self.send("GET", _policy_path(policy)))

    async def put_policy(
        self, version: str | int, *, policy: str | None = None, run: str | None = None, new_epoch: bool = False
    ) -> dict[str, Any]:
        """Announce the version of a policy (None: `default`) that the engines serve from now on: {version, epoch, run}.

        A new epoch begins if `run` is another ID than the last one, or with `new_epoch`: then the version may be lower, and
        groups that were sampled before are dropped. Otherwise a lower version is a ClientError (code `lower_version`).
        """
        body = {"version": version, "run": run, "new_epoch": new_epoch or None}
        return _logged(cast("dict[str, Any]", await self.send("PUT", _policy_path(policy), body)))

    async def pause(
        self,
        mode: Literal["wait", "reject"] = "wait",
        *,
        drain_s: float = 0,
        in_flight: Literal["keep", "abort", "resume"] = "keep",
        endpoints: Sequence[str] | None = None,
        policy: str | None = None,
    ) -> dict[str, Any]:
        """Pause new calls of a policy while its weights change, and wait up to `drain_s` until no call is in flight.

        `in_flight="abort"` then stops those that are left at their engines; their steps are partial. "resume" interrupts calls
        at once, and they are resumed after the pause; with `endpoints` (their labels, `name` of GET /engines), only these are
        held, and their calls are resumed at the others.
        """
        is_kept = in_flight == "keep"
        body = {"mode": mode, "in_flight": None if is_kept else in_flight, "endpoints": endpoints}
        wait_s = drain_s if is_kept else drain_s + ABORT_TIMEOUT_S
        paused = await self.send("POST", f"{_policy_path(policy)}/pause", body, wait_s=wait_s, drain_s=drain_s or None)
        return cast("dict[str, Any]", paused)

    async def resume(
        self,
        *,
        endpoints: Sequence[str] | None = None,
        version: str | int | None = None,
        policy: str | None = None,
        run: str | None = None,
    ) -> dict[str, Any]:
        """Resume paused calls of a policy, and release its endpoints that are held.

        With `endpoints`, only these are released; calls at them have `version` until the policy's next one is announced.
        """
        body = None if endpoints is None else {"endpoints": endpoints, "version": version, "run": run}
        return cast("dict[str, Any]", await self.send("POST", f"{_policy_path(policy)}/resume", body))

    async def update_policy(
        self,
        version: str | int,
        update: Callable[..., object],
        *,
        drain_s: float = 60.0,
        mode: Literal["wait", "reject"] = "wait",
        in_flight: InFlight = "resume",
        rolling: bool = False,
        policy: str | None = None,
        run: str | None = None,
    ) -> dict[str, Any]:
        """Pause calls of a policy (None: `default`), call `update`, announce `version`, resume.

        Return {version, epoch, run, in_flight} at the update. Calls of other policies are neither paused nor waited for. `run`
        is an ID of the training run, for example its tracker's. Another ID than the last one begins a new epoch: the run may
        continue from an earlier version, and groups that were sampled before are dropped. Otherwise a lower version than the
        announced one raises ClientError (code `lower_version`) without an update.

        `update` loads the weights into the engines; the asynchronous client awaits its result. `in_flight` is what happens to
        calls that are running:

        - "resume" interrupts them at once. They continue after the update from what was sampled until then: agents wait, and
          get one reply. Calls that cannot be resumed have `drain_s` to end; then they start again, or end as with "abort".
        - "drain" waits for them, and raises ClientError (code `not_drained`) without an update if some do not end within
          `drain_s`.
        - "abort" stops those that do not end within `drain_s` at their engines, with partial steps.
        - "continue" does not wait: they continue on the new weights, over what the engine has computed with the old ones
          (`policy_version` and `policy_version_end` of their steps differ).

        With `rolling`, endpoints are updated one after the other: each is held, its calls are resumed at the others, and
        `update(endpoint)` loads the weights into it; `endpoint` has its `label`, its `url` and the other fields of GET
        /engines. It is then released with the new version.
        After an exception of `update`, calls resume with the old version (in a rolling update, at this endpoint). If this
        process dies, or the version cannot be announced, calls stay paused: update again, or call `resume`.
        """
        _check_update(version, in_flight, rolling=rolling)
        _check_follows(await self.policy(policy), version, run)
        left = 0
        if rolling:
            await self._update_each(version, update, drain_s=drain_s, policy=policy, run=run)
        else:
            left = await self._update_all(update, drain_s=drain_s, mode=mode, in_flight=in_flight, policy=policy)
        try:
            announced = await self.put_policy(version, policy=policy, run=run)
        except BaseException as error:
            error.add_note(NOT_ANNOUNCED_ROLLING if rolling else NOT_ANNOUNCED)
            raise
        await self.resume(policy=policy)
        return {**announced, "in_flight": left}

    async def _update_all(
        self,
        update: Callable[[], object],
        *,
        drain_s: float,
        mode: Literal["wait", "reject"],
        in_flight: InFlight,
        policy: str | None,
    ) -> int:
        """Pause calls, and update all endpoints; return how many calls were in flight after the pause."""
        drains = in_flight != "continue"
        try:
            choice = _OF_PAUSE[in_flight]
            paused = await self.pause(mode, drain_s=drain_s if drains else 0, in_flight=choice, policy=policy)
            if drains:
                _check_drained(paused, drain_s)
            await self.transport.finished(update())
        except BaseException as error:
            try:
                await self.resume(policy=policy)
            except ClientError as failure:
                if failure.status != NOT_FOUND:  # an unknown policy is not paused
                    error.add_note(STILL_PAUSED.format(path=f"{_policy_path(policy)}/resume"))
            raise
        return int(paused["in_flight"])

    async def _update_each(
        self,
        version: str | int,
        update: Callable[[dict[str, Any]], object],
        *,
        drain_s: float,
        policy: str | None,
        run: str | None,
    ) -> None:
        """Hold, update and release the endpoints of a policy one after the other."""
        engines = (await self.send("GET", "/engines"))["engines"]
        endpoints = [engine for engine in engines if (policy or "default") in engine["policies"]]
        if not endpoints:
            raise ClientError(f"No engine serves policy {policy or 'default'!r}; nothing was updated.", code=NOT_VALID)
        for endpoint in endpoints:
            labels = [endpoint["name"]]
            held = STILL_HELD.format(label=endpoint["name"], path=f"{_policy_path(policy)}/resume")
            try:
                paused = await self.pause(drain_s=drain_s, in_flight="resume", endpoints=labels, policy=policy)
                _check_drained(paused, drain_s)
                await self.transport.finished(update({"label": endpoint["name"], **endpoint}))
            except BaseException as error:
                try:
                    await self.resume(endpoints=labels, policy=policy)
                except ClientError:
                    error.add_note(held)
                raise
            try:
                await self.resume(endpoints=labels, version=version, policy=policy, run=run)
            except BaseException as error:
                error.add_note(held)
                raise

    async def load_adapter(
        self,
        name: str | None,
        path: str,
        version: str | int,
        *,
        drain_s: float = 60.0,
        mode: Literal["wait", "reject"] = "wait",
        in_flight: Literal["drain", "abort", "resume"] = "drain",
        policy: str | None = None,
        run: str | None = None,
    ) -> dict[str, Any]:
        """Load a LoRA adapter of a policy into every vLLM as the model `name`, under a pause, and announce its version.

        `name` None is the only model of the policy. `run` and `in_flight` are as for `update_policy`.
        `path` is a folder at the engines, another one for each version. If an engine fails, all keep the adapter of before.
        """
        pause = {"drain_s": drain_s, "mode": mode, "in_flight": in_flight}
        body = {"name": name, "path": path, "version": version, "run": run, **pause}
        wait_s = drain_s + LOAD_TIMEOUT_S
        loaded = await self.send("POST", f"{_policy_path(policy)}/adapter", body, wait_s=wait_s)
        return _logged(cast("dict[str, Any]", loaded))

    async def _pages(self, path: str, place: str, **query: Any) -> AsyncGenerator[Any, None]:
        """Yield the items of all pages. `place` names the field of a page with the start of the next one, None in the last."""
        noun = path.rpartition("/")[2]
        while True:
            page = await self.send("GET", path, **query)
            for item in page[noun]:
                yield item
            if page[place] is None:
                return
            query[place] = page[place]

    def _rows(self, path: str, /, **query: Any) -> AsyncGenerator[dict[str, Any], None]:
        request = Request("GET", path, query=query_from(query), headers={"Accept": "application/x-ndjson"})
        return self._stream(request, lambda line: parse_json(line, self.url + path))

    async def _stream(self, request: Request, parse: Callable[[bytes], Any]) -> AsyncGenerator[Any, None]:
        """Yield the parsed lines of the response."""
        lines = LineBuffer()
        async with aclosing(self._parts(request)) as parts:
            async for part in parts:
                for line in lines.feed(part):
                    yield parse(line)
        if rest := lines.rest():
            yield parse(rest)

    async def _parts(self, request: Request) -> AsyncGenerator[bytes, None]:
        """Yield the body of the response. A request is repeated only if nothing of a body was received: see `retry_delay`."""
        attempt = 1
        while True:
            try:
                async with aclosing(self.transport.parts(request)) as parts:
                    async for part in parts:
                        yield part
            except ClientError as error:
                delay_s = retry_delay(error, attempt, self._max_attempts)
                if delay_s is None:
                    raise
            else:
                return
            await self.transport.sleep(delay_s)
            attempt += 1


def path_of(*names: str) -> str:
    """Return a path of these names, quoted; a name of dots alone would be read as a folder."""
    quoted = (quote(name, safe="") for name in names)
    return "".join("/" + (name.replace(".", "%2E") if set(name) == {"."} else name) for name in quoted)


def _policy_path(policy: str | None) -> str:
    """Return the path of a policy; None is the policy `default`."""
    return "/policy" if policy is None else path_of("policies", policy)


def query_from(options: Mapping[str, Any]) -> dict[str, str]:
    """Return options that are not None as query parameters; booleans are `true` and `false`."""
    return {
        name: str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in options.items()
        if value is not None
    }


def _check_float32(name: str, signal: Any) -> None:
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
            raise _not_valid(name, f"every number must be finite and within the range of float32 (±{MAX_FLOAT32:.8g})")


def _check_update(version: object, in_flight: str, *, rolling: bool) -> None:
    """Raise ClientError unless the version can be announced after the update, and the choice for calls in flight exists."""
    is_version = isinstance(version, int) or (isinstance(version, str) and 1 <= len(version) <= MAX_VERSION)
    if not is_version or isinstance(version, bool):
        raise _not_valid("version", f"must be an integer or a string of 1 to {MAX_VERSION} characters, not {version!r}")
    if in_flight not in _OF_PAUSE:
        raise _not_valid("in_flight", f"must be 'drain', 'abort', 'continue' or 'resume', not {in_flight!r}")
    if rolling and in_flight != "resume":
        raise _not_valid("in_flight", f"must be 'resume' in a rolling update, not {in_flight!r}")


def _check_follows(announced: Mapping[str, Any], version: str | int, run: str | None) -> None:
    """Raise ClientError if the proxy would refuse to announce the version after the update."""
    known, number = _number(announced.get("highest", announced["version"])), _number(version)
    if known is not None and number is not None and number < known and run in (None, announced.get("run")):
        raise ClientError(
            f"Version {version} is lower than {known}, which was announced; nothing was updated. If the run continues from an "
            "earlier version, use another run= than before, or put_policy(version, new_epoch=True) first.",
            type="conflict_error",
            code="lower_version",
            param="version",
        )


def _logged(announced: dict[str, Any]) -> dict[str, Any]:
    """Return the response to an announcement, and log its warning if it has one."""
    if "warning" in announced:
        LOG.warning("%s", announced["warning"])
    return announced


def _check_drained(paused: Mapping[str, Any], drain_s: float) -> None:
    """Raise ClientError if calls are in flight after a pause that drains."""
    if not paused["drained"]:
        raise ClientError(
            f"{paused['in_flight']} calls are in flight after {drain_s:g} s, or another client paused or resumed calls; "
            "nothing was updated. Use a larger drain_s, or another in_flight.",
            type="conflict_error",
            code="not_drained",
        )


def _number(version: str | int | None) -> int | None:
    """Return a version as a number; None unless it is a decimal number of at most 18 digits."""
    text = str(version)
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _DIGITS else None


def _not_valid(name: str, problem: str) -> ClientError:
    return ClientError(f"{name}: {problem}", type="invalid_request_error", code=NOT_VALID, param=name)
