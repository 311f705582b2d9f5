"""Announcements, heartbeats and reservations on Redis.

Every bucket has a copy of all announcements, so that `Store.open` returns them without another round trip. Heartbeats and
reservations are leases: they do not wait for durability.
"""

import asyncio

from storage.redis import scripts
from storage.redis.keys import BUCKETS, announcements_key, heartbeats_key, rollout_keys
from storage.redis.replies import decode_announcements, pairs, readable
from storage.redis.scripts import RunScript
from storage.types import Announcement, Reservation


class RedisAnnouncements:
    """The announcements under `prefix`. `run` waits for durability; `run_fast` does not."""

    def __init__(self, run: RunScript, prefix: str, *, run_fast: RunScript) -> None:
        self._run = run
        self._run_fast = run_fast
        self._heartbeats = heartbeats_key(prefix, BUCKETS[0])
        self._keys = [announcements_key(prefix, bucket) for bucket in BUCKETS]

    async def announce(self, name: str, value: bytes) -> Announcement:
        """Set a value in every bucket; the first bucket assigns its number."""
        return await self._announced(name, value, await self._number(name, value, ""))

    async def announce_if(self, name: str, value: bytes, number: int) -> Announcement | None:
        """Set a value if the present one has this number (0: there is none); the first bucket decides."""
        assigned = await self._number(name, value, number)
        return None if assigned < 0 else await self._announced(name, value, assigned)

    async def _number(self, name: str, value: bytes, present: int | str) -> int:
        number: int = await self._run(scripts.ANNOUNCE, [self._keys[0]], (name, value, "", present))
        return number

    async def _announced(self, name: str, value: bytes, number: int) -> Announcement:
        others = self._keys[1:]
        await asyncio.gather(*(self._run(scripts.ANNOUNCE, [key], (name, value, number, "")) for key in others))
        return Announcement(value, number)

    async def read(self) -> dict[str, Announcement]:
        """Return all announcements."""
        return decode_announcements(await self._run(scripts.ANNOUNCEMENTS, [self._keys[0]], ()))

    async def heartbeat(
        self, name: str, value: bytes, *, lifetime_ms: int
    ) -> tuple[dict[str, Announcement], dict[str, bytes]]:
        """Set a value that expires; return all announcements and all heartbeats that have not expired."""
        keys = [self._keys[0], self._heartbeats]
        announcements, heartbeats = await self._run_fast(scripts.HEARTBEAT, keys, (name, lifetime_ms, value))
        return decode_announcements(announcements), {readable(sender): value for sender, value in pairs(heartbeats)}


class RedisReservations:
    """The reservations of the rollouts under `prefix`."""

    def __init__(self, run: RunScript, prefix: str) -> None:
        self._run = run
        self._prefix = prefix

    def __repr__(self) -> str:
        return f"<RedisReservations under {self._prefix}>"

    async def extend(self, rollout: str, incarnation: str, reservation: Reservation) -> None:
        """Set the lease to end this long from now; 0 releases the reservation."""
        keys = rollout_keys(self._prefix, rollout)
        await self._run(scripts.EXTEND_RESERVATION, keys.all, (keys.encoded, 0, 0, incarnation, *reservation))
