"""An engine's reply: fed its bytes, gives the client's.

Strategy: every framing has the same two verbs, so the shell has ONE loop and never asks whether a call was streamed.
`feed` gives what the client may see at once; `finish` gives the withheld end and what was understood. A reply hides, by
its `View`, what the client did not ask for.

Rule 1: the end of the turn is withheld: of a stream, everything from the event on that carries the last open choice's
        finish reason (agents act on that one, not only on `[DONE]`), or from an error event on; else the whole body.
Rule 2: bytes that need no hiding are passed on as they came; events are never re-spelt for beauty.
Rule 3: what we do not understand is passed on, and said to be a problem.
"""

from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

from proxy.errors import EngineBroke
from proxy.protocols import synthetic_stream as replay
from proxy.protocols.dialects.base import Dialect
from proxy.protocols.dialects.translation import ResponseRenderer, Translator
from proxy.protocols.engines.base import Engine, Json, StripRules
from proxy.protocols.lenient_json import NotJson, read_json, write_json
from proxy.protocols.sse import Event, EventParser
from proxy.protocols.token_annotations import TokenAnnotations

_UNREADABLE: Final = 502  # what an answer that nobody can read is told as, where it cannot be passed on
_NOT_A_RESPONSE: Final = "the engine's answer has not the shape of one"
MALFORMED: Final = (
    TypeError,
    KeyError,
    AttributeError,
    IndexError,
    ValueError,
    RecursionError,
)  # what other people's JSON of an odd shape raises
_CUT: Final = "the engine's answer ended without its terminal event"


@dataclass(frozen=True, slots=True)
class ClientView:
    """What this client is to see: by which dialect and engine, what is hidden, how many choices are to come.

    `choices` is None where the body does not say; `model` is the name the client asked for, if it was another one.
    `replay`: the client wants a stream, and the engine was not asked for one; `usage`: with usage in it. `tokens`: what it
    wants told of them beside the usual, of whole responses only. `translation` and `telling`: its dialect, and this answer in
    it, where that is by way of chat.
    """

    dialect: Dialect
    engine: Engine
    strip_rules: StripRules
    choices: int | None
    model: str | None = None
    replay: bool = False
    usage: bool = False
    tokens: TokenAnnotations | None = None
    translation: Translator | None = None
    renderer: ResponseRenderer | None = None

    def whole(self, response: Json) -> Json:
        """What to show of an unstreamed response; the same dict if all of it."""
        shown = self._renamed(self.engine.strip(self.dialect.name, response, self.strip_rules))
        if self.tokens is None:
            return shown
        return self.tokens.annotate(shown, self.engine.tokens(self.dialect.name, {}, response))

    def chunk(self, chunk: Json) -> Json | None:
        """What to show of a streamed chunk; the same dict if all of it, None if nothing."""
        shown = self.engine.strip_chunk(self.dialect.name, chunk, self.strip_rules)
        return shown if shown is None or self.model is None else self._renamed(shown)

    def _renamed(self, shown: Json) -> Json:
        if self.model is None or not isinstance(shown.get("model"), str):
            return shown
        return {**shown, "model": self.model}


@dataclass(frozen=True, slots=True)
class ParsedResponse:
    """What a reply understood.

    `response` is the unstreamed or folded response, with what was injected; None if there was none. `ended` is whether
    the terminal event, or the whole body, came. `error` is the engine's error as text. `problems` are fidelity codes. `status`
    is told instead of the engine's.
    """

    response: Json | None
    ended: bool
    error: str | None = None
    problems: tuple[str, ...] = ()
    status: int | None = None


class ResponseStream(Protocol):
    """One reply of an engine, in one framing."""

    def feed(self, read: bytes) -> bytes:
        """Take bytes of the engine; give the bytes that the client may see now."""
        ...

    def finish(self) -> tuple[bytes, ParsedResponse]:
        """No more bytes come: the withheld end, and what was understood."""
        ...


class RawResponse:
    """An error, or something that is not JSON: kept, and passed on as it came."""

    def __init__(self, view: ClientView, status: int) -> None:
        self._view = view
        self._status = status
        self._reads: list[bytes] = []

    def feed(self, read: bytes) -> bytes:
        """Keep it: an error ends the turn as well."""
        self._reads.append(read)
        return b""

    def finish(self) -> tuple[bytes, ParsedResponse]:
        """All of it: untouched, or in the words of the client's dialect."""
        body = b"".join(self._reads)
        return failed(
            self._view, self._status, body, ParsedResponse(None, ended=True, error=body.decode("utf-8", "replace"))
        )


class WholeResponse:
    """An unstreamed JSON response."""

    def __init__(self, view: ClientView) -> None:
        self._view = view
        self._reads: list[bytes] = []

    def feed(self, read: bytes) -> bytes:
        """Keep it: nothing may be seen before all is stored."""
        self._reads.append(read)
        return b""

    def finish(self) -> tuple[bytes, ParsedResponse]:
        """The body as the client is to see it."""
        body = b"".join(self._reads)
        try:
            response, loosely = read_json(body)
        except NotJson:
            return self._unreadable(body)
        if not isinstance(response, dict) or not isinstance(response.get("choices"), list):
            return self._failed(body)
        try:
            shown = self._view.whole(response)
            return self._render(body, response, shown, loosely=loosely)
        except MALFORMED:
            return self._failed(body)

    def _unreadable(self, body: bytes) -> tuple[bytes, ParsedResponse]:
        """A body that is no JSON passes on as it came; one that breaks off is an error: half of it must not look whole."""
        answer = ParsedResponse(None, ended=False, error=body.decode("utf-8", "replace"), problems=("unparsed_event",))
        if self._view.translation is not None or body[:64].lstrip()[:1] not in (b"{", b"["):
            return failed(self._view, _UNREADABLE, body, answer)
        error = self._view.dialect.error(EngineBroke("the engine's answer is not valid JSON: it may have been cut off"))
        return error, replace(answer, status=_UNREADABLE)

    def _failed(self, body: bytes) -> tuple[bytes, ParsedResponse]:
        answer = ParsedResponse(None, ended=True, error=body.decode("utf-8", "replace"), problems=("unparsed_event",))
        return failed(self._view, _UNREADABLE, body, answer)

    def _render(self, body: bytes, response: Json, shown: Json, *, loosely: bool) -> tuple[bytes, ParsedResponse]:
        if self._view.renderer is not None:
            shown = self._view.renderer.whole(shown)
        end = body if shown is response else write_json(shown, loosely=loosely)
        return end, self._answer(response)

    def _answer(self, response: Json, *problems: str) -> ParsedResponse:
        """The response, and what it contradicts itself in."""
        found = list(problems)
        if response.get("usage") is None and self._view.engine.always_sends_usage:
            found.append("no_usage")
        if response.get("error") is not None:
            found.append("engine_error")
        return ParsedResponse(response, ended=True, problems=tuple(found))


class SyntheticStreamResponse(WholeResponse):
    """An unstreamed JSON response to a client that wants a stream."""

    def _render(self, body: bytes, response: Json, shown: Json, *, loosely: bool) -> tuple[bytes, ParsedResponse]:
        view = self._view
        if view.renderer is not None:
            return render_as_stream(view.engine, view.renderer, shown), self._answer(response)
        try:
            events = replay.replay_events(
                view.engine.shape, view.dialect.name, shown, usage=view.usage, loosely=loosely
            )
        except (TypeError, KeyError, AttributeError):  # like a response, and no events can be made of it
            events = b"data: " + write_json(shown, loosely=loosely) + b"\n\n" + replay.DONE
            return events, self._answer(response, "unparsed_event")
        return events, self._answer(response)


def render_as_stream(engine: Engine, renderer: ResponseRenderer, shown: Json) -> bytes:
    """An unstreamed chat response, told in another dialect as the stream that it asked for."""
    first, *others = replay.chunks(engine.shape, "chat", shown, usage=True)
    first = {"usage": shown.get("usage"), **first}  # a stream says from the beginning how long the prompt was
    return b"".join([*map(renderer.feed, (first, *others)), renderer.finish(shown)])


def failed(view: ClientView, status: int, body: bytes, answer: ParsedResponse) -> tuple[bytes, ParsedResponse]:
    """An answer that is none: as it came, or by way of chat told in the client's dialect."""
    if view.translation is None:
        return body, answer
    body_in_dialect = view.translation.engine_error(status, body.decode("utf-8", "replace"))
    return body_in_dialect, replace(answer, status=status)


@dataclass(frozen=True, slots=True)
class _Finish:
    """An event with a finish reason, withheld until it is known what the usage event has of it."""

    event: Event
    shown: Json
    loosely: bool
    is_unchanged: bool


class StreamResponse:
    """A stream of events, shown one by one as they come, up to the end of the turn.

    With `stream_options.include_usage` vLLM (0.32.0) writes `system_fingerprint` on the usage event, and without it on each
    event with a finish reason. Where we injected it, these events wait for the usage event and get the field back.
    """

    def __init__(self, view: ClientView, max_event_bytes: int | None = None) -> None:
        self._view = view
        self._cutter = EventParser() if max_event_bytes is None else EventParser(max_event_bytes)
        self._accumulator = view.dialect.accumulator()
        self._held: list[bytes | _Finish] = []
        self._holding = False
        self.ended = False  # its terminal event came
        self._error: str | None = None
        self._problems = self._accumulator.problems
        # Not knowing how many choices there are, the first that finishes may be the last.
        self._enough = view.choices or 1
        self._moved: Json = {}  # what the usage event has of the finish
        self._has_usage = False
        self.forces_usage = False  # usage came beside a choice, and nobody requested it there
        self._lacks_usage = False

    @property
    def pending(self) -> int:
        """The bytes of an event that is not whole yet."""
        return self._cutter.pending

    def feed(self, read: bytes) -> bytes:
        """Show the events that are whole, until the end of the turn begins."""
        shown: list[bytes] = []
        for event in self._cutter.feed(read):
            text = self._understand(event)
            if self._holding or isinstance(text, _Finish):
                self._held.append(text)
            else:
                shown.append(text)
        return b"".join(shown)

    def finish(self) -> tuple[bytes, ParsedResponse]:
        """The withheld events; a last one that was cut off is passed on as it came."""
        rest = self._cutter.finish()
        if rest is not None:
            self._held.append(self._understand(rest))
        end = b"".join(self._written(held) if isinstance(held, _Finish) else held for held in self._held)
        if self.ended and self._lacks_usage and not self._has_usage:
            self._problems.add("no_usage")
        try:
            response: Json | None = self._accumulator.finish()
        except MALFORMED:  # chunks that were like chunks, and do not add up to a response
            self._problems.add("unparsed_event")
            response = None
        answer = ParsedResponse(response, self.ended, self._error, tuple(sorted(self._problems)))
        return end + self._render_end(answer), answer

    def _render_end(self, answer: ParsedResponse) -> bytes:
        """What ends the stream in a dialect by way of chat."""
        renderer = self._view.renderer
        if renderer is None:
            return b""
        error = answer.error if answer.ended or answer.error else _CUT
        try:
            shown = None if answer.response is None else self._view.whole(answer.response)
            return renderer.finish(shown, error)
        except MALFORMED:  # chunks that add up to a response which this dialect has no words for
            return renderer.finish(None, error or _NOT_A_RESPONSE)

    def _understand(self, event: Event) -> bytes | _Finish:
        """Accumulate an event; return what the client sees of it."""
        payload = event.payload
        if not payload:
            return event.raw
        if self.ended:
            self._problems.add("content_after_end")
            return self._as_it_came(event)
        if payload == b"[DONE]":
            self.ended = self._holding = True
            return self._as_it_came(event)
        chunk: Any = None
        try:
            chunk, loosely = read_json(payload)
            if chunk.get("error") is not None:
                self._holding = True
                self._error = self._error or payload.decode("utf-8", "replace")
                return self._as_it_came(event)  # vLLM writes these with spaces: never spelt again
            return self._accumulate(event, chunk, loosely=loosely)
        except MALFORMED:  # NotJson among them
            self._problems.add("unparsed_event")
            if isinstance(chunk, dict) and chunk.get("choices"):
                self._holding = True  # it may say that a choice is over
            return self._as_it_came(event)

    def _accumulate(self, event: Event, chunk: Json, *, loosely: bool) -> bytes | _Finish:
        accumulator = self._accumulator
        finished = accumulator.finished
        accumulator.feed(chunk)
        if accumulator.finished >= self._enough:
            self._holding = True
        if chunk.get("usage") is not None:
            self._see_usage(chunk)
        view = self._view
        shown = view.chunk(chunk)
        if accumulator.finished > finished:
            wanted = view.usage or view.strip_rules.usage
            self._lacks_usage = wanted and view.engine.must_send_usage(view.dialect.name, chunk)
            if view.strip_rules.usage and shown is not None and view.renderer is None:
                return _Finish(event, shown, loosely, shown is chunk)
        if view.renderer is not None:
            return b"" if shown is None else view.renderer.feed(shown)
        if shown is chunk:
            return event.raw
        return b"" if shown is None else event.with_payload(write_json(shown, loosely=loosely))

    def _see_usage(self, chunk: Json) -> None:
        """Note the usage event. Usage beside a choice, unasked for, is the server's own way (--enable-force-include-usage)."""
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
            return finish.event.with_payload(write_json({**shown, **missing}, loosely=finish.loosely))
        except MALFORMED:  # nested too deeply to be written
            self._problems.add("unparsed_event")
            return finish.event.raw

    def _as_it_came(self, event: Event) -> bytes:
        """An event that is passed on; a client of another dialect could not read it."""
        return event.raw if self._view.renderer is None else b""


RESPONSE_STREAMS: dict[str, type[WholeResponse] | type[StreamResponse]] = {
    "application/json": WholeResponse,
    "text/event-stream": StreamResponse,
}


def response_stream_for(
    status: int, content_type: str, view: ClientView, max_event_bytes: int | None = None
) -> ResponseStream:
    """The reply for an answer of this status and content type."""
    framing = RESPONSE_STREAMS.get(content_type.partition(";")[0].strip().lower())
    if framing is None or status != 200:
        return RawResponse(view, status if status != 200 else _UNREADABLE)
    if framing is StreamResponse:
        return StreamResponse(view, max_event_bytes)
    return SyntheticStreamResponse(view) if view.replay else WholeResponse(view)
