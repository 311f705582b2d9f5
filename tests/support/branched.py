"""Rollouts and playbacks of them, written directly to the store."""

from typing import NamedTuple

from tests.support.forests import make_choice, make_step

from proxy.rollouts.rollout import Playback, Rollout, read_rollout, write_fields
from proxy.rollouts.values import GROUP_MARK, ROLLOUT_MARK
from proxy.trajectory.codec import encode
from proxy.trajectory.step import INHERITED, Sampled, Span
from storage.redis.store import Store
from storage.types import StepWrite


class Call(NamedTuple):
    """A step to be stored: it sampled one token with this version, or was sampled as another step."""

    name: str
    version: str | None = "1"
    sampled: Sampled | None = None
    epoch: int = 0
    policy: str = "default"


async def record(store: Store, name: str, *calls: Call | str, **fields) -> Rollout:
    """Open a rollout with these fields, and store a conversation in it, of one token for each call."""
    opened = await store.open(name, write_fields(fields), now_ms=1)
    prompt = [1]
    for number, given in enumerate(calls):
        call = Call(given) if isinstance(given, str) else given
        choice = make_choice(0, [10 + number], spans=(Span(0, 1, call.version, call.epoch),))
        inherited = {} if call.sampled is None else {INHERITED: call.sampled._asdict()}
        step = make_step(call.name, prompt, choice, rollout_id=name, extra=inherited, policy=call.policy)
        prompt = [*prompt, 10 + number, 2]
        encoded = encode(step)
        counts = {"steps": 1, "inherited": 1 if inherited else 0}
        written = StepWrite(name, opened.incarnation, call.name, encoded.record, encoded.blocks, counts=counts)
        await store.append(written, now_ms=1)
    stored = await store.get(name)
    return read_rollout(stored)


async def branch(
    store: Store, source: Rollout, before: str | None, name: str, *live: Call | str, reached: bool = True, **fields
) -> Rollout:
    """Store a playback of a rollout that repeats its steps `before` one (None: no step), and then has these calls."""
    tape = [Sampled(source.rollout_id, step) for step in STEPS[: 0 if before is None else STEPS.index(before)]]
    playback = Playback(source.rollout_id, source.incarnation, len(tape), len(tape), "branch", before=before)
    known = {"playback": _fields(playback), "has_branched": reached or None}
    calls = [*(Call(of.step_id, sampled=of) for of in tape), *live]
    return await record(store, name, *calls, **known, **fields)


async def replay(store: Store, dead: Rollout, name: str, *calls: Call | str, **fields) -> Rollout:
    """Store a playback of all steps of a rollout, with these calls."""
    steps = dead.counts.get("steps", 0)
    playback = Playback(dead.rollout_id, dead.incarnation, steps, steps, "sample")
    return await record(store, name, *calls, playback=_fields(playback), **fields)


async def mark(store: Store, source: Rollout, *, groups=(), rollouts=()) -> None:
    """Mark the source as played back by these groups and rollouts."""
    marks = {**{GROUP_MARK + name: b"" for name in groups}, **{ROLLOUT_MARK + name: b"" for name in rollouts}}
    await store.mark(source.rollout_id, source.incarnation, marks, now_ms=1)


STEPS = ("s0", "s1", "s2", "s3")  # of the sources


def _fields(playback: Playback) -> dict[str, object]:
    return {name: getattr(playback, name) for name in playback.__struct_fields__}
