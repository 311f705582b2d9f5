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
    answer,
    ending,
    failure,
    logprob_entries,
    seal,
)
from proxy.protocols.dialects.responses.tools import read_tools
from proxy.protocols.dialects.translation import CallIdentity, Json

THOUGHTS = ("reasoning", "reasoning_content")  # as engines call them in chat; one that tells both tells them twice

_BROKEN_OFF = "The engine's response ended early."


class ResponsesRenderer:
    """Renders one response. See `proxy.protocols.dialects.translation.ResponseRenderer`."""

    def __init__(self, body: Mapping[str, Any], told: CallIdentity) -> None:
        wanted = included(body)
        self._body = body
        self._told = told
        self._tools = read_tools(body, ignore_hosted=True)
        self._wants_logprobs = LOGPROBS in wanted
        self._wants_seal = ENCRYPTED in wanted
        self._events = Events()
        self._begun = False
        self._items: list[TextItem | CallItem] = []
        self._thoughts: list[TextItem] = []
        self._messages: list[TextItem] = []
        self._open: TextItem | None = None  # of the thoughts or the messages: what is being said
        self._calls: dict[int, CallItem] = {}
        self._unnamed: dict[int, Json] = {}  # calls whose name has not come
        self._logprobs: list[Json] = []  # that no text has come with
        self._final: Json = {}

    def feed(self, chunk: Json) -> bytes:
        """Return the events of this chunk."""
        told = [self._begin()]
        for choice in chunk.get("choices") or ():
            if choice.get("index"):  # a rule of the rollout's may ask for several samples; one is told
                continue
            if self._wants_logprobs:
                self._logprobs.extend(logprob_entries(choice.get("logprobs")))
            told.append(self._take(choice.get("delta") or {}))
        return b"".join(told)

    def finish(self, response: Json | None, error: str | None = None) -> bytes:
        """Return the events that end the stream."""
        told = [self._begin()]
        choices = (response or {}).get("choices")
        if error is not None or not choices:
            why = failure(error or _BROKEN_OFF)
            return told[0] + self._last("failed", why, self._shown("failed"), response)
        told.append(self._supply(choices[0].get("message") or {}))
        status, why = ending(choices[0].get("finish_reason"))
        if self._messages:
            self._messages[-1].note(self._logprobs)
        for item, stands in zip(self._items, self._statuses(status), strict=True):
            if isinstance(item, CallItem):
                told.append(item.end(stands))
            elif item is self._open:
                told.append(self._end_open(stands))
        told.append(self._last(status, why, self._shown(status), response))
        return b"".join(told)

    def whole(self, response: Json) -> Json:
        """Return an unstreamed response: the one that its stream would end with."""
        choice = response["choices"][0]
        message = choice.get("message") or {}
        calls = [{**call, "index": number} for number, call in enumerate(message.get("tool_calls") or ())]
        delta = {**message, "tool_calls": calls}
        self.feed({"choices": [{"delta": delta, "logprobs": choice.get("logprobs")}]})
        self.finish(response)
        return self._final

    def _begin(self) -> bytes:
        """The first two events, once."""
        if self._begun:
            return b""
        self._begun = True
        shown = answer(self._body, self._told)
        kinds = ("response.created", "response.in_progress")
        return b"".join(self._events.write(kind, response=shown) for kind in kinds)

    def _take(self, delta: Json) -> bytes:
        """What one delta says."""
        told = []
        thoughts = next((delta[name] for name in THOUGHTS if delta.get(name)), None)
        if isinstance(thoughts, str):
            told.append(self._think(thoughts))
        if isinstance(content := delta.get("content"), str) and content:
            told.append(self._say("output_text", content))
        if isinstance(refusal := delta.get("refusal"), str) and refusal:
            told.append(self._say("refusal", refusal))
        told.extend(self._call(call) for call in delta.get("tool_calls") or ())
        return b"".join(told)

    def _think(self, piece: str) -> bytes:
        told = b""
        if self._open is None or self._open not in self._thoughts:
            told = self._begin_text(names.REASONING, self._thoughts, {"type": "reasoning", "summary": []})
        assert self._open is not None
        return told + self._open.say("reasoning_text", piece)

    def _say(self, kind: Literal["output_text", "refusal"], piece: str) -> bytes:
        """A piece of the message: of its text, which logprobs stand by, or of a refusal."""
        told = self._begin_message()
        assert self._open is not None
        if kind == "refusal":
            return told + self._open.say(kind, piece)
        logprobs, self._logprobs = self._logprobs, []
        return told + self._open.say(kind, piece, logprobs)

    def _begin_message(self) -> bytes:
        if self._open is not None and self._open in self._messages:
            return b""
        return self._begin_text(names.MESSAGE, self._messages, {"type": "message", "role": "assistant"})

    def _begin_text(self, kind: str, among: list[TextItem], fields: Json) -> bytes:
        """Begin thoughts or a message, which ends what is being said."""
        told = self._end_open("completed")
        name = names.item_name(kind, self._told.step_id, len(among))
        self._open = TextItem(self._events, name, len(self._items), fields)
        among.append(self._open)
        self._items.append(self._open)
        return told + self._open.begin()

    def _call(self, call: Json) -> bytes:
        """A piece of a call, which begins as soon as its name is known."""
        index = call["index"]
        function = call.get("function") or {}
        arguments = function.get("arguments") or ""
        if not isinstance(arguments, str):  # as servers tell them whose own protocol has objects (Ollama's)
            arguments = orjson.dumps(arguments).decode()
        if index in self._calls:
            return self._calls[index].say(arguments)
        waiting = self._unnamed.setdefault(index, {"id": None, "arguments": ""})
        waiting["id"] = call.get("id") or waiting["id"]
        waiting["arguments"] += arguments
        return self._open_call(index, function["name"]) if function.get("name") else b""

    def _open_call(self, index: int, chat: str) -> bytes:
        waiting = self._unnamed.pop(index)
        tool, step = self._tools.of(chat), self._told.step_id
        kind = names.FUNCTION_CALL if tool.kind == "function" else names.CUSTOM_CALL
        name = names.item_name(kind, step, index)
        call_id = waiting["id"] or names.item_name(names.CALL, step, index)
        told = self._end_open("completed")
        item = self._calls[index] = CallItem(self._events, name, len(self._items), tool, call_id)
        self._items.append(item)
        return told + item.begin() + item.say(waiting["arguments"])

    def _supply(self, message: Json) -> bytes:
        """Begin the items that nothing was said of: an empty text, a call without a name; a message of nothing at all."""
        told = [self._open_call(index, "") for index in sorted(self._unnamed)]
        if message.get("content") == "" and not self._messages:
            told.append(self._say("output_text", ""))
        if not self._items:
            told.append(self._begin_message())
        return b"".join(told)

    def _end_open(self, status: Status) -> bytes:
        """End what is being said, thoughts with their seal."""
        item, self._open = self._open, None
        if item is None:
            return b""
        sealed = self._wants_seal and item in self._thoughts
        return item.end(status, **({"encrypted_content": seal(item.said("reasoning_text"))} if sealed else {}))

    def _statuses(self, status: Status) -> list[Status]:
        """How each item ended: all completely, or all but what came last in the message."""
        unfinished = self._calls[max(self._calls)] if self._calls else self._items[-1] if self._items else None
        cut: Status = "completed" if status == "completed" else "incomplete"
        return [cut if item is unfinished else "completed" for item in self._items]

    def _shown(self, status: Status) -> list[Json]:
        return [item.shown(stands) for item, stands in zip(self._items, self._statuses(status), strict=True)]

    def _last(self, status: Status, why: Json, output: Sequence[Json], response: Json | None) -> bytes:
        """The terminal event, and the answer that it holds."""
        usage = (response or {}).get("usage")
        self._final = answer(self._body, self._told, status=status, output=output, usage=usage, why=why)
        return self._events.write(f"response.{status}", response=self._final)
