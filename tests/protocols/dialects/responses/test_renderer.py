"""Responses API output, streamed and unstreamed, its events, and read back as chat messages."""

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.anthropic_events import folded
from tests.support.responses_drawn import (
    BODY,
    IDENTITY,
    SEALED,
    as_chat,
    events_of,
    in_chunks,
    messages,
    response_of,
    sampled_calls,
    stream_of,
)  # fmt: skip

from proxy.protocols.dialects.base import ResolvedReferences, TranslationOptions
from proxy.protocols.dialects.responses import (
    RESPONSES,
    CallItem,
    Events,
    ResponsesRenderer,
    TextItem,
    ending,
    logprob_entries,
    make_response,
    usage_from,
)
from proxy.protocols.dialects.responses.request import unseal
from proxy.protocols.dialects.responses.tools import Tool

DELTA = {
    "output_text": "text",
    "reasoning_text": "text",
    "function_call_arguments": "arguments",
    "custom_tool_call_input": "input",
}


def accumulated(events):
    """Return the output items, built from every event but the last as a client builds them."""
    items = {}
    for event in events[:-1]:
        kind = event["type"]
        if kind == "response.output_item.added":
            assert event["output_index"] == len(items)
            items[event["output_index"]] = event["item"]
        elif kind == "response.content_part.added":
            content = items[event["output_index"]]["content"]
            assert event["content_index"] == len(content)
            content.append(event["part"])
        elif kind.endswith(".delta"):
            item = items[event["output_index"]]
            field = DELTA[kind.split(".")[1]]
            target = item["content"][event["content_index"]] if "content_index" in event else item
            assert event["item_id"] == item["id"]
            target[field] += event["delta"]
            if "logprobs" in event:
                target["logprobs"] += event["logprobs"]
        elif kind.endswith("output_item.done"):
            assert {**event["item"], "status": 0} == {**items[event["output_index"]], "status": 0} | {
                name: value for name, value in event["item"].items() if name == "encrypted_content"
            }
            items[event["output_index"]] = event["item"]
    return [items[index] for index in sorted(items)]


@settings(max_examples=40)
@given(
    message=messages() | messages("reasoning_content"),
    sealed=st.booleans(),
    reason=st.sampled_from(["stop", "length"]),
    data=st.data(),
)
def test_streamed_and_unstreamed_output_agree_for_any_chunking(message, sealed, reason, data):
    """The items built from the events, the last event and the unstreamed response are equal; sequence numbers have no gap."""
    body = SEALED if sealed else BODY
    chunks = data.draw(in_chunks(message, reason))
    stream = stream_of(body, chunks)
    events = events_of(stream)
    whole = RESPONSES.renderer(body, IDENTITY).whole(folded(chunks))

    assert whole == events[-1]["response"]
    assert whole["output"] == accumulated(events)
    assert list(range(len(events))) == [event["sequence_number"] for event in events]
    assert stream == stream_of(body, chunks)


@settings(max_examples=40)
@given(message=messages(), data=st.data())
def test_each_item_ends_before_the_next_begins_and_no_call_before_its_step_is_stored(message, data):
    """finish() is called after the step is stored; pieces of messages with parallel calls may be in any order."""
    chunks = data.draw(in_chunks(message))
    parts, calls = [
        [chunk for chunk in chunks if any("tool_calls" in choice["delta"] for choice in chunk["choices"]) == has_call]
        for has_call in (False, True)
    ]
    shuffled = [*data.draw(st.permutations(parts)), *calls]
    if data.draw(st.booleans()):
        shuffled = data.draw(st.permutations(shuffled))
    renderer = ResponsesRenderer(BODY, IDENTITY)
    before = events_of(b"".join(map(renderer.feed, shuffled)))
    after = events_of(renderer.finish(folded(shuffled)))
    is_open = None
    for event in [*before, *after]:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert is_open is None
            is_open = event["output_index"]
        assert event.get("output_index") == (is_open if "output_index" in event else None)
        if kind == "output_item.done":
            is_open = None

    assert is_open is None
    ended = [event["item"]["type"] for event in before if event["type"] == "response.output_item.done"]
    assert {"reasoning", "message"} >= set(ended)
    assert after[-1]["response"]["output"] == accumulated([*before, *after])


@settings(max_examples=40)
@given(message=messages(), thought=st.sampled_from(["reasoning", "reasoning_content"]))
def test_output_is_read_back_as_the_sampled_message(message, thought):
    """The message that a chat client would return, byte for byte."""
    response = RESPONSES.renderer(BODY, IDENTITY).whole(response_of(message))
    resolved = ResolvedReferences(calls=sampled_calls(message))

    chat = RESPONSES.read({"input": response["output"]}, TranslationOptions(thought=thought), resolved)

    assert [as_chat(message, thought)] == chat["messages"]


@settings(max_examples=40)
@given(message=messages(), data=st.data())
def test_items_without_ids_and_reasoning_without_text_are_read_back(message, data):
    """Older Codex versions omit item ids, and return reasoning only as encrypted content."""
    response = RESPONSES.renderer(SEALED, IDENTITY).whole(response_of(message))
    kept = [
        {name: value for name, value in item.items() if name not in {"id", "status"}} for item in response["output"]
    ]
    kept = [item | ({"content": None} if item["type"] == "reasoning" else {}) for item in kept]
    resolved = ResolvedReferences(calls=sampled_calls(message))

    assert [as_chat(message)] == RESPONSES.read({"input": kept}, TranslationOptions(), resolved)["messages"]
    named = data.draw(st.permutations(response["output"]))
    assert len(RESPONSES.read({"input": named}, TranslationOptions(), resolved)["messages"]) == 1


@settings(max_examples=40)
@given(message=messages(), data=st.data())
def test_the_order_of_deltas_does_not_change_the_message_that_is_read_back(message, data):
    """Engines may send text after a call, or reasoning twice; joined, it is the message that the chunks accumulate to."""
    chunks = data.draw(in_chunks(message))
    shuffled = [*data.draw(st.permutations(chunks[:-2])), *chunks[-2:]]
    message = folded(shuffled)["choices"][0]["message"]
    response = events_of(stream_of(BODY, shuffled))[-1]["response"]

    (back,) = RESPONSES.read(
        {"input": response["output"]}, TranslationOptions(), ResolvedReferences(calls=sampled_calls(message))
    )["messages"]
    for chat in (back, expected := as_chat(message)):
        chat.get("tool_calls", []).sort(key=lambda call: call["id"])
    assert back == expected


def test_text_items_end_when_the_next_begins_and_what_follows_a_call_is_sent_at_the_end():
    """finish() sends the events of the end: no call is complete before its step is stored."""
    renderer = ResponsesRenderer(BODY, IDENTITY)
    deltas = [
        {"role": "assistant", "content": ""}, {"reasoning": "hm"}, {"content": "so"},
        {"tool_calls": [{"index": 0, "id": "c", "function": {"name": "look", "arguments": "{}"}}]},
        {"tool_calls": [{"index": 1, "id": "d", "function": {"name": "look", "arguments": "{"}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": " "}}, {"index": 1, "function": {"arguments": "}"}}]},
        {"content": "and"},
    ]  # fmt: skip
    kinds = [
        [
            event["type"].removeprefix("response.")
            for event in events_of(renderer.feed({"choices": [{"index": 0, "delta": delta}]}))
        ]
        for delta in deltas
    ]
    last = renderer.finish(folded([{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]))
    ends = [event["type"].removeprefix("response.") for event in events_of(last)]

    assert kinds == [
        ["created", "in_progress"],
        ["output_item.added", "content_part.added", "reasoning_text.delta"],
        ["reasoning_text.done", "content_part.done", "output_item.done", "output_item.added", "content_part.added",
         "output_text.delta"],
        ["output_text.done", "content_part.done", "output_item.done", "output_item.added", "function_call_arguments.delta"],
        [],
        ["function_call_arguments.delta"],
        [],
    ]  # fmt: skip
    assert ends == [
        "function_call_arguments.done", "output_item.done", "output_item.added",
        "function_call_arguments.delta", "function_call_arguments.delta",
        "function_call_arguments.done", "output_item.done", "output_item.added",
        "content_part.added", "output_text.delta", "output_text.done", "content_part.done", "output_item.done",
        "completed",
    ]  # fmt: skip


def test_each_finish_reason_has_a_status():
    """The last item of an incomplete response is incomplete."""
    message = {
        "role": "assistant",
        "content": "a",
        "tool_calls": [{"id": "c", "function": {"name": "look", "arguments": "{"}}],
    }
    responses = {
        reason: RESPONSES.renderer(BODY, IDENTITY).whole(response_of(message, reason))
        for reason in ("stop", "tool_calls", "length", "content_filter", "repetition", "abort", "error", None)
    }

    assert {reason: whole["status"] for reason, whole in responses.items()} == {
        "stop": "completed", "tool_calls": "completed", "length": "incomplete", "content_filter": "incomplete",
        "repetition": "incomplete", "abort": "failed", "error": "failed", None: "completed",
    }  # fmt: skip
    assert responses["length"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in responses["length"]["output"]] == ["completed", "incomplete"]
    assert responses["abort"]["error"]["code"] == "server_error"


def test_an_interrupted_response_ends_with_response_failed():
    """It contains the items so far; a stream without events begins and fails."""
    chunk = {"choices": [{"index": 0, "delta": {"content": "so"}}]}
    last = events_of(stream_of(BODY, [chunk], "the engine died"))[-1]
    alone = events_of(ResponsesRenderer(BODY, IDENTITY).finish(None))

    assert (last["type"], last["response"]["error"]["message"]) == ("response.failed", "the engine died")
    assert last["response"]["output"][0]["content"][0]["text"] == "so"
    assert last["response"]["output"][0]["status"] == "incomplete"
    assert [event["type"].removeprefix("response.") for event in alone] == ["created", "in_progress", "failed"]


def test_logprobs_are_sent_with_their_text_if_requested():
    """A token without text sends its logprob with the next text or at the end; ids are stripped, bytes are not."""

    def entry(token):
        return {
            "token": token,
            "logprob": -1.0,
            "bytes": None,
            "id": 7,
            "top_logprobs": [{"token": "x", "logprob": -2.0, "bytes": [120]}],
        }

    chunks = [
        {"choices": [{"index": 0, "delta": {"reasoning": "t"}, "logprobs": {"content": [entry("t")]}}]},
        {"choices": [{"index": 0, "delta": {"content": "é"}, "logprobs": {"content": [entry("é")]}}]},
        {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop", "logprobs": {"content": [entry("")]}}]},
    ]  # fmt: skip
    requested = {**BODY, "include": ["message.output_text.logprobs"]}
    events = events_of(stream_of(requested, chunks))
    (delta,) = [event for event in events if event["type"] == "response.output_text.delta"]
    (done,) = [event for event in events if event["type"] == "response.output_text.done"]

    assert [logprob["token"] for logprob in delta["logprobs"]] == ["t", "é"]
    assert [logprob["token"] for logprob in done["logprobs"]] == ["t", "é", ""]
    assert delta["logprobs"][1].keys() == {"token", "bytes", "logprob", "top_logprobs"}
    assert list("é".encode()) == delta["logprobs"][1]["bytes"]
    assert done["logprobs"] == events[-1]["response"]["output"][-1]["content"][0]["logprobs"]
    assert events_of(stream_of(BODY, chunks))[-1]["response"]["output"][-1]["content"][0]["logprobs"] == []


def test_a_call_without_an_id_gets_one():
    """It depends on the step; a missing name is empty."""
    message = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "", "function": {"name": "look", "arguments": "{}"}}],
    }
    (item,) = RESPONSES.renderer(BODY, IDENTITY).whole(response_of(message))["output"]
    chunk = {
        "choices": [
            {
                "index": 0,
                "delta": {"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]},
                "finish_reason": "length",
            }
        ]
    }
    nameless = events_of(stream_of(BODY, [chunk]))[-1]["response"]["output"]

    assert f"call_{IDENTITY.step_id}_0" == item["call_id"]
    assert [(item["name"], item["arguments"]) for item in nameless] == [("", "{")]


def test_reasoning_is_encrypted_if_requested():
    """In the item's last event and in the response."""
    message = {"role": "assistant", "content": "a", "reasoning": "hm"}
    requested, plain = (
        RESPONSES.renderer(body, IDENTITY).whole(response_of(message))["output"] for body in (SEALED, BODY)
    )

    assert unseal(requested[0]["encrypted_content"]) == "hm"
    assert ["encrypted_content" in item for item in (requested[1], *plain)] == [False, False, False]


def test_arguments_that_are_an_object_become_text():
    """Some servers return objects."""
    call = {"id": "c", "function": {"name": "look", "arguments": {"a": 1}}}
    (item,) = RESPONSES.renderer(BODY, IDENTITY).whole(response_of({"role": "assistant", "tool_calls": [call]}))[
        "output"
    ]

    assert item["arguments"] == '{"a":1}'


def test_a_response_without_content_has_an_empty_message():
    """It is read back: null content has no text part, empty content an empty one."""
    none, empty = (
        RESPONSES.renderer(BODY, IDENTITY).whole(response_of({"role": "assistant", "content": content}))["output"]
        for content in (None, "")
    )

    assert none[0]["content"] == []
    assert empty[0]["content"][0]["text"] == ""


def test_a_refusal_is_a_content_part():
    """vLLM and SGLang return none; other servers do."""
    message = {"role": "assistant", "content": None, "refusal": "no"}
    (item,) = RESPONSES.renderer(BODY, IDENTITY).whole(response_of(message))["output"]

    assert item["content"] == [{"type": "refusal", "refusal": "no"}]
    assert RESPONSES.read({"input": [item]}, TranslationOptions())["messages"] == [message]


def event_types(stream):
    return [event["type"].removeprefix("response.") for event in events_of(stream)]


def test_events_are_numbered_from_zero():
    events = Events()

    assert events.write("a", x=1) == b'event: a\ndata: {"type":"a","sequence_number":0,"x":1}\n\n'
    assert b'"sequence_number":1' in events.write("b")


def test_a_text_items_events_are_in_the_apis_order():
    """An empty delta adds the part and sends no delta event."""
    item = TextItem(Events(), "msg_1", 3, {"type": "message", "role": "assistant"})
    events = events_of(item.append("output_text", "") + item.append("output_text", "a") + item.end({"x": 1}))

    assert [event["type"].removeprefix("response.") for event in events] == [
        "content_part.added", "output_text.delta", "output_text.done", "content_part.done",
    ]  # fmt: skip
    assert {event["output_index"] for event in events} == {3}
    (part,) = [event["part"] for event in events if event["type"].endswith("content_part.done")]
    assert item.to_json("completed") == {
        "id": "msg_1", "type": "message", "role": "assistant", "x": 1, "content": [part], "status": "completed",
    }  # fmt: skip
    assert part["text"] == "a"


def test_text_and_refusal_are_parts_with_their_own_index():
    """Reasoning has no logprobs; a refusal is not output text."""
    item = TextItem(Events(), "msg_1", 0, {})
    text, refusal = events_of(item.append("output_text", "a"))[1], events_of(item.append("refusal", "b"))[1]

    assert (text["content_index"], text["delta"], text["logprobs"]) == (0, "a", [])
    assert (refusal["content_index"], refusal["delta"], "logprobs" in refusal) == (1, "b", False)
    assert (item.text_of("output_text"), item.text_of("refusal"), item.text_of("reasoning_text")) == ("a", "b", "")


def test_argument_deltas_are_forwarded_as_sampled():
    """Valid JSON or not."""
    item = CallItem(Events(), "fc_1", 0, Tool("crm__f", "function", "f", "crm"), "c")
    events = events_of(item.append("{ ") + item.append("") + item.append("x") + item.end())

    assert [event["delta"] for event in events if event["type"].endswith(".delta")] == ["{ ", "x"]
    assert events[-1]["arguments"] == "{ x"
    assert item.to_json("completed") == {
        "id": "fc_1", "type": "function_call", "call_id": "c", "name": "f", "namespace": "crm", "arguments": "{ x",
        "status": "completed",
    }  # fmt: skip


def test_the_input_of_a_custom_tool_is_streamed_without_its_json_quoting():
    """A delta never ends within an escape; arguments without an `input` string are sent when the item ends."""

    def item():
        return CallItem(Events(), "ctc_1", 0, Tool("p", "custom", "p"), "c")

    valid, invalid = item(), item()
    assert [
        [event["delta"] for event in events_of(valid.append(piece))] for piece in ('{"input": "', "a\\", 'n"}')
    ] == [[], ["a"], ["\n"]]
    assert event_types(valid.end()) == ["custom_tool_call_input.done"]
    assert invalid.append("{}") == b""
    assert event_types(invalid.end()) == ["custom_tool_call_input.delta", "custom_tool_call_input.done"]
    assert invalid.to_json("completed") == {
        "id": "ctc_1",
        "type": "custom_tool_call",
        "call_id": "c",
        "name": "p",
        "input": "{}",
    }


def test_a_response_repeats_the_settings_of_its_request():
    """Fields that the request does not set have OpenAI's defaults."""
    body = {
        "instructions": "i", "metadata": {"a": "b"}, "temperature": 0, "max_output_tokens": 5, "previous_response_id": "resp_1",
        "reasoning": {"effort": "low"}, "text": {"verbosity": "low"}, "tool_choice": {"type": "function", "name": "f"},
        "tools": [{"type": "function", "name": "f"}, {"type": "custom", "name": "p"}], "parallel_tool_calls": False,
        "store": False, "truncation": "auto", "top_logprobs": 2, "user": "u",
    }  # fmt: skip
    shown = make_response(body, IDENTITY)

    assert (f"resp_{IDENTITY.step_id}", IDENTITY.created_s, "gpt-5", "in_progress", [], None) == tuple(
        shown[name] for name in ("id", "created_at", "model", "status", "output", "usage")
    )
    assert {name: body[name] for name in body if name not in {"reasoning", "text", "tools"}}.items() <= shown.items()
    assert shown["reasoning"] == {"effort": "low", "summary": None}
    assert shown["text"] == {"verbosity": "low", "format": {"type": "text"}}
    assert shown["tools"][0] == {"type": "function", "name": "f", "parameters": None, "strict": None}
    assert tuple(
        make_response({}, IDENTITY)[name] for name in ("parallel_tool_calls", "tool_choice", "truncation", "store")
    ) == (True, "auto", "disabled", True)


def test_usage_has_cached_and_reasoning_tokens():
    """vLLM and llama.cpp return both in details, SGLang reasoning tokens on the top level."""
    vllm = {
        "prompt_tokens": 5, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 3},
        "completion_tokens_details": {"reasoning_tokens": 2},
    }  # fmt: skip
    expected = {
        "input_tokens": 5, "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0}, "output_tokens": 7,
        "output_tokens_details": {"reasoning_tokens": 2}, "total_tokens": 12,
    }  # fmt: skip
    sglang = {**vllm, "reasoning_tokens": 2, "completion_tokens_details": None}

    assert usage_from(vllm) == usage_from(sglang) == expected
    assert usage_from({"prompt_tokens": 5, "prompt_tokens_details": None})["input_tokens_details"]["cached_tokens"] == 0
    assert usage_from(None) is None


def test_finish_reasons_become_status_and_details():
    assert ending("length") == ("incomplete", {"incomplete_details": {"reason": "max_output_tokens"}})
    assert ending("repetition") == ("incomplete", {"incomplete_details": {"reason": None}})
    assert ending("abort")[0] == "failed"
    assert ending("tool_calls") == ending(None) == ("completed", {})


def test_logprob_entries_without_a_logprob_are_dropped():
    """llama.cpp returns probabilities with `post_sampling_probs`."""
    assert logprob_entries({"content": [{"token": "a", "prob": 0.5}]}) == logprob_entries(None) == []
