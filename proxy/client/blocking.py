"""The client that blocks.

Holds the sending over httpx2 and one method a route. What is asked stands in `verbs`, what is answered in `shapes`.
"""

from collections.abc import Callable, Iterator, Mapping
from time import sleep
from types import TracebackType
from typing import Any, Literal, Self, cast

import httpx2 as httpx

from proxy.client import verbs
from proxy.client.asking import Ask, ClientError, pause_before_again, read_line, refusal
from proxy.client.shapes import Opened, Rollout, Settled, Step


class Client:
    """The control face of the proxy at `url`. Close it, or use it in a `with`.

    `api_key` is a control key, where the proxy has one configured. An ask that is answered with 429 or 503 is asked again,
    up to `attempts` times, after the `Retry-After` of the answer. Everything raises ClientError.
    """

    def __init__(self, url: str, *, api_key: str | None = None, timeout_s: float = 60.0, attempts: int = 5) -> None:
        self.url = url.rstrip("/")
        self._attempts = attempts
        self._timeout_s = timeout_s
        self._http = httpx.Client(
            base_url=self.url, headers={"Authorization": f"Bearer {api_key}"} if api_key else None
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def open_rollout(self, rollout_id: str | None = None, **terms: Any) -> Opened:
        """Open a rollout, or get the same answer again for the same terms.

        Terms: `group_id`, `metadata`, `model`, `sampling` ({override, default, cap}), `tools`, `limits` ({max_steps,
        max_tokens, deadline_s}). An agent is given `base_url` and `api_key` of the answer.
        """
        return cast("Opened", self._ask(verbs.open_rollout(rollout_id, terms)))

    def rollout(self, rollout_id: str) -> Rollout:
        """The rollout: status, counts, reward, times."""
        return cast("Rollout", self._ask(verbs.rollout(rollout_id)))

    def rollouts(
        self, *, status: str | None = None, group_id: str | None = None, since: int | None = None, page: int = 100
    ) -> Iterator[Rollout]:
        """All rollouts, newest first, asked for page by page. `since` is unix seconds."""
        filters = {"status": status, "group_id": group_id, "since": since, "limit": page}
        return self._listed("rollouts", filters)

    def patch_rollout(self, rollout_id: str, **changes: Any) -> Rollout:
        """Set what is given: `reward`, `step_rewards` ({step_id: reward}), `advantages`, `metadata`."""
        return cast("Rollout", self._ask(verbs.patch_rollout(rollout_id, changes)))

    def finish_rollout(
        self,
        rollout_id: str,
        status: Literal["completed", "failed", "aborted", "truncated"] = "completed",
        *,
        reward: float | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Rollout:
        """Finish the rollout: it takes no more calls. The same again changes nothing."""
        body = {"status": status, "reward": reward, "metadata": metadata}
        return cast("Rollout", self._ask(verbs.finish_rollout(rollout_id, body)))

    def delete_rollout(self, rollout_id: str) -> None:
        """Delete all of the rollout, if it is there."""
        self._ask(verbs.rollout(rollout_id, "DELETE"))

    def step(self, rollout_id: str, step_id: str) -> Step:
        """One recorded step; a reply names it in `X-Step-Id`."""
        return cast("Step", self._ask(verbs.step(rollout_id, step_id)))

    def steps(self, rollout_id: str, *, page: int = 100) -> Iterator[Step]:
        """The recorded steps in the order of storing, asked for page by page."""
        after = None
        while True:
            answer = self._ask(verbs.steps(rollout_id, after, page))
            yield from answer["steps"]
            after = answer["after"]
            if after is None:
                return

    def tree(self, rollout_id: str) -> dict[str, Any]:
        """The tree of steps: parents, spans, drift, and which branch owns which tokens."""
        return cast("dict[str, Any]", self._ask(verbs.tree(rollout_id)))

    def export_rollout(self, rollout_id: str, format: str = "sequences", **options: Any) -> Iterator[dict[str, Any]]:  # noqa: A002
        """The rows of one rollout in a trainer's format, read as they come. Options are those of the route."""
        return self._lines(verbs.export(f"/rollouts/{verbs.named(rollout_id)}", {"format": format, **options}))

    def export_group(self, group_id: str, format: str = "sequences", **options: Any) -> Iterator[dict[str, Any]]:  # noqa: A002
        """The rows of one group in a trainer's format, read as they come."""
        return self._lines(verbs.export(f"/groups/{verbs.named(group_id)}", {"format": format, **options}))

    def export(self, format: str = "sequences", **options: Any) -> Iterator[dict[str, Any]]:  # noqa: A002
        """The rows of many rollouts, newest rollout first. Options: also `status`, `group_id`, `since`, `limit`."""
        return self._lines(verbs.export("", {"format": format, **options}))

    def open_group(
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
        return cast("dict[str, Any]", self._ask(ask))

    def group(self, group_id: str) -> dict[str, Any]:
        """The group: its members, their rewards and statuses, and whether it is complete."""
        return cast("dict[str, Any]", self._ask(verbs.group(group_id)))

    def groups(self, *, status: str | None = None, page: int = 100) -> Iterator[dict[str, Any]]:
        """All groups, asked for page by page."""
        return self._listed("groups", {"status": status, "limit": page})

    def delete_group(self, group_id: str) -> None:
        """Delete the group and its rollouts, if it is there."""
        self._ask(verbs.group(group_id, "DELETE"))

    def claim_batch(self, *, consumer: str, groups: int, **wanted: Any) -> dict[str, Any]:
        """Claim up to so many complete groups that nobody else holds: {batch_id, groups, rows, …}.

        Wanted: `format`, `wait_s`, `lease_s`, `order`, `max_staleness`, and what else the route takes. Acknowledge the
        batch before its lease runs out, or extend it, or it is given to somebody else.
        """
        return cast("dict[str, Any]", self._ask(verbs.claim({"consumer": consumer, "groups": groups, **wanted})))

    def ack_batch(self, batch_id: str, *, delete: bool | None = None) -> Settled:
        """Done with a batch; `delete` its rollouts too. `lost` names groups that somebody else holds by now."""
        return cast("Settled", self._ask(verbs.settle(batch_id, "ack", {"delete": delete})))

    def release_batch(self, batch_id: str) -> Settled:
        """Give a batch back."""
        return cast("Settled", self._ask(verbs.settle(batch_id, "release", {})))

    def extend_batch(self, batch_id: str, *, lease_s: float) -> Settled:
        """Hold a batch for so long from now on; `lost` as with `ack_batch`."""
        return cast("Settled", self._ask(verbs.settle(batch_id, "extend", {"lease_s": lease_s})))

    def policy(self) -> dict[str, Any]:
        """The policy version that is stamped on steps when the engine reports none."""
        return cast("dict[str, Any]", self._ask(Ask("GET", "/policy")))

    def put_policy(self, version: str | int) -> dict[str, Any]:
        """Say which policy version the engines serve now."""
        return cast("dict[str, Any]", self._ask(verbs.put_policy(version)))

    def pause(self, mode: Literal["wait", "reject"] = "wait", *, drain_s: float = 0) -> dict[str, Any]:
        """Hold new calls while the weights change, and wait so long at the most until none is in flight."""
        return cast("dict[str, Any]", self._ask(verbs.pause(mode, drain_s)))

    def resume(self) -> dict[str, Any]:
        """Let the calls that wait go on."""
        return cast("dict[str, Any]", self._ask(Ask("POST", "/policy/resume")))

    def _listed(self, noun: str, filters: Mapping[str, Any]) -> Iterator[Any]:
        cursor = None
        while True:
            answer = self._ask(verbs.listing(noun, filters, cursor))
            yield from answer[noun]
            cursor = answer["cursor"]
            if cursor is None:
                return

    def _ask(self, ask: Ask) -> Any:
        """The JSON of the answer; None where it has no body."""
        answer = self._patiently(lambda: self._send(ask, stream=False))
        return answer.json() if answer.content else None

    def _lines(self, ask: Ask) -> Iterator[dict[str, Any]]:
        answer = self._patiently(lambda: self._send(ask, stream=True))
        try:
            for line in answer.iter_lines():
                yield read_line(line)
        except httpx.TransportError as error:
            raise ClientError(f"the export broke off: {error}", code="broke_off") from error
        finally:
            answer.close()

    def _patiently(self, send: Callable[[], httpx.Response]) -> httpx.Response:
        for attempt in range(1, self._attempts + 1):
            try:
                return send()
            except ClientError as error:
                pause = pause_before_again(error, attempt, self._attempts)
                if pause is None:
                    raise
                sleep(pause)
        raise AssertionError("the last attempt returns or raises")

    def _send(self, ask: Ask, *, stream: bool) -> httpx.Response:
        timeout = httpx.Timeout(self._timeout_s, read=self._timeout_s + ask.wait_s)
        request = self._http.build_request(
            ask.method, ask.path, json=ask.body, params=ask.query, headers=ask.headers, timeout=timeout
        )
        try:
            answer = self._http.send(request, stream=stream)
            if answer.is_success:
                return answer
            raise refusal(answer.status_code, answer.headers, answer.read())
        except httpx.TransportError as error:
            code = "unreachable" if isinstance(error, httpx.ConnectError) else "broke_off"
            raise ClientError(f"{ask.method} {self.url}{ask.path}: {error}", code=code) from error
