"""What starts the conversations of a rollout: calls of tools, and summaries of other conversations."""

from collections import defaultdict, deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import nlargest
from itertools import islice
from typing import Final

from proxy.trajectory.conversation import Digests, text_of
from proxy.trajectory.families import Families
from proxy.trajectory.openings import Opening, called_with, replies_of

_LINE: Final = 16  # characters from which a line identifies a text
_LINES: Final = 3  # the longest lines of a text, by which it is found in another one
_SOURCES: Final = 4  # of equal texts, the newest
_SUMMARIZED: Final = 8  # texts with which a family began, the longest
_COMPARED: Final = 64  # places at which one conversation repeats a sampled text
_CHECKED: Final = 256  # lines of sampled texts in one conversation
_SEARCHES: Final = 256  # of the first messages of one step, if they are long; more if they are shorter
_SEARCHED: Final = 2**26  # characters that all searches of the first messages of one step may read


@dataclass(frozen=True, slots=True)
class Start:
    """What starts a conversation: the text, the ID of the step that sampled it, and the tool; None for a summary.

    `is_summary`: it is the start of the conversation that follows the summary that this step samples.
    """

    source: str
    text: str
    tool: str | None = None
    is_summary: bool = False

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


_NONE: Final = deque[_Sampled]()


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
        self._arguments: defaultdict[str, deque[_Sampled]] = defaultdict(_newest)
        self._lines: defaultdict[str, deque[_Sampled]] = defaultdict(_newest)
        self._family_began: dict[int, int] = {}
        self._beginnings: dict[tuple[int, int], bool] = {}
        self._searches: dict[int, int] = {}
        if len(set(self._conversations)) > 1:
            self._search_all()

    def of(self, at: int) -> Start | None:
        """Return what starts the conversation of an opening, or the one that follows if it samples the summary for it."""
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
        for reply in replies_of(self._openings[at].step):
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
            for sampled in reversed(self._arguments.get(part, _NONE)):
                yield sampled, part
        repeated = (
            (sampled, line, text)
            for text in opening.imported()
            for line in dict.fromkeys(map(str.strip, text.splitlines()))
            for sampled in reversed(self._lines.get(line, _NONE))
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


def _newest() -> deque[_Sampled]:
    return deque(maxlen=_SOURCES)


def _longest_lines(text: str) -> list[str]:
    lines = {line for each in text.splitlines() if len(line := each.strip()) >= _LINE}
    return sorted(lines, key=lambda line: (-len(line), line))[:_LINES]
