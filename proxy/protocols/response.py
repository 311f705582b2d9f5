"""The response of an engine as a stream of bytes: fed the engine's bytes, returns the client's.

Streams of server-sent events are here, whole responses in `whole_response`.

Each framing has the same two methods, so callers need one loop. `feed` returns what the client may receive now; `finish`
returns the withheld end and the parsed response. What the client did not request is stripped by the `ClientView`.

Rule 1: the end of the turn is withheld: in a stream, everything from the event with the last open choice's finish reason
        (agents act on it, not only on `[DONE]`), or from an error event; else the whole body.
Rule 2: bytes that need no stripping are forwarded unchanged; events are never reserialized without need.
Rule 3: what cannot be parsed is forwarded, and recorded as a problem.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, NamedTuple, Protocol

import orjson

from proxy.errors import EngineEventTooLong
from proxy.protocols.accumulators import ChatAccumulator, Chunks, RepeatedEvents
from proxy.protocols.dialects.base import EVENT_STREAM, Dialect, Json, ResponseRenderer, StreamFormat, Translator
from proxy.protocols.engines.base import NAMED_BY_ID, Engine, Sampled, StripRules, Tokens
from proxy.protocols.json_texts import KnownPrompt, read_json, read_lists, write_loosely
from proxy.protocols.parts import Before, PartsDiffer

_LINE_END = rb"(?:\r\n|\n|\r(?!\n))"
_BLANK_LINE = re.compile(_LINE_END + _LINE_END)
MAX_EVENT_BYTES: Final = 2**26  # all prompt ids and top logprobs of the longest answers, in one event


class Event(NamedTuple):  # made for each event of each stream: a frozen dataclass takes three times as long to make
    """One event. A block of comments alone has neither name nor payload."""

    raw: bytes  # with the blank line that ends it
    payload: bytes  # its data lines, joined by LF
    name: bytes = b""  # the value of its `event:` field
    before: bytes = b"data: "  # the bytes before the payload, if it is a single line: another can be placed there
    after: bytes = b"\n\n"  # and after it


_event = partial(tuple.__new__, Event)  # as `Event` is made, in C
_BLANK: Final = Event(b"\n\n", b"")  # of a stream of line ends, which has very many of them


def read_event(raw: bytes) -> Event:
    """Parse the raw bytes of one event."""
    payload: list[bytes] = []
    name = b""
    if b"data" in raw or b"event" in raw:
        for line in raw.splitlines():  # which splits bytes at LF, CRLF and CR only
            field, _, value = line.partition(b":")
            if field == b"data":
                payload.append(value.removeprefix(b" "))
            elif field == b"event":
                name = value.removeprefix(b" ")
    end = b"\r\n" if raw.endswith(b"\r\n") else b"\n"
    before = b"event: %b%bdata: " % (name, end) if name else b"data: "
    return _event((raw, b"\n".join(payload), name, before, end + end))


class EventParser:
    """Splits a byte stream into events, independent of how it is split into reads: feed it each read, then `finish`.

    Events are not interpreted. An event keeps its raw bytes, so an unchanged event is forwarded byte for byte. `limit`: maximum
    bytes of one event.

    Rule 1: an event ends with a blank line; lines end in LF, CRLF or CR (the HTML standard, section 9.2.6).
    Rule 2: the raw bytes of all events, joined, are the bytes that were fed; nothing is lost, added or reordered.
    Rule 3: each byte is searched and copied a constant number of times, however long an event is; its length is limited.
    """

    __slots__ = ("_limit", "rest")

    def __init__(self, limit: int = MAX_EVENT_BYTES) -> None:
        self._limit = limit
        self.rest = bytearray()  # the event that is not complete yet

    def feed(self, read: bytes) -> list[Event]:
        """Return the events that this read completes. Raises EngineEventTooLong; the parser is unusable afterwards."""
        rest = self.rest
        if not rest:
            is_one_line = read.startswith(b"data: ") and read.endswith(b"\n\n") and b"\r" not in read
            if is_one_line and read.find(b"\n") == len(read) - 2:  # what engines send, in the reads that they come in
                return [_event((read, read[6:-2], b"", b"data: ", b"\n\n"))]
            return self._cut(read, 0)
        # A line end has at most two bytes, so three of what is pending can belong to a blank line that ends in this read.
        scanned = max(len(rest) - 3, 0)
        is_whole = _ends_an_event(bytes(rest[scanned:]) + read)
        rest += read
        if not is_whole:
            if len(rest) > self._limit:
                rest.clear()  # so that it is not parsed
                raise EngineEventTooLong(
                    f"The engine sent an event of more than {self._limit} bytes (engines.max_event_bytes)"
                )
            return []
        whole = bytes(rest)
        rest.clear()
        return self._cut(whole, scanned)

    def finish(self) -> Event | None:
        """Return the bytes after the last blank line as a truncated event; None if there are none."""
        rest = bytes(self.rest)
        self.rest.clear()
        return read_event(rest) if rest else None

    def _cut(self, text: bytes, scanned: int) -> list[Event]:
        """Return the events of a text; keep what follows the last one. Its first `scanned` bytes contain no blank line."""
        if b"\r" not in text:  # what engines send: found without the search for three kinds of line ends
            *whole, last = text.split(b"\n\n")
            self.rest += last
            return [
                _BLANK
                if not raw
                else _event((raw + b"\n\n", raw[6:], b"", b"data: ", b"\n\n"))
                if raw.startswith(b"data: ") and b"\n" not in raw
                else read_event(raw + b"\n\n")
                for raw in whole
            ]
        events: list[Event] = []
        start = 0
        for found in _BLANK_LINE.finditer(text, scanned):
            first, end = found.span()
            if end == len(text) and text.endswith(b"\r"):
                break  # a LF that belongs to this CR may be in the next read
            raw = text[start:end]
            events.append(Event(raw, b"") if first == start else read_event(raw))
            start = end
        self.rest += text[start:]
        return events


def _ends_an_event(text: bytes) -> bool:
    """Return whether a blank line certainly ends in these bytes."""
    if b"\r" not in text:
        return b"\n\n" in text
    found = _BLANK_LINE.search(text)
    return found is not None and not (found.end() == len(text) and text.endswith(b"\r"))


Pieces = Callable[[Sequence[int]], Sequence[str | None]]


@dataclass(frozen=True, slots=True)
class TokenAnnotations:
    """The token annotations that a client requests: tokens as pieces of the vocabulary, and ids on each choice.

    Annotations are derived from the engine's ids; what is unknown is null or absent.

    Marin's clients (a3109ee) look each token's string up in the vocabulary, and need pieces ("Ġhello") where engines return
    text (" hello"); its vLLM context (004f4a5) reads `prompt_token_ids` and `response_token_ids` of a choice.
    """

    # The vocabulary's strings of ids, None for an unknown one; without it, tokens are the engine's texts.
    pieces: Pieces | None = None
    ids: bool = False  # each choice has its token ids and its prompt ids

    def fields(self, body: Mapping[str, Any]) -> Json:
        """Return what to request from the engine: alternatives by their ids, since several ids may have the same text."""
        named = self.pieces is not None and bool(body.get("top_logprobs"))
        return {"return_tokens_as_token_ids": True} if named else {}

    def annotate(self, shown: Json, tokens: Tokens) -> Json:
        """Return an annotated copy of a response. Raises KeyError or TypeError for an invalid one."""
        sampled = {sampled_choice.index: sampled_choice for sampled_choice in tokens.choices}
        choices = [self._choice(choice, sampled[choice.get("index", 0)], tokens) for choice in shown["choices"]]
        return {**shown, "choices": choices}

    def _choice(self, choice: Json, sampled: Sampled, tokens: Tokens) -> Json:
        annotated = {**choice}
        prompt = tokens.prompt_ids if sampled.prompt_ids is None else sampled.prompt_ids
        if self.ids and prompt is not None and sampled.ids is not None:
            annotated |= {"prompt_token_ids": prompt, "response_token_ids": sampled.ids}
        logprobs = choice.get("logprobs")
        if self.pieces is not None and isinstance(logprobs, dict) and logprobs.get("content") is not None:
            content = _with_pieces(logprobs["content"], sampled.ids or (), self.pieces)
            # A token's text in place of its piece may be another token's piece.
            annotated["logprobs"] = None if content is None else {**logprobs, "content": content}
        return annotated


def _with_pieces(content: Sequence[Json], ids: Sequence[int], pieces: Pieces) -> list[Json] | None:
    """Return the entries with pieces in place of text; None if a piece or an id is missing."""
    if len(content) != len(ids):
        return None
    annotated_entries = []
    for entry, token in zip(content, ids, strict=True):
        others = entry.get("top_logprobs") or ()
        named = [_named(other) for other in others]
        if None in named:
            return None
        piece, *alternatives = pieces([token, *(name for name in named if name is not None)])
        if piece is None or None in alternatives:
            return None
        # vLLM 0.32.0 returns the bytes of "token_id:7" for an alternative.
        annotated = [{**other, "token": name, "bytes": None} for other, name in zip(others, alternatives, strict=True)]
        annotated_entries.append(
            {**entry, "token": piece} | ({"top_logprobs": annotated} if "top_logprobs" in entry else {})
        )
    return annotated_entries


def _named(entry: Json) -> int | None:
    name = entry["token"].removeprefix(NAMED_BY_ID)
    return int(name) if name != entry["token"] and name.isdecimal() else None


# Raised by JSON of an unexpected shape.
MALFORMED: Final = (TypeError, KeyError, AttributeError, IndexError, ValueError, RecursionError)
_NOT_A_RESPONSE: Final = "the engine's response has an invalid shape"
_CUT: Final = "the engine's response ended without its terminal event"
ABORT: Final = b'"abort"'  # in the bytes of each response with this finish reason
ABANDONED_BYTES: Final = 2**18  # of an incomplete body or event that is not parsed
# Bytes: a shorter incomplete event may be searched again, and the lists of a shorter event are not parsed apart.
_SHORT_EVENT: Final = 1024


@dataclass(frozen=True, slots=True)
class ClientView:
    """What the client receives."""

    dialect: Dialect
    engine: Engine
    strip_rules: StripRules
    choices: int | None  # how many are expected; None if the body does not determine it
    model: str | None = None  # the name that the client requested, if it was replaced
    replay: bool = False  # the client requested a stream, which is not sent as one
    usage: bool = False  # and with usage in it
    is_counted: bool = False  # the stream was requested with usage
    are_choices_counted: bool = False  # and with usage in each event
    tokens: TokenAnnotations | None = None  # that the client requested, for whole responses only
    translation: Translator | None = None  # the client's dialect, if the call is translated to chat
    renderer: ResponseRenderer | None = None  # and this response in it
    before: Before | None = None  # what the client has received of a resumed call

    @property
    def stream_format(self) -> StreamFormat:
        """The format of a stream to the client that is not the engine's own."""
        return EVENT_STREAM if self.renderer is None else self.renderer.stream_format

    @property
    def hides_lists(self) -> bool:
        """Whether the client receives no token ids and no logprobs, so that they may be parsed apart (`read_lists`)."""
        rules = self.strip_rules
        return rules.token_ids and rules.logprobs and self.tokens is None and self.dialect.name == "chat"

    def is_aborted(self, response: Json) -> bool:
        """Return whether a response, or an event, says that the engine ended a choice before the model did."""
        choices = response.get("choices")
        found = choices if isinstance(choices, list) else ()
        return any(isinstance(choice, dict) and _reason_of(choice) == "abort" for choice in found)

    def written(self, shown: Json) -> bytes:
        """Return an event of the engine's dialect as the client receives it."""
        return b"data: %b\n\n" % orjson.dumps(shown) if self.renderer is None else self.renderer.feed(shown)

    def whole(self, response: Json) -> tuple[Json, PartsDiffer | None]:
        """Return what the client receives of an unstreamed response; the same dict if it is unchanged.

        Of a resumed call it is the response of all parts, and second why they do not go together, if so.
        """
        shown = self.engine.strip(self.dialect.name, response, self.strip_rules)
        if self.model is not None and isinstance(shown.get("model"), str):
            shown = {**shown, "model": self.model}
        if self.tokens is not None:
            shown = self.tokens.annotate(shown, self.engine.tokens(self.dialect.name, {}, response))
        if self.before is None:
            return shown, None
        try:
            self.before.check_prompt(response)
            return self.before.whole(shown), None
        except PartsDiffer as differs:
            return shown, differs


def _reason_of(choice: Json) -> Any:
    """Return the finish reason of a choice; that of SGLang's `/generate` is an object of `meta_info`."""
    meta = choice.get("meta_info")
    reason = (meta if isinstance(meta, dict) and "finish_reason" not in choice else choice).get("finish_reason")
    return reason.get("type") if isinstance(reason, dict) else reason


@dataclass(frozen=True, slots=True)
class ParsedResponse:
    """A parsed response."""

    response: Json | None  # unstreamed or accumulated, with injected values; None if there was none
    ended: bool  # the terminal event, or the whole body, arrived
    shown: Json | None = None  # what the client receives in the engine's dialect; None if it cannot be determined
    error: str | None = None  # of the engine, as text
    problems: tuple[str, ...] = ()
    status: int | None = None  # replaces the engine's
    differs: PartsDiffer | None = None  # why it cannot be the rest of a resumed call


class ResponseStream(Protocol):
    """One response of an engine, in one framing."""

    content_type: str | None = None  # of the client's response; None: the engine's
    # The prompt ids, with which the next call of the rollout may begin, if they were parsed apart (`read_lists`).
    prompt: KnownPrompt | None = None
    # Of a stream:
    is_over: bool = False  # its terminal event arrived: it is complete even if the connection is lost
    pending: int = 0  # the size of the incomplete event in bytes; the next feed may parse all of it
    is_cumulative: bool = False  # each event replaces the one before it, so that only the last one is kept
    forces_usage: bool | None = None  # the server writes usage to each event without a request; None: not yet known
    # The engine ended its only choice before the model did. Of a whole response it is known after `finish`.
    is_aborted: bool = False

    @property
    def is_undecided(self) -> bool:
        """Whether a stream can, now, not be resumed from its ids."""
        return False

    @property
    def has_ended(self) -> bool:
        """Whether all choices of a stream have ended: only its usage and its terminal event may be missing."""
        return False

    def feed(self, read: bytes) -> bytes:
        """Feed bytes of the engine; return the bytes that the client may receive now. Raises EngineEventTooLong."""
        ...

    def abandon(self) -> None:
        """Forget an incomplete body or event that is too long to be parsed on the event loop."""
        ...

    def complete(self, fields: Json) -> None:
        """End the only choice of an aborted response otherwise: with these fields."""
        ...

    def finish(self) -> tuple[bytes, ParsedResponse]:
        """Return the withheld end and the parsed response, after the last bytes."""
        ...

    def cut(self) -> tuple[Json | None, ParsedResponse]:
        """Return the response so far of a call that is resumed, and the withheld event with its last text, if there is one."""
        return None, self.finish()[1]


class _Finish(NamedTuple):
    """An event with a finish reason, withheld until the usage event shows which fields it lacks."""

    event: Event
    shown: Json
    loosely: bool
    is_unchanged: bool


class _Usage:
    """The token counts of a stream: strips them if they were injected, and checks them.

    With `stream_options.include_usage` vLLM (0.32.0) writes `system_fingerprint` to the usage event, and without it to each
    event with a finish reason. If it was injected, these events wait for the usage event to restore the field.
    """

    def __init__(self, view: ClientView) -> None:
        self._view = view
        self.rules = view.strip_rules
        # Usage comes beside a choice where it was not requested (--enable-force-include-usage), and is not stripped.
        self.is_forced: bool | None = None
        self.is_announced = False  # a usage event must follow
        self.total: Any = None  # of all choices
        self._moved: Json = {}  # fields of the finish that are on the usage event

    def read(self, chunk: Json, problems: set[str]) -> None:
        """Process the usage of an event: for all choices, or beside one choice if usage is stripped."""
        view, rules = self._view, self.rules
        if not chunk.get("choices"):
            if self.total not in (None, chunk["usage"]) and (view.choices == 1 or view.engine.sums_usage):
                problems.add("changed_midstream")
            self.total = chunk["usage"]
            if rules.usage:
                self.is_forced = False if view.choices == 1 else None
                self._moved = {key: chunk[key] for key in view.engine.shape.last if key in chunk}
        elif not rules.running_usage:
            self.is_forced = True
            self.rules = replace(rules, usage=False)

    def restored(self, finish: _Finish, problems: set[str]) -> bytes:
        event, shown = finish.event, {**self._moved, **finish.shown}
        if finish.is_unchanged and len(shown) == len(finish.shown):
            return event.raw
        try:
            whole = {**finish.shown, **shown}  # what it lacks is at its end
            return event.before + (write_loosely(whole) if finish.loosely else orjson.dumps(whole)) + event.after
        except MALFORMED:  # nested too deeply to be serialized
            problems.add("unparsed_event")
            return event.raw


class StreamResponse(ResponseStream):
    """A stream of events, forwarded as they arrive up to the end of the turn."""

    def __init__(self, view: ClientView, max_event_bytes: int | None = None, prompt: KnownPrompt | None = None) -> None:
        self._view = view
        if view.renderer is not None and view.stream_format is not EVENT_STREAM:
            self.content_type = view.stream_format.content_type
        self._known = prompt  # of the rollout's previous call
        self._is_prompt_apart: bool | None = None  # whether prompt ids are parsed apart; the first ones decide
        self._parser = EventParser(max_event_bytes or MAX_EVENT_BYTES)
        accumulator = self._accumulator = view.dialect.accumulator()
        # What is stripped must not depend on the text, or on earlier events.
        is_kept = not view.strip_rules.reasoning and (view.renderer is None or view.renderer.text_writer is not None)
        repeats = is_kept and isinstance(accumulator, ChatAccumulator)
        self._repeated = RepeatedEvents(accumulator) if repeats else None  # type: ignore[arg-type]
        self._usage = _Usage(view)
        self._held: list[bytes | _Finish] = []
        self._holding = False
        self.is_cumulative = accumulator.is_cumulative
        self._error: str | None = None
        self._problems = accumulator.problems

    def feed(self, read: bytes) -> bytes:
        shown: list[bytes] = []
        repeated, pending, at = self._repeated, self._parser.rest, 0
        if repeated is not None and repeated.shape is not None and 0 < len(pending) < _SHORT_EVENT and b"\n" in read:
            read = bytes(pending) + read
            pending.clear()
        while repeated is not None and repeated.is_learning and not self._holding and at < len(read):
            if repeated.shape is not None and not pending and (end := repeated.take(read, at, shown)) > at:
                at = end
                continue
            end = read.find(b"\n\n", at) + 2
            if end < 2:
                break
            self._take(self._parser.feed(read[at:end]), shown)
            at = end
        if at < len(read):
            self._take(self._parser.feed(read[at:]), shown)
        self.pending, self.is_cumulative = len(pending), self._accumulator.is_cumulative
        return b"".join(shown)

    @property
    def is_undecided(self) -> bool:
        return self._accumulator.is_undecided

    @property
    def has_ended(self) -> bool:
        return self._accumulator.finished >= (self._view.choices or 1)

    def _take(self, events: list[Event], shown: list[bytes]) -> None:
        """Process events: what the client may receive of them now is appended to `shown`."""
        for event in events:
            text = self._understand(event) if event.payload else event.raw
            if self._holding or isinstance(text, _Finish):
                self._held.append(text)
            else:
                shown.append(text)

    def abandon(self) -> None:
        if self.pending > ABANDONED_BYTES:
            self._parser.rest.clear()

    def complete(self, fields: Json) -> None:
        self.is_aborted, accumulator = False, self._accumulator
        assert isinstance(accumulator, Chunks)
        for choice in accumulator.choices.values():
            choice.fields.update(fields)
        for at, held in enumerate(self._held):
            if isinstance(held, _Finish):
                choices = [{**choice, **fields} for choice in held.shown["choices"]]
                self._held[at] = held._replace(shown={**held.shown, "choices": choices}, is_unchanged=False)

    def finish(self) -> tuple[bytes, ParsedResponse]:
        """Return the withheld events; a truncated last one is forwarded unchanged."""
        problems = self._problems
        if (rest := self._parser.finish() if self._parser.rest else None) is not None:
            self._holding = True
            self._take([rest], [])
        view, renderer = self._view, self._view.renderer
        end = [
            held
            if isinstance(held, bytes)
            else self._usage.restored(held, problems)
            if renderer is None
            else renderer.feed(held.shown)
            for held in self._held
        ]
        if self.is_over and self._usage.is_announced and self._usage.total is None:
            problems.add("no_usage")
        if view.are_choices_counted and not self._accumulator.is_counted:
            problems.add("uncounted")
        response = shown = differs = None
        try:
            response = self._accumulator.finish()
            shown, differs = view.whole(response)
        except MALFORMED:  # chunks that do not add up to a response, or to one that the client could have received
            problems.add("unparsed_event")
        answer = ParsedResponse(response, self.is_over, shown, self._error, tuple(sorted(problems)), differs=differs)
        if renderer is not None:
            end.append(_rendered_end(renderer, answer))
        return b"".join(end), answer

    def cut(self) -> tuple[Json | None, ParsedResponse]:
        """Return the last text, which was withheld with the finish reason, and the response so far."""
        response = shown = differs = None
        try:
            response = self._accumulator.finish()
            shown, differs = self._view.whole(response)
        except MALFORMED:
            self._problems.add("unparsed_event")
        problems = tuple(sorted(self._problems))
        answer = ParsedResponse(response, self.is_over, shown, problems=problems, differs=differs)
        held = next((held for held in self._held if isinstance(held, _Finish)), None)
        if held is None or len(held.shown["choices"]) != 1:
            return None, answer
        (choice,) = held.shown["choices"]
        content = (choice.get("text"), choice.get("logprobs"), choice.get("token_ids"))
        if not (any(content) or any((choice.get("delta") or {}).values())):
            return None, answer
        ends = ("finish_reason", "weight_versions", *self._view.engine.shape.choice)
        return {
            **held.shown,
            "choices": [{key: None if key in ends else value for key, value in choice.items()}],
        }, answer

    def _understand(self, event: Event) -> bytes | _Finish:
        """Accumulate an event; return what the client receives of it."""
        payload = event.payload
        if self._repeated is not None:
            self._repeated.shape = None
        if self.is_over or payload == b"[DONE]":
            if self.is_over:
                self._problems.add("content_after_end")
            # vLLM 0.32 ends a chat stream that is aborted before its first token without a finish reason.
            self.is_aborted = self.is_aborted or (not self._accumulator.finished and self._is_empty())
            self.is_over = self._holding = True
            return self._as_it_came(event)
        chunk: Any = None
        loosely = False
        try:
            if b'"prompt_token_ids":[' in payload:
                chunk = self._with_prompt_apart(payload)
            if chunk is None:
                try:
                    chunk = orjson.loads(payload)
                except orjson.JSONDecodeError:
                    chunk, loosely = read_json(payload)
            if chunk.get("error") is None:
                return self._accumulate(event, chunk, loosely=loosely)
            self._holding = True
            self._error = self._error or payload.decode("utf-8", "replace")
        except MALFORMED:  # includes NotJson
            self._problems.add("unparsed_event")
            if isinstance(chunk, dict) and (chunk.get("choices") or chunk.get("meta_info")):
                self._holding = True  # it may contain a finish reason
        return self._as_it_came(event)  # vLLM writes errors with spaces: never reserialized

    def _with_prompt_apart(self, payload: bytes) -> Json | None:
        """Return a chunk with prompt ids that are parsed apart; None if they are parsed with the rest."""
        if self._is_prompt_apart is None:
            self._is_prompt_apart = len(payload) > _SHORT_EVENT and self._view.hides_lists
        found = read_lists(payload, self.prompt or self._known, sampled=False) if self._is_prompt_apart else None
        if found is None:
            return None
        self.prompt = found[1]
        return found[0]

    def _accumulate(self, event: Event, chunk: Json, *, loosely: bool) -> bytes | _Finish:
        accumulator, usage, view = self._accumulator, self._usage, self._view
        has_finish = accumulator.feed(chunk)
        if has_finish and accumulator.finished >= (view.choices or 1):
            self._holding = True  # if the number of choices is unknown, the first that finishes may be the last
        if chunk.get("usage") is not None and (usage.rules.usage or not chunk.get("choices")):
            usage.read(chunk, self._problems)
            self._holding = self._holding or (not chunk.get("choices") and self._is_empty())  # it may be aborted
            self.forces_usage = usage.is_forced
        shown = view.engine.strip_chunk(view.dialect.name, chunk, usage.rules)
        if view.model is not None and shown is not None and isinstance(shown.get("model"), str):
            shown = {**shown, "model": view.model}
        if view.before is not None:
            view.before.check_prompt(chunk)
            shown = None if shown is None else view.before.chunk(shown)
        if has_finish:
            usage.is_announced = view.is_counted and view.engine.must_send_usage(view.dialect.name, chunk)
            self.is_aborted |= ABORT in event.payload and view.is_aborted(chunk)
            is_held = self.is_aborted and view.choices == 1
            if shown is not None and (is_held or (usage.rules.usage and view.renderer is None)):
                return _Finish(event, shown, loosely, shown is chunk)
        if view.renderer is None:
            return self._written(event, chunk, shown, loosely=loosely)
        if shown is None:
            return b""
        text = view.renderer.feed(shown)
        if self._repeated is not None and self._repeated.is_learning and not (self._holding or loosely):
            assert view.renderer.text_writer is not None
            self._repeated.learn(event.raw, chunk, text, view.renderer.text_writer())
        return text

    def _is_empty(self) -> bool:
        """Return whether nothing was sampled, and no choice has ended."""
        accumulator = self._accumulator
        choices = accumulator.choices.values() if isinstance(accumulator, Chunks) else ()
        return not accumulator.finished and self._error is None and not any(choice.size for choice in choices)

    def _written(self, event: Event, chunk: Json, shown: Json | None, *, loosely: bool) -> bytes:
        if shown is chunk:
            text = event.raw
        elif shown is None:
            text = b""
        else:
            text = event.before + (write_loosely(shown) if loosely else orjson.dumps(shown)) + event.after
        if self._repeated is not None and self._repeated.is_learning and not (self._holding or loosely):
            self._repeated.learn(event.raw, chunk, None if shown is chunk else text)
        return text

    def _as_it_came(self, event: Event) -> bytes:
        """Return the raw event; nothing for a client of another dialect, which could not read it."""
        return event.raw if self._view.renderer is None else b""


def _rendered_end(renderer: ResponseRenderer, answer: ParsedResponse) -> bytes:
    """Return the end of the stream in a dialect that is translated to chat."""
    error = answer.error if answer.ended or answer.error else _CUT
    if answer.response is None or answer.shown is not None:
        try:
            return renderer.finish(answer.shown, error)
        except MALFORMED:  # a response that this dialect cannot represent
            pass
    return renderer.finish(None, error or _NOT_A_RESPONSE)
