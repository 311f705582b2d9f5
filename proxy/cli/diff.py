"""`tokentape diff`: compares two rollouts step by step, and prints their differences from the first different step on.

Steps are compared in the order in which they were stored. From the first different ones on, a step is compared with the first
one of the other rollout that has equal messages, else with the next one that is left, so that parallel calls may end in another
order. Ids of tool calls are random: they are compared by their order of appearance.
"""

import asyncio
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

import orjson
from rich.console import Console
from rich.text import Text

from proxy.cli.console import print_json, print_lines, visible
from proxy.cli.control import Control, ControlAddress, connected
from proxy.cli.render import prompts_of
from proxy.trajectory.json_bytes import to_json_bytes
from proxy.trajectory.step import sent_messages

Step: TypeAlias = Mapping[str, Any]
_FILES: Final = (".json", ".jsonl")
_TOOLS: Final = ("tools", "tool_choice", "response_format")
_MAX_SHOWN: Final = 300  # characters of a value


class Difference(NamedTuple):
    """The first difference of two steps in one respect: where it is, and both values; None for one that is missing."""

    what: str
    where: str
    a: Any
    b: Any


@dataclass(frozen=True, slots=True)
class Pair:
    """Two steps that are compared; None for a step without a counterpart."""

    a: Step | None
    b: Step | None
    differences: Sequence[Difference]


@dataclass(slots=True)
class Compared:
    """The result: the numbers of steps, of the equal steps before the first different ones, and the pairs that differ."""

    steps: list[int] = field(default_factory=lambda: [0, 0])
    equal: int = 0
    pairs: list[Pair] = field(default_factory=list)


async def diff(address: ControlAddress, out: Console, a: str, b: str, tolerance: float, *, as_json: bool) -> bool:
    """Print the differences of two rollouts; return whether there are none. A name that ends in .json or .jsonl is a file.

    Raises OSError or ValueError if one cannot be read.
    """
    async with AsyncExitStack() as stack:
        control: Control | None = None
        steps: list[AsyncGenerator[Step, None]] = []
        for name in (a, b):
            if name.endswith(_FILES):
                steps.append(_steps_of_file(Path(name)))
            else:
                if control is None:
                    control = await stack.enter_async_context(connected(address))
                steps.append(control.steps(name))
        compared = await compare(steps[0], steps[1], tolerance)
    if as_json:
        print_json(_as_json(compared, a, b))
    else:
        print_lines(out, _lines(compared, a, b))
    return not compared.pairs


async def _steps_of_file(path: Path) -> AsyncGenerator[Step, None]:
    """Yield the steps of the rollouts in a file, as the control API returns them. Raises OSError, ValueError."""
    from proxy.api.control.steps import step_json  # these take as long as a command
    from proxy.rollouts.archive.tape_file import read_tape_file
    from proxy.rollouts.rollout import Rollout

    for rollout in await asyncio.to_thread(read_tape_file, path):
        for index, step in enumerate(rollout.steps.values()):
            text = to_json_bytes(step_json(replace(step, index=index), Rollout(rollout.rollout_id, "", 0, 0)))
            yield orjson.loads(text)


async def compare(a: AsyncGenerator[Step, None], b: AsyncGenerator[Step, None], tolerance: float) -> Compared:
    """Compare the steps of two rollouts. Logprobs may differ by `tolerance`."""
    result, rest = Compared(), ([], [])  # type: tuple[Compared, tuple[list[Step], list[Step]]]
    async with aclosing(a) as of_a, aclosing(b) as of_b:
        async for pair in _zip(of_a, of_b):
            for index, step in enumerate(pair):
                if step is not None:
                    result.steps[index] += 1
            if not any(rest) and None not in pair and not any(_differences(*pair, tolerance)):  # type: ignore[arg-type]
                result.equal += 1  # the steps are not kept
                continue
            for index, step in enumerate(pair):
                rest[index].extend([] if step is None else [step])
    for first, second in _paired(*rest):
        found = () if first is None or second is None else tuple(_differences(first, second, tolerance))
        if found or first is None or second is None:
            result.pairs.append(Pair(first, second, found))
    return result


async def _zip(a: AsyncIterator[Step], b: AsyncIterator[Step]) -> AsyncIterator[tuple[Step | None, Step | None]]:
    while True:
        pair = await anext(a, None), await anext(b, None)
        if pair == (None, None):
            return
        yield pair


def _paired(a: Sequence[Step], b: Sequence[Step]) -> Iterator[tuple[Step | None, Step | None]]:
    """Yield pairs of steps in the order of `a`: those with equal messages, then the others in their order."""
    waiting: defaultdict[bytes, deque[int]] = defaultdict(deque)
    for index, step in enumerate(b):
        waiting[orjson.dumps(_messages(step), option=orjson.OPT_SORT_KEYS)].append(index)
    partner: dict[int, int] = {}
    for index, step in enumerate(a):
        if found := waiting.get(orjson.dumps(_messages(step), option=orjson.OPT_SORT_KEYS)):
            partner[index] = found.popleft()
    taken = set(partner.values())
    others = iter([index for index in range(len(b)) if index not in taken])
    for index in range(len(a)):
        if index not in partner and (other := next(others, None)) is not None:
            partner[index] = other
        yield a[index], b[partner[index]] if index in partner else None
    yield from ((None, b[index]) for index in others)


def _differences(a: Step, b: Step, tolerance: float) -> Iterator[Difference]:
    """Yield the first difference in each respect."""
    for what, first, second in (
        ("messages", _messages(a), _messages(b)),
        ("tools", _tools(a), _tools(b)),
        ("sampling", a["sampling"], b["sampling"]),
        ("reply", _reply(a), _reply(b)),
    ):
        if (found := first_difference(first, second)) is not None:
            yield Difference(what, *found)
    for index, prompts in enumerate(zip_longest(prompts_of(a), prompts_of(b), fillvalue=())):
        yield from _of_ids("prompt ids", f"prompt {index}, " if index else "", *prompts)
    for choices in zip_longest(a["choices"], b["choices"]):
        yield from _of_choice(*choices, tolerance)
    for what, names in (
        ("status", ("status", "reason")),
        ("version", [name for name in {**a, **b} if name.startswith("policy")]),
    ):
        changed = [name for name in names if a.get(name) != b.get(name)]
        if changed:
            yield Difference(what, changed[0], a.get(changed[0]), b.get(changed[0]))
    if a["fidelity"]["problems"] != b["fidelity"]["problems"]:
        yield Difference("fidelity", "problems", a["fidelity"]["problems"], b["fidelity"]["problems"])


def _of_choice(a: Mapping[str, Any] | None, b: Mapping[str, Any] | None, tolerance: float) -> Iterator[Difference]:
    if a is None or b is None:
        yield Difference("choices", "", None if a is None else a["index"], None if b is None else b["index"])
        return
    place = f"choice {a['index']}, " if a["index"] else ""
    yield from _of_ids("ids", place, a["ids"], b["ids"])
    for position, (first, second) in enumerate(zip(a["logprobs"], b["logprobs"], strict=False)):
        if a["ids"][position : position + 1] != b["ids"][position : position + 1]:
            break  # logprobs of other tokens
        if (first is None) != (second is None) or (first is not None and abs(first - second) > tolerance):
            yield Difference("logprobs", f"{place}position {position}", first, second)
            break
    for name in ("finish_reason", "stop_reason"):
        if a[name] != b[name]:
            yield Difference(name.replace("_", " "), place.rstrip(", "), a[name], b[name])


def _of_ids(what: str, place: str, a: Sequence[int], b: Sequence[int]) -> Iterator[Difference]:
    if a == b:
        return
    position = next(
        (index for index, ids in enumerate(zip(a, b, strict=False)) if ids[0] != ids[1]), min(len(a), len(b))
    )
    first, second = (ids[position] if position < len(ids) else None for ids in (a, b))
    yield Difference(what, f"{place}position {position} of {len(a)} and {len(b)}", first, second)


def first_difference(a: Any, b: Any, where: str = "") -> tuple[str, Any, Any] | None:
    """Return where two JSON values differ first, as a path, and what is there; None if they are equal."""
    if isinstance(a, dict) and isinstance(b, dict):
        for name in {**a, **b}:
            if (found := first_difference(a.get(name), b.get(name), f"{where}.{name}")) is not None:
                return found
        return None
    if isinstance(a, list) and isinstance(b, list):
        for index, pair in enumerate(zip_longest(a, b)):
            if (found := first_difference(*pair, f"{where}[{index}]")) is not None:
                return found
        return None
    return None if a == b and isinstance(a, bool) == isinstance(b, bool) else (where, a, b)


def _messages(step: Step) -> Any:
    """Return the messages, with the ids of tool calls in the order of their appearance; or the prompt of another call."""
    messages = sent_messages(step["request"], step["sent"])
    if not messages:
        return {**step["request"], **(step["sent"].get("set") or {})}.get("prompt")
    return _renamed(messages)


def _renamed(messages: Sequence[Any]) -> list[Any]:
    """Return messages without fields that are null, and with ids of tool calls by the order of their appearance."""
    names: dict[str, str] = {}

    def name_of(given: Any) -> str:
        return names.setdefault(str(given), f"call {len(names)}")

    def renamed(message: Mapping[str, Any]) -> dict[str, Any]:
        found = {name: value for name, value in message.items() if value is not None}
        if isinstance(calls := message.get("tool_calls"), list):
            found["tool_calls"] = [
                {**call, "id": name_of(call["id"])} if isinstance(call, dict) and "id" in call else call
                for call in calls
            ]
        if "tool_call_id" in found:
            found["tool_call_id"] = name_of(found["tool_call_id"])
        return found

    return [renamed(message) if isinstance(message, dict) else message for message in messages]


def _tools(step: Step) -> dict[str, Any]:
    body = {**step["request"], **(step["sent"].get("set") or {})}
    return {name: body[name] for name in _TOOLS if body.get(name) is not None}


def _reply(step: Step) -> Any:
    """Return the messages or texts of the choices, or the response to a call that failed."""
    response = step["response"]
    choices = response.get("choices") if isinstance(response, dict) else None
    if not isinstance(choices, list):
        return response
    replies = (choice.get("message", choice.get("text")) if isinstance(choice, dict) else choice for choice in choices)
    return [_renamed([reply])[0] for reply in replies]


def _shown(found: Difference) -> dict[str, Any]:
    """Return a difference as JSON: of long texts the part around the first different character."""
    from proxy.trajectory.tape import from_difference  # it takes a third of the command's start

    a, b = found.a, found.b
    if isinstance(a, str) and isinstance(b, str):
        a, b = from_difference(a, b)
    return {"what": found.what, "where": found.where, "a": a, "b": b}


def _as_json(compared: Compared, a: str, b: str) -> dict[str, Any]:
    def reference(step: Step | None) -> dict[str, Any] | None:
        return None if step is None else {"step_id": step["step_id"], "index": step["index"]}

    pairs = [
        {"a": reference(pair.a), "b": reference(pair.b), "differences": list(map(_shown, pair.differences))}
        for pair in compared.pairs
    ]
    return {"a": a, "b": b, "steps": compared.steps, "equal": compared.equal, "different": pairs}


def _lines(compared: Compared, a: str, b: str) -> Iterator[Text]:
    """Yield how far the rollouts are equal, the first different steps in detail, and a line for each later pair."""
    names, steps = f"{visible(a)} and {visible(b)}", f"{compared.equal} step{'s' * (compared.equal != 1)}"
    if not compared.pairs:
        yield Text(f"{names} are equal: {max(compared.steps)} steps", "green")
        return
    yield Text(f"{names}: {steps} equal, {len(compared.pairs)} different", "bold")
    first, *others = compared.pairs
    yield _headline(first, a, b)
    for found in first.differences:
        yield Text(f"  {found.what}" + (f"  {visible(found.where)}" if found.where else ""))
        shown = _shown(found)
        yield Text(f"    - {_value(shown['a'])}", "red")
        yield Text(f"    + {_value(shown['b'])}", "green")
    for pair in others:
        yield Text.assemble(_headline(pair, a, b), ", ".join(dict.fromkeys(found.what for found in pair.differences)))


def _headline(pair: Pair, a: str, b: str) -> Text:
    numbers = dict.fromkeys(str(step["index"]) for step in (pair.a, pair.b) if step is not None)
    only = f"only in {visible(b if pair.a is None else a)}" if pair.a is None or pair.b is None else ""
    return Text.assemble((f"step {' and '.join(numbers)}", "bold cyan"), "  ", only)


def _value(value: Any) -> str:
    if value is None:
        return "(none)"
    text = value if isinstance(value, str) else orjson.dumps(value).decode()
    return visible(text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…")
