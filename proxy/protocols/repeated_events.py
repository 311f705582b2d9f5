"""Events of a chat stream that repeat the one before them, apart from text, token ids and logprobs.

Most events of a stream are such repetitions. They are recognized by their bytes, without a dict for each of them:

    data: {"id":"c1","choices":[{"index":0,"delta":{"content":"A"},"logprobs":{"content":[{…}]},"token_ids":[17]}]}
    └───────────────────── before ────────────────────────┘    └──────── variable, with the text ─────────┘ └ after

Contract: a repetition has the same effect on the client's bytes and on the accumulated response as the general path has. The
general path processes every event that is not recognized, and each such event replaces the known one.
"""

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final, NamedTuple

import orjson

from proxy.protocols.accumulators import ChatAccumulator, Place

# A string as orjson writes it, without its quotes: only such a text is the same in the client's event.
_PLAIN: Final = r'[^"\\\x00-\x1f]*+'
_TEXT: Final = rf'({_PLAIN}(?:\\(?:["\\nrtbf]|u00(?:0[0-7bef]|1[0-9a-f])){_PLAIN})*+)'
_IDS: Final = r"(\d++(?:,\d++)*+)"
# The fields of a token's logprobs. What these patterns find is parsed, and need not be valid.
_FIELDS: Final = {
    "token": r'"[^"\\]*+(?:\\.[^"\\]*+)*+"',
    "logprob": r"[-+.\deE]++",
    "bytes": r"(?:\[[\d,]*+\]|null)",
    "top_logprobs": r"\[\]",
}
_MAX_PATTERN: Final = 1000  # characters: a pattern is compiled and cached
_MAX_MISSES: Final = 16  # events whose shape was learned and did not occur again


class _Shape(NamedTuple):
    """The constant parts of an event; `variable` matches what is between `before` and `after`.

    The groups of `variable` are the text, the logprobs and the token ids, as far as the event has them; `form % groups` is JSON
    of the three. `shown`: what the client receives before and after the text, if that is not the engine's event.
    """

    before: str
    variable: re.Pattern[str]
    after: str
    has_text: bool
    form: str
    shown: tuple[str, str] | None


class _Slot(NamedTuple):
    """A variable part: what is before it, its pattern, what closes it, and all of them if the client did not request it."""

    name: str
    value: str
    close: str
    null: str


class _Parts(NamedTuple):
    """The variable parts of an event: the place of its text, the text, the pattern of its logprobs, whether it has ids."""

    place: Place
    text: str | None
    entry: str | None
    has_ids: bool


class RepeatedEvents:
    """Learns the shape of an event from the general path, and adds its repetitions to the accumulated response."""

    __slots__ = ("_accumulator", "_misses", "_place", "_shape")

    def __init__(self, accumulator: ChatAccumulator) -> None:
        self._accumulator = accumulator
        self._shape: _Shape | None = None
        self._place = Place(0, "", None)
        self._misses = 0

    @property
    def is_learning(self) -> bool:
        """Whether repetitions are likely, so that events are worth learning."""
        return self._misses < _MAX_MISSES

    def forget(self) -> None:
        """Forget the known event: the general path processes the next one."""
        self._shape = None

    def learn(self, raw: bytes, chunk: Mapping[str, Any], shown: bytes | None) -> None:
        """Learn the shape of an event that the general path has processed.

        `shown` is what the client received of it, None if that is the engine's bytes. Nothing is learned from an event with a
        finish reason, with usage or with another structure.
        """
        if not self.is_learning:
            return
        self._misses += 1
        parts = _parts(chunk)
        if parts is None:
            return
        self._place = parts.place
        try:
            self._shape = _shape(raw.decode(), None if shown is None else shown.decode(), parts)
        except UnicodeDecodeError:
            return

    def take(self, read: bytes) -> tuple[bytes, bytes] | None:
        """Accumulate the repetitions at the beginning of a read.

        Returns:
            What the client receives of them, and the rest of the read; None if there are no repetitions.
        """
        shape = self._shape
        if shape is None:
            return None
        try:
            text = read.decode()
            found, end = _found(shape, text)
            if not found:
                return None
            texts = [groups[0] for groups in found] if shape.has_text else []
            parts = found[0] if len(found) == 1 else _joined(shape, found)
            added, entries, ids = orjson.loads(shape.form % parts)
        except ValueError:  # not UTF-8, or not JSON: the general path reports it
            return None
        self._misses = 0
        self._accumulator.repeat(self._place, added, entries, ids)
        around = shape.shown
        if around is None:
            shown = text[:end]
        elif texts:
            shown = around[0] + (around[1] + around[0]).join(texts) + around[1]
        else:
            shown = around[0] * len(found)
        return shown.encode(), b"" if end == len(text) else text[end:].encode()


def _found(shape: _Shape, read: str) -> tuple[list[tuple[str, ...]], int]:
    """Return the variable parts of the repetitions at the beginning of a read, and where they end."""
    before, match, after = shape.before, shape.variable.match, shape.after
    skipped, closed = len(before), len(after)
    found: list[tuple[str, ...]] = []
    end = 0
    while read.startswith(before, end) and (event := match(read, end + skipped)) is not None:
        if not read.startswith(after, event.end()):
            break
        found.append(event.groups())
        end = event.end() + closed
    return found, end


def _joined(shape: _Shape, found: list[tuple[str, ...]]) -> tuple[str, ...]:
    """Return the variable parts of several events as those of one."""
    first, *others = zip(*found, strict=True)
    return ("" if shape.has_text else ",").join(first), *map(",".join, others)


def _parts(chunk: Mapping[str, Any]) -> _Parts | None:
    """Return the variable parts of a chunk; None for another structure."""
    choices = chunk.get("choices")
    if (
        type(choices) is not list
        or len(choices) != 1
        or chunk.get("usage") is not None
        or chunk.get("prompt_token_ids")
    ):
        return None
    (choice,) = choices
    found, logprobs, ids = _text(choice), choice.get("logprobs"), choice.get("token_ids")
    if found is None or choice.get("finish_reason") is not None:
        return None
    if logprobs is None:
        return _Parts(*found, None, bool(ids))
    entry = _entry(logprobs["content"][0]) if logprobs.keys() == {"content"} and logprobs["content"] else None
    return None if entry is None else _Parts(*found, entry, bool(ids))


def _text(choice: Mapping[str, Any]) -> tuple[Place, str | None] | None:
    """Return the place and the text of a choice's delta, which may have none; None if it has several."""
    delta = choice.get("delta")
    if type(delta) is not dict:
        return None
    texts = [name for name, value in delta.items() if type(value) is str and name != "role"]
    calls = delta.get("tool_calls")
    if calls is None:
        field = texts[0] if texts else ""
        return (Place(choice["index"], field, None), delta.get(field)) if len(texts) <= 1 else None
    if texts or type(calls) is not list or len(calls) != 1:
        return None
    arguments = (calls[0].get("function") or {}).get("arguments")
    return (Place(choice["index"], "arguments", calls[0]["index"]), arguments) if type(arguments) is str else None


def _entry(entry: Mapping[str, Any]) -> str | None:
    """Return the pattern of the logprobs of a token; None if they have other fields, or alternatives."""
    if not entry.keys() <= _FIELDS.keys() or entry.get("top_logprobs"):
        return None
    fields = [f'"{name}":{_FIELDS[name]}' for name in entry]
    return rf"\{{{','.join(fields)}\}}"


def _shape(raw: str, shown: str | None, parts: _Parts) -> _Shape | None:
    """Return the shape of an event; None if its parts are not in the usual order, or the client receives other parts."""
    if raw.count("\n") != 2 or not raw.startswith("data: ") or not raw.endswith("\n\n"):
        return None
    slots = _slots(parts)
    variable = before = kept = ""  # `kept`: the event after its text, without logprobs and token ids
    end = kept_from = 0
    for slot in slots:
        place = raw.find(slot.name, end)
        match = _compiled(slot.value).match(raw, place + len(slot.name))
        if place < 0 or match is None or raw.count(slot.name) != 1 or not raw.startswith(slot.close, match.end()):
            return None
        constant = raw[end : match.start()]
        before, constant = (before, constant) if variable else (constant, "")
        variable += re.escape(constant) + slot.value
        end = match.end()
        kept += raw[kept_from:place] + slot.null if slot.null else ""
        kept_from = end + len(slot.close)
    if not slots or len(variable) > _MAX_PATTERN:
        return None
    around = None if shown is None else _around(shown, parts, kept + raw[kept_from:])
    if around is None and shown is not None:
        return None
    has_text = parts.text is not None
    form = '["{}",[{}],[{}]]'.format(*("%s" if part else "" for part in (has_text, parts.entry, parts.has_ids)))
    return _Shape(before, _compiled(variable), raw[end:], has_text, form, around)


def _slots(parts: _Parts) -> list[_Slot]:
    """Return the variable parts in the order in which engines write them."""
    slots = [_Slot(f'"{parts.place.field}":"', _TEXT, '"', "")] if parts.text is not None else []
    if parts.entry:
        entries = f"({parts.entry}(?:,{parts.entry})*+)"
        slots.append(_Slot('"logprobs":{"content":[', entries, "]}", '"logprobs":null'))
    if parts.has_ids:
        slots.append(_Slot('"token_ids":[', _IDS, "]", '"token_ids":null'))
    return slots


def _around(shown: str, parts: _Parts, kept: str) -> tuple[str, str] | None:
    """Return what the client receives before and after the text; None if that depends on more than the text."""
    if parts.text is None:
        return (shown, "") if shown in {"", kept} else None
    before = shown.removesuffix(f"{orjson.dumps(parts.text)[1:].decode()}{kept}")
    return (before, f'"{kept}') if before != shown and before.endswith(f'"{parts.place.field}":"') else None


@lru_cache(maxsize=256)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)
