"""The response of an engine as a stream of bytes: fed the engine's bytes, returns the client's.

Streams of events are here, whole responses in `whole_response`.

Each framing has the same two methods, so callers need one loop. `feed` returns what the client may receive now; `finish`
returns the withheld end and the parsed response. What the client did not request is stripped by the `ClientView`.

Rule 1: the end of the turn is withheld: in a stream, everything from the event with the last open choice's finish reason
        (agents act on it, not only on `[DONE]`), or from an error event; else the whole body.
Rule 2: bytes that need no stripping are forwarded unchanged; events are never reserialized without need.
Rule 3: what cannot be parsed is forwarded, and recorded as a problem.
"""

from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

import orjson

from proxy.protocols.accumulators import ChatAccumulator
from proxy.protocols.dialects.base import Dialect
from proxy.protocols.dialects.sglang_generate import SglangGenerateAccumulator
from proxy.protocols.dialects.translation import ResponseRenderer, Translator
from proxy.protocols.engines.base import Engine, Json, StripRules
from proxy.protocols.lenient_json import read_json, write_json
from proxy.protocols.number_lists import KnownPrompt, read_lists
from proxy.protocols.repeated_events import RepeatedEvents
from proxy.protocols.sse import EVENT_STREAM, Event, EventParser
from proxy.protocols.token_annotations import TokenAnnotations

MALFORMED: Final = (
    TypeError,
    KeyError,
    AttributeError,
    IndexError,
    ValueError,
    RecursionError,
)  # raised by JSON of an unexpected shape
_NOT_A_RESPONSE: Final = "the engine's response has an invalid shape"
_CUT: Final = "the engine's response ended without its terminal event"
ABANDONED_BYTES: Final = 2**18  # of an incomplete body or event that is not parsed
_MIN_EVENTS: Final = 8  # before repetitions are recognized: short replies have few
_MAX_MISSES: Final = 3  # events of a read that are no repetitions, before the rest of it is taken as a whole
_LARGE_PART: Final = 8  # repetitions that are less than this part of the rest of a read do not reset the count
_SHORT_EVENT: Final = (
    1024  # bytes of an incomplete event that may be searched again, and of one whose lists are not parsed apart
)


@dataclass(frozen=True, slots=True)
class ClientView:
    """What the client receives: the dialect, the engine, what is stripped, how many choices are expected.

    `choices` is None if the body does not determine it; `model` is the name that the client requested, if it was replaced.
    `replay`: the client requested a stream, and the engine did not; `usage`: with usage in it. `is_counted`: the stream was
    requested with usage; `are_choices_counted`: with usage in each event. `tokens`: the token annotations
    that the client requested, for whole responses only. `translation` and `renderer`: the client's dialect and this response in
    it, if the call is translated to chat.
    """

    dialect: Dialect
    engine: Engine
    strip_rules: StripRules
    choices: int | None
    model: str | None = None
    replay: bool = False
    usage: bool = False
    is_counted: bool = False
    are_choices_counted: bool = False
    tokens: TokenAnnotations | None = None
    translation: Translator | None = None
    renderer: ResponseRenderer | None = None

    @property
    def hides_lists(self) -> bool:
        """Whether the client receives no token ids and no logprobs, so that they may be parsed apart (`number_lists`)."""
        rules = self.strip_rules
        return rules.token_ids and rules.logprobs and self.tokens is None and self.dialect.name == "chat"

    def whole(self, response: Json) -> Json:
        """Return what the client receives of an unstreamed response; the same dict if it is unchanged."""
        shown = self._renamed(self.engine.strip(self.dialect.name, response, self.strip_rules))
        if self.tokens is None:
            return shown
        return self.tokens.annotate(shown, self.engine.tokens(self.dialect.name, {}, response))

    def chunk(self, chunk: Json) -> Json | None:
        """Return what the client receives of a stream chunk; the same dict if it is unchanged, None if nothing."""
        shown = self.engine.strip_chunk(self.dialect.name, chunk, self.strip_rules)
        return shown if shown is None or self.model is None else self._renamed(shown)

    def _renamed(self, shown: Json) -> Json:
        if self.model is None or not isinstance(shown.get("model"), str):
            return shown
        return {**shown, "model": self.model}


@dataclass(frozen=True, slots=True)
class ParsedResponse:
    """A parsed response.

    `response` is the unstreamed or accumulated response, with injected values; None if there was none. `ended`: the terminal
    event, or the whole body, arrived. `error` is the engine's error as text. `problems` are fidelity codes. `status`
    replaces the engine's.
    """

    response: Json | None
    ended: bool
    error: str | None = None
    problems: tuple[str, ...] = ()
    status: int | None = None


class ResponseStream(Protocol):
    """One response of an engine, in one framing.

    `content_type` is that of the client's response; None: the engine's. `prompt`: the prompt ids, with which the next call of
    the rollout may begin, if they were parsed apart (`number_lists`). `forces_usage`: whether the stream showed that its server
    writes usage to each event even if it is not requested; None: neither.
    """

    content_type: str | None
    prompt: KnownPrompt | None
    forces_usage: bool | None

    @property
    def is_over(self) -> bool:
        """Whether a stream's terminal event arrived: the response is complete even if the connection is lost afterwards."""
        ...

    @property
    def pending(self) -> int:
        """The size of the incomplete event in bytes, all of which the next feed may parse."""
        ...

    @property
    def is_cumulative(self) -> bool:
        """Whether each event replaces the one before it, so that only the last one is held."""
        ...

    def feed(self, read: bytes) -> bytes:
        """Feed bytes of the engine; return the bytes that the client may receive now. Raises EngineEventTooLong."""
        ...

    def abandon(self) -> None:
        """Forget an incomplete body or event that is too long to be parsed on the event loop."""
        ...

    def finish(self) -> tuple[bytes, ParsedResponse]:
        """Return the withheld end and the parsed response, after the last bytes."""
        ...


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
        stream_type = EVENT_STREAM if view.renderer is None else view.renderer.stream_format
        self.content_type = None if stream_type == EVENT_STREAM else stream_type.content_type
        self._known = prompt  # of the rollout's previous call
        self.prompt: KnownPrompt | None = None
        self._parser = EventParser() if max_event_bytes is None else EventParser(max_event_bytes)
        self._is_prompt_apart: bool | None = None  # whether prompt ids are parsed apart; the first ones decide
        self._accumulator = view.dialect.accumulator()
        self._chunks = 0
        self._repeated: RepeatedEvents | None = None
        self._may_repeat = isinstance(self._accumulator, ChatAccumulator) and view.renderer is None
        self._held: list[bytes | _Finish] = []
        self._holding = False
        self.is_over = False  # its terminal event arrived
        self._error: str | None = None
        self._problems = self._accumulator.problems
        # If the number of choices is unknown, the first that finishes may be the last.
        self._enough = view.choices or 1
        self._moved: Json = {}  # fields of the finish that are on the usage event
        self._usage: Any = None  # of all choices
        self.forces_usage: bool | None = None  # whether usage comes beside a choice where it was not requested
        self._lacks_usage = False

    @property
    def pending(self) -> int:
        """The size of the incomplete event in bytes."""
        return len(self._parser.rest)

    @property
    def is_cumulative(self) -> bool:
        """Whether each event replaces the one before it, so that only the last one is held."""
        return isinstance(self._accumulator, SglangGenerateAccumulator) and self._accumulator.is_cumulative

    def feed(self, read: bytes) -> bytes:
        """Forward complete events, until the end of the turn begins."""
        shown: list[bytes] = []
        if self._may_repeat:
            read = self._take_repeated(read, shown)
        if read:
            self._take(read, shown)
        return b"".join(shown)

    def _take_repeated(self, read: bytes, shown: list[bytes]) -> bytes:
        """Process a read as long as most of its events are repetitions; return the rest of it.

        Each round copies the rest of the read, and all but a few take a large part of it: the time is linear in the read.
        """
        if self._repeated is None and read.count(b"\n\n") <= _MIN_EVENTS:
            return read
        misses = 0 if self._repeated is not None else -_MIN_EVENTS
        pending = self._parser.rest
        if self._repeated is not None and 0 < len(pending) < _SHORT_EVENT and b"\n" in read:
            read = bytes(pending) + read
            pending.clear()
        while read and misses < _MAX_MISSES and not self._holding:
            if self._repeated is not None and not pending and (taken := self._repeated.take(read)) is not None:
                shown.append(taken[0])
                if len(read) - len(taken[1]) >= len(read) // _LARGE_PART:
                    misses = 0
                read = taken[1]
                if not read:
                    break
            end = read.find(b"\n\n") + 2
            if end < 2:
                break
            misses += 1
            self._take(read[:end], shown)
            read = read[end:]
        return read

    def _take(self, read: bytes, shown: list[bytes]) -> None:
        """Process the events that a read completes, one by one."""
        for event in self._parser.feed(read):
            text = self._understand(event) if event.payload else event.raw
            if self._holding or isinstance(text, _Finish):
                self._held.append(text)
            else:
                shown.append(text)

    def abandon(self) -> None:
        """Forget a long incomplete event."""
        if self.pending > ABANDONED_BYTES:
            self._parser.rest.clear()

    def finish(self) -> tuple[bytes, ParsedResponse]:
        """Return the withheld events; a truncated last one is forwarded unchanged."""
        rest = self._parser.finish()
        if rest is not None:
            self._held.append(self._understand(rest) if rest.payload else rest.raw)
        end = b"".join(self._written(held) if isinstance(held, _Finish) else held for held in self._held)
        if self.is_over and self._lacks_usage and self._usage is None:
            self._problems.add("no_usage")
        if self._view.are_choices_counted and not self._accumulator.is_counted:
            self._problems.add("uncounted")
        try:
            response: Json | None = self._accumulator.finish()
        except MALFORMED:  # chunks that do not add up to a response
            self._problems.add("unparsed_event")
            response = None
        answer = ParsedResponse(response, self.is_over, self._error, tuple(sorted(self._problems)))
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
        if self._repeated is not None:
            self._repeated.forget()
        if self.is_over:
            self._problems.add("content_after_end")
            return self._as_it_came(event)
        if payload == b"[DONE]":
            self.is_over = self._holding = True
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
            if isinstance(chunk, dict) and (chunk.get("choices") or chunk.get("meta_info")):
                self._holding = True  # it may contain a finish reason
            return self._as_it_came(event)

    def _read(self, payload: bytes) -> tuple[Any, bool]:
        """Return a chunk, and whether it is loose (`read_json`). Raises NotJson."""
        if b'"prompt_token_ids":[' in payload and self._view.hides_lists:
            if self._is_prompt_apart is None:
                self._is_prompt_apart = len(payload) > _SHORT_EVENT
            if self._is_prompt_apart and (found := read_lists(payload, self.prompt or self._known, sampled=False)):
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
            self._lacks_usage = view.is_counted and view.engine.must_send_usage(view.dialect.name, chunk)
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
        self._chunks += 1
        if self._repeated is None and self._chunks >= _MIN_EVENTS and isinstance(accumulator, ChatAccumulator):
            self._repeated = RepeatedEvents(accumulator)
        if self._repeated is not None and not self._holding:
            self._repeated.learn(event.raw, chunk, None if shown is chunk else text)
            self._may_repeat = self._repeated.is_learning
        return text

    def _see_usage(self, chunk: Json) -> None:
        """Process a usage event. Unrequested usage beside a choice is a server setting (--enable-force-include-usage)."""
        view = self._view
        if not chunk.get("choices"):
            if self._usage not in (None, chunk["usage"]) and (view.choices == 1 or view.engine.sums_usage):
                self._problems.add("changed_midstream")
            self._usage = chunk["usage"]
            if view.strip_rules.usage:
                self.forces_usage = False if view.choices == 1 else None
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
