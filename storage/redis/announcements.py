"""Notices over the Redis protocol, which everybody who opens a rollout is told along, and places for records to come.

Each bucket has all notices, so that being told costs no round trip. What gives a place is `Store.open`, and what takes one up
is `Store.append`. No durability is waited for where a place is held: it is a lease.
"""

import asyncio

from storage.redis import scripts
from storage.redis.decoding import pairs, read_announcements
from storage.redis.keys import BUCKETS, announcements_key, heartbeats_key, rollout_keys
from storage.redis.scripts import Run
from storage.types import Announcement, Reservation


class RedisAnnouncements:
    """The notices under `prefix`."""

    def __init__(self, run: Run, prefix: str, *, run_fast: Run) -> None:
        self._run = run
        self._run_fast = run_fast  # waits for no disk and no replica: a beat that is lost is beaten again
        self._beats = heartbeats_key(prefix, BUCKETS[0])
        self._keys = [announcements_key(prefix, bucket) for bucket in BUCKETS]

    async def announce(self, name: str, value: bytes) -> Announcement:
        """Set what every `open` tells along from now on, wherever it is done."""
        first, *others = self._keys
        number = await self._run(scripts.ANNOUNCE, [first], (name, value, ""))
        await asyncio.gather(*(self._run(scripts.ANNOUNCE, [key], (name, value, number)) for key in others))
        return Announcement(value, number)

    async def read(self) -> dict[str, Announcement]:
        """What was announced last."""
        return read_announcements(await self._run(scripts.ANNOUNCEMENTS, [self._keys[0]], ()))

    async def heartbeat(
        self, name: str, value: bytes, *, lifetime_ms: int
    ) -> tuple[dict[str, Announcement], dict[str, bytes]]:
        """Say that `name` is alive; give back what is announced, and everybody's last beat."""
        notices, beats = await self._run_fast(
            scripts.HEARTBEAT, [self._keys[0], self._beats], (name, lifetime_ms, value)
        )
        return read_announcements(notices), {who.decode(): said for who, said in pairs(beats)}


class RedisReservations:
    """The places of a Redis store's rollouts."""

    def __init__(self, run: Run, prefix: str) -> None:
        self._run = run
        self._prefix = prefix

    def __repr__(self) -> str:
        return f"<RedisReservations under {self._prefix}>"

    async def extend(self, rollout: str, incarnation: str, reservation: Reservation) -> None:
        """Hold a place for so long from now; 0: no more. Nothing happens if that life of the rollout is over."""
        keys = rollout_keys(self._prefix, rollout)
        await self._run(scripts.EXTEND_RESERVATION, keys.all(), (keys.encoded, 0, 0, incarnation, *reservation))
