"""A chat response, rendered in the format of Responses: whole, or as events.

One item is open at a time, as at OpenAI: Agno 3.1 loses a call that is open while another begins, and LangChain 1.7 treats a
later piece of a text as a new item. Reasoning and text end where another item begins; a call ends with the response, and what
follows it is sent then.

Invariant: the whole response equals the one in the stream's last event, however the chunks are split. If a stream returns
to reasoning or text after another item, that is an item of its own in the stream.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Literal

import orjson

from proxy.protocols.dialects.held_pieces import TEXT, HeldPieces, Piece
from proxy.protocols.dialects.responses import item_ids as names
from proxy.protocols.dialects.responses.events import CallItem, Events, TextItem
from proxy.protocols.dialects.responses.request import LOGPROBS, included
from proxy.protocols.dialects.responses.response_object import (
    ENCRYPTED,
    Status,
    ending,
    failure,
    logprob_entries,
    make_response,
    seal,
)
from proxy.protocols.dialects.responses.tools import read_tools
from proxy.protocols.dialects.translation import CallIdentity, Json
from proxy.protocols.sse import EVENT_STREAM

REASONING_FIELDS = ("reasoning", "reasoning_content")  # of chat messages; an engine with both repeats the same text

_ENDED_EARLY = "The engine's response ended early."


class ResponsesRenderer:
    """Renders one response. See `proxy.protocols.dialects.translation.ResponseRenderer`."""

    stream_format = EVENT_STREAM

    def __init__(self, body: Mapping[str, Any], identity: CallIdentity) -> None:
        include = included(body)
        self._body = body
        self._identity = identity
        self._tools = read_tools(body, ignore_hosted=True)
        self._adds_logprobs = LOGPROBS in include
        self._adds_seal = ENCRYPTED in include
        self._events = Events()
        self._begun = False
        self._items: list[TextItem | CallItem] = []
        self._reasoning: list[TextItem] = []
        self._messages: list[TextItem] = []
        self._open: TextItem | CallItem | None = None
        self._calls: dict[int, CallItem] = {}
        self._held = HeldPieces()
        self._unnamed: dict[int, Json] = {}  # calls whose name is not yet received
        self._logprobs: list[Json] = []  # of tokens whose text is not yet received
        self._status: Status = "completed"
        self._last_call = TEXT  # its index, known at the end
        self._final: Json = {}

    def feed(self, chunk: Json) -> bytes:
        """Return the events of this chunk."""
        events = [self._begin()]
        for choice in chunk.get("choices") or ():
            if choice.get("index"):  # a sampling rule of the rollout may set `n`; only the first choice is rendered
                continue
            if self._adds_logprobs:
                self._logprobs.extend(logprob_entries(choice.get("logprobs")))
            events.append(self._held.take(self._pieces(choice.get("delta") or {})))
        return b"".join(events)

    def finish(self, response: Json | None, error: str | None = None) -> bytes:
        """Return the events that end the stream."""
        events = [self._begin()]
        choices = (response or {}).get("choices")
        self._last_call = max([*self._calls, *self._held.calls, *self._unnamed], default=TEXT)
        if error is not None or not choices:
            self._status = "failed"
            return events[0] + self._last(failure(error or _ENDED_EARLY), response)
        self._status, reason = ending(choices[0].get("finish_reason"))
        events.append(self._held.release())
        events.append(self._begin_missing(choices[0].get("message") or {}))
        if self._messages:
            self._messages[-1].add_logprobs(self._logprobs)
        events += [self._end_open(), self._last(reason, response)]
        return b"".join(events)

    def whole(self, response: Json) -> Json:
        """Return an unstreamed response: the one in the last event of its stream."""
        choice = response["choices"][0]
        message = choice.get("message") or {}
        calls = [{**call, "index": number} for number, call in enumerate(message.get("tool_calls") or ())]
        delta = {**message, "tool_calls": calls}
        self.feed({"choices": [{"delta": delta, "logprobs": choice.get("logprobs")}]})
        self.finish(response)
        return self._final

    def _begin(self) -> bytes:
        """Return the first two events, once."""
        if self._begun:
            return b""
        self._begun = True
        response = make_response(self._body, self._identity)
        kinds = ("response.created", "response.in_progress")
        return b"".join(self._events.write(kind, response=response) for kind in kinds)

    def _pieces(self, delta: Json) -> Iterator[Piece]:
        """Yield the pieces of a delta."""
        reasoning = next((delta[name] for name in REASONING_FIELDS if delta.get(name)), None)
        if isinstance(reasoning, str):
            yield TEXT, partial(self._add_reasoning, reasoning)
        if isinstance(content := delta.get("content"), str) and content:
            yield TEXT, partial(self._add_content, "output_text", content)
        if isinstance(refusal := delta.get("refusal"), str) and refusal:
            yield TEXT, partial(self._add_content, "refusal", refusal)
        for call in delta.get("tool_calls") or ():
            yield call["index"], partial(self._add_call, call)

    def _add_reasoning(self, piece: str) -> bytes:
        fields = {"type": "reasoning", "summary": []}
        item, events = self._open_text(names.REASONING, self._reasoning, fields)
        return events + item.append("reasoning_text", piece)

    def _add_content(self, kind: Literal["output_text", "refusal"], piece: str) -> bytes:
        """Return the events of a piece of the message's text, with logprobs, or of its refusal."""
        item, events = self._open_message()
        if kind == "refusal":
            return events + item.append(kind, piece)
        logprobs, self._logprobs = self._logprobs, []
        return events + item.append(kind, piece, logprobs)

    def _open_message(self) -> tuple[TextItem, bytes]:
        return self._open_text(names.MESSAGE, self._messages, {"type": "message", "role": "assistant"})

    def _open_text(self, kind: str, items: list[TextItem], fields: Json) -> tuple[TextItem, bytes]:
        """Return the open item of this kind, and the events that end another one and begin it."""
        if items and self._open is items[-1]:
            return items[-1], b""
        events = self._end_open()
        item = TextItem(
            self._events, names.item_name(kind, self._identity.step_id, len(items)), len(self._items), fields
        )
        items.append(item)
        return item, events + self._begin_item(item)

    def _begin_item(self, item: TextItem | CallItem) -> bytes:
        self._items.append(item)
        self._open = item
        return item.begin()

    def _add_call(self, call: Json) -> bytes:
        """Return the events of a piece of a call, which begins as soon as its name is known."""
        index = call["index"]
        function = call.get("function") or {}
        arguments = function.get("arguments") or ""
        if not isinstance(arguments, str):  # from servers whose own protocol has objects (Ollama)
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
        kind = names.FUNCTION_CALL if tool.kind == "function" else names.CUSTOM_CALL
        name = names.item_name(kind, step, index)
        call_id = waiting["id"] or names.item_name(names.CALL, step, index)
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
        status = self._status_of(item)
        if isinstance(item, CallItem):
            return item.end(status)
        sealed = self._adds_seal and bool(self._reasoning) and item is self._reasoning[-1]
        return item.end(status, **({"encrypted_content": seal(item.text_of("reasoning_text"))} if sealed else {}))

    def _status_of(self, item: TextItem | CallItem) -> Status:
        """Return the status of an item: completed, or incomplete if the response is cut in it: in the last call, else item."""
        unfinished = self._items[-1] if self._last_call == TEXT else self._calls.get(self._last_call)
        return "completed" if self._status == "completed" or item is not unfinished else "incomplete"

    def _last(self, reason: Json, response: Json | None) -> bytes:
        """Return the terminal event, which contains the response."""
        self._final = make_response(
            self._body,
            self._identity,
            status=self._status,
            output=[item.to_json(self._status_of(item)) for item in self._items],
            usage=(response or {}).get("usage"),
            reason=reason,
        )
        return self._events.write(f"response.{self._status}", response=self._final)
