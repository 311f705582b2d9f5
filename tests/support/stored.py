"""Steps and rollouts read directly from the store."""

import asyncio

from proxy.rollouts.rollout import Rollout, read_marks, read_rollout
from proxy.trajectory.blocks import BlockReader
from proxy.trajectory.codec import decode
from proxy.trajectory.step import Step

TIMEOUT_S = 50


async def stored_steps(store, rollout_id: str) -> list[Step]:
    """Return the steps of a rollout, in storage order."""
    records = await store.read(rollout_id, 0, 10_000)
    reader = BlockReader(await store.blocks(rollout_id))  # after the records, so that none of their blocks is missing
    return [decode(record, reader, index) for index, record in enumerate(records)]


async def stored_rollout(store, rollout_id: str) -> Rollout:
    """Return the stored rollout."""
    return read_rollout(await store.get(rollout_id))


async def wait_for_steps(store, rollout_id: str, count: int = 1) -> list[Step]:
    """Return the steps once there are this many: no client waits for a step after a disconnect."""
    async with asyncio.timeout(TIMEOUT_S):
        while len(steps := await stored_steps(store, rollout_id)) < count:
            await asyncio.sleep(0.005)
    return steps


async def wait_for_undelivered(store, rollout_id: str) -> frozenset[str]:
    """Return the IDs of undelivered steps, once there is one."""
    async with asyncio.timeout(TIMEOUT_S):
        while not (found := read_marks(await store.marks(rollout_id)).undelivered):
            await asyncio.sleep(0.005)
    return found
