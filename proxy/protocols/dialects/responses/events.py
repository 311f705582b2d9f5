"""The numbered events of a Responses stream, and its items while they are streamed."""

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import orjson

from proxy.protocols.dialects.responses.response_object import Status
from proxy.protocols.dialects.responses.tools import FreeformReader, Tool
from proxy.protocols.dialects.translation import Json

PartKind = Literal["output_text", "refusal", "reasoning_text"]

_FIELD: Final = {"output_text": "text", "refusal": "refusal", "reasoning_text": "text"}


class Events:
    """Writes the events of one stream."""

    __slots__ = ("_number",)

    def __init__(self) -> None:
        self._number = 0

    def write(self, kind: str, **fields: Any) -> bytes:
        """Return one event with the next number."""
        event = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps(event) + b"\n\n"


class _Part:
    """A content part while it is told."""

    __slots__ = ("index", "kind", "logprobs", "pieces")

    def __init__(self, kind: PartKind, index: int) -> None:
        self.kind = kind
        self.index = index
        self.pieces: list[str] = []
        self.logprobs: list[Json] = []

    def text(self) -> Json:
        """What it says, by the name that its kind has for it."""
        return {_FIELD[self.kind]: "".join(self.pieces)}

    def shown(self) -> Json:
        """The part as JSON."""
        notes = {"annotations": [], "logprobs": list(self.logprobs)} if self.kind == "output_text" else {}
        return {"type": self.kind, **self.text(), **notes}

    def logged(self, entries: Sequence[Json]) -> Json:
        """The field that events of texts have, and others have not."""
        return {"logprobs": list(entries)} if self.kind == "output_text" else {}


class TextItem:
    """A message or a reasoning item: parts, each of one text. `fields` are what else its JSON has."""

    def __init__(self, events: Events, name: str, index: int, fields: Mapping[str, Any]) -> None:
        self._events = events
        self._name = name
        self._index = index
        self._fields = dict(fields)
        self._parts: dict[PartKind, _Part] = {}

    def begin(self) -> bytes:
        """Return its first event."""
        return self._events.write(
            "response.output_item.added", output_index=self._index, item=self.shown("in_progress")
        )

    def say(self, kind: PartKind, piece: str, logprobs: Sequence[Json] = ()) -> bytes:
        """Return the events of a piece of a part; the first piece begins the part, an empty one adds no text."""
        told, part = b"", self._parts.get(kind)
        if part is None:
            part = self._parts[kind] = _Part(kind, len(self._parts))
            told = self._tell("response.content_part.added", part, part=part.shown())
        part.logprobs.extend(logprobs)
        if piece:
            part.pieces.append(piece)
            told += self._tell(f"response.{kind}.delta", part, delta=piece, **part.logged(logprobs))
        return told

    def note(self, logprobs: Sequence[Json]) -> None:
        """Add logprobs of tokens without text."""
        if (part := self._parts.get("output_text")) is not None:
            part.logprobs.extend(logprobs)

    def said(self, kind: PartKind) -> str:
        """Return a part's text so far."""
        return "".join(self._parts[kind].pieces) if kind in self._parts else ""

    def end(self, status: Status, **fields: Any) -> bytes:
        """Return its last events, and those of its parts; `fields` are only known now."""
        self._fields |= fields
        told = []
        for part in self._parts.values():
            told.append(self._tell(f"response.{part.kind}.done", part, **part.text(), **part.logged(part.logprobs)))
            told.append(self._tell("response.content_part.done", part, part=part.shown()))
        done = self._events.write("response.output_item.done", output_index=self._index, item=self.shown(status))
        return b"".join([*told, done])

    def shown(self, status: Status) -> Json:
        """Return the item as JSON, with its content so far."""
        content = [part.shown() for part in self._parts.values()]
        return {"id": self._name, **self._fields, "content": content, "status": status}

    def _tell(self, event: str, of: _Part, /, **fields: Any) -> bytes:
        place = {"item_id": self._name, "output_index": self._index, "content_index": of.index}
        return self._events.write(event, **place, **fields)


class CallItem:
    """A call of a function or a custom tool. Argument text is streamed as sampled; a custom tool's input is read from it."""

    def __init__(self, events: Events, name: str, index: int, tool: Tool, call_id: str) -> None:
        self._events = events
        self._name = name
        self._index = index
        self._reader = FreeformReader() if tool.kind == "custom" else None
        self._field = "arguments" if self._reader is None else "input"
        self._event = "function_call_arguments" if self._reader is None else "custom_tool_call_input"
        namespace = {} if tool.namespace is None else {"namespace": tool.namespace}
        kind = "function_call" if self._reader is None else "custom_tool_call"
        self._fields = {"type": kind, "call_id": call_id, "name": tool.name, **namespace}
        self._pieces: list[str] = []

    def begin(self) -> bytes:
        """Return its first event."""
        return self._events.write(
            "response.output_item.added", output_index=self._index, item=self.shown("in_progress")
        )

    def say(self, arguments: str) -> bytes:
        """Return the events of a piece of the argument text."""
        return self._pass_on(arguments if self._reader is None else self._reader.feed(arguments))

    def end(self, status: Status) -> bytes:
        """Return its last events."""
        told = b"" if self._reader is None else self._pass_on(self._reader.end())
        whole = {self._field: "".join(self._pieces)}
        told += self._tell("done", **whole)
        return told + self._events.write("response.output_item.done", output_index=self._index, item=self.shown(status))

    def shown(self, status: Status) -> Json:
        """Return the item as JSON. Custom calls have no status."""
        stands = {"status": status} if self._reader is None else {}
        return {"id": self._name, **self._fields, self._field: "".join(self._pieces), **stands}

    def _pass_on(self, piece: str) -> bytes:
        if not piece:
            return b""
        self._pieces.append(piece)
        return self._tell("delta", delta=piece)

    def _tell(self, stage: str, **fields: Any) -> bytes:
        place = {"item_id": self._name, "output_index": self._index}
        return self._events.write(f"response.{self._event}.{stage}", **place, **fields)
