"""SequenceNode of Atropos' ManagedServer (296a0bc), nodes that grow turn by turn, and their texts.

Turns are joined by token ids alone: a turn continues the longest node that its prompt begins with. Texts are
for people and are never compared to join turns, because a text does not always show the end of sequence, and different
ids can have equal texts.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

IGNORED: Final = -100
NO_LOGPROB: Final = 1.0  # a real logprob is never above 0
DUMMY_TOKENS: Final = 128  # as in Atropos' DummyManagedServer

Message = Mapping[str, Any]


@dataclass(slots=True)
class SequenceNode:
    """A conversation so far: three lists of equal length. Tokens of prompts have the mask -100 and the logprob 1.0."""

    full_text: str
    tokens: list[int]
    masked_tokens: list[int]
    logprobs: list[float]
    metadata: dict[str, Any] | None = None

    def copy(self) -> "SequenceNode":
        """Return a node that shares no list with this one."""
        return replace(
            self,
            tokens=list(self.tokens),
            masked_tokens=list(self.masked_tokens),
            logprobs=list(self.logprobs),
            metadata=self.metadata and dict(self.metadata),
        )

    def model_dump(self) -> dict[str, Any]:
        """Return the node as a dict, under the name that Atropos' pydantic model uses."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Sample:
    """One completion, and the text of its prompt and of the completion."""

    text: str
    ids: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: str | None


class Nodes:
    """The nodes of one ManagedServer: `current`, where a turn replaces the node it continues; with `track_tree`, all nodes."""

    __slots__ = ("_all", "_track_tree", "current", "sequences")

    def __init__(self, *, track_tree: bool) -> None:
        self.current: list[SequenceNode] = []
        self.sequences: dict[str, SequenceNode] = {}
        self._all: list[SequenceNode] = []  # replaced nodes too: a later call can branch off there
        self._track_tree = track_tree

    def grow(self, prompt: Sequence[int], samples: Sequence[Sample]) -> None:
        """Add the samples of one prompt; the first replaces the node that the prompt continues, if there is one."""
        prefixes = [node for node in self._all if node.tokens == list(prompt[: len(node.tokens)])]
        parent = self._longest(prefixes, lambda node: len(node.tokens))
        grown = [_node(parent, prompt, sample) for sample in samples]
        self._all += grown
        self._add(grown, parent)

    def add_dummies(self, texts: Sequence[str], finish_reasons: Sequence[str | None]) -> None:
        """Add placeholders, which continue no node."""
        pairs = zip(texts, finish_reasons, strict=True)
        self._add([_dummy(text, finish_reason) for text, finish_reason in pairs], None)

    def state(self) -> dict[str, Any]:
        """Return copies of the nodes in the shape of Atropos' `get_state`."""
        if not self._track_tree:
            return {"nodes": [node.copy() for node in self.current]}
        sequences = {text: node.copy() for text, node in self.sequences.items()}
        return {"sequences": sequences, "tree": sequences}

    def clear(self) -> None:
        """Remove all nodes."""
        self.current, self.sequences, self._all = [], {}, []

    def longest_text_prefix(self, text: str) -> SequenceNode | None:
        """Return the node with the longest `full_text` that is a prefix of `text`.

        Of equally long ones, a node that no turn has continued yet.
        """
        prefixes = [node for node in self._all if node.full_text and text.startswith(node.full_text)]
        return self._longest(prefixes, lambda node: len(node.full_text))

    def _longest(self, prefixes: list[SequenceNode], length: Callable[[SequenceNode], int]) -> SequenceNode | None:
        return max(prefixes, key=lambda node: (length(node), self._index(node) is not None), default=None)

    def _index(self, node: SequenceNode | None) -> int | None:
        """Return the index of this very node among the current ones; nodes can be equal."""
        return next((index for index, current in enumerate(self.current) if current is node), None)

    def _add(self, grown: Sequence[SequenceNode], parent: SequenceNode | None) -> None:
        if self._track_tree:
            for node in grown:
                self.sequences[self._free_key(node.full_text)] = node
            return
        index = self._index(parent)
        if index is None:
            self.current += grown
        else:
            self.current[index : index + 1] = grown[:1]
            self.current += grown[1:]

    def _free_key(self, text: str) -> str:
        """Return the text; if another node has it already, with a NUL and a number after it, so that none is replaced."""
        count, key = 1, text
        while key in self.sequences:
            count += 1
            key = f"{text}\0{count}"
        return key


def _node(parent: SequenceNode | None, prompt: Sequence[int], sample: Sample) -> SequenceNode:
    """Return the node of a prompt and one completion; completion tokens of the parent stay trained."""
    masked = [] if parent is None else parent.masked_tokens
    logprobs = [] if parent is None else parent.logprobs
    added = len(prompt) - len(masked)
    return SequenceNode(
        full_text=sample.text,
        tokens=[*prompt, *sample.ids],
        masked_tokens=[*masked, *[IGNORED] * added, *sample.ids],
        logprobs=[*logprobs, *[NO_LOGPROB] * added, *sample.logprobs],
        metadata={"finish_reason": sample.finish_reason},
    )


def _dummy(text: str, finish_reason: str | None) -> SequenceNode:
    """Return placeholder values in the shape that Atropos uses for engines without token ids."""
    return SequenceNode(
        full_text=text,
        tokens=list(range(DUMMY_TOKENS)),
        masked_tokens=[IGNORED, *range(1, DUMMY_TOKENS)],
        logprobs=[-0.5] * DUMMY_TOKENS,
        metadata={"finish_reason": finish_reason, "dummy_tokens": True},
    )


class ToolCallTranslator:
    """Maps tool calls back to the raw text they were parsed from, to render a replayed turn as it was sampled."""

    __slots__ = ("_raw",)

    def __init__(self) -> None:
        self._raw: dict[tuple[str, ...], str] = {}

    def remember(self, response: Any, step: Mapping[str, Any], tokenizer: Any) -> None:
        """Store the raw text of choices with tool calls that the engine parsed, under the ids of all their calls."""
        if tokenizer is None or not step["fidelity"]["exact"]:
            return
        for choice, recorded in zip(response.choices, step["choices"], strict=True):
            if choice.message.tool_calls:
                ids = tuple(call["id"] for call in choice.message.tool_calls)
                self._raw[ids] = tokenizer.decode(recorded["ids"], skip_special_tokens=True)

    def convert_messages_for_template(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Return the messages; the tool calls of sampled ones are replaced by their raw text as content."""
        return [self._converted(message) for message in messages]

    def _converted(self, message: Message) -> dict[str, Any]:
        raw = self._raw.get(tuple(str(call.get("id")) for call in message.get("tool_calls") or ()))
        if raw is None:
            return dict(message)
        return {**{name: value for name, value in message.items() if name != "tool_calls"}, "content": raw}


def render_prompt(tokenizer: Any, messages: Sequence[Message], tools: Sequence[Message] | None) -> str:
    """Render messages by the tokenizer's chat template, or as lines if it has none.

    A generation prompt is added unless the last message is the assistant's.
    """
    if not hasattr(tokenizer, "apply_chat_template"):
        return "\n".join(f"{message.get('role')}: {message.get('content')}" for message in messages)
    add_generation_prompt = not messages or messages[-1].get("role") != "assistant"
    options = {"tools": tools} if tools else {}
    return str(
        tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt, **options)
    )


def completion_text(tokenizer: Any, prompt: Sequence[int], ids: Sequence[int], engine_text: str) -> str:
    """Return the text of completion ids, with special tokens; without a tokenizer, the engine's text."""
    if tokenizer is None:
        return engine_text
    before, whole = tokenizer.decode(list(prompt)), tokenizer.decode([*prompt, *ids])
    return str(whole[len(before) :] if whole.startswith(before) else tokenizer.decode(list(ids)))


def starts_with_bos(tokenizer: Any, text: str) -> bool:
    """Return whether a text starts with the BOS token, so that the engine must not add another one."""
    bos = getattr(tokenizer, "bos_token", None)
    return bool(bos) and text.startswith(str(bos))


def dummy_text(messages: Sequence[Message], completion: str | None) -> str:
    """Return the text of a conversation without token ids."""
    turns = [f"{message.get('role')}:{message.get('content')}" for message in messages]
    return "\n\n".join([*turns, f"assistant:{completion or ''}"])
