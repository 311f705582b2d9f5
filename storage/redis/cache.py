"""The cache on Redis: in each bucket a hash of values, a sorted set of their expiry times, and their total size."""

from storage.redis import scripts
from storage.redis.keys import BUCKETS, bucket_for, cache_keys
from storage.redis.scripts import RunScript


class RedisCache:
    """The cache of the store under `prefix`. `run` reads and writes on a connection that calls do not share."""

    def __init__(self, run: RunScript, prefix: str) -> None:
        self._run = run
        self._prefix = prefix

    def __repr__(self) -> str:
        return f"<RedisCache under {self._prefix}>"

    async def get(self, name: str) -> bytes | None:
        """Return a value that was put at most its lifetime ago, or None."""
        values, _, _ = cache_keys(self._prefix, bucket_for(name))
        value: bytes | None = await self._run(scripts.CACHE_GET, [values], (name,))
        return value

    async def put(self, name: str, value: bytes, *, lifetime_s: int, limit: int) -> None:
        """Set a value, and remove the oldest ones of its bucket if they exceed its share of the limit."""
        keys = cache_keys(self._prefix, bucket_for(name))
        await self._run(scripts.CACHE_PUT, keys, (name, value, lifetime_s * 1000, limit // len(BUCKETS)))
