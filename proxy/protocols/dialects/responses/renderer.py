"""A chat response, rendered in the format of Responses: whole, or as events.

Reasoning and text end where another item begins: LangChain treats a later piece or end as a new item. Calls end with the
response, since agents run a call as soon as it is complete (Codex), and the step must be stored before.

Invariant: the whole response equals the one in the stream's last event, however the chunks are split. If a stream returns
to reasoning or text after another item, that is an item of its own in the stream.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import orjson

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
        self._open: TextItem | None = None  # the reasoning or message that is being streamed
        self._calls: dict[int, CallItem] = {}
        self._unnamed: dict[int, Json] = {}  # calls whose name is not yet received
        self._logprobs: list[Json] = []  # of tokens whose text is not yet received
        self._final: Json = {}

    def feed(self, chunk: Json) -> bytes:
        """Return the events of this chunk."""
        events = [self._begin()]
        for choice in chunk.get("choices") or ():
            if choice.get("index"):  # a sampling rule of the rollout may set `n`; only the first choice is rendered
                continue
            if self._adds_logprobs:
                self._logprobs.extend(logprob_entries(choice.get("logprobs")))
            events.append(self._take(choice.get("delta") or {}))
        return b"".join(events)

    def finish(self, response: Json | None, error: str | None = None) -> bytes:
        """Return the events that end the stream."""
        events = [self._begin()]
        choices = (response or {}).get("choices")
        if error is not None or not choices:
            reason = failure(error or _ENDED_EARLY)
            return events[0] + self._last("failed", reason, self._output("failed"), response)
        events.append(self._begin_missing(choices[0].get("message") or {}))
        status, reason = ending(choices[0].get("finish_reason"))
        if self._messages:
            self._messages[-1].add_logprobs(self._logprobs)
        for item, item_status in zip(self._items, self._statuses(status), strict=True):
            if isinstance(item, CallItem):
                events.append(item.end(item_status))
            elif item is self._open:
                events.append(self._end_open(item_status))
        events.append(self._last(status, reason, self._output(status), response))
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

    def _take(self, delta: Json) -> bytes:
        """Return the events of one delta."""
        events = []
        reasoning = next((delta[name] for name in REASONING_FIELDS if delta.get(name)), None)
        if isinstance(reasoning, str):
            events.append(self._add_reasoning(reasoning))
        if isinstance(content := delta.get("content"), str) and content:
            events.append(self._add_content("output_text", content))
        if isinstance(refusal := delta.get("refusal"), str) and refusal:
            events.append(self._add_content("refusal", refusal))
        events.extend(self._add_call(call) for call in delta.get("tool_calls") or ())
        return b"".join(events)

    def _add_reasoning(self, piece: str) -> bytes:
        events = b""
        if self._open is None or self._open not in self._reasoning:
            events = self._begin_text(names.REASONING, self._reasoning, {"type": "reasoning", "summary": []})
        assert self._open is not None
        return events + self._open.append("reasoning_text", piece)

    def _add_content(self, kind: Literal["output_text", "refusal"], piece: str) -> bytes:
        """Return the events of a piece of the message's text, with logprobs, or of its refusal."""
        events = self._begin_message()
        assert self._open is not None
        if kind == "refusal":
            return events + self._open.append(kind, piece)
        logprobs, self._logprobs = self._logprobs, []
        return events + self._open.append(kind, piece, logprobs)

    def _begin_message(self) -> bytes:
        if self._open is not None and self._open in self._messages:
            return b""
        return self._begin_text(names.MESSAGE, self._messages, {"type": "message", "role": "assistant"})

    def _begin_text(self, kind: str, items: list[TextItem], fields: Json) -> bytes:
        """End the open item and begin a reasoning item or a message."""
        events = self._end_open("completed")
        name = names.item_name(kind, self._identity.step_id, len(items))
        self._open = TextItem(self._events, name, len(self._items), fields)
        items.append(self._open)
        self._items.append(self._open)
        return events + self._open.begin()

    def _add_call(self, call: Json) -> bytes:
        """Return the events of a piece of a call, which begins as soon as its name is known."""
        index = call["index"]
        function = call.get("function") or {}
        arguments = function.get("arguments") or ""
        if not isinstance(arguments, str):  # from servers whose own protocol has objects (Ollama)
            arguments = orjson.dumps(arguments).decode()
        if index in self._calls:
            return self._calls[index].append(arguments)
        waiting = self._unnamed.setdefault(index, {"id": None, "arguments": ""})
        waiting["id"] = call.get("id") or waiting["id"]
        waiting["arguments"] += arguments
        return self._open_call(index, function["name"]) if function.get("name") else b""

    def _open_call(self, index: int, chat: str) -> bytes:
        waiting = self._unnamed.pop(index)
        tool, step = self._tools.of(chat), self._identity.step_id
        kind = names.FUNCTION_CALL if tool.kind == "function" else names.CUSTOM_CALL
        name = names.item_name(kind, step, index)
        call_id = waiting["id"] or names.item_name(names.CALL, step, index)
        events = self._end_open("completed")
        item = self._calls[index] = CallItem(self._events, name, len(self._items), tool, call_id)
        self._items.append(item)
        return events + item.begin() + item.append(waiting["arguments"])

    def _begin_missing(self, message: Json) -> bytes:
        """Begin the items that have no events yet: calls without a name, an empty text, the message of an empty response."""
        events = [self._open_call(index, "") for index in sorted(self._unnamed)]
        if message.get("content") == "" and not self._messages:
            events.append(self._add_content("output_text", ""))
        if not self._items:
            events.append(self._begin_message())
        return b"".join(events)

    def _end_open(self, status: Status) -> bytes:
        """End the open item; reasoning ends with its seal."""
        item, self._open = self._open, None
        if item is None:
            return b""
        sealed = self._adds_seal and item in self._reasoning
        return item.end(status, **({"encrypted_content": seal(item.text_of("reasoning_text"))} if sealed else {}))

    def _statuses(self, status: Status) -> list[Status]:
        """Return the status of each item: all are completed, or all but the message's last one."""
        unfinished = self._calls[max(self._calls)] if self._calls else self._items[-1] if self._items else None
        cut: Status = "completed" if status == "completed" else "incomplete"
        return [cut if item is unfinished else "completed" for item in self._items]

    def _output(self, status: Status) -> list[Json]:
        statuses = self._statuses(status)
        return [item.to_json(item_status) for item, item_status in zip(self._items, statuses, strict=True)]

    def _last(self, status: Status, reason: Json, output: Sequence[Json], response: Json | None) -> bytes:
        """Return the terminal event, which contains the response."""
        usage = (response or {}).get("usage")
        self._final = make_response(
            self._body, self._identity, status=status, output=output, usage=usage, reason=reason
        )
        return self._events.write(f"response.{status}", response=self._final)
