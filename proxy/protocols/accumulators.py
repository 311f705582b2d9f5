"""Stream chunks accumulated into the response that the unstreamed call would have returned.

There is one accumulator per format. Chunks are never modified. Contradictions between them are reported as problems.

Rule 1: pieces of text are joined; of every other field that repeats, the last value that is not null wins.
Rule 2: choices are matched by `index` and may interleave in any order.
"""

from collections.abc import Callable
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

Json: TypeAlias = dict[str, Any]

# Fields that have one value for the whole stream (vLLM 0.32.0, SGLang 0.5.23, llama.cpp 2026.10). `created` is not among
# them: SGLang writes the time of each chunk.
_CONSTANT: Final = frozenset({"id", "request_id", "model", "prompt_token_ids", "sglext"})


class Accumulator(Protocol):
    """Accumulates the chunks of one streamed call. `problems` are codes of `proxy.trajectory.fidelity.PROBLEMS`."""

    problems: set[str]

    def feed(self, chunk: Json) -> bool:
        """Add one chunk; return whether it finished a choice.

        Raises TypeError, KeyError, AttributeError or ValueError.
        """
        ...

    def finish(self) -> Json:
        """Return the response so far, its choices ordered by index."""
        ...

    @property
    def finished(self) -> int:
        """The number of choices that have a finish reason."""
        ...

    @property
    def is_counted(self) -> bool:
        """Whether running counts cover the ids of each choice, if there are several."""
        ...


class Place(NamedTuple):
    """Where the text of a chat chunk belongs: the choice, the field of its message, and the index of the tool call, if any."""

    choice: int
    field: str
    call: int | None


class ChoiceAccumulator:
    """One choice of chat or completions: ids, logprobs, finish reason and any other field."""

    __slots__ = ("counted", "fields", "ids", "logprobs", "text")

    def __init__(self, index: int) -> None:
        self.fields: Json = {"index": index, "finish_reason": None}
        self.ids: list[int] | None = None
        self.logprobs: dict[str, list[Any]] | None = None
        self.text: list[str] = []
        self.counted = 0  # the engine's running count of its tokens

    def feed(self, choice: Json, problems: set[str]) -> None:
        """Add a chunk's part of this choice."""
        for key, value in choice.items():
            if key in {"index", "delta"}:
                continue
            if value is None:
                self.fields.setdefault(key, None)  # a field that remains null is in the response as well
            elif key == "token_ids":
                self.ids = extended(self.ids, value)
            elif key == "logprobs":
                self._extend_logprobs(value)
            elif key == "text":
                self.text.append(text_of(value))
            else:
                replace(self.fields, key, value, problems)

    def _extend_logprobs(self, logprobs: Json) -> None:
        self.logprobs = {} if self.logprobs is None else self.logprobs
        for name, values in logprobs.items():
            if values is not None:
                self.logprobs[name] = extended(self.logprobs.get(name), values)

    @property
    def size(self) -> int:
        """The number of its ids."""
        return 0 if self.ids is None else len(self.ids)

    def finish(self) -> Json:
        """Return the choice so far."""
        lists = {"logprobs": self.logprobs, "token_ids": self.ids}
        return {**self.fields, **{key: values for key, values in lists.items() if values is not None}}


class Accumulating(Protocol):
    """What `Chunks` requires of a choice: `fields` with its finish reason, its running count, and the number of its ids."""

    fields: Json
    counted: int

    @property
    def size(self) -> int:
        """The number of its ids."""
        ...

    def feed(self, choice: Json, problems: set[str]) -> None:
        """Add a chunk's part of this choice."""
        ...


class Chunks:
    """A whole stream: the top-level fields, the choices by index, and contradictions. `total`: the usage of all choices."""

    __slots__ = ("_make", "_own_ids", "choices", "finished", "head", "problems", "total")

    def __init__(self, make: Callable[[int], Any] = ChoiceAccumulator) -> None:
        self._make = make
        self._own_ids: dict[int, Any] = {}  # of choices whose chunks have another `id` than the first chunk
        self.head: Json = {}
        self.choices: dict[int, Any] = {}
        self.finished = 0
        self.problems: set[str] = set()
        self.total: Any = None

    @property
    def is_counted(self) -> bool:
        """Whether running counts cover the ids of each choice, if there are several."""
        choices = self.choices.values()
        return len(choices) < 2 or all(choice.counted == choice.size for choice in choices if choice.size)

    def feed(self, chunk: Json) -> list[Json]:
        """Add one chunk; return its choices."""
        head = self.head
        for key, value in chunk.items():
            if key == "choices":
                continue
            if key not in head:
                head[key] = value
            elif key == "usage":  # 1 and true are equal, and must stay distinct
                head[key] = head[key] if value is None else value
            elif value is not None and value != head[key]:
                self._change(key, value, chunk)
        choices: list[Json] = chunk.get("choices") or []
        if self._own_ids:
            self._check_id(chunk.get("id"), choices)
        for choice in choices:
            self._feed_choice(choice)
        usage = chunk.get("usage")
        if usage is not None:
            self._check_usage(usage, choices)
        return choices

    def _change(self, key: str, value: Any, chunk: Json) -> None:
        """Change a top-level field; `id` remains the first one."""
        known = self.head[key]
        if known is not None and key in _CONSTANT:
            if key == "id" and self._is_own_id(value, chunk.get("choices")):
                return
            if key == "sglext" and isinstance(known, dict) and isinstance(value, dict):
                # Its parts arrive in several events: SGLang 0.5.23 frames ids, and sends cached tokens before them.
                value = known | {name: part for name, part in value.items() if part is not None}
            if key != "sglext" or not _extends(value, known):
                self.problems.add("changed_midstream")
        self.head[key] = value

    def _is_own_id(self, value: Any, choices: list[Json] | None) -> bool:
        """Return whether an `id` may be that of a choice (`_check_id`), and note it for the choices that begin."""
        for choice in choices or ():
            if choice["index"] not in self.choices:
                self._own_ids[choice["index"]] = value
        return bool(self._own_ids)

    def _check_id(self, value: Any, choices: list[Json]) -> None:
        """Check the `id` of a chunk of a stream whose choices have ids of their own.

        Seen in chat streams of SGLang 0.5.23: chunks with content have that of their choice; those that only finish a choice,
        and those of no choice, have any of them.
        """
        first, own = self.head.get("id"), self._own_ids
        is_known = value == first or value in own.values()
        if not is_known or any(own.get(choice["index"], first) != value for choice in choices if _has_content(choice)):
            self.problems.add("changed_midstream")

    def _check_usage(self, usage: Any, choices: list[Json]) -> None:
        """Check usage beside a choice; keep that of all choices."""
        if len(choices) == 1:
            self._check_running_count(usage, choices[0])
        elif not choices:
            self.total = usage

    def _feed_choice(self, choice: Json) -> None:
        index = choice["index"]
        if type(index) is not int:
            raise TypeError(f"a choice's index must be an integer, not {index!r}")
        accumulated = self.choices.get(index)
        if accumulated is None:
            accumulated = self.choices[index] = self._make(index)
        if accumulated.fields["finish_reason"] is None:
            accumulated.feed(choice, self.problems)
            if accumulated.fields["finish_reason"] is not None:
                self.finished += 1
            return
        if _has_content(choice):
            self.problems.add("content_after_end")
        accumulated.feed(choice, self.problems)

    def _check_running_count(self, usage: Any, choice: Json) -> None:
        """Check `usage` beside a choice, which counts the tokens of that choice so far (vLLM 0.32.0, `continuous_usage_stats`).

        A repeated, lost or reordered event breaks the count. Ids may be outside of events (SGLang).
        """
        count = usage.get("completion_tokens")
        if type(count) is not int:
            self.problems.add("bad_usage")
            return
        accumulated = self.choices[choice["index"]]
        added = len(choice.get("token_ids") or ())
        if count < accumulated.counted or (added and count - accumulated.counted != added):
            self.problems.add("running_count")
        accumulated.counted = count

    def finish(self, kind: str | None, choices: list[Json]) -> Json:
        """Return the response."""
        usage = self.head.pop("usage", None)
        usage = usage if self.total is None else self.total
        named = {} if kind is None else {"object": kind}
        return {**self.head, **named, "choices": choices, "usage": usage}


def _extends(value: Any, known: Any) -> bool:
    """Return whether an object has every field of another one with the same value, except those that were null."""
    are_objects = isinstance(value, dict) and isinstance(known, dict)
    return are_objects and all(part is None or value[name] == part for name, part in known.items())


def replace(fields: Json, key: str, value: Any, problems: set[str]) -> None:
    """Set a field of a choice that should occur once."""
    known = fields.get(key)
    if known is not None:
        if key == "finish_reason":
            problems.add("two_finish_reasons")
        elif key in _CONSTANT and known != value:
            problems.add("changed_midstream")
    fields[key] = value


def extended(values: list[Any] | None, more: Any) -> list[Any]:
    """Return the list extended by more, a new one if there was none. Raises TypeError for anything but a list."""
    if type(more) is not list:
        raise TypeError(f"expected a list, not {type(more).__name__}")
    if values is None:
        return more.copy()
    values.extend(more)
    return values


def text_of(value: Any) -> str:
    """Return a piece of text. Raises TypeError for anything else, which could not be joined."""
    if not isinstance(value, str):
        raise TypeError(f"expected a string, not {type(value).__name__}")
    return value


def _has_content(choice: Json) -> bool:
    """Return whether a chunk adds tokens, text or a call. Other fields may follow a finish reason (SGLang: hidden states)."""
    delta = choice.get("delta") or {}
    content_fields = ("content", "reasoning", "reasoning_content", "tool_calls", "function_call")
    return bool(
        choice.get("token_ids")
        or choice.get("text")
        or choice.get("logprobs")
        or any(delta.get(key) for key in content_fields)
    )


class CompletionsAccumulator:
    """Accumulates `text_completion` chunks."""

    def __init__(self) -> None:
        self._chunks = Chunks()
        self.problems = self._chunks.problems

    @property
    def finished(self) -> int:
        """The number of choices that have a finish reason."""
        return self._chunks.finished

    @property
    def is_counted(self) -> bool:
        """Whether running counts cover the ids of each choice, if there are several."""
        return self._chunks.is_counted

    def feed(self, chunk: Json) -> bool:
        """Add one chunk; return whether it finished a choice."""
        finished = self._chunks.finished
        self._chunks.feed(chunk)
        return self._chunks.finished > finished

    def finish(self) -> Json:
        """Return a `text_completion` response."""
        choices = [
            {**accumulated.finish(), "text": "".join(accumulated.text)}
            for _, accumulated in sorted(self._chunks.choices.items())
        ]
        return self._chunks.finish("text_completion", choices)


class _MessageAccumulator:
    """The message of one chat choice: texts by field, tool calls by index, and all other fields of deltas."""

    __slots__ = ("calls", "fields", "texts")

    def __init__(self) -> None:
        self.texts: dict[str, list[str]] = {}
        self.calls: dict[int, Json] = {}
        self.fields: Json = {"role": "assistant", "content": None}

    def feed(self, delta: Json) -> None:
        for key, value in delta.items():
            if value is None:
                continue
            if key == "tool_calls":
                for call in extended(None, value):
                    self._feed_call(call)
            elif isinstance(value, str) and key != "role":
                self.texts.setdefault(key, []).append(value)
            else:
                self.fields[key] = value

    def _feed_call(self, call: Json) -> None:
        index = call["index"]
        if type(index) is not int:
            raise TypeError(f"a tool call's index must be an integer, not {index!r}")
        kept = self.calls.setdefault(index, {"id": None, "type": "function", "function": {}})
        function = kept["function"]
        for key, value in call.items():
            if key not in {"index", "function"} and value is not None:
                kept[key] = value
        for key, value in (call.get("function") or {}).items():
            if key == "arguments":
                function.setdefault(key, []).append(text_of(value or ""))
            elif value is not None:
                function[key] = value

    def repeat(self, place: Place, text: str) -> None:
        """Add text to a field, or to the arguments of a tool call."""
        if place.call is None:
            self.texts[place.field].append(text)
        else:
            self.calls[place.call]["function"]["arguments"].append(text)

    def finish(self) -> Json:
        texts = {key: "".join(pieces) for key, pieces in self.texts.items()}
        message = {**self.fields, **{key: text for key, text in texts.items() if text or key != "content"}}
        if self.calls:
            message["tool_calls"] = [
                {
                    **call,
                    "function": {
                        **call["function"],
                        "arguments": "".join(call["function"].get("arguments", ())),
                    },
                }
                for _, call in sorted(self.calls.items())
            ]
        return message


class ChatAccumulator:
    """Accumulates `chat.completion.chunk` chunks."""

    def __init__(self) -> None:
        self._chunks = Chunks()
        self._messages: dict[int, _MessageAccumulator] = {}
        self.problems = self._chunks.problems

    @property
    def finished(self) -> int:
        """The number of choices that have a finish reason."""
        return self._chunks.finished

    @property
    def is_counted(self) -> bool:
        """Whether running counts cover the ids of each choice, if there are several."""
        return self._chunks.is_counted

    def feed(self, chunk: Json) -> bool:
        """Add one chunk; return whether it finished a choice."""
        finished = self._chunks.finished
        for choice in self._chunks.feed(chunk):
            message = self._messages.get(choice["index"])
            if message is None:
                message = self._messages[choice["index"]] = _MessageAccumulator()
            message.feed(choice.get("delta") or {})
        return self._chunks.finished > finished

    def repeat(self, place: Place, text: str, entries: list[Any], ids: list[Any]) -> None:
        """Add to a choice what consecutive chunks of the same shape add; a chunk of this shape was fed before."""
        choice: ChoiceAccumulator = self._chunks.choices[place.choice]
        if entries and choice.logprobs is not None:
            choice.logprobs["content"].extend(entries)
        if ids and choice.ids is not None:
            choice.ids.extend(ids)
        if text:
            self._messages[place.choice].repeat(place, text)

    def finish(self) -> Json:
        """Return a `chat.completion` response."""
        choices = [
            {**accumulated.finish(), "message": self._messages[index].finish()}
            for index, accumulated in sorted(self._chunks.choices.items())
            if index in self._messages
        ]
        return self._chunks.finish("chat.completion", choices)


class GenerateAccumulator:
    """Accumulates the chunks of `/inference/v1/generate`."""

    def __init__(self) -> None:
        self._chunks = Chunks(lambda _: _GenerateChoiceAccumulator())
        self.problems = self._chunks.problems

    @property
    def finished(self) -> int:
        """The number of choices that have a finish reason."""
        return self._chunks.finished

    @property
    def is_counted(self) -> bool:
        """Whether running counts cover the ids of each choice, if there are several."""
        return self._chunks.is_counted

    def feed(self, chunk: Json) -> bool:
        """Add one chunk; return whether it finished a choice."""
        finished = self._chunks.finished
        self._chunks.feed(chunk)
        return self._chunks.finished > finished

    def finish(self) -> Json:
        """Return a response of the endpoint."""
        choices = [accumulated.finish() for _, accumulated in sorted(self._chunks.choices.items())]
        return self._chunks.finish(None, choices)


class _GenerateChoiceAccumulator:
    """One choice."""

    __slots__ = ("_content", "_lists", "_texts", "counted", "fields")

    def __init__(self) -> None:
        self.fields: Json = {"finish_reason": None}
        self.counted = 0
        self._lists: dict[str, list[Any]] = {}
        self._texts: list[str] = []
        self._content: list[Any] | None = None

    def feed(self, choice: Json, problems: set[str]) -> None:
        """Add a chunk's part of this choice."""
        for key, value in choice.items():
            if value is None:
                self.fields.setdefault(key, None)
            elif key == "text":
                self._texts.append(text_of(value))
                self.fields[key] = None
            elif key == "logprobs":
                self._content = extended(self._content, value.get("content") or [])
            elif key in {"token_ids", "sampling_mask"}:
                self._lists[key] = extended(self._lists.get(key), value)
            elif key == "index":
                self.fields[key] = value
            else:
                replace(self.fields, key, value, problems)

    @property
    def size(self) -> int:
        """The number of its ids."""
        return len(self._lists.get("token_ids", ()))

    def finish(self) -> Json:
        """Return the choice so far."""
        texts = {"text": "".join(self._texts)} if "text" in self.fields else {}
        logprobs = None if self._content is None else {"content": self._content}
        return {**self.fields, **self._lists, **texts, "logprobs": logprobs}
