"""Unstreamed responses: JSON, errors and everything else. They follow the rules of `response`."""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any, Final

import orjson

from proxy.errors import EngineDisconnected
from proxy.protocols.dialects.base import Json, ResponseRenderer
from proxy.protocols.engines.base import Engine, StreamShape
from proxy.protocols.json_texts import (
    WEIGHTS,
    KnownPrompt,
    NotJson,
    most_weight,
    read_json,
    read_lists,
    repeats,
    write_loosely,
)
from proxy.protocols.parts import PartsDiffer, Told
from proxy.protocols.response import ABANDONED_BYTES, ABORT, MALFORMED, ClientView, ParsedResponse, ResponseStream

_UNREADABLE: Final = 502  # status of an unreadable response that cannot be forwarded
DONE: Final = b"data: [DONE]\n\n"

_THOUGHTS: Final = ("reasoning_content", "reasoning")
# Fields of an unstreamed choice that streams lack (vLLM 0.32.0).
_UNSTREAMED: Final = frozenset({"index", "message", "logprobs", "finish_reason", "prompt_logprobs", "routed_experts"})


class Withheld(ResponseStream):
    """A body that is withheld until it is complete and its step is stored."""

    _ending: Json | None = None  # how its choice ends, instead of as the engine ended it

    def __init__(self, view: ClientView, prompt: KnownPrompt | None = None) -> None:
        self._view = view
        self.prompt = prompt
        self.content_type = None if view.translation is None else "application/json"
        self._reads: list[bytes] = []
        self._repeated = 0  # where the known prompt ends

    def feed(self, read: bytes) -> bytes:
        self._reads.append(read)
        return b""

    def repeat(self, known: KnownPrompt | None) -> int:
        """Compare the body with the newest prompt of its rollout; return how many bytes `finish` does not parse for it."""
        self.prompt, self._reads = known, [b"".join(self._reads)]
        self._repeated = repeats(self._reads[0], known)
        return 0 if known is None or not self._repeated else len(known.text)

    def weight(self) -> int:
        """Return at least the bytes of memory that parsing the body takes, after `repeat`."""
        body, known, weight = self._reads[0], self.prompt, 0
        if known is not None and self._repeated:
            weight = most_weight(body[: self._repeated - len(known.text)]) + WEIGHTS[b","] * len(known.ids)
        return 2 * len(body) + weight + most_weight(body[self._repeated :])

    def complete(self, fields: Json) -> None:
        self._ending = fields

    def abandon(self) -> None:
        if sum(map(len, self._reads)) > ABANDONED_BYTES:
            self._reads.clear()


class RawResponse(Withheld):
    """An error, or a response that is not JSON: withheld, as an error ends the turn as well, and forwarded unchanged."""

    def __init__(self, view: ClientView, status: int) -> None:
        super().__init__(view)
        self._status = status

    def finish(self) -> tuple[bytes, ParsedResponse]:
        body = b"".join(self._reads)
        return failed(
            self._view, self._status, body, ParsedResponse(None, ended=True, error=body.decode("utf-8", "replace"))
        )


class WholeResponse(Withheld):
    """An unstreamed JSON response. `prompt`: the prompt ids of the rollout's previous call, after `finish` of this one."""

    def finish(self) -> tuple[bytes, ParsedResponse]:
        view, body = self._view, b"".join(self._reads)
        found = read_lists(body, self.prompt) if view.hides_lists else None
        self.prompt = None if found is None else found[1]
        try:
            parsed, loosely = read_json(body) if found is None else (found[0], False)
        except NotJson:
            return self._unreadable(body)
        response = view.dialect.read_body(parsed)
        if response is None:
            return self._failed(body)
        if self._ending is not None:
            response = {**response, "choices": [{**choice, **self._ending} for choice in response["choices"]]}
            body = orjson.dumps(view.dialect.write_body(response))
        shown, problems = response, []
        try:
            shown, differs = view.whole(response)
            counts_there = view.engine.always_sends_usage and not view.dialect.counts_in_choices
            if response.get("usage") is None and counts_there:
                problems.append("no_usage")
            if response.get("error") is not None:
                problems.append("engine_error")
            self.is_aborted = ABORT in body and view.is_aborted(response)
            end = b"" if differs else self._written(body, response, shown, problems, loosely=loosely)
        except PartsDiffer as error:
            end, differs = b"", error
        except MALFORMED:
            return self._failed(body)
        return end, ParsedResponse(response, ended=True, shown=shown, problems=tuple(problems), differs=differs)

    def parsed(self) -> Json:
        """Return the response as the engine sent it. Raises NotJson, or one of `MALFORMED`."""
        response, _ = read_json(b"".join(self._reads))
        return self._view.dialect.read_body(response) or {}

    def tell(self, told: Told) -> None:
        """Set the reply of all parts of a resumed call."""
        assert self._view.before is not None
        self._view = replace(self._view, before=replace(self._view.before, told=told))

    def _written(self, body: bytes, response: Json, shown: Json, problems: list[str], *, loosely: bool) -> bytes:
        if self._view.renderer is not None:
            shown = self._view.renderer.whole(shown)
        if shown is response:
            return body
        written = self._view.dialect.write_body(shown)
        return write_loosely(written) if loosely else orjson.dumps(written)

    def _unreadable(self, body: bytes) -> tuple[bytes, ParsedResponse]:
        """Forward a body that is not JSON; a truncated body becomes an error, so that it cannot pass for a complete one."""
        answer = ParsedResponse(None, ended=False, error=body.decode("utf-8", "replace"), problems=("unparsed_event",))
        if self._view.translation is not None or body[:64].lstrip()[:1] not in (b"{", b"["):
            return failed(self._view, _UNREADABLE, body, answer)
        error = self._view.dialect.error(
            EngineDisconnected("the engine's response is not valid JSON; it may be truncated")
        )
        return error, replace(answer, status=_UNREADABLE)

    def _failed(self, body: bytes) -> tuple[bytes, ParsedResponse]:
        answer = ParsedResponse(None, ended=True, error=body.decode("utf-8", "replace"), problems=("unparsed_event",))
        return failed(self._view, _UNREADABLE, body, answer)


class SyntheticStreamResponse(WholeResponse):
    """An unstreamed JSON response to a client that requested a stream: the events that the engine would have sent.

    It is used for calls that are sent unstreamed because the engine's streams lose tokens.

    Rule 1: accumulating the events returns the response: nothing is lost or repeated.
    Rule 2: a choice's events are its role, its reasoning, its text, its tool calls, its finish; ids and logprobs that the
            client requested are on the first event with text, as when an engine sends several tokens at once.
    """

    def __init__(self, view: ClientView, prompt: KnownPrompt | None = None) -> None:
        super().__init__(view, prompt)
        self.content_type = view.stream_format.content_type

    def _written(self, body: bytes, response: Json, shown: Json, problems: list[str], *, loosely: bool) -> bytes:
        view = self._view
        # An aborted call may go on, or be completed: what is not written must not have been rendered.
        renderer = deepcopy(view.renderer) if self.is_aborted else view.renderer
        if view.before is not None and view.before.is_stream:
            return self._rest(shown, renderer)
        if renderer is not None:
            return render_as_stream(view.engine, renderer, shown)
        try:
            return replay_events(view.engine.shape, view.dialect.name, shown, usage=view.usage, loosely=loosely)
        except (TypeError, KeyError, AttributeError):  # similar to a response, but it cannot be converted into events
            problems.append("unparsed_event")
            return _event(shown, loosely=loosely) + DONE

    def _rest(self, shown: Json, renderer: ResponseRenderer | None) -> bytes:
        """Return the events that the client of a resumed stream has not received."""
        view = self._view
        assert view.before is not None
        rest = view.before.rest_of(shown)
        usage = view.usage or renderer is not None
        events = [
            event
            for event in chunks(view.engine.shape, view.dialect.name, rest, usage=usage)
            if not any((choice.get("delta") or {}).get("role") for choice in event["choices"])
        ]
        if renderer is None:
            return b"".join([*(_event(event, loosely=False) for event in events), DONE])
        return b"".join([*map(renderer.feed, events), renderer.finish(shown)])


def render_as_stream(engine: Engine, renderer: ResponseRenderer, shown: Json) -> bytes:
    """Render an unstreamed chat response as a stream of another dialect."""
    first, *others = chunks(engine.shape, "chat", shown, usage=True)
    first = {"usage": shown.get("usage"), **first}  # the first event has the length of the prompt
    return b"".join([*map(renderer.feed, (first, *others)), renderer.finish(shown)])


def failed(view: ClientView, status: int, body: bytes, answer: ParsedResponse) -> tuple[bytes, ParsedResponse]:
    """Return an error response: unchanged, or in the client's dialect if the call is translated to chat."""
    if view.translation is None:
        return body, answer
    body_in_dialect = view.translation.engine_error(status, body.decode("utf-8", "replace"))
    return body_in_dialect, replace(answer, status=status)


def replay_events(shape: StreamShape, dialect: str, response: Json, *, usage: bool, loosely: bool = False) -> bytes:
    """Return the whole stream of a response, with its terminal event. `usage`: the client requested it."""
    events = [_event(chunk, loosely=loosely) for chunk in chunks(shape, dialect, response, usage=usage)]
    return b"".join([*events, DONE])


def text_event(shape: StreamShape, dialect: str, response: Json, text: str) -> Json:
    """Return the event of a stream that adds this text to its only choice. `response`: of the stream so far."""
    content = {"message": {"role": "assistant", "content": text}} if dialect == "chat" else {"text": text}
    whole = {**response, "choices": [{"index": 0, "finish_reason": None, **content}]}
    return next(event for event in chunks(shape, dialect, whole, usage=False) if _text_of(event))


def _text_of(event: Json) -> Any:
    (choice,) = event["choices"]
    return choice.get("text") or (choice.get("delta") or {}).get("content")


def error_events(body: bytes) -> bytes:
    """Return an engine's error as an event of a stream that has begun (vLLM 0.32.0, SGLang 0.5.23)."""
    try:
        error, _ = read_json(body)
    except NotJson:
        error = {"message": body.decode("utf-8", "replace")}
    nested = error if isinstance(error, dict) and "error" in error else {"error": error}
    return _event(nested, loosely=False) + DONE


def chunks(shape: StreamShape, dialect: str, response: Json, *, usage: bool) -> Iterator[Json]:
    """Yield the events as JSON. Raises TypeError, KeyError or AttributeError for an invalid response."""
    kind = "chat.completion.chunk" if dialect == "chat" else response.get("object")
    head = {key: kind if key == "object" else value for key, value in response.items() if key in shape.head}
    last = {key: response[key] for key in shape.last if key in response}
    choice_events = _chat_choice if dialect == "chat" else _text_choice
    no_usage_yet = {"usage": None} if shape.no_usage_yet else {}
    events_so_far = [
        {**head, "choices": [choice], **first}
        for whole in sorted(response["choices"], key=lambda choice: choice["index"])
        for choice, first in choice_events(shape, whole, response)
    ]
    events_so_far += [
        {**head, "choices": [], **no_usage_yet, key: response[key]}
        for key in shape.alone
        if response.get(key) is not None
    ]
    if usage:
        counts = response.get("usage")
        if not shape.null_usage and isinstance(counts, dict):
            counts = {key: value for key, value in counts.items() if value is not None}
        events_so_far.append({**head, "choices": [], "usage": counts})
    if events_so_far:
        events_so_far[-1] |= last
    yield from events_so_far


def _chat_choice(shape: StreamShape, whole: Json, response: Json) -> Iterator[tuple[Json, Json]]:
    """Yield the events of one chat choice, each with its additional top-level fields."""
    first = {key: response[key] for key in shape.first if key in response}
    yield _choice(shape, whole, dict(shape.role), early=False), first
    logprobs = whole.get("logprobs")
    early = {key: whole[key] for key in shape.early if key in whole}
    for delta in _deltas(shape, whole["message"]):
        choice = _choice(shape, whole, delta, early=True)
        if logprobs is not None:
            choice["logprobs"] = logprobs
        yield {**choice, **early}, {"usage": None} if shape.no_usage_yet and "tool_calls" in delta else {}
        logprobs, early = None, dict.fromkeys(early)
    finish = _choice(shape, whole, dict(shape.delta), early=False)
    if logprobs is not None:  # tokens without text
        finish["logprobs"] = logprobs
    ending = {key: whole.get(key) for key in shape.choice}
    extra = {key: value for key, value in whole.items() if key not in _UNSTREAMED | ending.keys() | early.keys()}
    yield {**finish, "finish_reason": whole.get("finish_reason"), **ending, **early, **extra}, {}


def _choice(shape: StreamShape, whole: Json, delta: Json, *, early: bool) -> Json:
    silent: Json = {"logprobs": None} if shape.null_logprobs else {}
    # vLLM has stop_reason in its last event only; SGLang has matched_stop in each.
    waiting = {} if shape.early else dict.fromkeys(shape.choice)
    ids = dict.fromkeys(key for key in shape.early if early and key in whole)
    return {"index": whole["index"], "delta": delta, **silent, "finish_reason": None, **waiting, **ids}


def _deltas(shape: StreamShape, message: Mapping[str, Any]) -> Iterator[Json]:
    """Yield the deltas of a message, one field at a time."""
    for key in _THOUGHTS:
        if message.get(key):
            yield {**shape.delta, key: message[key]}
    content = {
        key: value
        for key, value in message.items()
        if key not in {"role", "tool_calls", *_THOUGHTS} and value not in (None, "")
    }
    if content:
        yield {**shape.delta, **content}
    for index, call in enumerate(message.get("tool_calls") or ()):
        function = call["function"]
        arguments = function.get("arguments")
        named = {key: value for key, value in function.items() if key != "arguments"}
        opening = {**call, "index": call.get("index", index), "function": {**named, **shape.call}}
        if named:  # else it has begun before
            yield {**shape.call_delta, "tool_calls": [opening]}
        if arguments:
            more = {**shape.more_function, "arguments": arguments}
            yield {**shape.call_delta, "tool_calls": [{**shape.more_call, "index": opening["index"], "function": more}]}


def _text_choice(shape: StreamShape, whole: Json, _response: Json) -> Iterator[tuple[Json, Json]]:
    """Yield a choice of completions as one event, as engines do for several tokens at once."""
    choice = {key: value for key, value in whole.items() if key not in {"prompt_logprobs", "routed_experts"}}
    yield choice, {"usage": None} if shape.no_usage_yet else {}


def _event(chunk: Json, *, loosely: bool) -> bytes:
    return b"data: " + (write_loosely(chunk) if loosely else orjson.dumps(chunk)) + b"\n\n"
