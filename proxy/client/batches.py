"""Batches of complete groups, one after the other, their leases kept alive while the trainer works.

Holds when a batch is acknowledged and when it is given back; not what is asked (`verbs`), nor the sending (`awaiting`).
"""

import asyncio
import logging
import re
from collections.abc import AsyncGenerator
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from proxy.client.asking import ClientError
from proxy.client.shapes import ClaimedGroup

if TYPE_CHECKING:
    from proxy.client.awaiting import AsyncClient

_LONG_POLL_S: Final = 30.0
_BEATS_A_LEASE: Final = 3  # two may fail before the lease runs out
_LOST: Final = (404, 409)
_LOG: Final = logging.getLogger("tokentape.client")
_QUOTED: Final = re.compile(r"'[^']*'|\d+")


class Batch:
    """Groups that only this consumer holds, as `async with` keeps them: acknowledged at its end, released on an exception.

    `claimed` is the whole answer of the claim, `groups` its groups (`shapes.ClaimedGroup`): `data` is the group in the
    format that was claimed, and `rows[i]` describes row i of it: rollout, steps, reward, advantage. `is_lost` is set once
    the lease of some or all groups has run out in spite of the heartbeat: another consumer has those now, and `ack` raises.
    """

    def __init__(self, client: "AsyncClient", claimed: dict[str, Any], lease_s: float) -> None:
        self.claimed = claimed
        self.batch_id: str = claimed["batch_id"]
        self.groups: list[ClaimedGroup] = claimed["groups"]
        self.is_lost = False
        self._client = client
        self._lease_s = lease_s
        self._is_settled = False
        self._heartbeat: asyncio.Task[None] | None = None

    async def ack(self, *, delete: bool | None = None) -> None:
        """Done with it; `delete` its rollouts too. Raises ClientError, 404 or 409, if a group was lost."""
        self._settle()
        settled = await self._client.ack_batch(self.batch_id, delete=delete)
        if settled["lost"]:
            raise ClientError(
                f"the lease of batch {self.batch_id!r} ran out, and somebody else holds {', '.join(settled['lost'])}; "
                "its other groups are acknowledged",
                status=409,
                type="conflict",
                code="lease_lost",
            )

    async def release(self) -> None:
        """Give it back, for somebody else to claim."""
        self._settle()
        await self._client.release_batch(self.batch_id)

    async def __aenter__(self) -> Self:
        self._heartbeat = asyncio.create_task(self._beat())  # noqa: TID251 - held here, and ended when it is settled
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        if self._is_settled:
            return
        if error is None:
            await self.ack()
            return
        with suppress(ClientError):  # what went wrong first matters more; the lease runs out by itself
            await self.release()

    def _settle(self) -> None:
        self._is_settled = True
        if self._heartbeat is not None:
            self._heartbeat.cancel()

    async def _beat(self) -> None:
        while not self.is_lost:
            await asyncio.sleep(self._lease_s / _BEATS_A_LEASE)
            try:
                extended = await self._client.extend_batch(self.batch_id, lease_s=self._lease_s)
                self.is_lost = bool(extended["lost"])
            except ClientError as error:  # anything but a lost lease may be over at the next beat
                self.is_lost = error.status in _LOST


async def claim_batches(
    client: "AsyncClient", *, consumer: str, groups: int, wait_s: float | None, lease_s: float, **wanted: Any
) -> AsyncGenerator[Batch, None]:
    """Batch after batch; see `AsyncClient.batches`."""
    logged: set[str] = set()
    while True:
        poll_s = _LONG_POLL_S if wait_s is None else wait_s
        claimed = await client.claim_batch(consumer=consumer, groups=groups, wait_s=poll_s, lease_s=lease_s, **wanted)
        _log_left_out(claimed, logged)
        if claimed["batch_id"] is not None:
            async with Batch(client, claimed, lease_s) as batch:
                yield batch
        elif wait_s is not None:
            return


def _log_left_out(claimed: dict[str, Any], logged: set[str]) -> None:
    """Log why groups of a claim were refused or dropped: each reason once, whichever rollouts and numbers it names."""
    for outcome in ("refused", "dropped"):
        for group in claimed.get(outcome, ()):
            reason = f"{outcome}: {_QUOTED.sub('', group['why'])}"
            if reason not in logged:
                logged.add(reason)
                _LOG.warning("group %s is %s: %s", group["group_id"], outcome, group["why"])
