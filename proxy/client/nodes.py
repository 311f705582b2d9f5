"""SequenceNode as Atropos' ManagedServer has it (296a0bc), and nodes that grow from turn to turn.

Holds the joining of turns, which is by ids alone: a turn goes on from the longest node whose tokens its prompt begins with.
Texts are told and never compared, so that neither an end of sequence that no text shows nor two equal texts can mislead.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

IGNORED: Final = -100
NOT_SAMPLED: Final = 1.0  # no legal logprob is above 0
_DUMMIES: Final = 128  # as Atropos' DummyManagedServer has them


@dataclass(slots=True)
class SequenceNode:
    """A conversation so far: three lists of one length. Where nothing was sampled, -100 and 1.0."""

    full_text: str
    tokens: list[int]
    masked_tokens: list[int]
    logprobs: list[float]
    metadata: dict[str, Any] | None = None

    def copy(self) -> "SequenceNode":
        """A node of its own: what is changed in one is not changed in the other."""
        return replace(
            self,
            tokens=list(self.tokens),
            masked_tokens=list(self.masked_tokens),
            logprobs=list(self.logprobs),
            metadata=self.metadata and dict(self.metadata),
        )

    def model_dump(self) -> dict[str, Any]:
        """The node as a dict, under the name that callers of Atropos' own know."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Sample:
    """What one call sampled behind its prompt, and the text of both."""

    text: str
    ids: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: str | None


class Nodes:
    """The nodes of one ManagedServer: `current` (a turn replaces what it goes on from), or with `track_tree`, all of them."""

    __slots__ = ("_known", "_track_tree", "current", "sequences")

    def __init__(self, *, track_tree: bool) -> None:
        self.current: list[SequenceNode] = []
        self.sequences: dict[str, SequenceNode] = {}
        self._known: list[SequenceNode] = []  # also replaced ones: a later call may branch off there
        self._track_tree = track_tree

    def grow(self, prompt: Sequence[int], samples: Sequence[Sample]) -> None:
        """Add the samples of one prompt: the first in the place of the node that it goes on from, if there is one."""
        parent = self._longest(list(prompt))
        grown = [_node(parent, prompt, sample) for sample in samples]
        self._known += grown
        self._add(grown, parent)

    def add_dummies(self, texts: Sequence[str], finish_reasons: Sequence[str | None]) -> None:
        """Add placeholders, which go on from nothing."""
        pairs = zip(texts, finish_reasons, strict=True)
        self._add([_dummy(text, finish_reason) for text, finish_reason in pairs], None)

    def copies(self) -> dict[str, Any]:
        """The state as Atropos tells it."""
        if not self._track_tree:
            return {"nodes": [node.copy() for node in self.current]}
        sequences = {text: node.copy() for text, node in self.sequences.items()}
        return {"sequences": sequences, "tree": sequences}

    def clear(self) -> None:
        """Forget all of them."""
        self.current, self.sequences, self._known = [], {}, []

    def that_begins(self, text: str) -> SequenceNode | None:
        """The node with the longest text that this one begins with; of equals, one that no turn went on from yet."""
        begun = [node for node in self._known if node.full_text and text.startswith(node.full_text)]
        return max(begun, key=lambda node: (len(node.full_text), self._place(node) is not None), default=None)

    def _longest(self, prompt: list[int]) -> SequenceNode | None:
        """The node with the most tokens that this prompt begins with; of equals likewise."""
        begun = [node for node in self._known if node.tokens == prompt[: len(node.tokens)]]
        return max(begun, key=lambda node: (len(node.tokens), self._place(node) is not None), default=None)

    def _place(self, wanted: SequenceNode | None) -> int | None:
        """Where it stands: this one, not one that is equal."""
        return next((place for place, node in enumerate(self.current) if node is wanted), None)

    def _add(self, grown: Sequence[SequenceNode], parent: SequenceNode | None) -> None:
        if self._track_tree:
            for node in grown:
                self.sequences[self._free_key(node.full_text)] = node
            return
        place = self._place(parent)
        if place is None:
            self.current += grown
        else:
            self.current[place : place + 1] = grown[:1]
            self.current += grown[1:]

    def _free_key(self, text: str) -> str:
        """The text; of texts alike, all but the first with a NUL and a number behind it, so that none hides another."""
        count, key = 1, text
        while key in self.sequences:
            count += 1
            key = f"{text}\0{count}"
        return key


def _node(parent: SequenceNode | None, prompt: Sequence[int], sample: Sample) -> SequenceNode:
    """The prompt and what was sampled behind it; what the parent sampled stays trained."""
    masked = [] if parent is None else parent.masked_tokens
    logprobs = [] if parent is None else parent.logprobs
    given = len(prompt) - len(masked)
    return SequenceNode(
        full_text=sample.text,
        tokens=[*prompt, *sample.ids],
        masked_tokens=[*masked, *[IGNORED] * given, *sample.ids],
        logprobs=[*logprobs, *[NOT_SAMPLED] * given, *sample.logprobs],
        metadata={"finish_reason": sample.finish_reason},
    )


def _dummy(text: str, finish_reason: str | None) -> SequenceNode:
    """Placeholder values, of the shape that Atropos gives where its engine tells no ids."""
    return SequenceNode(
        full_text=text,
        tokens=list(range(_DUMMIES)),
        masked_tokens=[IGNORED, *range(1, _DUMMIES)],
        logprobs=[-0.5] * _DUMMIES,
        metadata={"finish_reason": finish_reason, "dummy_tokens": True},
    )
