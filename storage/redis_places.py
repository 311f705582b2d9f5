"""Places for records to come, over the Redis protocol.

Holds what `Places` promises; what gives a place is `Store.open`, and what takes one up is `Store.append`. No durability is
waited for: a place is a lease.
"""

from storage import scripts
from storage.keys import keys_of
from storage.scripts import Run
from storage.store import Place


class RedisPlaces:
    """The places of a Redis store's rollouts."""

    def __init__(self, run: Run, prefix: str) -> None:
        self._run = run
        self._prefix = prefix

    def __repr__(self) -> str:
        return f"<RedisPlaces under {self._prefix}>"

    async def hold(self, rollout: str, birth: str, place: Place) -> None:
        """Hold a place for so long from now; 0: no more. Nothing happens if that life of the rollout is over."""
        keys = keys_of(self._prefix, rollout)
        await self._run(scripts.HOLD, keys.all(), (keys.encoded, 0, 0, birth, *place))
