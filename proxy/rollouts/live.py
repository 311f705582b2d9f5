"""What this process remembers of the rollouts of its calls: one object for each of them, and one limit of memory."""

from collections import OrderedDict
from dataclasses import dataclass, field
from threading import Lock
from typing import Final

from proxy.rollouts.rollout import Rollout
from proxy.telemetry.metrics import Metrics
from proxy.trajectory.blocks import KnownBlocks

_BYTES_PER_ROLLOUT: Final = 3000  # an estimate: the objects of a rollout without its own fields
_BYTES_PER_BLOCK: Final = 120  # of its name in a set
_WEIGHT_OF_FIELDS: Final = 4  # an estimate: bytes of memory for each byte of a stored field and its value


@dataclass(slots=True, eq=False)
class LiveRollout:
    """One incarnation of a rollout: as it was read last, and the number of its `calls` in flight.

    `blocks`: the names of its blocks that are stored. `size`: the approximate memory in bytes.
    """

    rollout: Rollout
    calls: int = 0
    blocks: KnownBlocks = field(default_factory=lambda: KnownBlocks(lock=Lock()))
    size: int = 0

    def measured(self) -> int:
        """Return the approximate memory in bytes."""
        fields = sum(map(len, self.rollout.origin.fields.values()))
        blocks = _BYTES_PER_BLOCK * len(self.blocks) + self.blocks.chain_bytes
        return _BYTES_PER_ROLLOUT + _WEIGHT_OF_FIELDS * fields + blocks


class LiveRollouts:
    """The rollouts with calls in flight or lately used, of at most `max_bytes` together.

    Above, those that were not used for the longest time are forgotten; a call that has one in use keeps it. `busy` has calls
    in flight.
    """

    def __init__(self, max_bytes: int, metrics: Metrics) -> None:
        self.busy: set[LiveRollout] = set()
        self._max_bytes = max_bytes
        self._size = 0
        self._of: OrderedDict[str, LiveRollout] = OrderedDict()
        metrics.rollout_cache_bytes.set_function(lambda: self._size)
        metrics.in_flight_rollouts.set_function(lambda: len({live.rollout.rollout_id for live in self.busy}))

    def __repr__(self) -> str:
        return f"<LiveRollouts {len(self._of)}, {len(self.busy)} busy, {self._size} bytes>"

    def get(self, rollout_id: str) -> LiveRollout | None:
        """Return a rollout, which counts as used now; None if it is not known."""
        live = self._of.get(rollout_id)
        if live is not None:
            self._of.move_to_end(rollout_id)
        return live

    def note(self, rollout: Rollout) -> LiveRollout:
        """Return what is known of a rollout that was read now; nothing is known of another incarnation."""
        live = self.get(rollout.rollout_id)
        if live is not None and live.rollout.incarnation == rollout.incarnation:
            is_equal = live.rollout.origin is rollout.origin
            live.rollout = rollout
            if not is_equal:
                self.keep(live)
            return live
        if live is not None:
            self._size -= live.size
        live = self._of[rollout.rollout_id] = LiveRollout(rollout)
        self.keep(live)
        return live

    def keep(self, live: LiveRollout) -> None:
        """Count the memory of a rollout that has changed, and forget others above the limit."""
        if self._of.get(live.rollout.rollout_id) is not live:
            return  # forgotten meanwhile
        size = live.measured()
        self._size += size - live.size
        live.size = size
        while self._size > self._max_bytes:
            _, forgotten = self._of.popitem(last=False)
            self._size -= forgotten.size
