"""Hypothesis strategies for chat responses, their chunks, and what the official OpenAI SDK reads from ours."""

import json

import orjson
from hypothesis import strategies as st
from tests.support.anthropic_events import folded
from tests.support.odd_values import paths_in

from proxy.protocols.dialects.base import CallIdentity, ResolvedReferences
from proxy.protocols.dialects.responses import RESPONSES

IDENTITY = CallIdentity("01ARZ3NDEKTSV4RRFFQ69G5FAV", 1_790_000_000, "gpt-5")
TOOLS = [
    {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": False},
    {"type": "custom", "name": "patch", "description": "Patches files."},
    {"type": "namespace", "name": "crm", "description": "d", "tools": [{"type": "function", "name": "find"}]},
]
BODY = {"model": "gpt-5", "input": "hi", "tools": TOOLS}
SEALED = {**BODY, "include": ["reasoning.encrypted_content", "message.output_text.logprobs"]}

TEXT = st.text(max_size=12)
TEXTS = st.text(min_size=1, max_size=12) | st.sampled_from(['é\n"\\', "\\ud83d", "🙂"])


def argument_text(text, *, spaced, plain):
    """Return the argument text of a custom tool call, as models format it."""
    separators = (", ", ": ") if spaced else (",", ":")
    return json.dumps({"input": text}, separators=separators, ensure_ascii=plain)


FREEFORM = (
    st.builds(argument_text, TEXTS, spaced=st.booleans(), plain=st.booleans()) | TEXT | st.just('{"input": "cut \\u00')
)
CALL = st.tuples(st.sampled_from(["look", "crm__find", "unheard_of"]), TEXT | st.just('{ "a":1.0 }')) | st.tuples(
    st.just("patch"), FREEFORM
)


@st.composite
def messages(draw, thought="reasoning"):
    """Draw a message as engines return it: every kind of content, reasoning, and calls with unique IDs."""
    message = {"role": "assistant", "content": draw(st.none() | TEXT)}
    if thoughts := draw(st.none() | TEXTS):
        message[thought] = thoughts
    calls = draw(st.lists(CALL, max_size=3))
    if calls:
        message["tool_calls"] = [
            {"id": f"chatcmpl-tool-{number}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for number, (name, arguments) in enumerate(calls)
        ]
    return message


def response_of(message, finish_reason="stop", **fields):
    """Return the unstreamed response with this message."""
    usage = {"prompt_tokens": 5, "completion_tokens": 7, "total_tokens": 12}
    choice = {"index": 0, "message": message, "finish_reason": finish_reason, **fields}
    return {"id": "chatcmpl-1", "object": "chat.completion", "model": "m", "choices": [choice], "usage": usage}


def cut(draw, text):
    """Split the text into pieces, which may be empty."""
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=4)))
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@st.composite
def in_chunks(draw, message, finish_reason="stop"):
    """Return the chunks of a stream with this message, in the order in which engines send its fields."""
    deltas = [{"role": "assistant", "content": ""}] if draw(st.booleans()) else []
    for name in ("reasoning", "reasoning_content", "content"):
        deltas += [{name: piece} for piece in cut(draw, message.get(name) or "")]
    for index, call in enumerate(message.get("tool_calls") or ()):
        function = call["function"]
        pieces = cut(draw, function["arguments"])
        first = {"name": function["name"]} | ({"arguments": pieces.pop(0)} if draw(st.booleans()) else {})
        deltas.append({"tool_calls": [{"index": index, "id": call["id"], "type": "function", "function": first}]})
        deltas += [{"tool_calls": [{"index": index, "function": {"arguments": piece}}]} for piece in pieces]
    chunks = [_chunk(delta) for delta in _joined(draw, deltas)]
    if not chunks or draw(st.booleans()):
        chunks.append(_chunk({}))
    chunks[-1]["choices"][0]["finish_reason"] = finish_reason
    usage = response_of(message)["usage"]
    return [*chunks, {"object": "chat.completion.chunk", "model": "m", "choices": [], "usage": usage}]


def _joined(draw, deltas):
    """Merge some neighbouring chunks that have different fields."""
    joined = []
    for delta in deltas:
        if joined and not joined[-1].keys() & delta.keys() and draw(st.booleans()):
            joined[-1] = joined[-1] | delta
        else:
            joined.append(delta)
    return joined


def _chunk(delta):
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
    return {"id": "chatcmpl-1", "object": "chat.completion.chunk", "model": "m", "choices": [choice]}


def stream_of(body, chunks, error=None):
    """Return the whole stream that a client gets."""
    renderer = RESPONSES.renderer(body, IDENTITY)
    stream = b"".join([renderer.feed(chunk) for chunk in chunks])
    return stream + renderer.finish(folded(chunks) if error is None else None, error)


def events_of(stream):
    """Return the events of a stream; assert that each `event` line equals the type in its data."""
    events = []
    for block in stream.decode().split("\n\n")[:-1]:
        kind, text = block.split("\n")
        event = orjson.loads(text.removeprefix("data: "))
        assert kind == f"event: {event['type']}"
        events.append(event)
    return events


def as_chat(message, thought="reasoning"):
    """Return the message that a chat client sends back, with the field for reasoning that the engine reads."""
    thoughts = message.get("reasoning") or message.get("reasoning_content")
    calls = [{name: call[name] for name in ("id", "type", "function")} for call in message.get("tool_calls") or ()]
    return (
        {"role": "assistant", "content": message["content"]}
        | ({thought: thoughts} if thoughts else {})
        | ({"tool_calls": calls} if calls else {})
    )


def sampled_calls(message):
    """Return the functions of calls by call ID, as the rollout's earlier steps have them."""
    return {call["id"]: call["function"] for call in message.get("tool_calls") or ()}


# A call with everything in it, to be changed anywhere.
RICH = {
    "model": "m", "instructions": "i", "stream": True, "temperature": 0.5, "max_output_tokens": 5, "top_logprobs": 2,
    "include": ["message.output_text.logprobs", "reasoning.encrypted_content"], "metadata": {"a": "b"}, "user": "u",
    "reasoning": {"effort": "low", "summary": "auto"}, "chat_template_kwargs": {"a": 1}, "parallel_tool_calls": True,
    "text": {"format": {"type": "json_schema", "name": "n", "schema": {}, "strict": True, "description": "d"}},
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "look"}]},
    "previous_response_id": "resp_1", "background": False, "conversation": None, "prompt": None, "max_tool_calls": 1,
    "truncation": "auto", "store": True, "seed": 1,
    "tools": [
        *TOOLS, {"type": "custom", "name": "p", "format": {"type": "grammar", "syntax": "lark", "definition": "d"}},
    ],
    "input": [
        {"role": "developer", "content": "d"},
        {"type": "message", "role": "user", "content": [
            {"type": "input_text", "text": "t"}, {"type": "input_image", "image_url": "u", "detail": "low"},
            {"type": "input_file", "file_data": "data:text/plain;base64,w6k=", "filename": "f"},
            {"type": "input_audio", "input_audio": {"data": "d", "format": "wav"}},
        ]},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "s"}], "encrypted_content": "x",
         "content": [{"type": "reasoning_text", "text": "r"}]},
        {"type": "message", "id": "msg_1", "role": "assistant", "content": [
            {"type": "output_text", "text": "t", "annotations": []}, {"type": "refusal", "refusal": "r"},
        ]},
        {"type": "function_call", "id": "fc_1", "call_id": "c", "name": "look", "namespace": "crm", "arguments": "{}"},
        {"type": "custom_tool_call", "call_id": "p", "name": "patch", "input": "i"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "o"}]},
        {"type": "custom_tool_call_output", "call_id": "p", "output": "o"},
        {"type": "item_reference", "id": "msg_0"},
        {"type": "agent_message", "author": "/a", "content": [{"type": "encrypted_content", "encrypted_content": "e"}]},
    ],
}  # fmt: skip
EARLIER = ResolvedReferences(items={"msg_0": {"role": "assistant", "content": "a"}})


def changed(value, at, part):
    """Return the value with something else at a path, if it has that path."""
    if not at:
        return part
    if isinstance(value, dict) and at[0] in value:
        return value | {at[0]: changed(value[at[0]], at[1:], part)}
    if isinstance(value, list):
        return [changed(element, at[1:], part) if number == at[0] else element for number, element in enumerate(value)]
    return value


PATHS = paths_in(RICH)
ODD = [
    None, True, 0, -0.5, "", "é", [], {}, [None], [[]], [{}], ["a"], [{"type": "a"}], {"type": 1}, {"a": {}}, {"id": "x"},
    {"type": "function"}, {"type": "web_search"}, {"type": "custom", "name": "c"}, [{"type": "input_text", "text": "a"}],
    "assistant", "auto",
]  # fmt: skip


@st.composite
def odd_bodies(draw):
    """Draw that call with some of its values replaced."""
    body = RICH
    for _ in range(draw(st.integers(1, 3))):
        body = changed(body, draw(st.sampled_from(PATHS)), draw(st.sampled_from(ODD)))
    return body
