"""The tapes of a proxy that has no engine: each call that names a tape belongs to a playback of it.

A playback is begun by the first call of a tape, and again by a call with which the tape begins, if the newest playback has used
it: another run of the agent. `Tapes` answers the calls.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from proxy.clock import Clock
from proxy.errors import NotFound, UnprocessableRequest
from proxy.rollouts.playback import Tapes, ignored
from proxy.rollouts.rollout import MAX_ID_CHARACTERS, LoadedTape, no_rollout, read_rollout
from proxy.trajectory.conversations import role_of
from proxy.trajectory.tape import Tape
from storage.redis.store import Store

MAX_KEPT = 100  # playbacks of a tape: a proxy may serve one for months


@dataclass(slots=True, eq=False)
class ServedTape:
    """A tape, and its newest playback. `openings`: how many steps have each key of the calls with which it begins.

    `kept`: its playbacks in the store, the newest last.
    """

    name: str
    loaded: LoadedTape
    openings: Counter[bytes]
    kept: deque[str] = field(default_factory=deque)
    count: int = 0  # of playbacks
    calls: int = 0  # of the newest playback
    used: Counter[bytes] = field(default_factory=Counter)  # of `openings`
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class ServedTapes:
    """The rollouts `names` as tapes. `terms`: `ignore` and `presets` of their playbacks."""

    def __init__(
        self, tapes: Tapes, store: Store, clock: Clock, names: Sequence[str], terms: Mapping[str, Sequence[str]]
    ) -> None:
        self._tapes = tapes
        self._store = store
        self._clock = clock
        self._names = names
        self._terms = terms
        self._served: dict[str, ServedTape] = {}

    async def find(self, rollout_id: str | None) -> ServedTape | None:
        """Return the tape that a call names; the only tape for a call that names none; None for a playback.

        Raises NotFound, and UnprocessableRequest for a rollout that a tape does not answer alone.
        """
        if rollout_id is None and len(self._names) == 1:
            rollout_id = self._names[0]
        if rollout_id is not None and rollout_id in self._names:
            if rollout_id in self._served:
                return self._served[rollout_id]
            return await self._read(rollout_id)
        stored = None if rollout_id is None else await self._store.get(rollout_id)
        if stored is None:
            named = "names none" if rollout_id is None else f"names {rollout_id[:200]!r}"
            shown = ", ".join(map(repr, self._names[:10])) + (", …" if len(self._names) > 10 else "")
            raise NotFound(
                f"This proxy has tapes in place of an engine, and the call {named} of them: {shown}. Use the base URL "
                "/rollouts/TAPE/v1, or the API key rollout:TAPE.",
                param="rollout_id",
            )
        playback = read_rollout(stored).playback
        if playback is None or playback.on_mismatch != "refuse":
            raise UnprocessableRequest(
                f"This proxy has no engine, and the calls of rollout {rollout_id!r} can be live: open a playback with "
                "on_mismatch refuse.",
                param="rollout_id",
            )
        return None

    async def _read(self, name: str) -> ServedTape:
        stored = await self._store.get(name)
        if stored is None:
            raise no_rollout(name)
        source = read_rollout(stored)
        loaded = await self._tapes.load(name, source.incarnation, ignored(self._terms), source.counts.get("steps", 0))
        return self._served.setdefault(name, ServedTape(name, loaded, openings_of(loaded.tape)))

    async def playback(self, tape: ServedTape, key: bytes | None, *, is_retry: bool) -> str:
        """Return the playback to which a call with this key belongs, a new one if it begins another run. Raises StorageError.

        A call that names an earlier response begins none; its key is None.
        """
        async with tape.lock:
            if not tape.kept or (not is_retry and self._begins(tape, key)):
                await self._open(tape)
            tape.calls += 1
            if key is not None and key in tape.openings:
                tape.used[key] += 1
            return tape.kept[-1]

    def _begins(self, tape: ServedTape, key: bytes | None) -> bool:
        """Return whether the newest playback has used the steps with this key, or has refused all calls until now."""
        return (
            key is not None
            and key in tape.openings
            and (tape.used[key] >= tape.openings[key] or (tape.calls > 0 and not tape.used))
        )

    async def _open(self, tape: ServedTape) -> None:
        """Open the next playback of a tape, and delete an old one; skip names that others have used."""
        fields = await self._tapes.open({**self._terms, "of": tape.name, "on_mismatch": "refuse"})
        while True:
            tape.count += 1
            suffix = f"-playback-{tape.count}"
            name = tape.name[: MAX_ID_CHARACTERS - len(suffix)] + suffix
            if (await self._store.open(name, fields, now_ms=self._clock.now_ms())).created:
                break
        tape.kept.append(name)
        tape.calls, tape.used = 0, Counter()
        if len(tape.kept) > MAX_KEPT:
            await self._store.delete(tape.kept.popleft())


def openings_of(tape: Tape) -> Counter[bytes]:
    """Return the keys of the steps before the first one that continues a reply: an agent sends these calls first, in any order.

    Of calls without messages it is the first one alone.
    """
    found: Counter[bytes] = Counter()
    for step in tape.steps:
        messages: Sequence[Any] = tape.messages(step)
        if any(role_of(message) == "assistant" for message in messages) or (found and not messages):
            break
        if step.is_answerable:
            found[step.key] += 1
    return found
