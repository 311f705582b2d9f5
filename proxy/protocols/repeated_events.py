"""Events of a chat stream that repeat the previous event, apart from text, token ids and logprobs.

Most events of a stream are repetitions. They are recognized by their bytes, without a dict for each:

    data: {"id":"c1","choices":[{"index":0,"delta":{"content":"A"},"logprobs":{"content":[{…}]},"token_ids":[17]}]}
    └───────────────────── before ────────────────────────┘    └──────── variable, with the text ─────────┘ └ after

Contract: a repetition has the same effect on the client's bytes and on the accumulated response as on the general path. The
general path processes every event that is not recognized, and learns its shape in place of the known shape.
"""

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final, NamedTuple

import orjson

from proxy.protocols.accumulators import ChoiceAccumulator, Chunks, has_content

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


class _Shape(NamedTuple):
    """The constant parts of an event, and what is between them."""

    before: bytes
    variable: re.Pattern[bytes]  # its groups are the text, the logprobs and the token ids, as far as the event has them
    after: bytes
    has_text: bool
    form: bytes  # `form % groups` is JSON with a list for each group
    lists: tuple[list[Any], ...]  # of the accumulated choice, which these extend
    shown: tuple[bytes, bytes] | None  # what the client receives before and after the text, if not the engine's event


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
    """Learns the shape of an event from the general path, and adds its repetitions to the accumulated response."""

    __slots__ = ("_accumulator", "_misses", "is_learning", "shape")

    def __init__(self, accumulator: Chunks) -> None:
        self._accumulator = accumulator
        # Of the previous event. The general path removes it: the event after cannot repeat that shape.
        self.shape: _Shape | None = None
        self.is_learning = True  # repetitions are likely enough to learn events
        self._misses = 0

    def learn(self, raw: bytes, chunk: Mapping[str, Any], shown: bytes | None) -> None:
        """Learn the shape of an event with strictly valid JSON that the general path has processed.

        `shown` is what the client received of it, None if it received the engine's bytes. Nothing is learned from an event with
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
            self.shape = _shape(raw, choice, shown, self._accumulator.choices[choice["index"]])

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
        if shape.shown is None:
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


def _shape(raw: bytes, choice: Mapping[str, Any], shown: bytes | None, accumulated: ChoiceAccumulator) -> _Shape | None:
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
    around = None if shown is None else _around(shown, slots[0].name, text, kept + raw[kept_from:])
    if around is None and shown is not None:
        return None
    lists = tuple([slot.values for slot in slots])
    return _Shape(
        before, _compiled(variable), raw[end:], text is not None, _FORMS[text is None][len(slots)], lists, around
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
