"""Rollouts in a JSON file, whole: read from it and brought into a store.

Each line is a step, as `GET /rollouts/{id}/steps` returns it, or `{"rollout": …}`, the rollout of the lines that follow; or the
file is one document with `rollout` and `steps`, as `tokentape show --json` prints it. In place of a list or text in `request`,
in `sent.set` or as `prompt_ids`, {"repeats": [k, n], "then": …} is the first n items of the step k lines before, then these.
Experts and masks of sampling are not in the file (docs/decisions/151).
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from math import nan
from pathlib import Path
from typing import Any, Final

import msgspec
import orjson
from msgspec import Struct

from proxy.errors import BadRequest, Damaged
from proxy.rollouts.recorder import entry_of
from proxy.rollouts.rollout import FINISHED, UNDELIVERED_MARK, checked_id, read_rollout, write_fields
from proxy.trajectory.arrays import pack_ids, pack_logprobs
from proxy.trajectory.blocks import KnownBlocks
from proxy.trajectory.codec import encode
from proxy.trajectory.step import DEFAULT_POLICY, Choice, Dialect, EngineFacts, Span, Status, Step, Timing
from storage.redis.store import Store
from storage.types import LATE_MARK

_MAX_BACK: Final = 64  # lines
_TERMS: Final = ("model", "sampling", "tools", "reply", "continuation", "metadata", "reward", "step_rewards")


class _Model(Struct, frozen=True):
    asked: str | None = None
    served: str | None = None


class _Fidelity(Struct, frozen=True):
    problems: tuple[str, ...] = ()


class _Choice(Struct):
    ids: list[int]
    logprobs: list[float | None]
    index: int = 0
    prompt: int = 0
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    spans: tuple[Span, ...] = ()


class _Step(Struct):
    """A step as the control API returns it."""

    step_id: str
    rollout_id: str
    dialect: Dialect
    endpoint: str
    engine: EngineFacts
    request: dict[str, Any]
    response: dict[str, Any] | None
    timing: Timing
    status: Status
    model: _Model = _Model()
    sent: dict[str, Any] = {}
    prompt_ids: list[int] | None = None
    prompts: list[list[int]] = []
    choices: list[_Choice] = []
    usage: dict[str, Any] | None = None
    sampling: dict[str, Any] = {}
    reason: str | None = None
    delivered: bool = True
    late: bool = False
    policy: str = DEFAULT_POLICY
    fidelity: _Fidelity = _Fidelity()
    extra: dict[str, Any] = {}


_OTHERWISE: Final = {"prompts", "choices"}  # in JSON, but not as they are in a step
_EQUAL: Final = [each.name for each in fields(Step) if each.name in {*_Step.__struct_fields__} - _OTHERWISE]
_VERSIONS: Final = [each.name for each in fields(Step) if each.name.startswith("policy_version")]


@dataclass(slots=True)
class TapeRollout:
    """A rollout of a file: its JSON, which may be empty, and its steps."""

    rollout_id: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    steps: dict[str, Step] = field(default_factory=dict)  # by their ids

    def add(self, step: Step) -> None:
        """Add the next step. Raises ValueError if the rollout has one with its id."""
        if self.steps.setdefault(step.step_id, step) is not step:
            raise ValueError(f"rollout {step.rollout_id!r} has step {step.step_id!r} before")


def read_tape_file(path: Path) -> list[TapeRollout]:
    """Return the rollouts of a file.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is not such a file; the message names the line.
    """
    found: dict[str, TapeRollout] = {}
    earlier: deque[Mapping[str, Any]] = deque(maxlen=_MAX_BACK)
    for place, value in _values(path):
        try:
            if "step_id" not in value:
                rollout_id = value["rollout"]["rollout_id"]
                found.setdefault(checked_id(rollout_id), TapeRollout(rollout_id)).facts = value["rollout"]
                continue
            _put_repeats(value, earlier)
            earlier.appendleft(value)
            step = _step(value)
            found.setdefault(checked_id(step.rollout_id), TapeRollout(step.rollout_id)).add(step)
        except BadRequest as error:
            raise ValueError(f"{place}: {error.message}") from None
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise ValueError(f"{place} is no step of a rollout: {error}") from None
    if not any(rollout.steps for rollout in found.values()):
        raise ValueError(f"{path} has no steps")
    return list(found.values())


def _values(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the JSON objects of a file with their places. Raises OSError, ValueError."""
    text = path.read_bytes()
    first, _, rest = text.partition(b"\n")
    if first.strip() == b"{" or not rest.strip():  # one document, or one line
        document = _parsed(text, str(path))
        if isinstance(document.get("steps"), list):
            yield f"{path}, rollout", {"rollout": document.get("rollout")}
            yield from ((f"{path}, step {index}", step) for index, step in enumerate(document["steps"]))
            return
        yield f"{path}, line 1", document
        return
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            yield f"{path}, line {number}", _parsed(line, f"{path}, line {number}")


def _parsed(text: bytes, place: str) -> Any:
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"{place} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{place} is not a JSON object")  # noqa: TRY004 - about the file, not about a type
    return value


def _put_repeats(step: dict[str, Any], earlier: Sequence[Mapping[str, Any]]) -> None:
    """Replace what a step repeats of earlier ones, the newest first. Raises ValueError, LookupError, TypeError."""
    for inside in ((), ("request",), ("sent", "set")):
        values = _inner(step, inside)
        for name in list(values) if inside else ["prompt_ids"]:
            value = values.get(name)
            if isinstance(value, dict) and value.keys() == {"repeats", "then"}:
                back, length = value["repeats"]
                if type(back) is not int or type(length) is not int or back < 1 or length < 0:
                    raise ValueError(f"{name} repeats {value['repeats']!r}")
                values[name] = _inner(earlier[back - 1], inside)[name][:length] + value["then"]


def _inner(step: Mapping[str, Any], names: Sequence[str]) -> Any:
    found: Any = step
    for name in names:
        found = found.get(name) or {}
    return found


def _step(value: Any) -> Step:
    """Return the step of its JSON. Raises ValueError."""
    read = msgspec.convert(value, _Step)
    given = read.prompts or ([] if read.prompt_ids is None else [read.prompt_ids])
    versions: Any = msgspec.convert({name: value.get(name) for name in _VERSIONS}, dict[str, str | None])
    return Step(
        **{name: getattr(read, name) for name in _EQUAL},
        **versions,
        model_asked=read.model.asked,
        model_served=read.model.served,
        prompts=tuple(map(pack_ids, given)),
        choices=tuple(map(_choice, read.choices)),
        problems=read.fidelity.problems,
    )


def _choice(read: _Choice) -> Choice:
    logprobs = [nan if logprob is None else logprob for logprob in read.logprobs]
    return Choice(
        index=read.index,
        ids=pack_ids(read.ids),
        logprobs=pack_logprobs(logprobs),
        finish_reason=read.finish_reason,
        stop_reason=read.stop_reason,
        prompt=read.prompt,
        spans=read.spans,
    )


async def import_rollout(store: Store, rollout: TapeRollout, now_ms: int) -> None:
    """Bring a rollout into a store that does not have it, as a finished one. Raises ValueError, StorageError."""
    facts = rollout.facts
    status = facts.get("status") if facts.get("status") in FINISHED else FINISHED[0]
    terms = write_fields({name: facts.get(name) for name in _TERMS} | {"status": status, "finished_ms": now_ms})
    stored = await store.open(rollout.rollout_id, {}, now_ms=now_ms)
    if not stored.created:
        raise ValueError(f"the store has a rollout {rollout.rollout_id!r} already")
    known, marks = KnownBlocks(), dict[str, bytes]()
    for step in rollout.steps.values():
        try:
            record = encode(step, known)
        except TypeError as error:
            raise ValueError(f"step {step.step_id!r} of rollout {rollout.rollout_id!r}: {error}") from None
        await store.append(entry_of(step, stored.incarnation, record), now_ms=now_ms)
        known.update(record.blocks)
        marks |= {LATE_MARK + step.step_id: b"1"} if step.late else {}
        marks |= {} if step.delivered else {UNDELIVERED_MARK + step.step_id: b"1"}
    if marks:
        await store.mark(rollout.rollout_id, stored.incarnation, marks, now_ms=now_ms)
    updated = await store.update_if(rollout.rollout_id, terms, expect={}, now_ms=now_ms)
    try:
        assert updated is not None
        read_rollout(updated)
    except Damaged as damage:  # by terms in the file
        raise ValueError(f"rollout {rollout.rollout_id!r}: {damage.message}") from None
