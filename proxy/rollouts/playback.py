"""Playbacks: rollouts whose calls are answered from the recorded steps of another rollout, their tape (docs/playback.md).

A step that is answered from the tape is inherited: it is stored in the playback with the id, the tokens and the messages of its
origin. A call that the tape does not answer is live, and sampled by an engine.

A proxy without an engine has tapes in its place (`ServedTapes`): each call that names a tape belongs to a playback of it. A
playback is begun by the first call of a tape, and again by a call with which the tape begins, if the newest playback has used
it: another run of the agent.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final
from weakref import WeakValueDictionary

import msgspec
import orjson

from proxy.clock import Clock
from proxy.continuation.turns import has_own_ids
from proxy.errors import NotFound, UnprocessableRequest
from proxy.protocols.engines.base import TEMPLATE_FIELDS
from proxy.protocols.json_texts import prompt_of
from proxy.protocols.plan import Plan, with_continuation
from proxy.rollouts.rollout import (
    MAX_ID_CHARACTERS,
    LiveRollout,
    LoadedTape,
    Playback,
    Played,
    Rollout,
    no_rollout,
    read_marks,
    read_rollout,
)
from proxy.rollouts.steps import read_steps
from proxy.trajectory.codec import decode
from proxy.trajectory.conversations import replies_of, role_of
from proxy.trajectory.images import IMAGES
from proxy.trajectory.step import BRANCHED_FROM, INHERITED, Sampled, Step, Timing
from proxy.trajectory.tape import Asked, Tape
from proxy.trajectory.thread_rules import PRESETS
from proxy.upstream.concurrency import off_loop
from storage.redis.store import Store

_SHORT: Final = 2**12  # bytes of a record that is decoded in a millisecond
_PAGE: Final = 500  # records per read from the store
TAKEN_OVER: Final = ("model", "sampling", "tools", "reply", "continuation")  # terms of a source


@dataclass(frozen=True, slots=True)
class Recorded:
    """What the tape has of a live call: the step with its key, and its messages, which differ in what is ignored."""

    tape: Tape
    step: Step | None
    asked: Sequence[Any]
    messages: Sequence[Any]


class Tapes:
    """Read the tapes of playbacks, each once for all of them in this process."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._loaded: WeakValueDictionary[tuple[str, str, tuple[str, ...]], LoadedTape] = WeakValueDictionary()
        self._loading: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()

    def __repr__(self) -> str:
        return f"<Tapes {len(self._loaded)}>"

    async def open(self, terms: Mapping[str, Any]) -> dict[str, bytes]:
        """Return the stored fields of a playback with these terms (`PlaybackTerms`), and the terms of its source.

        Raises:
            NotFound: The source or the step is unknown.
            UnprocessableRequest: The step `through` cannot be answered again.
        """
        of, before, through = terms["of"], terms.get("before"), terms.get("through")
        stored = await self._store.get(of)
        if stored is None:
            raise no_rollout(of)
        source, ignore = read_rollout(stored), ignored(terms)
        loaded = await self.load(of, source.incarnation, ignore, source.counts.get("steps", 0))
        tape, end = loaded.tape, len(loaded.tape)
        if (name := before or through) is not None:
            step = tape.step(name)
            if step is None:
                raise NotFound(f"Step {name[:200]!r} of rollout {of!r} not found.", param="playback")
            if through is not None and not step.is_answerable:
                raise UnprocessableRequest(
                    f"Step {name!r} of rollout {of!r} is not complete, so no call can continue it; branch before it.",
                    param="playback.through",
                )
            end = step.position + (through is not None)
        playback = Playback(
            of=of,
            incarnation=source.incarnation,
            end=end,
            answerable=sum(step.is_answerable for step in tape.steps[:end]),
            on_mismatch=terms.get("on_mismatch", "refuse" if name is None else "branch"),
            before=before,
            through=through,
            ignore=ignore,
        )
        taken = {name: stored.fields[name] for name in TAKEN_OVER if name in stored.fields}
        return {**taken, "playback": orjson.dumps(msgspec.to_builtins(playback))}

    async def play(self, live: LiveRollout, playback: Playback) -> Played | None:
        """Return what this process knows of a playback, and renew the expiry of its source; None if the source is gone."""
        if not await self._store.renew(playback.of, playback.incarnation):
            return None
        async with live.large_work:  # once, for calls that arrive together
            if live.played is None:
                try:
                    loaded = await self.load(playback.of, playback.incarnation, playback.ignore, playback.end)
                except NotFound:  # deleted since it was renewed
                    return None
                live.played = Played(loaded, await self._used(live.rollout))
        return live.played

    async def read(self, played: Played, playback: Playback, step_id: str) -> Step | None:
        """Return a step of the source; None if the source is gone. Raises UnreadableRecord."""
        found = await self._store.find(playback.of, step_id)
        if found is None:
            return None
        step = played.tape.step(step_id)
        size = len(found[1]) + (0 if step is None else 4 * step.place.length)
        async with played.loaded.lock:
            return await off_loop(size, _SHORT, decode, found[1], played.tape.reader, found[0])

    async def has_branched(self, played: Played, playback: Playback, asked: Asked) -> bool:
        """Return whether a call reaches the branch step.

        It has the key of that step, or of a later one of the source: of an agent that works on several things at once, any may
        be the first. Or it continues a reply of the step `through`.
        """
        tape, name = played.tape, playback.through
        if any(step.position >= playback.end for step in tape.asked_as(asked.key)):
            return True
        if name is None or (last := tape.step(name)) is None:
            return False
        if played.replies is None:
            whole = await self.read(played, playback, name)
            played.replies = tape.replied(last, [] if whole is None else list(replies_of(whole).values()))
        if not played.replies:  # a completion, or an error of the engine
            return name in played.used
        return not played.replies.isdisjoint(place.digest for place in asked.places)

    async def _used(self, rollout: Rollout) -> dict[str, "asyncio.Task[Any] | None"]:
        if not rollout.counts.get("inherited"):
            return {}
        return {step.step_id: None for step in await read_steps(self._store, rollout, whole=False) if step.inherited}

    async def load(self, of: str, incarnation: str, ignore: tuple[str, ...], count: int) -> LoadedTape:
        """Return the tape of a source with at least `count` steps. Raises NotFound if the source is gone."""
        lock = self._loading.setdefault((of, incarnation), asyncio.Lock())
        async with lock:
            key = of, incarnation, ignore
            loaded = self._loaded.get(key)
            if loaded is None or len(loaded.tape) < count:
                loaded = self._loaded[key] = LoadedTape(await self._read(of, incarnation, ignore))
        return loaded

    async def _read(self, of: str, incarnation: str, ignore: tuple[str, ...]) -> Tape:
        records: list[bytes] = []
        while len(records) % _PAGE == 0 and (page := await self._store.read(of, len(records), _PAGE)):
            records += page
        blocks, marks = await self._store.blocks(of), read_marks(await self._store.marks(of))
        stored = await self._store.get(of)
        if stored is None or stored.incarnation != incarnation:
            raise no_rollout(of)
        tape = Tape(ignore)
        await asyncio.to_thread(tape.extend, records, blocks, marks.undelivered)
        return tape


def ignored(terms: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the patterns of texts that count as equal: those of `ignore`, and of the agents in `presets`."""
    of_agents = (text for name in terms.get("presets", ()) for text in PRESETS[name].ignore)
    return tuple(dict.fromkeys((*terms.get("ignore", ()), *of_agents)))


def inherited(
    origin: Step, rollout_id: str, request: Mapping[str, Any], timing: Timing, extra: Mapping[str, Any]
) -> Step:
    """Return the step of a call that is answered from its origin: with the client's own request, and the origin's body.

    Its attempt is the origin's, so that the same steps are superseded. `extra` is added to the origin's.
    """
    body = origin.body
    changed = {name: value for name, value in body.items() if name not in request or request[name] != value}
    sampled = origin.inherited or Sampled(origin.rollout_id, origin.step_id)
    return replace(
        origin,
        rollout_id=rollout_id,
        request=request,
        sent={"set": changed, "unset": sorted(request.keys() - body.keys())},
        timing=timing,
        delivered=True,
        late=False,
        index=None,
        extra={**origin.extra, **extra, INHERITED: sampled._asdict()},
    )


def as_recorded(plan: Plan, recorded: Recorded, *, as_ids: bool) -> Plan:
    """Return the plan of a live call with what the tape has of it: its messages, and its prompt ids if they are the same.

    They are if the step with its key is exact, was sampled by this kind of engine, this model and this policy, and no term of
    the playback changes what a chat template reads.
    """
    messages = plan.body.get("messages")
    if messages == recorded.asked and messages != recorded.messages:
        changed = {"messages": list(recorded.messages)}
        sent = {**plan.sent, "set": {**plan.sent["set"], **changed}}
        plan = replace(plan, body={**plan.body, **changed}, sent=sent)
    if (step := recorded.step) is None:
        return plan
    sampled = step.inherited or Sampled(step.rollout_id, step.step_id)
    was = step.engine.kind, step.model_served, step.policy
    # The prompt of a flagged step may be wrong: sent as ids, it would look exact.
    is_same = was == (plan.engine_facts.kind, plan.model_served, plan.policy) and step.exact and len(step.prompts) == 1
    one, other = ({name: body.get(name) for name in TEMPLATE_FIELDS[1:]} for body in (plan.body, step.body))
    is_same = is_same and recorded.tape.compared(one) == recorded.tape.compared(other)
    if as_ids and is_same and step.prompts[0] and IMAGES not in step.extra and not has_own_ids(plan.body):
        facts = step.extra.get("continuation") or {}
        plan = with_continuation(plan, prompt_of(step.prompts[0][:], None), facts)
    source = {**sampled._asdict(), "ids": plan.prompt is not None}
    return replace(plan, extra={**plan.extra, BRANCHED_FROM: source})


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
