# Generated from tokentape/async_client.py by `python -m docs.generate`; edit async_client.py instead.
"""Client: the control API over httpx2, one method per route."""

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import suppress
from time import sleep
from types import TracebackType
from typing import Any, Literal, Self, cast
from uuid import uuid4

from tokentape import requests
from tokentape.sync_batches import Batch, claim_batches
from tokentape.sync_events import follow_events
from tokentape.transport import ClientError, LineBuffer, Request, error_from_response, parse_line, require, retry_delay
from tokentape.types import BatchResult, Change, FinishStatus, OpenedRollout, Rollout, Step
from tokentape.updates import (
    NOT_ANNOUNCED,
    NOT_FOUND,
    STILL_PAUSED,
    InFlight,
    check_drained,
    check_follows,
    check_update,
    finished,
    logged,
)
from tokentape.waits import LOG, OPEN_PAGE

with suppress(ImportError):  # `import tokentape` works without httpx2; the constructor raises
    import httpx2 as httpx


class Client:
    """A client of the control API at `url`. Close it, or use `with`.

    `api_key` is a control key; it is required if the proxy has one configured. `timeout_s` limits the connection and each
    wait for data. Requests that return 429 or 503, or find no proxy at `url`, are sent up to `attempts` times, after the
    delay of the `Retry-After` header. Every failure is a ClientError.
    """

    def __init__(self, url: str, *, api_key: str | None = None, timeout_s: float = 60.0, attempts: int = 5) -> None:
        require("httpx2", user="Client", requirement="httpx2>=2")
        self.url = url.rstrip("/")
        self._instance = uuid4().hex
        self._max_attempts = attempts
        self._timeout_s = timeout_s
        self._http = httpx.Client(
            base_url=self.url, headers={"Authorization": f"Bearer {api_key}"} if api_key else None
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def open_rollout(self, rollout_id: str | None = None, **options: Any) -> OpenedRollout:
        """Open a rollout; the same options again return the same rollout.

        Options: `group_id`, `metadata`, `model`, `sampling` ({override, default, cap}), `tools`, `limits` ({max_steps,
        max_tokens}), `deadline_s`, `idle_s` and `start_s` (it is finished as `aborted` at this age, without a call in flight
        for so long, or without a first call), `continuation` ("off", "faithful", "append"). Pass `base_url` and `api_key` of
        the response to the agent.
        """
        return cast("OpenedRollout", self._request(requests.open_rollout(rollout_id, options)))

    def rollout(self, rollout_id: str) -> Rollout:
        """Return the rollout: status, counts, reward, times."""
        return cast("Rollout", self._request(requests.rollout(rollout_id)))

    def rollouts(
        self, *, status: str | None = None, group_id: str | None = None, since: int | None = None, page: int = 100
    ) -> Iterator[Rollout]:
        """Iterate over all rollouts, newest first, `page` per request. `since` is in Unix seconds."""
        filters = {"status": status, "group_id": group_id, "since": since, "limit": page}
        return self._list_pages("rollouts", filters)

    def patch_rollout(self, rollout_id: str, **changes: Any) -> Rollout:
        """Set `reward`, `step_rewards`, `thread_rewards`, `advantages`, `metadata` or `continuation`; others are unchanged.

        `warning` of the result, which is logged, is why a reward has no effect: the group was dropped before.
        """
        patched = cast("Rollout", self._request(requests.patch_rollout(rollout_id, changes)))
        if "warning" in patched:
            LOG.warning("rollout %r: %s", rollout_id, patched["warning"])
        return patched

    def finish_rollout(
        self,
        rollout_id: str,
        status: FinishStatus = "completed",
        *,
        reward: float | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Rollout:
        """Finish the rollout: it accepts no more calls. The same request again changes nothing."""
        body = {"status": status, "reward": reward, "metadata": metadata}
        return cast("Rollout", self._request(requests.finish_rollout(rollout_id, body)))

    def delete_rollout(self, rollout_id: str) -> None:
        """Delete the rollout and its steps; one that does not exist is no error."""
        self._request(requests.rollout(rollout_id, "DELETE"))

    def step(self, rollout_id: str, step_id: str) -> Step:
        """Return one recorded step; the `X-Step-Id` header of a response has its id."""
        return cast("Step", self._request(requests.step(rollout_id, step_id)))

    def steps(self, rollout_id: str, *, page: int = 100) -> Iterator[Step]:
        """Iterate over the recorded steps in the order in which they were stored, `page` per request."""
        after = None
        while True:
            answer = self._request(requests.steps(rollout_id, after, page))
            for step in answer["steps"]:
                yield step
            after = answer["after"]
            if after is None:
                return

    def tree(self, rollout_id: str, *, texts: bool | None = None) -> dict[str, Any]:
        """Return the tree of steps, their spans, threads and drift; `texts=False`: drift is not explained with a tokenizer."""
        return cast("dict[str, Any]", self._request(requests.tree(rollout_id, texts=texts)))

    def events(self, rollout_id: str | None = None) -> Generator[Change | None, None, None]:
        """Follow the changes of all rollouts or of one, without end; None after each connection.

        Changes are not repeated: at None, read the rollouts. A lost connection is opened again, for up to two hours; meanwhile
        its error is logged every 30 s.
        """
        return follow_events(lambda: self._stream(requests.events(rollout_id), bytes))

    def export_rollout(
        self,
        rollout_id: str,
        format: str = "sequences",  # noqa: A002 - the name of the query parameter
        **options: Any,
    ) -> Iterator[dict[str, Any]]:
        """Stream the rows of one rollout in a trainer's format. Options are the query parameters of the route."""
        return self._stream(requests.export_rollout(rollout_id, {"format": format, **options}), parse_line)

    def export_group(self, group_id: str, format: str = "sequences", **options: Any) -> Iterator[dict[str, Any]]:  # noqa: A002
        """Stream the rows of one group in a trainer's format."""
        return self._stream(requests.export_group(group_id, {"format": format, **options}), parse_line)

    def export(self, format: str = "sequences", **options: Any) -> Iterator[dict[str, Any]]:  # noqa: A002
        """Stream the rows of many rollouts, newest rollout first. Options include `status`, `group_id`, `since`, `limit`."""
        return self._stream(requests.export({"format": format, **options}), parse_line)

    def open_group(  # noqa: PLR0913 - each parameter is a named option
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
        replace: bool | int | None = None,
    ) -> dict[str, Any]:
        """Open a group and its `size` rollouts, each with the options `rollout`, `idle_s` and `start_s`, atomically.

        `deadline_s` is the limit of each rollout and of those that replace it, together. By default a rollout is aborted that
        has no call for `groups.idle_s` of the settings, or no first call for `groups.start_s`.

        `over_sample` opens this many more; the group is complete once `size` rollouts have a reward. `replace` opens a rollout
        that fails again, at most this many times (True: 3); `replaced_by` of its finish has the new one.

        Returns {group_id, size, status, rollouts: [{rollout_id, base_url, api_key, …}]}. The same options again return the
        same group.
        """
        deadlines = {"deadline_s": deadline_s, "idle_s": idle_s, "start_s": start_s}
        members = {"size": size, "over_sample": over_sample, "replace": replace}
        request = requests.open_group(group_id, {**members, "rollout": rollout, "metadata": metadata, **deadlines})
        return cast("dict[str, Any]", self._request(request))

    def group(self, group_id: str) -> dict[str, Any]:
        """Return the group: its members, their rewards and statuses, and whether it is complete."""
        return cast("dict[str, Any]", self._request(requests.group(group_id)))

    def groups(self, *, status: str | None = None, page: int = 100) -> Iterator[dict[str, Any]]:
        """Iterate over all groups, `page` per request."""
        return self._list_pages("groups", {"status": status, "limit": page})

    def requeue_group(
        self, group_id: str, *, max_staleness: int | None = None, policy: str | None = None
    ) -> dict[str, Any]:
        """Put a group that was dropped or acknowledged into the queue again; one that is queued is unchanged.

        Its next delivery has `max_staleness` instead of that of the claim, and `requeued` and `acked` (how often its batches
        were acknowledged before): a group that was acknowledged is trained again. Raises ClientError (409) while it is open
        or claimed.
        """
        request = requests.requeue_group(group_id, {"max_staleness": max_staleness, "policy": policy})
        return cast("dict[str, Any]", self._request(request))

    def delete_group(self, group_id: str) -> None:
        """Delete the group and its rollouts; one that does not exist is no error."""
        self._request(requests.group(group_id, "DELETE"))

    def claim_batch(self, *, consumer: str, groups: int, policy: str | None = None, **options: Any) -> dict[str, Any]:
        """Claim up to `groups` complete groups that no other consumer has claimed: {batch_id, groups, rows, …}.

        `policy` is required if several policies are trained; each of them claims a group independently of the others.
        Options: `format`, `threads`, `wait_s`, `lease_s`, `exact`, `members`, `min_group`, `max_staleness` and the other fields
        of the route. Acknowledge the batch or extend its lease before the lease expires; otherwise another consumer can claim
        its groups. With `heartbeat_s` it is extended so often: another client with the same `consumer` takes the batch over
        once that was missed. `waiting`, `refused`, `dropped` and `reasons` of the response are groups that are not in it.
        """
        body = {"consumer": consumer, "groups": groups, "policy": policy, "instance": self._instance, **options}
        return cast("dict[str, Any]", self._request(requests.claim_batch(body)))

    def ack_batch(self, batch_id: str, *, delete: bool | None = None) -> BatchResult:
        """Acknowledge a batch; `delete` deletes its rollouts. `lost` lists groups that another consumer has claimed.

        `kept` lists groups that are not deleted because another policy still has them in its queue.
        """
        return cast("BatchResult", self._request(requests.ack_batch(batch_id, delete=delete)))

    def release_batch(self, batch_id: str) -> BatchResult:
        """Release a batch: other consumers can claim its groups."""
        return cast("BatchResult", self._request(requests.release_batch(batch_id)))

    def extend_batch(self, batch_id: str, *, lease_s: float) -> BatchResult:
        """Set the lease of a batch to `lease_s` from now; `lost` as for `ack_batch`."""
        return cast("BatchResult", self._request(requests.extend_batch(batch_id, lease_s)))

    def batches(
        self,
        *,
        consumer: str,
        groups: int,
        policy: str | None = None,
        wait_s: float | None = None,
        lease_s: float = 60.0,
        stall_s: float | None = 60.0,
        **options: Any,
    ) -> Generator[Batch, None, None]:
        """Iterate over batches of up to `groups` complete groups; the lease of each is extended while the body runs.

        `policy` is required if several policies are trained.

            for batch in client.batches(consumer="trainer-0", groups=4, format="trl"):
                train(batch.groups)

        A batch is acknowledged when the loop continues, or by `batch.ack()`. After an exception, a `break` or when the
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
        listing = requests.listing("groups", {"status": "open", "limit": OPEN_PAGE}, None)
        return claim_batches(
            self, consumer=consumer, groups=groups, list_open=lambda: self._request(listing), **options
        )

    def policies(self) -> dict[str, Any]:
        """Return the policies with their models, announced versions and pauses."""
        return cast("dict[str, Any]", self._request(requests.policies()))

    def policy(self, policy: str | None = None) -> dict[str, Any]:
        """Return the announced {version, epoch, run} of a policy (None: `default`); steps whose engine reports none have it."""
        return cast("dict[str, Any]", self._request(requests.policy(policy)))

    def put_policy(
        self, version: str | int, *, policy: str | None = None, run: str | None = None, new_epoch: bool = False
    ) -> dict[str, Any]:
        """Announce the version of a policy (None: `default`) that the engines serve from now on: {version, epoch, run}.

        A new epoch begins if `run` is another ID than the last one, or with `new_epoch`: then the version may be lower, and
        groups that were sampled before are dropped. Otherwise a lower version is a ClientError (code `lower_version`).
        """
        request = requests.put_policy(version, policy, run, new_epoch=new_epoch)
        return logged(cast("dict[str, Any]", self._request(request)))

    def pause(
        self,
        mode: Literal["wait", "reject"] = "wait",
        *,
        drain_s: float = 0,
        in_flight: Literal["keep", "abort"] = "keep",
        policy: str | None = None,
    ) -> dict[str, Any]:
        """Pause new calls of a policy while its weights change, and wait up to `drain_s` until no call is in flight.

        `in_flight="abort"` then stops those that are left at their engines; their steps are partial.
        """
        return cast("dict[str, Any]", self._request(requests.pause(mode, drain_s, in_flight, policy)))

    def resume(self, *, policy: str | None = None) -> dict[str, Any]:
        """Resume paused calls of a policy."""
        return cast("dict[str, Any]", self._request(requests.resume(policy)))

    def update_policy(
        self,
        version: str | int,
        update: Callable[[], object],
        *,
        drain_s: float = 60.0,
        mode: Literal["wait", "reject"] = "wait",
        in_flight: InFlight = "drain",
        policy: str | None = None,
        run: str | None = None,
    ) -> dict[str, Any]:
        """Pause calls of a policy (None: `default`), drain, call `update`, announce `version`, resume.

        Return {version, epoch, run, in_flight} at the update. Calls of other policies are neither paused nor waited for.

        `run` is an ID of the training run, for example that of its tracker. Another ID than the last one begins a new epoch:
        the run may continue from an earlier version, and groups that were sampled before are dropped. Otherwise a lower
        version than the announced one raises ClientError (code `lower_version`) without an update.

        `update` loads the weights into the engines; the asynchronous client awaits its result. `in_flight` is what happens
        to calls that do not end within `drain_s`: "drain" raises ClientError (code `not_drained`) without an update; "abort"
        stops them at their engines, with partial steps; "continue" does not wait, and they continue on the new weights
        (`policy_version` and `policy_version_end` of their steps differ). After an exception of `update`, calls resume with
        the old version. If this process dies, or the version cannot be announced, calls stay paused: update again, or call
        `resume`.
        """
        check_update(version, in_flight)
        check_follows(self.policy(policy), version, run)
        drains, choice = in_flight != "continue", "abort" if in_flight == "abort" else "keep"
        try:
            paused = self._request(requests.pause(mode, drain_s if drains else 0, choice, policy))
            if drains:
                check_drained(paused, drain_s)
            finished(update())
        except BaseException as error:
            try:
                self.resume(policy=policy)
            except ClientError as failure:
                if failure.status != NOT_FOUND:  # an unknown policy is not paused
                    error.add_note(STILL_PAUSED.format(path=requests.resume(policy).path))
            raise
        try:
            announced = self.put_policy(version, policy=policy, run=run)
        except BaseException as error:
            error.add_note(NOT_ANNOUNCED)
            raise
        self.resume(policy=policy)
        return {**announced, "in_flight": paused["in_flight"]}

    def load_adapter(
        self,
        name: str | None,
        path: str,
        version: str | int,
        *,
        drain_s: float = 60.0,
        mode: Literal["wait", "reject"] = "wait",
        in_flight: Literal["drain", "abort"] = "drain",
        policy: str | None = None,
        run: str | None = None,
    ) -> dict[str, Any]:
        """Load a LoRA adapter of a policy into every vLLM as the model `name`, under a pause, and announce its version.

        `name` None is the only model of the policy. `run` is that of `update_policy`.
        `path` is a folder at the engines, another one for each version. If an engine fails, all keep the adapter of before.
        """
        pause = {"drain_s": drain_s, "mode": mode, "in_flight": in_flight}
        request = requests.load_adapter({"name": name, "path": path, "version": version, "run": run, **pause}, policy)
        return logged(cast("dict[str, Any]", self._request(request)))

    def _list_pages(self, noun: str, filters: Mapping[str, Any]) -> Iterator[Any]:
        cursor = None
        while True:
            answer = self._request(requests.listing(noun, filters, cursor))
            for item in answer[noun]:
                yield item
            cursor = answer["cursor"]
            if cursor is None:
                return

    def _request(self, request: Request) -> Any:
        """Return the JSON of the response, or None if it has no body."""
        response = self._send_with_retries(request, stream=False)
        return response.json() if response.content else None

    def _stream(self, request: Request, parse: Callable[[bytes], Any]) -> Generator[Any, None, None]:
        """Yield the parsed lines of the response."""
        lines = LineBuffer()
        response = self._send_with_retries(request, stream=True)
        try:
            for received in response.iter_bytes():
                for line in lines.feed(received):
                    yield parse(line)
            if rest := lines.rest():
                yield parse(rest)
        except httpx.TransportError as error:
            raise ClientError(f"connection lost during {request.path}: {error}", code="connection_lost") from error
        finally:
            response.close()

    def _send_with_retries(self, request: Request, *, stream: bool) -> "httpx.Response":
        for attempt in range(1, self._max_attempts + 1):
            try:
                return self._send(request, stream=stream)
            except ClientError as error:
                delay_s = retry_delay(error, attempt, self._max_attempts)
                if delay_s is None:
                    raise
                sleep(delay_s)
        raise AssertionError("the last attempt returns or raises")

    def _send(self, request: Request, *, stream: bool) -> "httpx.Response":
        timeout = httpx.Timeout(self._timeout_s, read=self._timeout_s + request.wait_s)
        sent = self._http.build_request(
            request.method,
            request.path,
            json=request.body,
            params=request.query,
            headers=request.headers,
            timeout=timeout,
        )
        try:
            response = self._http.send(sent, stream=stream)
            if response.is_success:
                return response
            raise error_from_response(response.status_code, response.headers, response.read())
        except httpx.TransportError as error:
            code = "unreachable" if isinstance(error, httpx.ConnectError) else "connection_lost"
            raise ClientError(f"{request.method} {self.url}{request.path}: {error}", code=code) from error
