"""A streamed response: forwarded event by event up to the end of the turn, and accumulated.

The rules are those of `response.py`.
"""

from dataclasses import dataclass, replace
from typing import Any, Final

import orjson

from proxy.protocols.accumulators import ChatAccumulator
from proxy.protocols.engines.base import Json
from proxy.protocols.lenient_json import read_json, write_json
from proxy.protocols.number_lists import KnownPrompt, read_lists
from proxy.protocols.repeated_events import RepeatedEvents
from proxy.protocols.response import (
    MALFORMED,
    ClientView,
    ParsedResponse,
    RawResponse,
    ResponseStream,
    SyntheticStreamResponse,
    WholeResponse,
)
from proxy.protocols.sse import Event, EventParser

_BAD_GATEWAY: Final = 502  # status of a response of a type that cannot be forwarded
_NOT_A_RESPONSE: Final = "the engine's response has an invalid shape"
_CUT: Final = "the engine's response ended without its terminal event"
_MAX_MISSES: Final = 3  # events of a read that are no repetitions, before the rest of it is taken as a whole
_SHORT_EVENT: Final = 1024  # bytes of an incomplete event that may be searched again


@dataclass(frozen=True, slots=True)
class _Finish:
    """An event with a finish reason, withheld until the usage event shows which fields it lacks."""

    event: Event
    shown: Json
    loosely: bool
    is_unchanged: bool


class StreamResponse:
    """A stream of events, forwarded as they arrive up to the end of the turn.

    With `stream_options.include_usage` vLLM (0.32.0) writes `system_fingerprint` to the usage event, and without it to each
    event with a finish reason. If it was injected, these events wait for the usage event to restore the field.
    """

    def __init__(self, view: ClientView, max_event_bytes: int | None = None, prompt: KnownPrompt | None = None) -> None:
        self._view = view
        self._known = prompt  # of the rollout's previous call
        self.prompt: KnownPrompt | None = None
        self._parser = EventParser() if max_event_bytes is None else EventParser(max_event_bytes)
        self._accumulator = accumulator = view.dialect.accumulator()
        self._repeated = (
            RepeatedEvents(accumulator) if isinstance(accumulator, ChatAccumulator) and view.renderer is None else None
        )
        self._held: list[bytes | _Finish] = []
        self._holding = False
        self.ended = False  # its terminal event arrived
        self._error: str | None = None
        self._problems = self._accumulator.problems
        # If the number of choices is unknown, the first that finishes may be the last.
        self._enough = view.choices or 1
        self._moved: Json = {}  # fields of the finish that are on the usage event
        self._has_usage = False
        self.forces_usage = False  # usage came beside a choice, and was not requested there
        self._lacks_usage = False

    @property
    def pending(self) -> int:
        """The size of the incomplete event in bytes."""
        return len(self._parser.rest)

    def feed(self, read: bytes) -> bytes:
        """Forward complete events, until the end of the turn begins."""
        shown: list[bytes] = []
        if self._repeated is not None and self._repeated.is_learning:
            read = self._take_repeated(self._repeated, read, shown)
        if read:
            self._take(read, shown)
        return b"".join(shown)

    def _take_repeated(self, repeated: RepeatedEvents, read: bytes, shown: list[bytes]) -> bytes:
        """Process a read as long as most of its events are repetitions; return the rest of it."""
        misses = 0
        pending = self._parser.rest
        if repeated.knows_shape and 0 < len(pending) < _SHORT_EVENT and b"\n" in read:
            read = bytes(pending) + read
            pending.clear()
        while read and misses < _MAX_MISSES and not self._holding:
            if not pending and (taken := repeated.take(read)) is not None:
                shown.append(taken[0])
                read, misses = taken[1], 0
                if not read:
                    break
            end = read.find(b"\n\n") + 2
            if end < 2:
                break
            self._take(read[:end], shown)
            read = read[end:]
            misses += 1
        return read

    def _take(self, read: bytes, shown: list[bytes]) -> None:
        """Process the events that a read completes, one by one."""
        for event in self._parser.feed(read):
            text = self._understand(event)
            if self._holding or isinstance(text, _Finish):
                self._held.append(text)
            else:
                shown.append(text)

    def finish(self) -> tuple[bytes, ParsedResponse]:
        """Return the withheld events; a truncated last one is forwarded unchanged."""
        rest = self._parser.finish()
        if rest is not None:
            self._held.append(self._understand(rest))
        end = b"".join(self._written(held) if isinstance(held, _Finish) else held for held in self._held)
        if self.ended and self._lacks_usage and not self._has_usage:
            self._problems.add("no_usage")
        try:
            response: Json | None = self._accumulator.finish()
        except MALFORMED:  # chunks that do not add up to a response
            self._problems.add("unparsed_event")
            response = None
        answer = ParsedResponse(response, self.ended, self._error, tuple(sorted(self._problems)))
        return end + self._render_end(answer), answer

    def _render_end(self, answer: ParsedResponse) -> bytes:
        """Return the end of the stream in a dialect that is translated to chat."""
        renderer = self._view.renderer
        if renderer is None:
            return b""
        error = answer.error if answer.ended or answer.error else _CUT
        try:
            shown = None if answer.response is None else self._view.whole(answer.response)
            return renderer.finish(shown, error)
        except MALFORMED:  # a response that this dialect cannot represent
            return renderer.finish(None, error or _NOT_A_RESPONSE)

    def _understand(self, event: Event) -> bytes | _Finish:
        """Accumulate an event; return what the client receives of it."""
        payload = event.payload
        if not payload:
            return event.raw
        if self._repeated is not None:
            self._repeated.forget()
        if self.ended:
            self._problems.add("content_after_end")
            return self._as_it_came(event)
        if payload == b"[DONE]":
            self.ended = self._holding = True
            return self._as_it_came(event)
        chunk: Any = None
        try:
            chunk, loosely = self._read(payload)
            if chunk.get("error") is not None:
                self._holding = True
                self._error = self._error or payload.decode("utf-8", "replace")
                return self._as_it_came(event)  # vLLM writes these with spaces: never reserialized
            return self._accumulate(event, chunk, loosely=loosely)
        except MALFORMED:  # includes NotJson
            self._problems.add("unparsed_event")
            if isinstance(chunk, dict) and chunk.get("choices"):
                self._holding = True  # it may contain a finish reason
            return self._as_it_came(event)

    def _read(self, payload: bytes) -> tuple[Any, bool]:
        """Return a chunk, and whether it is loose (`read_json`). Raises NotJson."""
        if self._view.hides_lists and b'"prompt_token_ids":[' in payload:
            found = read_lists(payload, self.prompt or self._known, sampled=False)
            if found is not None:
                self.prompt = found[1]
                return found[0], False
        try:
            return orjson.loads(payload), False
        except orjson.JSONDecodeError:
            return read_json(payload)

    def _accumulate(self, event: Event, chunk: Json, *, loosely: bool) -> bytes | _Finish:
        accumulator = self._accumulator
        has_finish = accumulator.feed(chunk)
        if has_finish and accumulator.finished >= self._enough:
            self._holding = True
        if chunk.get("usage") is not None:
            self._see_usage(chunk)
        view = self._view
        shown = view.chunk(chunk)
        if has_finish:
            wanted = view.usage or view.strip_rules.usage
            self._lacks_usage = wanted and view.engine.must_send_usage(view.dialect.name, chunk)
            if view.strip_rules.usage and shown is not None and view.renderer is None:
                return _Finish(event, shown, loosely, shown is chunk)
        if view.renderer is not None:
            return b"" if shown is None else view.renderer.feed(shown)
        if shown is chunk:
            text = event.raw
        elif shown is None:
            text = b""
        else:
            text = event.with_payload(write_json(shown, loosely=True) if loosely else orjson.dumps(shown))
        if self._repeated is not None and not self._holding:
            self._repeated.learn(event.raw, chunk, None if shown is chunk else text)
        return text

    def _see_usage(self, chunk: Json) -> None:
        """Process a usage event. Unrequested usage beside a choice is a server setting (--enable-force-include-usage)."""
        view = self._view
        if not chunk.get("choices"):
            self._has_usage = True
            if view.strip_rules.usage:
                self._moved = {key: chunk[key] for key in view.engine.shape.last if key in chunk}
        elif view.strip_rules.usage and not view.strip_rules.running_usage:
            self.forces_usage = True
            self._view = replace(view, strip_rules=replace(view.strip_rules, usage=False))

    def _written(self, finish: _Finish) -> bytes:
        shown = finish.shown
        missing = {key: value for key, value in self._moved.items() if key not in shown}
        if finish.is_unchanged and not missing:
            return finish.event.raw
        try:
            whole = {**shown, **missing}
            return finish.event.with_payload(write_json(whole, loosely=True) if finish.loosely else orjson.dumps(whole))
        except MALFORMED:  # nested too deeply to be serialized
            self._problems.add("unparsed_event")
            return finish.event.raw

    def _as_it_came(self, event: Event) -> bytes:
        """Return the raw event; nothing for a client of another dialect, which could not read it."""
        return event.raw if self._view.renderer is None else b""


RESPONSE_STREAMS: dict[str, type[WholeResponse] | type[StreamResponse]] = {
    "application/json": WholeResponse,
    "text/event-stream": StreamResponse,
}


def response_stream_for(
    status: int,
    content_type: str,
    view: ClientView,
    max_event_bytes: int | None = None,
    prompt: KnownPrompt | None = None,
) -> ResponseStream:
    """Return the response stream for a response with this status and content type."""
    framing = RESPONSE_STREAMS.get(content_type.partition(";")[0].strip().lower())
    if framing is None or status != 200:
        return RawResponse(view, status if status != 200 else _BAD_GATEWAY)
    if framing is StreamResponse:
        return StreamResponse(view, max_event_bytes, prompt)
    return SyntheticStreamResponse(view, prompt) if view.replay else WholeResponse(view, prompt)
