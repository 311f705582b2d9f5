"""What this process remembers of the rollouts of its calls: one object for each of them, and one limit of memory."""

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, Final

from msgspec import structs

from proxy.continuation.turns import Turns
from proxy.protocols.json_texts import KnownPrompt, LongText
from proxy.rollouts.rollout import DRIFT_FIELD, Rollout, read_rollout
from proxy.telemetry.metrics import Metrics
from proxy.trajectory.blocks import KnownBlocks
from proxy.trajectory.endings import Endings
from proxy.trajectory.step import Step
from proxy.trajectory.tape import Tape
from storage.types import StoredEntity

_BYTES_PER_ROLLOUT: Final = 3000  # an estimate: the objects of a rollout without its own fields
_BYTES_PER_TURNS: Final = 2000  # an estimate: the objects of a rollout without turns
_BYTES_PER_BLOCK: Final = 120  # of its name in a set
_WEIGHT_OF_FIELDS: Final = 4  # an estimate: bytes of memory for each byte of a stored field and its value


@dataclass(slots=True, eq=False)
class KnownTurns:
    """The turns of a rollout; the lock is held while they are changed or searched.

    `pending`: steps to add, with their indexes: mostly the newest one, and `pending_bytes` their memory. `count`: the number of
    steps that were added or are pending, without a gap.
    """

    turns: Turns = field(default_factory=Turns)
    pending: list[tuple[int, Step]] = field(default_factory=list)
    pending_bytes: int = 0
    count: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class LoadedTape:
    """A tape, shared by the playbacks of a process that have the same source. The lock is held while its blocks are read."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.lock = asyncio.Lock()


@dataclass(slots=True, eq=False)
class Played:
    """What a process knows of a playback: its tape, and the steps of it that are used, in order.

    A step that is being stored has its task. `delivered` and `undelivered`: of these, those whose client is known to have
    received the response, or not.
    """

    loaded: LoadedTape
    used: dict[str, "asyncio.Task[Any] | None"]
    delivered: set[str] = field(default_factory=set)
    undelivered: set[str] = field(default_factory=set)
    replies: frozenset[bytes] | None = None  # the digests of the messages that continue the step `through`

    @property
    def tape(self) -> Tape:
        """The tape."""
        return self.loaded.tape


@dataclass(slots=True, eq=False)
class LiveRollout:
    """One incarnation of a rollout: as it was read last, and the number of its `calls` in flight.

    `blocks`: the names of its blocks that are stored. `large_work` is held while a large response is parsed or a large step
    encoded. Of the newest call: `prompt`, its ids, and `text`, its body if that is long. `known`: the turns that calls
    continue, None if there are none in memory. `endings`: of its latest steps. `size`: the approximate memory in bytes.
    """

    rollout: Rollout
    calls: int = 0
    blocks: KnownBlocks = field(default_factory=KnownBlocks)
    large_work: asyncio.Lock = field(default_factory=asyncio.Lock)
    prompt: KnownPrompt | None = None
    text: LongText | None = None
    known: KnownTurns | None = None
    played: Played | None = None  # of a playback
    endings: Endings = field(default_factory=Endings)
    size: int = 0


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

    def note(self, stored: StoredEntity) -> LiveRollout:
        """Return the LiveRollout of a rollout that was read just now; a new one for another incarnation. Raises Damaged.

        If the stored fields did not change since the last read, the parsed values are reused.
        """
        live = self._of.get(stored.name)
        if live is not None and live.rollout.incarnation == stored.incarnation:
            self._of.move_to_end(stored.name)
            before = live.rollout
            is_known = before.origin.fields == stored.fields and before.created_ms == stored.created_ms
            if is_known and DRIFT_FIELD not in stored.fields and stored.damage is None:  # it depends on the counts
                live.rollout = structs.replace(
                    before, touched_ms=stored.touched_ms, counts=stored.counts, has_reservation=stored.has_reservation
                )
                return live
            live.rollout = read_rollout(stored)
        else:
            rollout = read_rollout(stored)
            if live is not None:
                self._size -= live.size
            live = self._of[stored.name] = LiveRollout(rollout)
        self.keep(live)
        return live

    def keep(self, live: LiveRollout) -> None:
        """Count the memory of a rollout that has changed, and forget others above the limit."""
        if self._of.get(live.rollout.rollout_id) is not live:
            return  # forgotten meanwhile
        blocks, prompt, text, known = live.blocks, live.prompt, live.text, live.known
        size = _BYTES_PER_ROLLOUT + _BYTES_PER_BLOCK * len(blocks) + blocks.chain_bytes + live.endings.size
        for value in live.rollout.origin.fields.values():
            size += _WEIGHT_OF_FIELDS * len(value)
        if prompt is not None:
            size += len(prompt.text) + len(prompt.ids) * prompt.ids.itemsize
        if text is not None:
            size += text.size
        if live.played is not None:
            size += live.played.tape.size
        if known is not None:
            turns = known.turns
            size += _BYTES_PER_TURNS + turns.size + turns.conversations.newest.size + known.pending_bytes
        self._size += size - live.size
        live.size = size
        while self._size > self._max_bytes:
            _, forgotten = self._of.popitem(last=False)
            self._size -= forgotten.size
