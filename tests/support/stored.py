"""Reading back what the proxy stored, straight from the store."""

import asyncio

from proxy.rollouts.rollout import Rollout, read_marks, read_rollout
from proxy.trajectory.blocks import BlockReader
from proxy.trajectory.codec import decode
from proxy.trajectory.step import Step

TIMEOUT_S = 50


async def steps_of(store, rollout_id: str) -> list[Step]:
    """The steps of a rollout, in order of storing."""
    records = await store.read(rollout_id, 0, 10_000)
    reader = BlockReader(await store.blocks(rollout_id))  # after the records: so none is missing that they lean on
    return [decode(record, reader, index) for index, record in enumerate(records)]


async def rollout_of(store, rollout_id: str) -> Rollout:
    """The rollout as it stands."""
    return read_rollout(await store.get(rollout_id))


async def some_steps(store, rollout_id: str, count: int = 1) -> list[Step]:
    """The steps, once there are so many: nobody waits for a step whose client has left."""
    async with asyncio.timeout(TIMEOUT_S):
        while len(steps := await steps_of(store, rollout_id)) < count:
            await asyncio.sleep(0.005)
    return steps


async def undelivered_of(store, rollout_id: str) -> frozenset[str]:
    """The ids of undelivered steps, once there is one."""
    async with asyncio.timeout(TIMEOUT_S):
        while not (found := read_marks(await store.marks(rollout_id)).undelivered):
            await asyncio.sleep(0.005)
    return found
