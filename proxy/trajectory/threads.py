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

from collections import defaultdict, deque
from collections.abc import Container, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from heapq import nlargest
from itertools import islice
from typing import Any, Final

from proxy.trajectory.conversations import Digests, Replies, replies_of, text_of
from proxy.trajectory.openings import Opening, Openings, called_with, works_in_turns
from proxy.trajectory.step import Step
from proxy.trajectory.thread_rules import KINDS_OF, SUB_AGENT, RuleSearch, ThreadKind, ThreadRule, Wanted

_STATES: Final = 4  # the newest states of one conversation, and the last replies in a conversation
_LINE: Final = 16  # characters from which a line identifies a text
_LINES: Final = 3  # the longest lines of a text, by which it is found in another one
_SOURCES: Final = 4  # of equal texts, the newest
_SUMMARIZED: Final = 8  # texts with which a family began, the longest
_COMPARED: Final = 64  # places at which one conversation repeats a sampled text
_CHECKED: Final = 256  # lines of sampled texts in one conversation
_SEARCHES: Final = 256  # of the first messages of one step, if they are long; more if they are shorter
_SEARCHED: Final = 2**26  # characters that all searches of the first messages of one step may read
MAIN: Final = "main"
_TITLE: Final = 80  # characters
_DIGEST_BYTES: Final = 6
_ARTICLES: Final[Mapping[ThreadKind, str]] = {
    "main": "the main one",
    "sub-agent": "a sub-agent",
    "compaction": "a compaction",
    "auxiliary": "auxiliary",
}


class Families:
    """The families of openings, which are sorted by age."""

    def __init__(self, openings: Sequence[Opening], digests: Digests) -> None:
        self._digests = digests
        self._parents: list[int] = []  # of each node, which are the different agents, or models with prompts and tools
        self._nodes: dict[Hashable, int] = {}
        self._alike: dict[Hashable, int] = {}
        self._states: defaultdict[Hashable, deque[tuple[int, Opening]]] = defaultdict(partial(deque, maxlen=_STATES))
        self._replied = Replies[tuple[int, Opening]]()
        self._members = list(map(self._added, openings))

    def of(self, at: int) -> int:
        """Return the family of an opening by its index."""
        return self._root(self._members[at])

    def _added(self, opening: Opening) -> int:
        key = (opening.agent,) if opening.agent is not None else (opening.model, opening.system.key, opening.tools)
        node = self._nodes.get(key)
        is_new = node is None
        if node is None:
            node = self._nodes[key] = len(self._parents)
            self._parents.append(node)
        if opening.agent is None:
            self._join(node, opening, is_new=is_new)
        return node

    def _join(self, node: int, opening: Opening, *, is_new: bool) -> None:
        """Join the node of an opening with the other nodes of its family."""
        prompt = opening.model, opening.system.key
        if is_new:
            for tool in opening.tools:
                self._unite(node, self._alike.setdefault((prompt, tool), node))
        if opening.system.text:
            self._unite(node, self._alike.setdefault((prompt, opening.digest), node))
        states = self._states[opening.model, opening.digest]
        if all(self._root(node) != self._root(other) for other, _ in states):
            for other, state in states:
                if opening.tools & state.tools and opening.system.resembles(state.system, share_tools=False):
                    self._unite(node, other)
            states.append((node, opening))
        continued = self._continued(opening)
        if continued is not None:
            other, state = continued
            shares = bool(opening.tools & state.tools)
            if self._root(node) != self._root(other) and opening.system.resembles(state.system, share_tools=shares):
                self._unite(node, other)
        place = self._place(opening, opening.length)
        for reply in replies_of(opening.step).values():
            self._replied.add(place, self._digests.of(reply), (node, opening))

    def _continued(self, opening: Opening) -> tuple[int, Opening] | None:
        """Return the newest step that an opening repeats from the start, messages and reply; None if it repeats none."""
        for at in range(opening.length - 1, max(opening.first, opening.length - _STATES) - 1, -1):
            found = self._replied.at(self._place(opening, at)).get(self._digests.of(opening.message(at)))
            if found:
                return found[-1]
        return None

    def _place(self, opening: Opening, at: int) -> Hashable:
        """Return what identifies the place of a reply: its conversation, its index, and the message before it."""
        before = self._digests.of(opening.message(at - 1)) if at else b""
        return opening.model, opening.digest, at, before

    def _root(self, node: int) -> int:
        while (parent := self._parents[node]) != node:
            self._parents[node] = node = self._parents[parent]
        return node

    def _unite(self, one: int, other: int) -> None:
        low, high = sorted((self._root(one), self._root(other)))
        self._parents[high] = low


@dataclass(frozen=True, slots=True)
class Start:
    """What starts a conversation."""

    source: str  # the ID of the step that sampled the text
    text: str
    tool: str | None = None  # None for a summary
    is_summary: bool = False  # it starts the conversation that follows the summary that this step samples

    @property
    def key(self) -> Hashable:
        """What is equal for conversations of one thread."""
        return (self.source, self.tool) if self.tool is None else (self.text, "")


@dataclass(frozen=True, slots=True)
class _Sampled:
    """A text that a step sampled, as a reply or as an argument of a tool."""

    at: int
    text: str
    tool: str | None = None


class Starts:
    """The starts of the conversations of a rollout, by the index of an opening; openings are sorted by age.

    A conversation has the steps of a family with the same messages before the first reply.
    """

    def __init__(self, openings: Sequence[Opening], families: Families, digests: Digests) -> None:
        self._openings = openings
        self._families = families
        self._digests = digests
        self._conversations = [(families.of(at), opening.digest) for at, opening in enumerate(openings)]
        self._found: dict[Hashable, Start] = {}
        self._summaries: dict[Hashable, Start] = {}
        self._arguments: defaultdict[str, deque[_Sampled]] = defaultdict(partial(deque, maxlen=_SOURCES))
        self._lines: defaultdict[str, deque[_Sampled]] = defaultdict(partial(deque, maxlen=_SOURCES))
        self._family_began: dict[int, int] = {}
        self._beginnings: dict[tuple[int, int], bool] = {}
        self._searches: dict[int, int] = {}
        if len(set(self._conversations)) > 1:
            self._search_all()

    def of(self, at: int) -> Start | None:
        """Return what starts the conversation of an opening; if it samples a summary, what starts the next conversation."""
        summary = self._summaries.get(self._request(at)) if self._summaries else None
        return summary or self._found.get(self._conversations[at])

    def begun(self, at: int) -> Start | None:
        """Return what starts the conversation of an opening."""
        return self._found.get(self._conversations[at])

    def _request(self, at: int) -> Hashable:
        """Return what is equal for attempts at one call."""
        opening = self._openings[at]
        last = self._digests.of(opening.messages[-1]) if opening.length else b""
        return self._conversations[at], opening.length, last

    def _search_all(self) -> None:
        """Find what starts each conversation among the texts that older steps sampled."""
        known = set()
        for at, conversation in enumerate(self._conversations):
            self._family_began.setdefault(conversation[0], at)
            if conversation not in known:
                known.add(conversation)
                self._search(conversation, at)
            self._add(at)

    def _add(self, at: int) -> None:
        """Add the texts that a step sampled: arguments of tools as a whole, and all by their longest lines."""
        for reply in replies_of(self._openings[at].step).values():
            for tool, text in called_with(reply):
                sampled = _Sampled(at, text.strip(), tool)
                if sampled.text:
                    self._arguments[sampled.text].append(sampled)
                for line in _longest_lines(sampled.text):
                    self._lines[line].append(sampled)
            text = text_of(reply)
            for line in _longest_lines(text):
                self._lines[line].append(_Sampled(at, text))

    def _search(self, conversation: tuple[int, bytes], at: int) -> None:
        """Find what starts a conversation; `at` is the index of its oldest step.

        A text that a step of the family has in its own first messages is not evidence: agents search for their task.
        """
        for sampled, line in islice(self._candidates(at), _COMPARED):
            source = self._openings[sampled.at]
            is_family = self._families.of(sampled.at) == conversation[0]
            if sampled.tool is not None:
                if is_family and self._begins_with(sampled.at, [line]):
                    continue
                self._found[conversation] = Start(source.step_id, sampled.text, sampled.tool)
                return
            if self._is_summary(sampled.at, line, at):
                start = Start(source.step_id, sampled.text)
                self._found[conversation] = start
                if is_family:
                    self._summaries[self._request(sampled.at)] = replace(start, is_summary=True)
                return

    def _candidates(self, at: int) -> Iterator[tuple[_Sampled, str]]:
        """Yield the sampled texts that occur in the messages with which a conversation begins, and the line of each."""
        opening = self._openings[at]
        for part in opening.parts():
            for sampled in reversed(self._arguments.get(part, ())):
                yield sampled, part
        repeated = (
            (sampled, line, text)
            for text in opening.imported()
            for line in dict.fromkeys(map(str.strip, text.splitlines()))
            for sampled in reversed(self._lines.get(line, ()))
        )
        for sampled, line, text in islice(repeated, _CHECKED):
            if sampled.tool is None or sampled.text in text:
                yield sampled, line

    def _is_summary(self, source_at: int, line: str, at: int) -> bool:
        """Return whether a step sampled a summary: of its own conversation, or of the family from the text of its beginning.

        A line that the step has in its own first messages is not evidence, nor is a plan, which is older than what it begins.
        """
        source, family = self._openings[source_at], self._families.of(at)
        if self._families.of(source_at) == family:
            may_be = source.first < source.length
        else:
            began_at = self._family_began[family]
            may_be = began_at < source_at and not source.tools and self._has_beginning(source_at, began_at)
        return may_be and not self._begins_with(source_at, [line])

    def _has_beginning(self, source_at: int, began_at: int) -> bool:
        """Return whether the first messages of a step have one of the longest texts with which a family began."""
        key = source_at, began_at
        if key not in self._beginnings:
            longest = nlargest(_SUMMARIZED, self._openings[began_at].parts(), key=len)
            self._beginnings[key] = self._begins_with(source_at, longest)
        return self._beginnings[key]

    def _begins_with(self, at: int, texts: Sequence[str]) -> bool:
        """Return whether the first messages of a step have one of these texts.

        False after a number of searches that depends on their length: a thousand conversations may come from one long step.
        """
        left = self._searches.get(at)
        if left is None:
            left = max(_SEARCHES, _SEARCHED // (1 + sum(map(len, self._openings[at].parts()))))
        if left <= 0:
            return False
        self._searches[at] = left - len(texts)
        parts = list(self._openings[at].parts())
        return any(text in part for text in texts for part in parts)


def _longest_lines(text: str) -> list[str]:
    lines = {line for each in text.splitlines() if len(line := each.strip()) >= _LINE}
    return sorted(lines, key=lambda line: (-len(line), line))[:_LINES]


@dataclass(frozen=True, slots=True)
class Thread:
    """A thread."""

    name: str  # unique within its rollout
    kind: ThreadKind
    agent: str | None  # which its calls name
    model: str | None  # of the oldest call
    title: str  # the beginning of the text with which it starts
    steps: int
    parent: str | None = None  # the thread of the step that started it
    started_by: str | None = None  # the step that called it with `tool`, or sampled its summary
    tool: str | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the thread without what is absent."""
        return {name: value for name in self.__slots__ if (value := getattr(self, name)) is not None}


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
    """Return a thread of late steps. Late steps can change its parent's name: the name without them is kept."""
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
    others = [(step.step_id, of[step.step_id]) for step in steps if of[step.step_id].kind not in kinds]
    why = f"threads={wanted}: its thread is "
    skipped = [
        {"step_id": step_id, "thread": thread.name, "why": why + _ARTICLES[thread.kind]} for step_id, thread in others
    ]
    return kept, skipped


@dataclass(slots=True, eq=False)
class _Group:
    """The steps of a thread, before its kind is known."""

    agent: str | None  # after which it is named
    openings: list[Opening] = field(default_factory=list)
    is_long: bool = False
    start: Start | None = None
    rule: ThreadRule | None = None
    kind: ThreadKind | None = None
    parent: "_Group | None" = None
    name: str = ""

    @property
    def is_task(self) -> bool:
        return self.agent is not None and self.agent.startswith(SUB_AGENT)

    @property
    def oldest(self) -> Opening:
        return self.openings[0]

    @property
    def own(self) -> list[Opening]:
        """The steps without the one that samples a compaction's summary, unless it is the only step."""
        source = None if self.start is None else self.start.source
        return [opening for opening in self.openings if opening.step_id != source] or self.openings

    @property
    def model_and_prompt(self) -> tuple[str | None, bytes]:
        return self.oldest.model, self.oldest.system.key

    @property
    def turns(self) -> set[tuple[bytes, int]]:
        return {(opening.digest, opening.length) for opening in self.openings}


def _found(ordered: Sequence[Step], rules: Sequence[ThreadRule]) -> Threads:
    groups = _grouped(ordered, rules)
    _classify(groups)
    by_name: dict[str, list[_Group]] = {}
    for group in groups:
        group.name = _name(group)
        by_name.setdefault(group.name, []).append(group)
    threads = {name: _thread(alike) for name, alike in by_name.items()}
    of = {opening.step_id: threads[group.name] for group in groups for opening in group.openings}
    return Threads(tuple(sorted(threads.values(), key=lambda thread: thread.kind != MAIN)), of)


def _grouped(ordered: Sequence[Step], rules: Sequence[ThreadRule]) -> list[_Group]:
    reader = Openings()
    openings = [reader.read(step) for step in ordered]
    families = Families(openings, reader.digests)
    search = RuleSearch(rules)
    matched = [
        search.first(each.model, each.system.text, each.tools, each.agent, partial(reader.user, each))
        for each in openings
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
    return [*groups.values()]


def _classify(groups: Sequence[_Group]) -> None:
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
    candidates = [group for group in open_groups if group not in beside] or open_groups
    if candidates and not any(group.kind == MAIN for group in groups):
        min(candidates, key=lambda group: group.oldest.step_id).kind = MAIN
    for group in open_groups:
        if group.kind is None:
            group.kind = "auxiliary" if group in beside else "sub-agent"


def _auxiliary(others: Sequence[_Group], groups: Sequence[_Group]) -> set[_Group]:
    """Return the groups that do not work in turns, if a group with another prompt or model does or has more turns."""
    best: dict[Any, tuple[bool, int]] = {}
    for group in others:
        key = group.model_and_prompt
        best[key] = max(best.get(key, (False, 0)), (group.is_long, len(group.turns)))
    ranked: list[tuple[Any, tuple[bool, int]]] = sorted(best.items(), key=lambda item: item[1], reverse=True)
    first, second = [*ranked, (None, (False, 0)), (None, (False, 0))][:2]

    def is_beside(group: _Group) -> bool:
        _, (is_long, turns) = second if first[0] == group.model_and_prompt else first
        return not group.is_long and (is_long or turns > len(group.turns))

    return {group for group in groups if is_beside(group)}


def _name(group: _Group) -> str:
    """Return the agent's name, `main`, or the kind with a digest of what the thread is and what starts it."""
    if group.agent is not None:
        return group.agent
    if group.kind == MAIN:
        return MAIN
    started = b"" if group.start is None else group.start.text.encode(errors="replace")
    if group.rule is not None and group.rule.kind == "sub-agent":
        started = group.oldest.digest
    keys = [("\0".join((each.model or "", *sorted(each.tools))), each.system.key) for each in group.own]
    digests = (blake2b(key + text.encode(errors="replace"), digest_size=16).digest() for text, key in keys)
    digest = blake2b(min(digests) + started, digest_size=_DIGEST_BYTES)
    return f"{group.kind}:{digest.hexdigest()}"


def _thread(groups: Sequence[_Group]) -> Thread:
    group = groups[0]  # the others have the same name
    start, parent = group.start, group.parent
    text = next(reversed([*group.own[0].parts()]), "") if start is None else start.text
    return Thread(
        name=group.name,
        kind=group.kind or MAIN,
        agent=None if group.is_task else group.agent,
        model=group.oldest.model,
        title=title_of(text),
        steps=sum(len(each.openings) for each in groups),
        parent=None if parent is None or parent is group else parent.name,
        started_by=None if start is None else start.source,
        tool=None if start is None else start.tool,
    )
