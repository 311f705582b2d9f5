"""Reading a rollout's steps back from the store."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple, TypeAlias, TypeVar

from proxy.errors import DamagedStep, UnprocessableRequest
from proxy.rollouts.rollout import Marks, Rollout, no_rollout, own_metadata, read_marks, read_rollout
from proxy.trajectory.blocks import BlockReader
from proxy.trajectory.codec import UnreadableRecord, decode, expanded_size_of
from proxy.trajectory.facts import RolloutFacts
from proxy.trajectory.step import Step, messages_of
from proxy.trajectory.thread_rules import ThreadRule
from proxy.trajectory.threads import find_threads
from proxy.upstream.concurrency import off_loop
from storage.redis.store import Store
from storage.types import FullRollout

T = TypeVar("T")
Versions: TypeAlias = frozenset[tuple[int, str | None]]  # with their epochs, that sampled tokens

_PAGE = 200  # records per read from the store
LONG = 32  # short steps, which take some milliseconds to decode, join and write
# They take two milliseconds, in which threads would pass the interpreter's lock hundreds of times.
_LONG_TO_DECODE = 2 * LONG
_TOKENS_OF_A_STEP = 1024  # tokens that take as long as a short step as lists of numbers,
_PACKED_TOKENS_OF_A_STEP = 8192  # and as arrays
_MESSAGES_OF_A_STEP = 64  # messages that do
_BLOCKS_OF_A_STEP = 16  # blocks that do
_BYTES_OF_A_STEP = (
    2**13
)  # bytes that do, expanded: logs and JSON are ten times as long as their record, or a thousand times
_SHOWN_THREADS = 20
NO_VERSIONS: Final[Versions] = frozenset()


async def read_short(store: Store, rollouts: Sequence[Rollout]) -> dict[str, FullRollout]:
    """Return the data of those of these rollouts that have few steps together, for `read_steps`; one write to each server."""
    names, steps = [], 0
    for rollout in rollouts:
        steps += rollout.counts.get("steps", 0)
        if steps < _PAGE:
            names.append(rollout.rollout_id)
    found = await store.read_each(names, _PAGE)
    return {name: full for name, full in zip(names, found, strict=True) if full is not None}


async def read_steps(store: Store, rollout: Rollout, *, whole: bool, full: FullRollout | None = None) -> list[Step]:
    """Return all steps of a rollout, with their delivery and lateness from its marks. `full`: its data, if it was read already.

    Without `whole`, requests and responses are not decoded: rows of ids need neither.
    """
    if rollout.counts.get("steps", 0) < _PAGE:
        full = full or await store.read_all(rollout.rollout_id, _PAGE)
        if full is None or full.rollout.incarnation != rollout.incarnation:
            raise no_rollout(rollout.rollout_id)
        if len(full.records) < _PAGE:
            reader = BlockReader(full.blocks)
            return await _decode(rollout.rollout_id, full.records, 0, reader, full.marks, whole=whole)
    records: list[bytes] = []
    while len(records) % _PAGE == 0 and (page := await store.read(rollout.rollout_id, len(records), _PAGE)):
        records += page
    return await decode_records(store, rollout, records, 0, whole=whole)


async def aside(weight: int, work: Callable[[], T]) -> T:
    """Run work in a thread if it is heavy (`weights_of`), so that it does not block the event loop."""
    return await off_loop(weight, LONG - 1, work)


def versions_in(step: Step) -> Versions:
    """Return the epochs and versions that sampled the tokens of a step; a version is None if it is unknown."""
    return frozenset((span.epoch, span.policy_version) for choice in step.choices for span in choice.spans)


def versions_of(steps: Iterable[Step]) -> dict[str, Versions]:
    """Return `versions_in` these steps by policy."""
    found: dict[str, Versions] = {}
    for step in steps:
        found[step.policy] = found.get(step.policy, NO_VERSIONS) | versions_in(step)
    return found


class Weights(NamedTuple):
    """The weights of steps for `aside`."""

    rows: int  # of rendering rows with lists
    packed: int  # of planning rows, or of rendering packed ones (`Plan.pack`), without a conversion of ids


def weights_of(steps: Sequence[Step]) -> Weights:
    """Return the weights of these steps: 1 per choice, and more for many tokens or messages."""
    choices = tokens = messages = 0
    for step in steps:
        choices += max(1, len(step.choices))
        tokens += step.sampled + sum(map(len, step.prompts))
        messages += len(messages_of(step))
    short = choices + messages // _MESSAGES_OF_A_STEP
    return Weights(short + tokens // _TOKENS_OF_A_STEP, short + tokens // _PACKED_TOKENS_OF_A_STEP)


def facts_of(rollout: Rollout) -> RolloutFacts:
    """Return the facts of a rollout that exported rows contain."""
    return RolloutFacts(
        rollout_id=rollout.rollout_id,
        group_id=rollout.group_id,
        status=rollout.status,
        reward=rollout.reward,
        step_rewards=rollout.step_rewards,
        thread_rewards=rollout.thread_rewards,
        thread_advantages=rollout.thread_advantages,
        advantages=rollout.advantages,
        metadata=own_metadata(rollout.metadata),
    )


async def decode_records(
    store: Store, rollout: Rollout, records: Sequence[bytes], start: int, *, whole: bool
) -> list[Step]:
    """Return the steps of records; `start` is the index of the first.

    Blocks are read after records, so that no required block is missing. Raises NotFound if the rollout was deleted since.
    """
    name = rollout.rollout_id
    reader = BlockReader(await store.blocks(name))
    marks = await store.marks(name)
    stored = await store.get(name)
    if stored is None or stored.incarnation != rollout.incarnation:
        raise no_rollout(name)
    return await _decode(name, records, start, reader, marks, whole=whole)


async def _decode(
    name: str, records: Sequence[bytes], start: int, reader: BlockReader, marks: Mapping[str, bytes], *, whole: bool
) -> list[Step]:
    read = read_marks(marks)

    def decoded() -> list[Step]:
        return [_read(name, record, reader, start + offset, read, whole=whole) for offset, record in enumerate(records)]

    weight = len(records) + reader.count // _BLOCKS_OF_A_STEP
    if weight <= _LONG_TO_DECODE:
        weight += (reader.size + sum(map(expanded_size_of, records))) // _BYTES_OF_A_STEP
    return await off_loop(weight, _LONG_TO_DECODE, decoded)


def _read(name: str, record: bytes, reader: BlockReader, index: int, marks: Marks, *, whole: bool) -> Step:
    try:
        step = decode(record, reader, index, whole=whole)
    except UnreadableRecord as error:
        raise DamagedStep(f"Step at index {index} of rollout {name!r} is unreadable: {error}", name=name) from error
    if step.step_id in marks.undelivered or step.step_id in marks.late:
        delivered = step.delivered and step.step_id not in marks.undelivered
        return replace(step, delivered=delivered, late=step.step_id in marks.late)
    return step


async def check_step_rewards(store: Store, rollout: Rollout, rewards: Mapping[str, float | list[float]]) -> None:
    """Raise UnprocessableRequest for rewards of a step that does not exist, or that has another number of tokens."""
    for step_id, given in rewards.items():
        found = await store.find(rollout.rollout_id, step_id)
        if found is None:
            raise UnprocessableRequest(f"step_rewards: step {step_id!r} not found.", param="step_rewards")
        if isinstance(given, list):
            (step,) = await decode_records(store, rollout, [found[1]], found[0], whole=False)
            counts = [len(choice.ids) for choice in step.choices]
            if counts != [len(given)]:
                raise UnprocessableRequest(
                    f"step_rewards: step {step_id!r} has {' and '.join(map(str, counts)) or 'no'} "
                    f"sampled tokens, but {len(given)} rewards were sent. A list requires one "
                    "reward for each sampled token of a step with one choice.",
                    param="step_rewards",
                )


async def check_threads(
    store: Store, rollout: Rollout, rules: Sequence[ThreadRule], rewards: Mapping[str, float]
) -> None:
    """Raise UnprocessableRequest for a reward of a thread that the rollout does not have."""
    if not rewards:
        return
    steps = await read_steps(store, rollout, whole=True)
    found = await aside(weights_of(steps).packed, lambda: find_threads(steps, rules))
    known = [thread.name for thread in found.all]
    for name in rewards:
        if name not in known:
            shown = ", ".join(known[:_SHOWN_THREADS]) + (", …" if len(known) > _SHOWN_THREADS else "")
            raise UnprocessableRequest(
                f"thread_rewards: thread {name!r} not found; the threads are {shown or 'none yet'}.",
                param="thread_rewards",
            )


async def read_step(store: Store, rollout_id: str, step_id: str) -> Step | None:
    """Return one whole step; None if the rollout or the step does not exist."""
    stored = await store.get(rollout_id)
    found = None if stored is None else await store.find(rollout_id, step_id)
    if stored is None or found is None:
        return None
    index, record = found
    (step,) = await decode_records(store, read_rollout(stored), [record], index, whole=True)
    return step
