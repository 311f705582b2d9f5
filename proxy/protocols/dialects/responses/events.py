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
    """A content part while it is streamed."""

    __slots__ = ("index", "kind", "logprobs", "pieces")

    def __init__(self, kind: PartKind, index: int) -> None:
        self.kind = kind
        self.index = index
        self.pieces: list[str] = []
        self.logprobs: list[Json] = []

    def text(self) -> Json:
        """Return the text so far, under the field name of the part's type."""
        return {_FIELD[self.kind]: "".join(self.pieces)}

    def to_json(self) -> Json:
        """Return the part as JSON."""
        notes = {"annotations": [], "logprobs": list(self.logprobs)} if self.kind == "output_text" else {}
        return {"type": self.kind, **self.text(), **notes}

    def logprobs_field(self, entries: Sequence[Json]) -> Json:
        """Return the field `logprobs` for events of texts, and nothing for others."""
        return {"logprobs": list(entries)} if self.kind == "output_text" else {}


class TextItem:
    """A message or a reasoning item: parts with one text each. `fields` are the other fields of its JSON."""

    def __init__(self, events: Events, name: str, index: int, fields: Mapping[str, Any]) -> None:
        self._events = events
        self._name = name
        self._index = index
        self._fields = dict(fields)
        self._parts: dict[PartKind, _Part] = {}

    def begin(self) -> bytes:
        """Return its first event."""
        return self._events.write(
            "response.output_item.added", output_index=self._index, item=self.to_json("in_progress")
        )

    def append(self, kind: PartKind, piece: str, logprobs: Sequence[Json] = ()) -> bytes:
        """Return the events of a piece of a part; the first piece begins the part, an empty one adds no text."""
        events, part = b"", self._parts.get(kind)
        if part is None:
            part = self._parts[kind] = _Part(kind, len(self._parts))
            events = self._event("response.content_part.added", part, part=part.to_json())
        part.logprobs.extend(logprobs)
        if piece:
            part.pieces.append(piece)
            events += self._event(f"response.{kind}.delta", part, delta=piece, **part.logprobs_field(logprobs))
        return events

    def add_logprobs(self, logprobs: Sequence[Json]) -> None:
        """Add logprobs of tokens without text."""
        if (part := self._parts.get("output_text")) is not None:
            part.logprobs.extend(logprobs)

    def text_of(self, kind: PartKind) -> str:
        """Return a part's text so far."""
        return "".join(self._parts[kind].pieces) if kind in self._parts else ""

    def end(self, status: Status, **fields: Any) -> bytes:
        """Return its last events, and those of its parts; `fields` are those that are only known at the end."""
        self._fields |= fields
        events = []
        for part in self._parts.values():
            logprobs = part.logprobs_field(part.logprobs)
            events.append(self._event(f"response.{part.kind}.done", part, **part.text(), **logprobs))
            events.append(self._event("response.content_part.done", part, part=part.to_json()))
        done = self._events.write("response.output_item.done", output_index=self._index, item=self.to_json(status))
        return b"".join([*events, done])

    def to_json(self, status: Status) -> Json:
        """Return the item as JSON, with its content so far."""
        content = [part.to_json() for part in self._parts.values()]
        return {"id": self._name, **self._fields, "content": content, "status": status}

    def _event(self, event: str, of: _Part, /, **fields: Any) -> bytes:
        ids = {"item_id": self._name, "output_index": self._index, "content_index": of.index}
        return self._events.write(event, **ids, **fields)


class CallItem:
    """A call of a function or a custom tool. Argument text is streamed as sampled; a custom tool's input is read from it."""

    def __init__(self, events: Events, name: str, index: int, tool: Tool, call_id: str) -> None:
        self._events = events
        self._name = name
        self._index = index
        self._reader = FreeformReader() if tool.kind == "custom" else None
        self._field = "arguments" if self._reader is None else "input"
        self._event_name = "function_call_arguments" if self._reader is None else "custom_tool_call_input"
        namespace = {} if tool.namespace is None else {"namespace": tool.namespace}
        kind = "function_call" if self._reader is None else "custom_tool_call"
        self._fields = {"type": kind, "call_id": call_id, "name": tool.name, **namespace}
        self._pieces: list[str] = []

    def begin(self) -> bytes:
        """Return its first event."""
        return self._events.write(
            "response.output_item.added", output_index=self._index, item=self.to_json("in_progress")
        )

    def append(self, arguments: str) -> bytes:
        """Return the events of a piece of the argument text."""
        return self._append(arguments if self._reader is None else self._reader.feed(arguments))

    def end(self, status: Status) -> bytes:
        """Return its last events."""
        events = b"" if self._reader is None else self._append(self._reader.end())
        whole = {self._field: "".join(self._pieces)}
        events += self._event("done", **whole)
        done = self._events.write("response.output_item.done", output_index=self._index, item=self.to_json(status))
        return events + done

    def to_json(self, status: Status) -> Json:
        """Return the item as JSON. Custom calls have no status."""
        status_field = {"status": status} if self._reader is None else {}
        return {"id": self._name, **self._fields, self._field: "".join(self._pieces), **status_field}

    def _append(self, piece: str) -> bytes:
        if not piece:
            return b""
        self._pieces.append(piece)
        return self._event("delta", delta=piece)

    def _event(self, stage: str, **fields: Any) -> bytes:
        ids = {"item_id": self._name, "output_index": self._index}
        return self._events.write(f"response.{self._event_name}.{stage}", **ids, **fields)
