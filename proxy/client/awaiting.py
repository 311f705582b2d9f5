"""The client that awaits.

Holds the sending over httpx2 and one method a route, as `blocking` does. What is asked stands in `verbs`, what is answered
in `shapes`.
"""

from asyncio import sleep
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, cast

import httpx2 as httpx

from proxy.client import verbs
from proxy.client.asking import Ask, ClientError, pause_before_again, read_line, refusal
from proxy.client.batches import Batch, claim_batches
from proxy.client.shapes import Opened, Rollout, Settled, Step

if TYPE_CHECKING:
    from proxy.client.managed import ManagedServer


class AsyncClient:
    """The control face of the proxy at `url`. Close it, or use it in an `async with`.

    `api_key` is a control key, where the proxy has one configured. An ask that is answered with 429 or 503 is asked again,
    up to `attempts` times, after the `Retry-After` of the answer. Everything raises ClientError.
    """

    def __init__(self, url: str, *, api_key: str | None = None, timeout_s: float = 60.0, attempts: int = 5) -> None:
        self.url = url.rstrip("/")
        self._attempts = attempts
        self._timeout_s = timeout_s
        self._http = httpx.AsyncClient(
            base_url=self.url, headers={"Authorization": f"Bearer {api_key}"} if api_key else None
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def open_rollout(self, rollout_id: str | None = None, **terms: Any) -> Opened:
        """Open a rollout, or get the same answer again for the same terms.

        Terms: `group_id`, `metadata`, `model`, `sampling` ({override, default, cap}), `tools`, `limits` ({max_steps,
        max_tokens, deadline_s}). An agent is given `base_url` and `api_key` of the answer.
        """
        return cast("Opened", await self._ask(verbs.open_rollout(rollout_id, terms)))

    async def rollout(self, rollout_id: str) -> Rollout:
        """The rollout: status, counts, reward, times."""
        return cast("Rollout", await self._ask(verbs.rollout(rollout_id)))

    def rollouts(
        self, *, status: str | None = None, group_id: str | None = None, since: int | None = None, page: int = 100
    ) -> AsyncIterator[Rollout]:
        """All rollouts, newest first, asked for page by page. `since` is unix seconds."""
        filters = {"status": status, "group_id": group_id, "since": since, "limit": page}
        return self._listed("rollouts", filters)

    async def patch_rollout(self, rollout_id: str, **changes: Any) -> Rollout:
        """Set what is given: `reward`, `step_rewards` ({step_id: reward}), `advantages`, `metadata`."""
        return cast("Rollout", await self._ask(verbs.patch_rollout(rollout_id, changes)))

    async def finish_rollout(
        self,
        rollout_id: str,
        status: Literal["completed", "failed", "aborted", "truncated"] = "completed",
        *,
        reward: float | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Rollout:
        """Finish the rollout: it takes no more calls. The same again changes nothing."""
        body = {"status": status, "reward": reward, "metadata": metadata}
        return cast("Rollout", await self._ask(verbs.finish_rollout(rollout_id, body)))

    async def delete_rollout(self, rollout_id: str) -> None:
        """Delete all of the rollout, if it is there."""
        await self._ask(verbs.rollout(rollout_id, "DELETE"))

    async def step(self, rollout_id: str, step_id: str) -> Step:
        """One recorded step; a reply names it in `X-Step-Id`."""
        return cast("Step", await self._ask(verbs.step(rollout_id, step_id)))

    async def steps(self, rollout_id: str, *, page: int = 100) -> AsyncIterator[Step]:
        """The recorded steps in the order of storing, asked for page by page."""
        after = None
        while True:
            answer = await self._ask(verbs.steps(rollout_id, after, page))
            for step in answer["steps"]:
                yield step
            after = answer["after"]
            if after is None:
                return

    async def tree(self, rollout_id: str) -> dict[str, Any]:
        """The tree of steps: parents, spans, drift, and which branch owns which tokens."""
        return cast("dict[str, Any]", await self._ask(verbs.tree(rollout_id)))

    def export_rollout(
        self,
        rollout_id: str,
        format: str = "sequences",  # noqa: A002 - as the route calls it
        **options: Any,
    ) -> AsyncIterator[dict[str, Any]]:
        """The rows of one rollout in a trainer's format, read as they come. Options are those of the route."""
        return self._lines(verbs.export(f"/rollouts/{verbs.named(rollout_id)}", {"format": format, **options}))

    def export_group(self, group_id: str, format: str = "sequences", **options: Any) -> AsyncIterator[dict[str, Any]]:  # noqa: A002
        """The rows of one group in a trainer's format, read as they come."""
        return self._lines(verbs.export(f"/groups/{verbs.named(group_id)}", {"format": format, **options}))

    def export(self, format: str = "sequences", **options: Any) -> AsyncIterator[dict[str, Any]]:  # noqa: A002
        """The rows of many rollouts, newest rollout first. Options: also `status`, `group_id`, `since`, `limit`."""
        return self._lines(verbs.export("", {"format": format, **options}))

    async def open_group(
        self,
        size: int,
        *,
        group_id: str | None = None,
        rollout: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Open a group and its `size` rollouts, all on the terms `rollout`, at once or not at all.

        {group_id, size, status, rollouts: [{rollout_id, base_url, api_key, …}]}, and the same again for the same terms.
        """
        ask = verbs.open_group(group_id, {"size": size, "rollout": rollout, "metadata": metadata})
        return cast("dict[str, Any]", await self._ask(ask))

    async def group(self, group_id: str) -> dict[str, Any]:
        """The group: its members, their rewards and statuses, and whether it is complete."""
        return cast("dict[str, Any]", await self._ask(verbs.group(group_id)))

    def groups(self, *, status: str | None = None, page: int = 100) -> AsyncIterator[dict[str, Any]]:
        """All groups, asked for page by page."""
        return self._listed("groups", {"status": status, "limit": page})

    async def delete_group(self, group_id: str) -> None:
        """Delete the group and its rollouts, if it is there."""
        await self._ask(verbs.group(group_id, "DELETE"))

    async def claim_batch(self, *, consumer: str, groups: int, **wanted: Any) -> dict[str, Any]:
        """Claim up to so many complete groups that nobody else holds: {batch_id, groups, rows, …}.

        Wanted: `format`, `wait_s`, `lease_s`, `order`, `max_staleness`, and what else the route takes. Acknowledge the
        batch before its lease runs out, or extend it, or it is given to somebody else.
        """
        return cast("dict[str, Any]", await self._ask(verbs.claim({"consumer": consumer, "groups": groups, **wanted})))

    async def ack_batch(self, batch_id: str, *, delete: bool | None = None) -> Settled:
        """Done with a batch; `delete` its rollouts too. `lost` names groups that somebody else holds by now."""
        return cast("Settled", await self._ask(verbs.settle(batch_id, "ack", {"delete": delete})))

    async def release_batch(self, batch_id: str) -> Settled:
        """Give a batch back."""
        return cast("Settled", await self._ask(verbs.settle(batch_id, "release", {})))

    async def extend_batch(self, batch_id: str, *, lease_s: float) -> Settled:
        """Hold a batch for so long from now on; `lost` as with `ack_batch`."""
        return cast("Settled", await self._ask(verbs.settle(batch_id, "extend", {"lease_s": lease_s})))

    def batches(
        self, *, consumer: str, groups: int, wait_s: float | None = None, lease_s: float = 60.0, **wanted: Any
    ) -> AsyncGenerator[Batch, None]:
        """Batches of up to so many complete groups, each held while the body of the loop works on it.

            async for batch in client.batches(consumer="trainer-0", groups=4, format="trl"):
                train(batch.groups)

        A batch is acknowledged when the body goes on to the next, or by `await batch.ack()`. Left in any other way (an
        exception, `break`) it is released, so that nothing is lost: `ack` before a `break`. The loop ends when nothing
        came for `wait_s`; None waits for ever. Why groups are refused or dropped is logged once for each reason.
        """
        return claim_batches(self, consumer=consumer, groups=groups, wait_s=wait_s, lease_s=lease_s, **wanted)

    async def policy(self) -> dict[str, Any]:
        """The policy version that is stamped on steps when the engine reports none."""
        return cast("dict[str, Any]", await self._ask(Ask("GET", "/policy")))

    async def put_policy(self, version: str | int) -> dict[str, Any]:
        """Say which policy version the engines serve now."""
        return cast("dict[str, Any]", await self._ask(verbs.put_policy(version)))

    async def pause(self, mode: Literal["wait", "reject"] = "wait", *, drain_s: float = 0) -> dict[str, Any]:
        """Hold new calls while the weights change, and wait so long at the most until none is in flight."""
        return cast("dict[str, Any]", await self._ask(verbs.pause(mode, drain_s)))

    async def resume(self) -> dict[str, Any]:
        """Let the calls that wait go on."""
        return cast("dict[str, Any]", await self._ask(Ask("POST", "/policy/resume")))

    def managed_server(
        self,
        tokenizer: Any = None,
        base_url: str | None = None,
        preserve_think_blocks: bool = False,  # noqa: FBT001, FBT002 - as in Atropos
        **said: Any,
    ) -> "ManagedServer":
        """ManagedServer over a rollout of this proxy, as Atropos' server managers give it; use it in an `async with`.

        `base_url` names one of several servers there; here it is this proxy or nothing.
        """
        from proxy.client.managed import ManagedServer  # noqa: PLC0415 - it needs `openai`, and the client does not

        if base_url is not None and base_url.rstrip("/").removesuffix("/v1") != self.url:
            raise ValueError(f"base_url {base_url!r} is not known here: the one server is the proxy at {self.url}")
        return ManagedServer(self, tokenizer, preserve_think_blocks=preserve_think_blocks, **said)

    async def _listed(self, noun: str, filters: Mapping[str, Any]) -> AsyncIterator[Any]:
        cursor = None
        while True:
            answer = await self._ask(verbs.listing(noun, filters, cursor))
            for listed in answer[noun]:
                yield listed
            cursor = answer["cursor"]
            if cursor is None:
                return

    async def _ask(self, ask: Ask) -> Any:
        """The JSON of the answer; None where it has no body."""
        answer = await self._patiently(lambda: self._send(ask, stream=False))
        return answer.json() if answer.content else None

    async def _lines(self, ask: Ask) -> AsyncIterator[dict[str, Any]]:
        answer = await self._patiently(lambda: self._send(ask, stream=True))
        try:
            async for line in answer.aiter_lines():
                yield read_line(line)
        except httpx.TransportError as error:
            raise ClientError(f"the export broke off: {error}", code="broke_off") from error
        finally:
            await answer.aclose()

    async def _patiently(self, send: Callable[[], Awaitable[httpx.Response]]) -> httpx.Response:
        for attempt in range(1, self._attempts + 1):
            try:
                return await send()
            except ClientError as error:
                pause = pause_before_again(error, attempt, self._attempts)
                if pause is None:
                    raise
                await sleep(pause)
        raise AssertionError("the last attempt returns or raises")

    async def _send(self, ask: Ask, *, stream: bool) -> httpx.Response:
        timeout = httpx.Timeout(self._timeout_s, read=self._timeout_s + ask.wait_s)
        request = self._http.build_request(
            ask.method, ask.path, json=ask.body, params=ask.query, headers=ask.headers, timeout=timeout
        )
        try:
            answer = await self._http.send(request, stream=stream)
            if answer.is_success:
                return answer
            raise refusal(answer.status_code, answer.headers, await answer.aread())
        except httpx.TransportError as error:
            code = "unreachable" if isinstance(error, httpx.ConnectError) else "broke_off"
            raise ClientError(f"{ask.method} {self.url}{ask.path}: {error}", code=code) from error
