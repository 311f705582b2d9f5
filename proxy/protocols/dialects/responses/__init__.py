"""OpenAI's Responses API, translated to chat: its requests are read in `request`, its responses and errors are rendered here.

A stream has numbered events. One item is open at a time, as at OpenAI: Agno 3.1 loses a call that is open while another begins,
and LangChain 1.7 treats a later piece of a text as a new item. Reasoning and text end where another item begins; a call ends
with the response, and what follows it is sent then.

Invariant: the whole response equals the response in the stream's last event, however the chunks are split. If a stream returns
to reasoning or text after another item, a new item begins.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal

import orjson

from proxy.errors import ProxyError
from proxy.protocols.accumulators import WriteTexts
from proxy.protocols.dialects.base import (
    EVENT_STREAM,
    CallIdentity,
    DialectName,
    Json,
    References,
    ResolvedReferences,
    ResponseRenderer,
    Translator,
    openai_error,
    text_or_none,
)
from proxy.protocols.dialects.responses.request import (
    ENCRYPTED,
    LOGPROBS,
    call_ids_from,
    included,
    item_ids_from,
    item_name,
    read,
    response_name,
    seal,
)
from proxy.protocols.dialects.responses.tools import FreeformReader, Tool, read_tools
from proxy.protocols.dialects.translation import TEXT, HeldPieces, event, read_usage, reasoning_of
from proxy.protocols.json_texts import NotJson, read_json
from proxy.trajectory.conversations import THOUGHTS
from proxy.trajectory.step import Step, messages_of

Status = Literal["in_progress", "completed", "incomplete", "failed"]

# By the chat choice's finish reason; with any other reason the response is completed.
_INCOMPLETE: Final = {"length": "max_output_tokens", "content_filter": "content_filter", "repetition": None}
_BROKEN: Final = {"abort": "The engine aborted the response.", "error": "The engine failed during the response."}


def ending(finish_reason: object) -> tuple[Status, Json]:
    """Return the status of a response, and the fields with the reason if it is not completed."""
    if finish_reason in _INCOMPLETE:
        return "incomplete", {"incomplete_details": {"reason": _INCOMPLETE[str(finish_reason)]}}
    if finish_reason in _BROKEN:
        return "failed", failure(_BROKEN[str(finish_reason)])
    return "completed", {}


def failure(message: str) -> Json:
    """Return the error field of a failed response."""
    return {"error": {"code": "server_error", "message": message}}


def make_response(
    body: Mapping[str, Any],
    identity: CallIdentity,
    *,
    status: Status = "in_progress",
    output: Sequence[Json] = (),
    usage: object = None,
    reason: Mapping[str, Any] | None = None,
) -> Json:
    """Return a response object. Fields of the client that TokenTape does not use are repeated unchanged."""
    text = body.get("text")
    return {
        "id": response_name(identity.step_id, identity.rollout_id),
        "object": "response",
        "created_at": identity.created_s,
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.get("instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "max_tool_calls": body.get("max_tool_calls"),
        "metadata": body.get("metadata") or {},
        "model": identity.model,
        "output": list(output),
        "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
        "previous_response_id": body.get("previous_response_id"),
        "prompt_cache_key": body.get("prompt_cache_key"),
        "reasoning": {name: (body.get("reasoning") or {}).get(name) for name in ("effort", "summary")},
        "safety_identifier": body.get("safety_identifier"),
        "store": body.get("store") is not False,
        "temperature": body.get("temperature"),
        "text": text if text and text.get("format") else {**(text or {}), "format": {"type": "text"}},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": [{**_REQUIRED, **it} if it.get("type") == "function" else it for it in body.get("tools") or ()],
        "top_logprobs": body.get("top_logprobs") or 0,
        "top_p": body.get("top_p"),
        "truncation": body.get("truncation") or "disabled",
        "usage": usage_from(usage),
        "user": body.get("user"),
        **(reason or {}),
    }


# Fields of functions that are optional in requests and required in responses.
_REQUIRED: Final = {"parameters": None, "strict": None}


def usage_from(usage: object) -> Json | None:
    """Return the usage in this dialect, from chat's."""
    if not isinstance(usage, dict):
        return None
    counts = read_usage(usage)
    return {
        "input_tokens": counts.prompt,
        "input_tokens_details": {"cached_tokens": counts.cached, "cache_write_tokens": 0},
        "output_tokens": counts.completion,
        "output_tokens_details": {"reasoning_tokens": counts.reasoning or 0},
        "total_tokens": counts.prompt + counts.completion,
    }


def logprob_entries(logprobs: object) -> list[Json]:
    """Return chat's logprobs in the format of Responses: without ids, and always with bytes."""
    entries = logprobs.get("content") if isinstance(logprobs, dict) else None
    return [
        {**_logprob(entry), "top_logprobs": [_logprob(other) for other in entry.get("top_logprobs") or ()]}
        for entry in entries or ()
        if "logprob" in entry  # llama.cpp returns probabilities instead with `post_sampling_probs`
    ]


def _logprob(entry: Json) -> Json:
    token = entry["token"]
    own = entry.get("bytes")
    return {"token": token, "bytes": list(token.encode()) if own is None else own, "logprob": entry["logprob"]}


PartKind = Literal["output_text", "refusal", "reasoning_text"]

_FIELD: Final = {"output_text": "text", "refusal": "refusal", "reasoning_text": "text"}


class Events:
    """Writes the events of one stream."""

    _number = 0

    def write(self, kind: str, **fields: Any) -> bytes:
        """Return one event with the next number."""
        self._number += 1
        return event(kind, sequence_number=self._number - 1, **fields)

    def write_texts(self, like: bytes, texts: Sequence[bytes]) -> bytes:
        """Return an event for each text, a JSON string without quotes. `like`: such an event without number and text."""
        before, _, rest = like.partition(b":0,")
        between, _, after = rest.partition(b':""')
        first, self._number = self._number, self._number + len(texts)
        parts = [
            b'%b:%d,%b:"%b"%b' % (before, number, between, text, after) for number, text in enumerate(texts, first)
        ]
        return b"".join(parts)


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
    """A message or a reasoning item while it is streamed: parts with one text each. `fields`: of its JSON, at its beginning."""

    def __init__(self, events: Events, name: str, index: int, fields: Json) -> None:
        self._events = events
        self._name = name
        self.index = index
        self._fields = fields
        self._parts: dict[PartKind, _Part] = {}

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

    def writer(self, kind: PartKind) -> WriteTexts:
        """Return what writes further pieces of a part, as `append` does without logprobs."""
        part = self._parts[kind]
        like = event(
            f"response.{kind}.delta", sequence_number=0, **self._ids(part), delta="", **part.logprobs_field(())
        )

        def write(texts: Sequence[bytes], pieces: Sequence[str]) -> bytes:
            part.pieces.extend(pieces)
            return self._events.write_texts(like, [text for text in texts if text])

        return write

    def add_logprobs(self, logprobs: Sequence[Json]) -> None:
        """Add logprobs of tokens without text."""
        if (part := self._parts.get("output_text")) is not None:
            part.logprobs.extend(logprobs)

    def text_of(self, kind: PartKind) -> str:
        """Return a part's text so far."""
        return "".join(self._parts[kind].pieces) if kind in self._parts else ""

    def end(self, fields: Json) -> bytes:
        """Return the last events of its parts; `fields` are the fields that are only known at the end."""
        self._fields |= fields
        events = []
        for part in self._parts.values():
            logprobs = part.logprobs_field(part.logprobs)
            events.append(self._event(f"response.{part.kind}.done", part, **part.text(), **logprobs))
            events.append(self._event("response.content_part.done", part, part=part.to_json()))
        return b"".join(events)

    def to_json(self, status: Status) -> Json:
        """Return the item as JSON, with its content so far."""
        content = [part.to_json() for part in self._parts.values()]
        return {"id": self._name, **self._fields, "content": content, "status": status}

    def _ids(self, of: _Part) -> Json:
        return {"item_id": self._name, "output_index": self.index, "content_index": of.index}

    def _event(self, event: str, of: _Part, /, **fields: Any) -> bytes:
        return self._events.write(event, **self._ids(of), **fields)


class CallItem:
    """A call of a function or a custom tool. Argument text is streamed as sampled; a custom tool's input is read from it."""

    def __init__(self, events: Events, name: str, index: int, tool: Tool, call_id: str) -> None:
        self._reader = FreeformReader() if tool.kind == "custom" else None
        self._field = "arguments" if self._reader is None else "input"
        self._event_name = "function_call_arguments" if self._reader is None else "custom_tool_call_input"
        namespace = {} if tool.namespace is None else {"namespace": tool.namespace}
        kind = "function_call" if self._reader is None else "custom_tool_call"
        self._events = events
        self._name = name
        self.index = index
        self._fields = {"type": kind, "call_id": call_id, "name": tool.name, **namespace}
        self._pieces: list[str] = []

    def append(self, arguments: str) -> bytes:
        """Return the events of a piece of the argument text."""
        return self._append(arguments if self._reader is None else self._reader.feed(arguments))

    def end(self) -> bytes:
        """Return the last events of its argument text."""
        events = b"" if self._reader is None else self._append(self._reader.end())
        return events + self._event("done", **{self._field: "".join(self._pieces)})

    def to_json(self, status: Status) -> Json:
        """Return the item as JSON, with its argument text so far."""
        status_field = {"status": status} if self._reader is None else {}  # custom calls have no status
        return {"id": self._name, **self._fields, self._field: "".join(self._pieces), **status_field}

    def _append(self, piece: str) -> bytes:
        if not piece:
            return b""
        self._pieces.append(piece)
        return self._event("delta", delta=piece)

    def _event(self, stage: str, **fields: Any) -> bytes:
        ids = {"item_id": self._name, "output_index": self.index}
        return self._events.write(f"response.{self._event_name}.{stage}", **ids, **fields)


class ResponsesRenderer(ResponseRenderer):
    """Renders one response."""

    stream_format = EVENT_STREAM

    def __init__(self, body: Mapping[str, Any], identity: CallIdentity) -> None:
        include = included(body)
        self._body = body
        self._identity = identity
        self._tools = read_tools(body, ignore_hosted=True)
        self._adds_logprobs = LOGPROBS in include
        # An event with logprobs has an effect even if it has no text.
        self.text_writer = None if self._adds_logprobs else self._writer
        self._adds_seal = ENCRYPTED in include
        self._events = Events()
        self._begun = False
        self._items: list[TextItem | CallItem] = []
        self._reasoning: list[TextItem] = []
        self._messages: list[TextItem] = []
        self._open: TextItem | CallItem | None = None
        self._fed: tuple[TextItem, PartKind] | None = None  # where the text of the last chunk was added
        self._calls: dict[int, CallItem] = {}
        self._held = HeldPieces()
        self._unnamed: dict[int, Json] = {}  # calls without a name so far
        self._logprobs: list[Json] = []  # of tokens without text so far
        self._status: Status = "completed"
        self._last_call = TEXT  # its index, known at the end
        self._final: Json = {}

    def feed(self, chunk: Json) -> bytes:
        events, self._fed = [self._begin()], None
        for choice in chunk.get("choices") or ():
            if choice.get("index"):  # a sampling rule of the rollout may set `n`; only the first choice is rendered
                continue
            if self._adds_logprobs:
                self._logprobs.extend(logprob_entries(choice.get("logprobs")))
            events += self._pieces(choice.get("delta") or {})
        return b"".join(events)

    def _writer(self) -> WriteTexts | None:
        """Return what writes further texts into events of the part that the last one belongs to."""
        return None if self._fed is None else self._fed[0].writer(self._fed[1])

    def finish(self, response: Json | None, error: str | None = None) -> bytes:
        events = [self._begin()]
        choices = (response or {}).get("choices")
        self._last_call = max([*self._calls, *self._held.calls, *self._unnamed], default=TEXT)
        if error is not None or not choices:
            self._status = "failed"
            return events[0] + self._last(failure(error or "The engine's response ended early."), response)
        self._status, reason = ending(choices[0].get("finish_reason"))
        events.append(self._held.release())
        events.append(self._begin_missing(choices[0].get("message") or {}))
        if self._messages:
            self._messages[-1].add_logprobs(self._logprobs)
        events += [self._end_open(), self._last(reason, response)]
        return b"".join(events)

    def whole(self, response: Json) -> Json:
        """Return the unstreamed response, which a stream has in its last event."""
        choice = response["choices"][0]
        message = choice.get("message") or {}
        calls = [{**call, "index": number} for number, call in enumerate(message.get("tool_calls") or ())]
        delta = {**message, "tool_calls": calls}
        self.feed({"choices": [{"delta": delta, "logprobs": choice.get("logprobs")}]})
        self.finish(response)
        return self._final

    def _begin(self) -> bytes:
        if self._begun:
            return b""
        self._begun = True
        response = make_response(self._body, self._identity)
        kinds = ("response.created", "response.in_progress")
        return b"".join(self._events.write(kind, response=response) for kind in kinds)

    def _pieces(self, delta: Json) -> Iterator[bytes]:
        """Yield the events of the pieces of a delta."""
        take = self._held.take
        if isinstance(reasoning := reasoning_of(delta), str):
            yield take(TEXT, self._add_reasoning, reasoning)
        if isinstance(content := delta.get("content"), str) and content:
            yield take(TEXT, self._add_content, "output_text", content)
        if isinstance(refusal := delta.get("refusal"), str) and refusal:
            yield take(TEXT, self._add_content, "refusal", refusal)
        for call in delta.get("tool_calls") or ():
            yield take(call["index"], self._add_call, call)

    def _add_reasoning(self, piece: str) -> bytes:
        item, events = self._open_text("rs", self._reasoning, {"type": "reasoning", "summary": []})
        self._fed = item, "reasoning_text"
        return events + item.append("reasoning_text", piece)

    def _add_content(self, kind: Literal["output_text", "refusal"], piece: str) -> bytes:
        item, events = self._open_message()
        self._fed = item, kind
        if kind == "refusal":
            return events + item.append(kind, piece)
        logprobs, self._logprobs = self._logprobs, []
        return events + item.append(kind, piece, logprobs)

    def _open_message(self) -> tuple[TextItem, bytes]:
        return self._open_text("msg", self._messages, {"type": "message", "role": "assistant"})

    def _open_text(self, kind: str, items: list[TextItem], fields: Json) -> tuple[TextItem, bytes]:
        """Return the open item of this kind, and the events that end another one and begin it."""
        if items and self._open is items[-1]:
            return items[-1], b""
        events = self._end_open()
        item = TextItem(self._events, item_name(kind, self._identity.step_id, len(items)), len(self._items), fields)
        items.append(item)
        return item, events + self._begin_item(item)

    def _begin_item(self, item: TextItem | CallItem) -> bytes:
        self._items.append(item)
        self._open = item
        return self._item_event("added", item, "in_progress")

    def _item_event(self, stage: str, item: TextItem | CallItem, status: Status) -> bytes:
        kind = f"response.output_item.{stage}"
        return self._events.write(kind, output_index=item.index, item=item.to_json(status))

    def _add_call(self, call: Json) -> bytes:
        index = call["index"]
        function = call.get("function") or {}
        arguments = function.get("arguments") or ""
        if not isinstance(arguments, str):  # from servers with objects in their own protocol (Ollama)
            arguments = orjson.dumps(arguments).decode()
        if index in self._calls:
            return self._calls[index].append(arguments)
        waiting = self._unnamed.setdefault(index, {"id": None, "arguments": []})
        waiting["id"] = call.get("id") or waiting["id"]
        waiting["arguments"].append(arguments)
        return self._open_call(index, function["name"]) if function.get("name") else b""

    def _open_call(self, index: int, chat: str) -> bytes:
        waiting = self._unnamed.pop(index)
        tool, step = self._tools.of(chat), self._identity.step_id
        kind = "fc" if tool.kind == "function" else "ctc"
        name = item_name(kind, step, index)
        call_id = waiting["id"] or item_name("call", step, index)
        events = self._end_open()
        item = self._calls[index] = CallItem(self._events, name, len(self._items), tool, call_id)
        self._held.open_call = index
        return events + self._begin_item(item) + item.append("".join(waiting["arguments"]))

    def _begin_missing(self, message: Json) -> bytes:
        """Begin the items that have no events yet: calls without a name, an empty text, the message of an empty response."""
        events = [self._open_call(index, "") for index in sorted(self._unnamed)]
        if message.get("content") == "" and not self._messages:
            events.append(self._add_content("output_text", ""))
        if not self._items:
            events.append(self._open_message()[1])
        return b"".join(events)

    def _end_open(self) -> bytes:
        """End the open item; reasoning ends with its seal."""
        item, self._open = self._open, None
        if item is None:
            return b""
        if isinstance(item, CallItem):
            events = item.end()
        else:
            is_sealed = self._adds_seal and bool(self._reasoning) and item is self._reasoning[-1]
            events = item.end({"encrypted_content": seal(item.text_of("reasoning_text"))} if is_sealed else {})
        return events + self._item_event("done", item, self._status_of(item))

    def _status_of(self, item: TextItem | CallItem) -> Status:
        """Return the status of an item. A cut response has one incomplete item: its last call, else its last item."""
        unfinished = self._items[-1] if self._last_call == TEXT else self._calls.get(self._last_call)
        return "completed" if self._status == "completed" or item is not unfinished else "incomplete"

    def _last(self, reason: Json, response: Json | None) -> bytes:
        self._final = make_response(
            self._body,
            self._identity,
            status=self._status,
            output=[item.to_json(self._status_of(item)) for item in self._items],
            usage=(response or {}).get("usage"),
            reason=reason,
        )
        return self._events.write(f"response.{self._status}", response=self._final)


def response_object(step: Step) -> Json:
    """Return the response object of a complete call, as it was first returned."""
    return ResponsesRenderer(step.request, CallIdentity.of(step)).whole(dict(step.response or {}))


def resolve_references(
    before: Step | None, named: Iterable[Step], calls: Mapping[str, Mapping[str, Any]]
) -> ResolvedReferences:
    """Return the references of a call: messages of the call before it, items of `named` calls, sampled functions by call id.

    The call continues exactly the messages that were sent for the call before, and the message it sampled. The instructions
    of a call do not apply to later ones (https://platform.openai.com/docs/api-reference/responses).
    """
    steps = list(named)
    items = {item["id"]: item for step in steps for item in input_items(step)}
    for step in steps:  # an item of a response takes precedence over a client's copy with the same id
        items |= {item["id"]: item for item in response_object(step)["output"]}
    messages: list[Json] = []
    if before is not None:
        messages = [*_without(before.request.get("instructions"), messages_of(before)), sampled(before)]
    own = {call["id"]: call["function"] for message in messages for call in message.get("tool_calls") or ()}
    return ResolvedReferences(messages, items, {**calls, **own})


def _without(instructions: object, messages: Sequence[Json]) -> Sequence[Json]:
    first = messages[0].get("content") if messages else None
    if not isinstance(instructions, str) or not isinstance(first, str) or not first.startswith(instructions):
        return messages
    rest = first[len(instructions) :].removeprefix("\n\n")
    return [{"role": "system", "content": rest}, *messages[1:]] if rest else messages[1:]


def sampled(step: Step) -> Json:
    """Return the message that a call sampled, with all fields that engines read."""
    message = (step.response or {})["choices"][0].get("message") or {}
    fields: Json = {"role": "assistant", "content": message.get("content")}
    fields |= {name: message[name] for name in (*THOUGHTS, "refusal") if message.get(name)}
    if message.get("tool_calls"):
        fields["tool_calls"] = [
            {
                "id": call.get("id") or item_name("call", step.step_id, number),
                "type": "function",
                "function": call["function"],
            }
            for number, call in enumerate(message["tool_calls"])
        ]
    return fields


def input_items(step: Step) -> list[Json]:
    """Return the input items of a call, each with an id, and the text of messages as a part."""
    value = step.request.get("input") or ()
    entries = [{"role": "user", "content": value}] if isinstance(value, str) else value
    return [
        {"id": item_name("in", step.step_id, number), "type": "message", **item, **_parts(item)}
        for number, item in enumerate(entries)
    ]


def _parts(item: Json) -> Json:
    content = item.get("content")
    if not isinstance(content, str):
        return {}
    if item.get("role") == "assistant":
        return {"content": [{"type": "output_text", "text": content, "annotations": []}]}
    return {"content": [{"type": "input_text", "text": content}]}


# OpenAI's own; another status is an invalid request below 500, else a server error.
_TYPES: Final = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
_MAX_MESSAGE: Final = 2000  # characters of a response in no known error format


class Responses(Translator):
    """`POST /v1/responses`."""

    name: DialectName = "responses"
    read = staticmethod(read)

    def references(self, body: Mapping[str, Any]) -> References:
        items = body.get("input")
        return References(text_or_none(body.get("previous_response_id")), item_ids_from(items), call_ids_from(items))

    def renderer(self, body: Mapping[str, Any], identity: CallIdentity) -> ResponsesRenderer:
        return ResponsesRenderer(body, identity)

    def error(self, error: ProxyError) -> bytes:
        return openai_error(error)

    def engine_error(self, status: int, text: str) -> bytes:
        """Return the body of an engine's error: its message, param and code. vLLM and llama.cpp nest them, SGLang does not."""
        fields = _error_fields(text)
        message = fields.get("message")
        kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
        if not isinstance(message, str) or not message:
            message = text.strip()[:_MAX_MESSAGE] or f"The engine returned status {status} without a message."
        return orjson.dumps(
            {
                "error": {
                    "message": message,
                    "type": kind,
                    "param": text_or_none(fields.get("param")),
                    "code": text_or_none(fields.get("code")),  # vLLM's and SGLang's repeat the status
                }
            }
        )


def _error_fields(text: str) -> dict[str, Any]:
    try:
        body, _ = read_json(text.encode("utf-8", "replace"))
    except NotJson:
        return {}
    inner = body.get("error") if isinstance(body, dict) and "error" in body else body
    if isinstance(inner, str):
        return {"message": inner}
    return inner if isinstance(inner, dict) else {}


RESPONSES: Final = Responses()
