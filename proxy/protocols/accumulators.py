"""Stream chunks accumulated into the response that the unstreamed call would have returned.

There is one accumulator per format. Chunks are never modified. Contradictions between them are reported as problems.

Rule 1: pieces of text are joined; of every other field that repeats, the last value that is not null wins.
Rule 2: choices are matched by `index` and may interleave in any order.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

import orjson

from proxy.trajectory.conversations import THOUGHTS

Json: TypeAlias = dict[str, Any]

# Fields that have one value for the whole stream (vLLM 0.32.0, SGLang 0.5.23, llama.cpp 2026.10). `created` is not among
# them: SGLang writes the time of each chunk.
_CONSTANT: Final = frozenset({"id", "request_id", "model", "prompt_token_ids", "sglext"})
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
        if self.calls or any(any(self.texts.get(name, ())) for name in THOUGHTS):
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


# A string as orjson writes it, without its quotes: only such a text is the same in the client's event.
_PLAIN: Final = rb'[^"\\\x00-\x1f]*+'
_TEXT: Final = rb'(%b(?:\\(?:["\\nrtbf]|u00(?:0[0-7bef]|1[0-9a-f]))%b)*+)' % (_PLAIN, _PLAIN)
_IDS: Final = rb"(\d++(?:,\d++)*+)"
# The fields of a token's logprobs. What these patterns find is parsed, and need not be valid.
_FIELDS: Final = {
    "token": rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"',
    "logprob": rb"[-+.\deE]++",
    "bytes": rb"(?:\[[\d,]*+\]|null)",
    "top_logprobs": rb"\[\]",
}
# The values of an event as JSON, by the number of its variable parts: of an event with a text, and of one without.
_FORMS: Final = (
    (b"", b'[["%b"]]', b'[["%b"],[%b]]', b'[["%b"],[%b],[%b]]'),
    (b"", b"[[%b]]", b"[[%b],[%b]]"),
)
_MAX_PATTERN: Final = 1000  # bytes: a pattern is compiled and cached
_MAX_MISSES: Final = 16  # learned events that were not repeated


# Returns what the client receives of further texts: as JSON strings without quotes, and the same texts.
WriteTexts: TypeAlias = Callable[[Sequence[bytes], Sequence[str]], bytes]


class _Shape(NamedTuple):
    """The constant parts of an event, and what is between them."""

    before: bytes
    variable: re.Pattern[bytes]  # its groups are the text, the logprobs and the token ids, as far as the event has them
    after: bytes
    has_text: bool
    form: bytes  # `form % groups` is JSON with a list for each group
    lists: tuple[list[Any], ...]  # of the accumulated choice, which these extend
    shown: tuple[bytes, bytes] | None  # what the client receives before and after the text, if not the engine's event
    write: WriteTexts | None  # or what writes it


class _Slot(NamedTuple):
    """A variable part."""

    name: bytes  # what is before it
    value: bytes  # its pattern
    close: bytes
    null: (
        bytes | None
    )  # in place of all of it if the client did not request it; None for a text, which the client receives
    values: list[Any]  # of the accumulated choice


class RepeatedEvents:
    """Events of a chat stream that repeat the previous event, apart from text, token ids and logprobs.

    Most events of a stream are repetitions. They are recognized by their bytes, without a dict for each:

        data: {"id":"c1","choices":[{"index":0,"delta":{"content":"A"},"logprobs":{"content":[{…}]},"token_ids":[17]}]}
        └───────────────────── before ────────────────────────┘    └──────── variable, with the text ─────────┘ └ after

    Contract: a repetition has the same effect on the client's bytes and on the accumulated response as on the general path. The
    general path processes every event that is not recognized, and learns its shape in place of the known shape.
    """

    __slots__ = ("_accumulator", "_misses", "is_learning", "shape")

    def __init__(self, accumulator: Chunks) -> None:
        self._accumulator = accumulator
        # Of the previous event. The general path removes it: the event after cannot repeat that shape.
        self.shape: _Shape | None = None
        self.is_learning = True  # repetitions are likely enough to learn events
        self._misses = 0

    def learn(self, raw: bytes, chunk: Mapping[str, Any], shown: bytes | None, write: WriteTexts | None = None) -> None:
        """Learn the shape of an event with strictly valid JSON that the general path has processed.

        `shown` is what the client received of it, None if it received the engine's bytes; `write` is for a client of another
        dialect, which received the text, and nothing else, in an event of this dialect. Nothing is learned from an event with
        a finish reason, with usage or with another structure, nor from an event without content: its repetitions may have
        content, which the general path checks.
        """
        self._misses += 1
        self.is_learning = self._misses < _MAX_MISSES
        choices = chunk.get("choices")
        if type(choices) is not list or len(choices) != 1 or chunk.get("usage") is not None:
            return
        (choice,) = choices
        if choice.get("finish_reason") is None and not chunk.get("prompt_token_ids") and has_content(choice):
            self.shape = _shape(raw, choice, shown, self._accumulator.choices[choice["index"]], write)

    def take(self, read: bytes, at: int, shown: list[bytes]) -> int:
        """Accumulate the repetitions in a read from a position on; return where they end.

        What the client receives of them is appended to `shown`.
        """
        shape = self.shape
        if shape is None:
            return at
        before, match, after = shape.before, shape.variable.match, shape.after
        skipped, closed = len(before), len(after)
        found: list[tuple[bytes, ...]] = []
        end = at
        while read.startswith(before, end) and (event := match(read, end + skipped)) is not None:
            if not read.startswith(after, event.end()):
                break
            found.append(event.groups())
            end = event.end() + closed
        if not found:
            return at
        try:
            added = orjson.loads(shape.form % (found[0] if len(found) == 1 else _joined(shape, found)))
        except orjson.JSONDecodeError:  # the general path reports it
            return at
        for values, more in zip(shape.lists, added, strict=True):
            values.extend(more)
        self._misses = 0
        if shape.write is not None:
            shown.append(shape.write([groups[0] for groups in found], added[0]))
        elif shape.shown is None:
            shown.append(read[at:end])
        else:
            start, close = shape.shown
            texts = [groups[0] for groups in found] if shape.has_text else [b""] * len(found)
            shown.append(start + (close + start).join(texts) + close)
        return end


def _joined(shape: _Shape, found: list[tuple[bytes, ...]]) -> tuple[bytes, ...]:
    """Join the variable parts of several events, as if one event had them all."""
    first, *others = zip(*found, strict=True)
    return (b'","' if shape.has_text else b",").join(first), *map(b",".join, others)


def _shape(
    raw: bytes, choice: Mapping[str, Any], shown: bytes | None, accumulated: ChoiceAccumulator, write: WriteTexts | None
) -> _Shape | None:
    """Return the shape of an event; None if its parts are not in the usual order, or the client receives other parts."""
    slots = _slots(choice, accumulated)
    if not slots or raw.count(b"\n") != 2 or not raw.startswith(b"data: ") or not raw.endswith(b"\n\n"):
        return None
    variable = before = kept = b""  # `kept`: the event after its text, without logprobs and token ids
    text: bytes | None = None
    end = kept_from = 0
    for slot in slots:
        place = raw.find(slot.name, end)
        match = _compiled(slot.value).match(raw, place + len(slot.name))
        if place < 0 or match is None or raw.count(slot.name) != 1 or not raw.startswith(slot.close, match.end()):
            return None
        constant = raw[end : match.start()]
        before, constant = (before, constant) if variable else (constant, b"")
        variable += re.escape(constant) + slot.value
        end = match.end()
        if slot.null is None:
            text = match[0]
        else:
            kept += raw[kept_from:place] + slot.null
        kept_from = end + len(slot.close)
    if len(variable) > _MAX_PATTERN:
        return None
    write = None if text is None else write
    around = None if shown is None or write else _around(shown, slots[0].name, text, kept + raw[kept_from:])
    if around is None and write is None and shown is not None:
        return None
    lists = tuple([slot.values for slot in slots])
    return _Shape(
        before, _compiled(variable), raw[end:], text is not None, _FORMS[text is None][len(slots)], lists, around, write
    )


def _slots(choice: Mapping[str, Any], accumulated: ChoiceAccumulator) -> list[_Slot]:
    """Return the variable parts of a choice in the order in which engines write them; none for another structure."""
    delta, logprobs, ids = choice.get("delta"), choice.get("logprobs"), choice.get("token_ids")
    if type(delta) is not dict:
        return []
    texts = [name for name, value in delta.items() if type(value) is str and name != "role"]
    calls = delta.get("tool_calls")
    slots: list[_Slot] = []
    if calls is not None:
        if texts or len(calls) != 1 or type((calls[0].get("function") or {}).get("arguments")) is not str:
            return []
        arguments = accumulated.calls[calls[0]["index"]]["function"]["arguments"]
        slots.append(_Slot(b'"arguments":"', _TEXT, b'"', None, arguments))
    elif texts:
        slots.append(_Slot(f'"{texts[0]}":"'.encode(), _TEXT, b'"', None, accumulated.texts[texts[0]]))
    if len(texts) > 1:
        return []
    if logprobs is not None:
        content = logprobs["content"] if logprobs.keys() == {"content"} else None
        entry = content[0] if content else None
        if type(entry) is not dict or not entry.keys() <= _FIELDS.keys() or entry.get("top_logprobs"):
            return []  # they have other fields, or alternatives
        lists = accumulated.logprobs or {}
        entries = _entries(tuple(entry))
        slots.append(_Slot(b'"logprobs":{"content":[', entries, b"]}", b'"logprobs":null', lists["content"]))
    if ids and accumulated.ids is not None:
        slots.append(_Slot(b'"token_ids":[', _IDS, b"]", b'"token_ids":null', accumulated.ids))
    return slots


@lru_cache(maxsize=64)
def _entries(names: tuple[str, ...]) -> bytes:
    """Return the pattern of the logprobs of tokens with these fields."""
    entry = rb"\{%b\}" % b",".join([b'"%b":%b' % (name.encode(), _FIELDS[name]) for name in names])
    return b"(%b(?:,%b)*+)" % (entry, entry)


def _around(shown: bytes, name: bytes, text: bytes | None, kept: bytes) -> tuple[bytes, bytes] | None:
    """Return what the client receives before and after the text; None if that depends on more than the text."""
    if text is None:
        return (shown, b"") if shown in {b"", kept} else None
    start = shown.removesuffix(b'%b"%b' % (text, kept))
    return (start, b'"' + kept) if start != shown and start.endswith(name) else None


@lru_cache(maxsize=256)
def _compiled(pattern: bytes) -> re.Pattern[bytes]:
    return re.compile(pattern)
