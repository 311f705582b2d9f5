"""Batches of complete groups, claimed one after the other, with leases that are extended while the trainer works."""

import asyncio
import logging
import re
from collections.abc import AsyncGenerator
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, Self

from tokentape.transport import ClientError
from tokentape.types import BatchApi, ClaimedGroup

LONG_POLL_S: Final = 30.0
HEARTBEATS_PER_LEASE: Final = 3  # two can fail before the lease expires
LOST_STATUSES: Final = (404, 409)
LEASE_LOST: Final = "lease_lost"
LOG: Final = logging.getLogger("tokentape.client")
_NAMES_AND_NUMBERS: Final = re.compile(r"'[^']*'|\d+")


class Batch:
    """Claimed groups. `async with` acknowledges the batch at its end, and releases it after an exception.

    `claimed` is the whole response to the claim and `groups` its groups (`tokentape.types.ClaimedGroup`): `data` is the
    group in the claimed format, and `rows[i]` describes row i of it: rollout, steps, reward, advantage. `is_lost` is set
    if the lease of any group expires in spite of the heartbeat: another consumer has claimed it, and `ack` raises.
    """

    def __init__(self, client: BatchApi, claimed: dict[str, Any], lease_s: float) -> None:
        self.claimed = claimed
        self.batch_id: str = claimed["batch_id"]
        self.groups: list[ClaimedGroup] = claimed["groups"]
        self.is_lost = False
        self._client = client
        self._lease_s = lease_s
        self._is_ended = False
        self._heartbeat: asyncio.Task[None] | None = None

    async def ack(self, *, delete: bool | None = None) -> None:
        """Acknowledge the batch; `delete` deletes its rollouts. Raises ClientError (404 or 409) if a group is lost."""
        self._end()
        result = await self._client.ack_batch(self.batch_id, delete=delete)
        if result["lost"]:
            raise ClientError(
                f"The lease of batch {self.batch_id!r} expired and another consumer claimed "
                f"{', '.join(result['lost'])}; its other groups are acknowledged.",
                status=409,
                type="conflict",
                code=LEASE_LOST,
            )

    async def release(self) -> None:
        """Release the batch: other consumers can claim its groups."""
        self._end()
        await self._client.release_batch(self.batch_id)

    async def __aenter__(self) -> Self:
        self._heartbeat = asyncio.create_task(self._extend_lease())  # noqa: TID251 - referenced here, cancelled in _end
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._is_ended:
            return
        if error is None:
            await self.ack()
            return
        with suppress(ClientError):  # the first error matters more, and the lease expires
            await self.release()

    def _end(self) -> None:
        self._is_ended = True
        if self._heartbeat is not None:
            self._heartbeat.cancel()

    async def _extend_lease(self) -> None:
        while not self.is_lost:
            await asyncio.sleep(self._lease_s / HEARTBEATS_PER_LEASE)
            try:
                result = await self._client.extend_batch(self.batch_id, lease_s=self._lease_s)
                self.is_lost = bool(result["lost"])
            except ClientError as error:  # any other error can be over at the next heartbeat
                self.is_lost = error.status in LOST_STATUSES


async def claim_batches(
    client: BatchApi, *, consumer: str, groups: int, wait_s: float | None, lease_s: float, **options: Any
) -> AsyncGenerator[Batch, None]:
    """Claim one batch after the other; see `AsyncClient.batches`."""
    logged: set[str] = set()
    poll_s = LONG_POLL_S if wait_s is None else wait_s
    while True:
        claimed = await client.claim_batch(consumer=consumer, groups=groups, wait_s=poll_s, lease_s=lease_s, **options)
        _log_excluded(claimed, logged)
        if claimed["batch_id"] is not None:
            async with Batch(client, claimed, lease_s) as batch:
                yield batch
        elif wait_s is not None:
            return


def _log_excluded(claimed: dict[str, Any], logged: set[str]) -> None:
    """Log why groups were refused or dropped: each reason once, ignoring its ids and numbers."""
    for outcome in ("refused", "dropped"):
        for group in claimed.get(outcome, ()):
            reason = f"{outcome}: {_NAMES_AND_NUMBERS.sub('', group['why'])}"
            if reason not in logged:
                logged.add(reason)
                LOG.warning("group %s is %s: %s", group["group_id"], outcome, group["why"])
