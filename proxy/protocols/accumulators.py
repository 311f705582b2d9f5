"""Stream chunks accumulated into the response that the unstreamed call would have returned.

There is one accumulator per format. Chunks are never modified. Contradictions between them are reported as problems.

Rule 1: pieces of text are joined; of every other field that repeats, the last value that is not null wins.
Rule 2: choices are matched by `index` and may interleave in any order.
"""

from typing import Any, Final, Protocol, TypeAlias

Json: TypeAlias = dict[str, Any]

# Fields that have one value for the whole stream (vLLM 0.32.0, SGLang 0.5.23, llama.cpp 2026.10). `created` is not among
# them: SGLang writes the time of each chunk.
_CONSTANT: Final = frozenset({"id", "request_id", "model", "prompt_token_ids", "sglext"})
_THOUGHTS: Final = ("reasoning", "reasoning_content")
_SPLIT: Final = "\ufffd"


class Accumulator(Protocol):
    """Accumulates the chunks of one streamed call."""

    problems: set[str]  # codes of `proxy.trajectory.step.PROBLEMS`
    finished: int = 0  # the number of choices that have a finish reason
    is_cumulative: bool = False  # each chunk of a choice has all of it so far

    def feed(self, chunk: Json) -> bool:
        """Add one chunk; return whether it finished a choice.

        Raises TypeError, KeyError, AttributeError or ValueError.
        """
        ...

    def finish(self) -> Json:
        """Return the response so far, its choices ordered by index."""
        ...

    @property
    def is_counted(self) -> bool:
        """Whether running counts cover the ids of each choice, if there are several."""
        return True

    @property
    def is_undecided(self) -> bool:
        """Whether a choice is; see `ChoiceAccumulator`."""
        return False


class ChoiceAccumulator:
    """One choice of chat or completions: ids, logprobs, finish reason and any other field; its text, or its message."""

    __slots__ = ("calls", "counted", "fields", "ids", "logprobs", "message", "text", "texts")

    def __init__(self, index: int) -> None:
        self.fields: Json = {"index": index, "finish_reason": None}
        self.ids: list[int] | None = None
        self.logprobs: dict[str, list[Any]] | None = None
        self.text: list[str] = []
        self.counted = 0  # the engine's running count of its tokens
        self.message: Json | None = None  # its fields apart from `texts` and `calls`; None before any delta
        self.texts: dict[str, list[str]] = {}
        self.calls: dict[int, Json] = {}

    def feed(self, choice: Json, problems: set[str]) -> None:
        """Add a chunk's part of this choice, apart from its delta."""
        for key, value in choice.items():
            if key in {"index", "delta"}:
                continue
            if value is None:
                self.fields.setdefault(key, None)  # a field that remains null is in the response as well
            elif key == "token_ids":
                self.ids = extended(self.ids, value)
            elif key == "logprobs":
                lists = self.logprobs = {} if self.logprobs is None else self.logprobs
                for name, values in value.items():
                    if values is not None:
                        lists[name] = extended(lists.get(name), values)
            elif key == "text":
                self.text.append(text_of(value))
            else:
                replace(self.fields, key, value, problems)

    def feed_delta(self, delta: Json) -> None:
        """Add a delta: texts by field, tool calls by index, and all other fields."""
        if self.message is None:
            self.message = {"role": "assistant", "content": None}
        for key, value in delta.items():
            if value is None:
                continue
            if key == "tool_calls":
                for call in extended(None, value):
                    self._feed_call(call)
            elif isinstance(value, str) and key != "role":
                self.texts.setdefault(key, []).append(value)
            else:
                self.message[key] = value

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

    @property
    def size(self) -> int:
        """The number of its ids."""
        return 0 if self.ids is None else len(self.ids)

    @property
    def is_undecided(self) -> bool:
        """Whether what is next depends on more than its ids: it has been parsed, or ends with a part of a character.

        vLLM (0.32.0) shows no text for a part of a character, SGLang (0.5.23) U+FFFD.
        """
        if self.calls or any(any(self.texts.get(name, ())) for name in _THOUGHTS):
            return True
        entries, names = ((self.logprobs or {}).get(name) for name in ("content", "tokens"))
        last = entries[-1] if entries else {"token": names[-1]} if names else {}
        shown = self.text[-1:] or self.texts.get("content", [""])[-1:]
        return last.get("token") == "" or "".join(shown).endswith(_SPLIT)

    def finish(self) -> Json:
        """Return the choice so far."""
        found = {**self.fields}
        if self.logprobs is not None:
            found["logprobs"] = self.logprobs
        if self.ids is not None:
            found["token_ids"] = self.ids
        if self.message is None:
            found["text"] = "".join(self.text)
            return found
        message = found["message"] = {**self.message}
        for key, pieces in self.texts.items():
            text = "".join(pieces)
            if text or key != "content":
                message[key] = text
        if self.calls:
            calls = message["tool_calls"] = []
            for _, call in sorted(self.calls.items()):
                function = call["function"]
                calls.append({**call, "function": {**function, "arguments": "".join(function.get("arguments", ()))}})
        return found


class Chunks(Accumulator):
    """A whole stream: the top-level fields, the choices by index, and contradictions."""

    kind: str | None = None  # of the object of a whole response
    has_messages = False
    choice: type[Any] = ChoiceAccumulator

    def __init__(self) -> None:
        self._own_ids: dict[int, Any] = {}  # by choice, if its chunks have another `id` than the first chunk
        self.head: Json = {}
        self.choices: dict[int, Any] = {}
        self.problems: set[str] = set()
        self.total: Any = None  # the usage of all choices

    @property
    def is_counted(self) -> bool:
        choices = self.choices.values()
        return len(choices) < 2 or all(choice.counted == choice.size for choice in choices if choice.size)

    @property
    def is_undecided(self) -> bool:
        return any(choice.is_undecided for choice in self.choices.values() if isinstance(choice, ChoiceAccumulator))

    def feed(self, chunk: Json) -> bool:
        head, finished = self.head, self.finished
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
        self._feed_choices(choices)
        if chunk.get("usage") is not None:
            self._check_usage(chunk["usage"], choices)
        if self.has_messages:
            for choice in choices:
                self.choices[choice["index"]].feed_delta(choice.get("delta") or {})
        return self.finished > finished

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
        """Return whether an `id` may belong to a choice (`_check_id`), and note it for the choices that begin."""
        for choice in choices or ():
            if choice["index"] not in self.choices:
                self._own_ids[choice["index"]] = value
        return bool(self._own_ids)

    def _check_id(self, value: Any, choices: list[Json]) -> None:
        """Check the `id` of a chunk of a stream in which each choice has a separate id.

        Seen in chat streams of SGLang 0.5.23: chunks with content have the id of their choice; chunks that only finish a
        choice, and chunks without a choice, have any of these ids.
        """
        first, own = self.head.get("id"), self._own_ids
        is_known = value == first or value in own.values()
        if not is_known or any(own.get(choice["index"], first) != value for choice in choices if has_content(choice)):
            self.problems.add("changed_midstream")

    def _check_usage(self, usage: Any, choices: list[Json]) -> None:
        """Keep the usage of all choices; check `usage` beside a choice, which counts the tokens of that choice so far.

        Verified on vLLM 0.32.0 (`continuous_usage_stats`). A repeated, lost or reordered event breaks the count. Ids may be
        outside of events (SGLang).
        """
        if len(choices) != 1:
            self.total = self.total if choices else usage
            return
        (choice,) = choices
        count = usage.get("completion_tokens")
        if type(count) is not int:
            self.problems.add("bad_usage")
            return
        accumulated = self.choices[choice["index"]]
        added = len(choice.get("token_ids") or ())
        if count < accumulated.counted or (added and count - accumulated.counted != added):
            self.problems.add("running_count")
        accumulated.counted = count

    def _feed_choices(self, choices: list[Json]) -> None:
        for choice in choices:
            index = choice["index"]
            if type(index) is not int:
                raise TypeError(f"a choice's index must be an integer, not {index!r}")
            accumulated = self.choices.get(index)
            if accumulated is None:
                accumulated = self.choices[index] = self.choice(index)
            is_open = accumulated.fields["finish_reason"] is None
            if not is_open and has_content(choice):
                self.problems.add("content_after_end")
            accumulated.feed(choice, self.problems)
            self.finished += is_open and accumulated.fields["finish_reason"] is not None

    def finish(self) -> Json:
        head = {**self.head}
        usage = head.pop("usage", None)
        kind = {} if self.kind is None else {"object": self.kind}
        choices = []
        for _, choice in sorted(self.choices.items()):
            if not self.has_messages or choice.message is not None:  # else each of its chunks was invalid
                choices.append(choice.finish())
        return {**head, **kind, "choices": choices, "usage": usage if self.total is None else self.total}


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


def has_content(choice: Json) -> bool:
    """Return whether a chunk adds tokens, text or a call. Other fields may follow a finish reason (SGLang: hidden states)."""
    delta = choice.get("delta") or {}
    content_fields = ("content", "reasoning", "reasoning_content", "tool_calls", "function_call")
    return bool(
        choice.get("token_ids")
        or choice.get("text")
        or choice.get("logprobs")
        or any(delta.get(key) for key in content_fields)
    )


class _GenerateChoice:
    """One choice of `/inference/v1/generate`."""

    __slots__ = ("_content", "_lists", "_texts", "counted", "fields")

    def __init__(self, _index: int) -> None:
        self.fields: Json = {"finish_reason": None}
        self.counted = 0
        self._lists: dict[str, list[Any]] = {}
        self._texts: list[str] = []
        self._content: list[Any] | None = None

    def feed(self, choice: Json, problems: set[str]) -> None:
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
        return len(self._lists.get("token_ids", ()))

    def finish(self) -> Json:
        texts = {"text": "".join(self._texts)} if "text" in self.fields else {}
        logprobs = None if self._content is None else {"content": self._content}
        return {**self.fields, **self._lists, **texts, "logprobs": logprobs}


class ChatAccumulator(Chunks):
    """Accumulates `chat.completion.chunk` chunks."""

    kind = "chat.completion"
    has_messages = True


class CompletionsAccumulator(Chunks):
    """Accumulates `text_completion` chunks."""

    kind = "text_completion"


class GenerateAccumulator(Chunks):
    """Accumulates the chunks of `/inference/v1/generate`."""

    choice = _GenerateChoice
