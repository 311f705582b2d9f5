"""Feeders of rollouts: their steps in nasty shapes, analysed, stored and exported."""

from array import array
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import orjson
from tests.support.feeding import FACTS_OF_ROLLOUT, FEEDERS, FEW, FRAGMENTS, Work, feeder, many, text
from tests.support.forests import make_choice, make_step
from tests.support.threaded import said, user

from proxy.export import FORMATS
from proxy.export.base import Fill, Rows, with_columns
from proxy.export.containers import CONTAINERS
from proxy.rollouts.archive.rows import put_together, take_apart
from proxy.trajectory.advantages import SoftPenalty, episodes, returns, vine
from proxy.trajectory.arrays import Experts, Link, Mask, SharedIds
from proxy.trajectory.blocks import BlockReader, BlockWriter, KnownBlocks
from proxy.trajectory.codec import decode, encode, read_head
from proxy.trajectory.conversations import replies_of
from proxy.trajectory.drift import Endings, explain, find_boundaries
from proxy.trajectory.images import IMAGES, aligned, names_in
from proxy.trajectory.openings import Openings
from proxy.trajectory.outline import find_forks, outline
from proxy.trajectory.ratios import ratio_warnings
from proxy.trajectory.retokenize import retokenize
from proxy.trajectory.sequence import Options, Scores, decode_scores, encode_scores, sequences
from proxy.trajectory.step import Step
from proxy.trajectory.tape import Tape, difference
from proxy.trajectory.text_search import Needle, search
from proxy.trajectory.thread_rules import PRESETS, rules_of
from proxy.trajectory.threads import find_threads, select_threads
from proxy.trajectory.tree import grow

# Rollouts


def a_call(at: int, messages: list[Any], reply: Any, prompt: list[int], ids: list[int], **facts: Any) -> Step:
    message = reply if isinstance(reply, dict) else {"role": "assistant", "content": reply}
    body = {"model": "m", "messages": messages, **facts.pop("body", {})}
    response = {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}
    return make_step(f"s{at:08}", prompt, ids, **{"request": body, "response": response, "index": at, **facts})


def apart(fragment: str, size: int) -> list[Step]:
    """Return calls with equal ids and messages, most of them retries."""
    return [
        a_call(
            at, [user(fragment)], fragment, [1, 2], [3], delivered=False, extra={"request_key": "k", "attempt": at % 3}
        )
        for at in many(fragment, size, 512)
    ]


def growing(fragment: str, size: int) -> list[Step]:
    """Return a conversation with messages and prompts of this size in all."""
    steps, messages, prompt = [], [user(fragment)], [1]
    for at in range(int((size // 4) ** 0.5) + 1):
        steps.append(a_call(at, list(messages), fragment, list(prompt), [3]))
        messages += [said(fragment), user(fragment)]
        prompt += [3, 4]
    return steps


def edited(fragment: str, size: int) -> list[Step]:
    """Return a conversation with equal ids; each call changes its first message."""
    steps, later = [], []
    for at in range(int((size // 4) ** 0.5) + 1):
        steps.append(a_call(at, [user(f"{fragment}{at}"), *later], fragment, [1] * (at + 1), [3]))
        later += [said(fragment), user(fragment)]
    return steps


def started(fragment: str, size: int) -> list[Step]:
    """Return a conversation that starts many others with the arguments of its calls."""
    tasks = [f"{fragment} the task with number {at}" for at in many(fragment, size, 256)]
    caller = a_call(0, [user("go")], said("", *(("task", {"prompt": task}) for task in tasks)), [1], [2])
    system = {"role": "system", "content": "another"}
    return [caller, *(a_call(at, [system, user(task)], "ok", [at + 2], [9]) for at, task in enumerate(tasks, 1))]


def begun(fragment: str, size: int) -> list[Step]:
    """Return a long call that starts many short conversations of the same prompt with the arguments of its calls."""
    tasks = [f"{fragment} the task with number {at}" for at in many(fragment, size, 256)]
    reply = said("", *(("task", {"prompt": task}) for task in tasks))
    caller = a_call(0, [user(text(fragment + " ", size // 2))], reply, [1], [2])
    return [caller, *(a_call(at, [user(task)], "ok", [at + 2], [9]) for at, task in enumerate(tasks, 1))]


def replaced(fragment: str, size: int) -> list[Step]:
    """Return a call with a long reply, and many that send a short one back in its place."""
    long = text(fragment + " ", size // 2)
    steps = [a_call(0, [user("a")], said(long, ("f", {"a": long})), [1] * 8, [2] * (size // 16))]
    for at in many(fragment, size, 256):
        other = said(f"b{at}", ("f", {"a": at}))
        steps.append(a_call(at + 1, [user("a"), other, user("c")], "ok", [1] * 8 + [3, at], [2]))
    return steps


def summarized(fragment: str, size: int) -> list[Step]:
    """Return conversations with many parts in their first messages, and one that begins with a summary."""
    parts = [{"type": "text", "text": f"{fragment}{at}" + "x" * 32} for at in range(32)]
    lines = "\n".join(f"{fragment} a line of a summary {at}" for at in many(fragment, size))
    first = a_call(0, [{"role": "user", "content": parts}] * (size // 4096 + 1), "ok", [1], [2])
    summary = a_call(1, [*first.request["messages"], said("b"), user("Summarize.")], lines, [5], [6])
    return [first, summary, a_call(2, [user(lines)], "ok", [7], [8]), a_call(3, [user(lines + "x")], "ok", [9], [8])]


def one(fragment: str, size: int) -> list[Step]:
    """Return calls with long texts."""
    long = text(fragment, size)
    arguments = said(long, ("f", {"a": long}))
    changed = {**arguments, "content": long.strip() + " "}
    return [
        a_call(0, [user(long)], arguments, [1], [2]),
        a_call(1, [user(long), changed, user(long)], long, [1, 5], [2]),
    ]


def listed(fragment: str, size: int) -> list[Step]:
    """Return calls with many short messages, parts, tools and calls."""
    count = len(many(fragment, size, 128))
    tools = [{"type": "function", "function": {"name": f"{fragment}{at}"}} for at in range(count)]
    calls = said(fragment, *[("f", {"a": fragment})] * count)
    parts = {"role": "user", "content": [{"type": "text", "text": fragment}] * count}
    messages = [user(fragment), said(fragment), {"role": "tool", "tool_call_id": "c", "content": fragment}] * count
    return [
        a_call(0, [parts, *messages], calls, [1], [2], body={"tools": tools}),
        a_call(1, [*messages, user("b")], calls, [1], [2], body={"tools": tools[1:]}),
    ]


def tokens(fragment: str, size: int) -> list[Step]:
    """Return calls with prompts of one id that share their beginnings; one has images, one all that an engine returns."""
    prompt = [1] * (size // 4)
    extra = {IMAGES: {"ids": ["a" * 32] * (size // 64), "token": 1}}
    full = replace(
        make_choice(0, [1] * (size // 16)),
        routed_experts=Experts("int32", bytes(size // 16)),
        sampling_mask=Mask(array("i", [1] * (size // 16)), array("i", range(size // 16 + 1))),
    )
    shared = SharedIds(_chain(size), b"")
    steps = [a_call(at, [user("a")], fragment, prompt[at:], [1] * (at + 1)) for at in range(4)]
    steps[1] = replace(steps[1], extra=extra)
    steps[2] = replace(steps[2], choices=(full,))
    return [*steps, replace(steps[3], step_id="s9", prompts=(shared,), index=9)]


def _chain(size: int) -> Link | None:
    link = None
    for _ in range(size // 4096):
        link = Link(link, bytes(1024))
    return link


SHAPES = (apart, growing, edited, started, begun, replaced, summarized, one, listed, tokens)
RULES = rules_of(PRESETS, ())


class _Letters:
    """A tokenizer with an id for each character."""

    def render(self, messages: Any, tools: Any, *, reply: bool) -> list[int]:
        return self.encode("".join(str(message.get("content")) for message in messages))

    def encode(self, text: str) -> list[int]:
        return [1] * len(text)


def _threads(steps: list[Step]) -> None:
    find_threads(steps, RULES)
    select_threads(steps, (), "main")
    reader = Openings()
    for step in steps:
        reader.user(reader.read(step))


def _drift(steps: list[Step]) -> None:
    tree = grow(steps)
    boundaries = find_boundaries(tree)
    drift = [explain(boundary, "a", "b") for boundary in boundaries]
    find_forks(tree, {boundary.step_id for boundary in boundaries})
    outline(steps, FACTS_OF_ROLLOUT, drift)
    endings = Endings()
    for step in steps:
        endings.add(step)


def _records(steps: list[Step]) -> None:
    known, blocks = KnownBlocks(), {}
    for step in steps:
        record = encode(step, known)
        known.update(record.blocks)
        blocks |= record.blocks
        reader = BlockReader(blocks)
        decode(record.record, reader)
        parts, _ = take_apart(record.record, reader, blocks)
        put_together(parts, frozenset())
        read_head(parts.head)
        read_head(orjson.dumps({**orjson.loads(parts.head), "reason": {}}))  # value by value


def _rows(steps: list[Step]) -> None:
    tree = grow(steps)
    tree.superseded()
    sequences(steps, FACTS_OF_ROLLOUT, Options(include="flagged"), tree=tree)
    facts = replace(FACTS_OF_ROLLOUT, step_rewards={step.step_id: 1.0 for step in steps})
    for episode in episodes(steps, facts, Options()):
        episode.penalized(facts, SoftPenalty(9, 3))
        episode.turns(facts)
    returns([step.step_id for step in steps], facts, 0.5)
    vine(range(len(steps)), dict.fromkeys(range(len(steps)), 0.5), 0.0, 1.0)
    for step in steps:
        retokenize(replace(step, problems=("no_token_ids",)), _Letters())


def _tape(steps: list[Step]) -> None:
    known, blocks, records = KnownBlocks(), {}, []
    for step in steps:
        record = encode(step, known)
        known.update(record.blocks)
        blocks |= record.blocks
        records.append(record.record)
    tape = Tape(("a*b", "<*>", "*data", "think"))
    tape.extend(records, blocks, frozenset())
    for step in (steps[0], steps[-1]):
        asked = tape.ask(step.dialect, step.request, step.body)
        tape.equal(asked.key, len(tape))
        tape.asked_as(asked.key)
        tape.step(step.step_id)
        tape.restored(asked, tape.inherited_length(asked, 0))
        tape.replied(tape.steps[0], list(replies_of(step).values()))
        if (nearest := tape.nearest(asked, tape.steps)) is not None:
            difference(asked.messages, [*tape.messages(nearest[0]), {"role": "a"}], nearest[1])
            difference([step.request], [steps[0].response], 0)


def _search(steps: list[Step]) -> None:
    search(steps, Needle("nothing"), 10)


def _trajectories(steps: list[Step]) -> None:
    for name in ("atif", "rollout_detail"):
        with suppress(ValueError):
            FORMATS[name].rows(FACTS_OF_ROLLOUT, steps, Options(include="flagged"))


def _formats(steps: list[Step]) -> None:
    fill = Fill(decode=lambda ids: "a" * len(ids))
    for form in FORMATS.values():
        with suppress(ValueError):
            rows = form.rows(FACTS_OF_ROLLOUT, steps, Options(), fill)
            ratio_warnings(rows.recorded)
            form.gather([rows, rows])
            for name in ("json", "ndjson", "msgpack"):
                writer = CONTAINERS[name](form)
                for row in rows.rows:
                    writer.fills(row)
                    writer.row(row)
                writer.closing({"skipped": rows.skipped})
            for entry in form.gather([rows]) if isinstance(form.gather([rows]), list) else ():
                form.flat(entry)


OF_ROLLOUTS: set[str] = set()


def _rollouts(analysis: Callable[[list[Step]], None], shape: Callable[[str, int], list[Step]]) -> None:
    def feed(fragment: str, size: int) -> Work:
        steps = shape(fragment, size)
        return lambda: analysis(steps)

    wide = FRAGMENTS if shape is one and analysis in (_drift, _threads) else FEW[:2]
    name = f"{analysis.__name__.strip('_')}_{shape.__name__}"
    FEEDERS[name] = feed, wide
    OF_ROLLOUTS.add(name)


for _analysis in (_threads, _drift, _records, _tape, _rows, _search, _trajectories, _formats):
    for _shape in SHAPES:
        _rollouts(_analysis, _shape)


def _pictured(size: int) -> Step:
    """Return a call with many images, and a long one."""
    urls = ["data:image/png;base64,AAAA", *["data:image/png;base64,AA=="] * (size // 64), "data:," + "A" * size]
    content = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    names = names_in([{"content": content}])
    return a_call(
        0, [{"role": "user", "content": content}], "a", [1] * (size // 4), [2], extra={IMAGES: {"ids": names}}
    )


@feeder("a")
def images_of_a_call(fragment: str, size: int) -> Work:
    step = _pictured(size)

    def work() -> None:
        _records([step])
        record = encode(step)
        reader = BlockReader(record.blocks)
        for name in step.extra[IMAGES]["ids"][:1]:
            reader.image(bytes.fromhex(name))
        aligned(step.extra[IMAGES]["ids"], [1, 2], step.prompts)

    return work


@feeder("a")
def scores_of_rows(fragment: str, size: int) -> Work:
    ids = [1] * (size // 8)
    steps = [a_call(0, [user("a")], "a", [1], ids)]
    one_of = array("i", [1])
    scores = Scores("e", "m", None, array("f", [-1.0]) * len(ids), 1, one_of * len(ids), array("f", [-1.0]) * len(ids))

    def work() -> None:
        decode_scores(encode_scores(scores))
        for form in FORMATS.values():
            for role in form.scored:
                scored = with_columns(form, role, likely=role in form.likely)
                with suppress(ValueError, NotImplementedError):
                    scored.rows(FACTS_OF_ROLLOUT, steps, Options(), Fill(scores=[scores], role=role))

    return work


@feeder("a")
def rows_of_a_group(fragment: str, size: int) -> Work:
    row = {"a": [fragment], "b": [1]}
    rows = [dict(row) for _ in many(fragment, size)]
    rows[-1]["b"] = None  # type: ignore[assignment]
    members = [Rows(rows, [])]

    def work() -> None:
        with suppress(ValueError):
            FORMATS["trl"].gather(members)

    return work


@feeder(*FEW)
def blocks_of_messages(fragment: str, size: int) -> Work:
    pieces = [fragment.encode()] * max(2**13, len(many(fragment, size)))  # a chain that is compared with the next one
    return lambda: BlockWriter(KnownBlocks()).write(b"messages", pieces)
