"""Responses as the official Anthropic SDK reads them: its models, its accumulation of streams, and what it sends back."""

from typing import Annotated, Any

import httpx2
import orjson
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message, RawMessageStreamEvent
from hypothesis import strategies as st
from pydantic import Field, TypeAdapter

from proxy.errors import ProxyError
from proxy.protocols.accumulators import ChatAccumulator
from proxy.protocols.dialects.base import CallIdentity, ResolvedReferences, TranslationOptions, Translator
from proxy.protocols.dialects.gemini import alt_from, bound_fields, read_target
from proxy.protocols.dialects.translation import call_ids

EVENT = TypeAdapter(Annotated[RawMessageStreamEvent, Field(discriminator="type")])


def events_of(stream: bytes) -> list[dict]:
    """Return the events of a stream; each is framed as the API does it and conforms to the SDK's model."""
    events = []
    for block in stream.split(b"\n\n")[:-1]:
        name, _, text = block.partition(b"\n")
        event = orjson.loads(text.removeprefix(b"data: "))
        assert name == b"event: " + event["type"].encode()
        if event["type"] not in {"ping", "error"}:
            EVENT.validate_python(event)
        events.append(event)
    assert stream == b"" or stream.endswith(b"\n\n")
    return events


def accumulated(stream: bytes) -> Message:
    """Return the message that the SDK has at the end of a stream."""
    snapshot, texts = None, {}
    for event in events_of(stream):
        if event["type"] != "ping":
            built = EVENT.validate_python(event)
            snapshot = accumulate_event(event=built, current_snapshot=snapshot, json_bufs=texts)
    return snapshot


def plain(message: Message | dict) -> dict:
    """Return a message as JSON, without null values."""
    read = message if isinstance(message, Message) else Message.model_validate(message)
    return read.model_dump(mode="json", exclude_none=True, warnings="error")


def sampled_calls(message: dict, step_id: str, *prefix: str) -> dict[str, dict]:
    """Return the sampled functions of a message's calls by the ids that clients receive."""
    calls = message.get("tool_calls") or []
    return {name: call["function"] for name, call in zip(call_ids(calls, step_id, *prefix), calls, strict=True)}


def sent_back(message: Message | dict, *, after: str = "go on") -> list[dict]:
    """Return the turns that an agent sends after this response: it, and the results of its calls."""
    read = message if isinstance(message, Message) else Message.model_validate(message)
    content = [block.model_dump(mode="json", exclude_unset=True) for block in read.content]
    results = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": "r"} for block in content if "input" in block
    ]
    return [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": content},
        {"role": "user", "content": results or after},
    ]


def folded(chunks: list[dict]) -> dict:
    """Return the response accumulated from these chunks."""
    fold = ChatAccumulator()
    for chunk in chunks:
        fold.feed(chunk)
    return fold.finish()


# --- messages that models sample -------------------------------------------------------------------------------------

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.sampled_from([0.5, 1e-7, 1e300]) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("abé"), inner, max_size=2),
    max_leaves=3,
)
OBJECTS = st.dictionaries(st.sampled_from(["city", "a", "\n"]), VALUES, max_size=3)


@st.composite
def arguments(draw) -> str:
    """Draw the text of a call's arguments: formatted in any way, truncated, or not JSON."""
    import json

    value = draw(OBJECTS)
    text = draw(
        st.sampled_from(
            [
                json.dumps(value, ensure_ascii=False),
                json.dumps(value),
                json.dumps(value, indent=2),
                orjson.dumps(value).decode(),
                " " + orjson.dumps(value).decode() + "\n",
            ]
        )
    )
    end = draw(st.just(len(text)) | st.integers(0, len(text)))
    return text[:end] + draw(st.sampled_from(["", "", "", "}", "x", '"', "\n"]))


@st.composite
def messages(draw) -> dict:
    """Draw a chat message as engines return it: any field may be missing, null or empty."""
    thought = draw(st.none() | st.text(min_size=1, max_size=4))
    message: dict[str, Any] = {"role": "assistant", "content": draw(st.none() | st.text(max_size=4))}
    if draw(st.booleans()):
        message["refusal"] = None
    if thought is not None or draw(st.booleans()):
        message[draw(st.sampled_from(["reasoning", "reasoning_content"]))] = thought
    calls = [
        {
            "id": draw(st.sampled_from([f"call_{position}", f"functions.f:{position}", "same", "", None])),
            "type": "function",
            "function": {"name": draw(st.sampled_from(["f", "g"])), "arguments": draw(arguments())},
        }
        for position in range(draw(st.integers(0, 2)))
    ]
    return message | ({"tool_calls": calls} if calls else {})


def response_of(message: dict, finish: str | None = None, **choice: Any) -> dict:
    """Return an unstreamed chat response with this message."""
    ended = finish or ("tool_calls" if message.get("tool_calls") else "stop")
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1795229441,
        "model": "tiny",
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": ended, **choice}],
        "usage": {"prompt_tokens": 33, "completion_tokens": 5, "total_tokens": 38},
    }


def atoms(message: dict) -> list[tuple]:
    """Split a message into the smallest pieces of a stream: one character each, or the start of a call."""
    pieces: list[tuple] = []
    for name in ("reasoning", "reasoning_content", "content"):
        pieces += [(name, char) for char in message.get(name) or ""]
    for position, call in enumerate(message.get("tool_calls") or ()):
        opening = {key: value for key, value in call.items() if key != "function"}
        pieces.append(("tool_calls", {"index": position, **opening, "function": {"name": call["function"]["name"]}}))
        pieces += [
            ("tool_calls", {"index": position, "function": {"arguments": char}})
            for char in call["function"]["arguments"]
        ]
    return pieces


def chunks_of(pieces: list[tuple], sizes: list[int], response: dict, *, apart: bool) -> list[dict]:
    """Return the chunks of a stream with this many pieces in each delta, the finish reason with the last of them or
    not.
    """
    deltas: list[dict] = [{"role": "assistant", "content": ""}]
    position = turn = 0
    while position < len(pieces):
        size = sizes[turn % len(sizes)] if sizes else 1
        deltas.append(_delta(pieces[position : position + size]))
        position, turn = position + size, turn + 1
    head = {key: response[key] for key in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    chunks = [head | {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    if apart:
        chunks.append(head | {"choices": [{"index": 0, "delta": {}, "finish_reason": None}]})
    end = {key: value for key, value in response["choices"][0].items() if key not in {"index", "message", "logprobs"}}
    chunks[-1]["choices"][0] |= end
    return [*chunks, head | {"choices": [], "usage": response["usage"]}]


def _delta(pieces: list[tuple]) -> dict:
    """Merge pieces into one delta: texts by field, pieces of a call by its index."""
    delta: dict[str, Any] = {}
    for name, piece in pieces:
        if name != "tool_calls":
            delta[name] = delta.get(name, "") + piece
            continue
        calls = delta.setdefault("tool_calls", [])
        if calls and calls[-1]["index"] == piece["index"]:
            function = calls[-1]["function"]
            function["arguments"] = function.get("arguments", "") + piece["function"]["arguments"]
        else:
            calls.append({**piece, "function": dict(piece["function"])})
    return delta


class Served:
    """A server of a dialect, for an SDK, in front of an engine that samples these messages, one per call."""

    def __init__(self, dialect: Translator, *replies: Any) -> None:
        self.dialect, self.replies = dialect, list(replies)
        self.bodies: list[dict] = []
        self.chats: list[dict] = []
        self.sampled: dict[str, dict] = {}

    def __call__(self, request: httpx2.Request) -> httpx2.Response:
        if request.method == "GET":
            models = self.dialect.models([{"id": "policy", "created": 1, "max_model_len": 4096}])
            return httpx2.Response(200, json=models)
        body = orjson.loads(request.content)
        if self.dialect.name == "gemini":
            target = read_target(request.url.raw_path.decode().partition("?")[0], request.method)
            body |= bound_fields(target, alt_from(request.url.params))
        self.bodies.append(body)
        try:
            chat = self.dialect.read(body, TranslationOptions(), ResolvedReferences(calls=self.sampled))
            reply = self.replies.pop(0)
            if isinstance(reply, ProxyError):
                raise reply
        except ProxyError as error:
            return httpx2.Response(error.status, content=self.dialect.error(error))
        self.chats.append(chat)
        return self.respond(body, reply if "choices" in reply else response_of(reply))

    def respond(self, body: dict, response: dict) -> httpx2.Response:
        """Render a response of the engine."""
        step = f"s{len(self.chats)}"
        renderer = self.dialect.renderer(body, CallIdentity(step, 1795229441, body["model"]))
        message = response["choices"][0]["message"]
        self.sampled |= sampled_calls(message, step, *(["call"] if self.dialect.name == "gemini" else []))
        if not self.chats[-1].get("stream"):
            return httpx2.Response(200, content=orjson.dumps(renderer.whole(response)))
        chunks = chunks_of(atoms(message), [2, 5, 1], response, apart=True)
        end = renderer.finish(None, "the engine broke off") if message.get("broke") else None
        stream = b"".join(renderer.feed(chunk) for chunk in chunks) + (end or renderer.finish(response))
        kind = (
            renderer.stream_format.content_type if self.dialect.name == "gemini" else "text/event-stream; charset=utf-8"
        )
        return httpx2.Response(200, content=stream, headers={"content-type": kind})
