"""Threads: the conversations of a rollout, and what starts each of them.

Rule 1: steps are of one family if they name the same agent; else if their model and system prompt are equal and they share
        tools, or one continues the other and the prompts are similar. Digits of a system prompt do not count, as in dates.
Rule 2: a family is one thread, except that a conversation that another one starts is a thread of its own: a sub-agent begins
        with a text that a tool call of another conversation has as an argument, a compaction with a summary that was sampled
        in the family or from its text. The call that samples the summary belongs to it.
Rule 3: a thread without tools and with one turn is auxiliary if another one has tools or more turns, and another system
        prompt or model. The main thread is the oldest of the others that nothing starts. All others are sub-agents.
Rule 4: a rule's kind has precedence. Late steps do not change the threads of other steps.

The result does not depend on the order of the steps of different threads, except that what starts a thread is older. The cost
is linear in the steps and their new messages: steps are compared by digests, and with a few others at most.
"""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from typing import Any, Final

from proxy.trajectory.families import Families
from proxy.trajectory.openings import Opening, Openings, works_in_turns
from proxy.trajectory.step import Step
from proxy.trajectory.thread_agents import SUB_AGENT
from proxy.trajectory.thread_rules import KINDS_OF, RuleSearch, ThreadKind, ThreadRule, Wanted
from proxy.trajectory.thread_starts import Start, Starts

MAIN: Final = "main"
_TITLE: Final = 80  # characters
_DIGEST_BYTES: Final = 6
_ARTICLES: Final[Mapping[ThreadKind, str]] = {
    "main": "the main one",
    "sub-agent": "a sub-agent",
    "compaction": "a compaction",
    "auxiliary": "auxiliary",
}


@dataclass(frozen=True, slots=True)
class Thread:
    """A thread. `name` identifies it within its rollout.

    `agent` is that of its calls, `model` that of the oldest one. `title` begins the text with which it starts. `started_by` is
    the step that called it with `tool` or sampled its summary, and `parent` the thread of that step.
    """

    name: str
    kind: ThreadKind
    agent: str | None
    model: str | None
    title: str
    steps: int
    parent: str | None = None
    started_by: str | None = None
    tool: str | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the thread without what is absent."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Threads:
    """The threads of a rollout, the main one first, then by age; and the thread of each step by its ID."""

    all: tuple[Thread, ...]
    of: Mapping[str, Thread]


def find_threads(steps: Iterable[Step], rules: Sequence[ThreadRule] = ()) -> Threads:
    """Return the threads of a rollout's steps, which need their requests and responses."""
    ordered = sorted(steps, key=lambda step: step.step_id)
    in_time = [step for step in ordered if not step.late]
    found = _found(in_time or ordered, rules)
    if len(in_time) in (0, len(ordered)):
        return found
    known = {thread.name: thread for thread in found.all}
    late = {step_id: thread for step_id, thread in _found(ordered, rules).of.items() if step_id not in found.of}
    names = {step_id: thread.name for step_id, thread in (late | {**found.of}).items()}
    present = frozenset(names.values())
    added = {thread.name: _renamed(thread, names, present) for thread in late.values() if thread.name not in known}
    threads = known | added
    return Threads(tuple(threads.values()), {step_id: threads[name] for step_id, name in names.items()})


def _renamed(thread: Thread, names: Mapping[str, str], present: Container[str]) -> Thread:
    """Return a thread of late steps. Its parent may have another name with late steps than without."""
    if thread.parent is None or thread.started_by is None or thread.parent in present:
        return thread
    parent = names[thread.started_by]
    return replace(thread, parent=None if parent == thread.name else parent)


def title_of(text: str) -> str:
    """Return the beginning of a text, in one line."""
    return " ".join(text[: 4 * _TITLE].split())[:_TITLE]


def select_threads(
    steps: Sequence[Step], rules: Sequence[ThreadRule], wanted: Wanted
) -> tuple[list[Step], list[dict[str, Any]]]:
    """Return the steps of these threads with the names of their threads, and the others as skipped."""
    of, kinds = find_threads(steps, rules).of, KINDS_OF[wanted]
    kept = [replace(step, thread=of[step.step_id].name) for step in steps if of[step.step_id].kind in kinds]
    skipped = [
        {
            "step_id": step.step_id,
            "thread": thread.name,
            "why": f"threads={wanted}: its thread is {_ARTICLES[thread.kind]}",
        }
        for step in steps
        if (thread := of[step.step_id]).kind not in kinds
    ]
    return kept, skipped


class _Group:
    """The steps of a thread, before its kind is known."""

    __slots__ = ("agent", "is_long", "kind", "openings", "parent", "rule", "start")

    def __init__(self, agent: str | None) -> None:
        self.agent = agent  # after which it is named
        self.openings: list[Opening] = []
        self.is_long = False
        self.start: Start | None = None
        self.rule: ThreadRule | None = None
        self.kind: ThreadKind | None = None
        self.parent: _Group | None = None

    @property
    def is_task(self) -> bool:
        """Whether the client's metadata names it as a sub-agent."""
        return self.agent is not None and self.agent.startswith(SUB_AGENT)

    @property
    def oldest(self) -> Opening:
        return self.openings[0]

    @property
    def first(self) -> Opening:
        """The oldest step after the one that samples the summary with which a compaction begins."""
        source = None if self.start is None else self.start.source
        return next((opening for opening in self.openings if opening.step_id != source), self.oldest)

    @property
    def model_and_prompt(self) -> tuple[str | None, bytes]:
        return self.oldest.model, self.oldest.system.key

    @property
    def turns(self) -> set[tuple[bytes, int]]:
        return {(opening.digest, opening.length) for opening in self.openings}


def _found(ordered: Sequence[Step], rules: Sequence[ThreadRule]) -> Threads:
    groups = list(_grouped(ordered, rules))
    _classify(groups)
    names: dict[int, str] = {}
    by_name: dict[str, list[_Group]] = {}
    for group in groups:
        names[id(group)] = name = _name(group)
        by_name.setdefault(name, []).append(group)
    group_of = {opening.step_id: group for group in groups for opening in group.openings}
    threads = {name: _thread(name, alike, names) for name, alike in by_name.items()}
    of = {step_id: threads[names[id(group)]] for step_id, group in group_of.items()}
    ordered_threads = sorted(threads.values(), key=lambda thread: thread.kind != MAIN)
    return Threads(tuple(ordered_threads), of)


def _grouped(ordered: Sequence[Step], rules: Sequence[ThreadRule]) -> Iterator[_Group]:
    """Yield the groups of steps, by age."""
    reader = Openings()
    openings = [reader.read(step) for step in ordered]
    families = Families(openings, reader.digests)
    search = RuleSearch(rules)
    matched = [
        search.first(
            model=opening.model,
            system=opening.system.text,
            tools=opening.tools,
            agent=opening.agent,
            user=partial(reader.user, opening),
        )
        for opening in openings
    ]
    starts = Starts(openings, families, reader.digests)
    groups: dict[Any, _Group] = {}
    of_step: dict[str, _Group] = {}  # of the step's conversation, also if the step belongs to what follows it
    for at, opening in enumerate(openings):
        number = matched[at]
        rule = None if number is None else rules[number]
        start, family, agent = starts.of(at), families.of(at), opening.agent
        key: tuple[Any, ...] = (family, None if start is None else start.key)
        if agent is not None and (rule is None or rule.agent is not None):
            key, start = (agent,), None
        elif rule is not None and not (rule.kind == "compaction" and start is not None and start.is_summary):
            agent, start = None, start if rule.kind == "sub-agent" else None
            key = (family, opening.digest if rule.kind == "sub-agent" else None, number)
        group = groups.setdefault(key, _Group(agent))
        group.openings.append(opening)
        group.rule = group.rule or rule
        group.start = group.start or start
        begun = starts.begun(at)
        of_step[opening.step_id] = groups.get((family, None if begun is None else begun.key), group)
    for group in groups.values():
        group.parent = None if group.start is None else of_step.get(group.start.source)
        group.is_long = works_in_turns(group.openings, reader.digests)
    yield from groups.values()


def _classify(groups: Sequence[_Group]) -> None:
    """Set the kind of each group."""
    summaries = {group.start.source for group in groups if group.start is not None and not group.start.tool}
    for group in groups:
        if group.agent == MAIN:
            group.kind = MAIN
        elif group.rule is not None:
            group.kind = group.rule.kind
        elif group.is_task:
            group.kind = "sub-agent"
        elif group.start is not None:
            group.kind = "compaction" if group.start.tool is None else "sub-agent"
        elif not group.is_long and any(opening.step_id in summaries for opening in group.openings):
            group.kind = "compaction"
    open_groups = [group for group in groups if group.kind is None]
    beside = _auxiliary([group for group in groups if group.rule is None or group.kind != "auxiliary"], open_groups)
    candidates = [group for group in open_groups if id(group) not in beside] or open_groups
    if candidates and not any(group.kind == MAIN for group in groups):
        min(candidates, key=lambda group: group.oldest.step_id).kind = MAIN
    for group in open_groups:
        if group.kind is None:
            group.kind = "auxiliary" if id(group) in beside else "sub-agent"


def _auxiliary(others: Sequence[_Group], groups: Sequence[_Group]) -> set[int]:
    """Return the identities of the groups beside which another one has tools or more turns, and another prompt or model."""
    best: dict[Any, tuple[bool, int]] = {}
    for group in others:
        key = group.model_and_prompt
        best[key] = max(best.get(key, (False, 0)), (group.is_long, len(group.turns)))
    first, second = [
        *sorted(best.items(), key=lambda item: item[1], reverse=True),
        (None, (False, 0)),
        (None, (False, 0)),
    ][:2]

    def is_beside(group: _Group) -> bool:
        _, (is_long, turns) = second if first[0] == group.model_and_prompt else first
        return not group.is_long and (is_long or turns > len(group.turns))

    return {id(group) for group in groups if is_beside(group)}


def _name(group: _Group) -> str:
    """Return the agent's name, `main`, or the kind with a digest of what the thread is and what starts it."""
    if group.agent is not None:
        return group.agent
    if group.kind == MAIN:
        return MAIN
    source = None if group.start is None else group.start.source
    others = [opening for opening in group.openings if opening.step_id != source] or group.openings
    started = b"" if group.start is None else group.start.text.encode(errors="replace")
    if group.rule is not None and group.rule.kind == "sub-agent":
        started = group.oldest.digest
    digest = blake2b(min(map(_key, others)) + started, digest_size=_DIGEST_BYTES)
    return f"{group.kind}:{digest.hexdigest()}"


def _key(opening: Opening) -> bytes:
    """Return a digest of the model, the system prompt and the tools of a step."""
    values = "\0".join((opening.model or "", *sorted(opening.tools)))
    return blake2b(opening.system.key + values.encode(errors="replace"), digest_size=16).digest()


def _thread(name: str, groups: Sequence[_Group], names: Mapping[int, str]) -> Thread:
    """Return the thread of these groups, which are of one name."""
    group = groups[0]
    start = group.start
    parent = group.parent
    text = next(reversed([*group.first.parts()]), "") if start is None else start.text
    return Thread(
        name=name,
        kind=group.kind or MAIN,
        agent=None if group.is_task else group.agent,
        model=group.oldest.model,
        title=title_of(text),
        steps=sum(len(each.openings) for each in groups),
        parent=None if parent is None or parent is group else names[id(parent)],
        started_by=None if start is None else start.source,
        tool=None if start is None else start.tool,
    )
