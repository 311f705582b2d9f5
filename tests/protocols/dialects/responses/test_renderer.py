"""Answers told as streams and whole, and read again."""

from hypothesis import given, settings
from hypothesis import strategies as st
from responses_drawn import (
    BODY,
    SEALED,
    TOLD,
    as_chat,
    events_of,
    folded,
    in_chunks,
    messages,
    response_of,
    sampled_calls,
    stream_of,
)  # fmt: skip

from proxy.protocols.dialects.responses import RESPONSES
from proxy.protocols.dialects.responses.renderer import ResponsesRenderer
from proxy.protocols.dialects.responses.response_object import unseal
from proxy.protocols.dialects.translation import ResolvedReferences, TranslationOptions

DELTA = {
    "output_text": "text",
    "reasoning_text": "text",
    "function_call_arguments": "arguments",
    "custom_tool_call_input": "input",
}


def accumulated(events):
    """The answer, put together from every event but the last as a client would."""
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
            at = item["content"][event["content_index"]] if "content_index" in event else item
            assert event["item_id"] == item["id"]
            at[field] += event["delta"]
            if "logprobs" in event:
                at["logprobs"] += event["logprobs"]
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
def test_streamed_and_whole_agree_whatever_the_chunks(message, sealed, reason, data):
    """The stream's events put together, its last event and the whole answer are one answer; numbers go up by one."""
    body = SEALED if sealed else BODY
    chunks = data.draw(in_chunks(message, reason))
    stream = stream_of(body, chunks)
    events = events_of(stream)
    whole = RESPONSES.renderer(body, TOLD).whole(folded(chunks))

    assert whole == events[-1]["response"]
    assert whole["output"] == accumulated(events)
    assert list(range(len(events))) == [event["sequence_number"] for event in events]
    assert stream == stream_of(body, chunks)


@settings(max_examples=40)
@given(message=messages(), thought=st.sampled_from(["reasoning", "reasoning_content"]))
def test_what_was_sampled_comes_back_as_it_was(message, thought):
    """Read again, an answer's items are the message that a client of chat would have sent back, byte for byte."""
    answer = RESPONSES.renderer(BODY, TOLD).whole(response_of(message))
    resolved = ResolvedReferences(calls=sampled_calls(message))

    chat = RESPONSES.read({"input": answer["output"]}, TranslationOptions(thought=thought), resolved)

    assert [as_chat(message, thought)] == chat["messages"]


@settings(max_examples=40)
@given(message=messages(), data=st.data())
def test_items_may_lose_their_names_and_thoughts_their_text(message, data):
    """Older Codex sends back items without ids, and reasoning as it was sealed; the message is the same."""
    answer = RESPONSES.renderer(SEALED, TOLD).whole(response_of(message))
    kept = [{name: value for name, value in item.items() if name not in {"id", "status"}} for item in answer["output"]]
    kept = [item | ({"content": None} if item["type"] == "reasoning" else {}) for item in kept]
    resolved = ResolvedReferences(calls=sampled_calls(message))

    assert [as_chat(message)] == RESPONSES.read({"input": kept}, TranslationOptions(), resolved)["messages"]
    named = data.draw(st.permutations(answer["output"]))
    assert len(RESPONSES.read({"input": named}, TranslationOptions(), resolved)["messages"]) == 1


@settings(max_examples=40)
@given(message=messages(), data=st.data())
def test_the_order_of_fields_makes_no_difference_to_what_comes_back(message, data):
    """Engines may say text after a call, or think again; joined, it is the message that the chunks fold to."""
    chunks = data.draw(in_chunks(message))
    said = [*data.draw(st.permutations(chunks[:-2])), *chunks[-2:]]
    message = folded(said)["choices"][0]["message"]
    answer = events_of(stream_of(BODY, said))[-1]["response"]

    (back,) = RESPONSES.read(
        {"input": answer["output"]}, TranslationOptions(), ResolvedReferences(calls=sampled_calls(message))
    )["messages"]
    for chat in (back, expected := as_chat(message)):
        chat.get("tool_calls", []).sort(key=lambda call: call["id"])
    assert expected == back


def test_what_is_said_ends_where_another_item_begins_and_calls_at_the_end():
    """Nothing of the end is told before `finish`: no call is over before its step is stored."""
    renderer = ResponsesRenderer(BODY, TOLD)
    deltas = [
        {"role": "assistant", "content": ""}, {"reasoning": "hm"}, {"content": "so"},
        {"tool_calls": [{"index": 0, "id": "c", "function": {"name": "look", "arguments": "{}"}}]}, {},
    ]  # fmt: skip
    kinds = [
        [
            event["type"].removeprefix("response.")
            for event in events_of(renderer.feed({"choices": [{"index": 0, "delta": delta}]}))
        ]
        for delta in deltas
    ]

    assert [
        ["created", "in_progress"],
        ["output_item.added", "content_part.added", "reasoning_text.delta"],
        ["reasoning_text.done", "content_part.done", "output_item.done", "output_item.added", "content_part.added",
         "output_text.delta"],
        ["output_text.done", "content_part.done", "output_item.done", "output_item.added", "function_call_arguments.delta"],
        [],
    ] == kinds  # fmt: skip


def test_how_an_answer_ended():
    """Each finish reason has its status; what came last in an unfinished answer is unfinished itself."""
    message = {
        "role": "assistant",
        "content": "a",
        "tool_calls": [{"id": "c", "function": {"name": "look", "arguments": "{"}}],
    }
    wholes = {
        reason: RESPONSES.renderer(BODY, TOLD).whole(response_of(message, reason))
        for reason in ("stop", "tool_calls", "length", "content_filter", "repetition", "abort", "error", None)
    }

    assert {
        "stop": "completed", "tool_calls": "completed", "length": "incomplete", "content_filter": "incomplete",
        "repetition": "incomplete", "abort": "failed", "error": "failed", None: "completed",
    } == {reason: whole["status"] for reason, whole in wholes.items()}  # fmt: skip
    assert {"reason": "max_output_tokens"} == wholes["length"]["incomplete_details"]
    assert ["completed", "incomplete"] == [item["status"] for item in wholes["length"]["output"]]
    assert "server_error" == wholes["abort"]["error"]["code"]


def test_a_broken_answer_ends_in_an_event_that_says_so():
    """The items so far stand in it; a stream that had not begun begins and fails."""
    chunk = {"choices": [{"index": 0, "delta": {"content": "so"}}]}
    last = events_of(stream_of(BODY, [chunk], "the engine died"))[-1]
    alone = events_of(ResponsesRenderer(BODY, TOLD).finish(None))

    assert ("response.failed", "the engine died") == (last["type"], last["response"]["error"]["message"])
    assert "so" == last["response"]["output"][0]["content"][0]["text"]
    assert "incomplete" == last["response"]["output"][0]["status"]
    assert ["created", "in_progress", "failed"] == [event["type"].removeprefix("response.") for event in alone]


def test_logprobs_stand_by_the_text_if_they_are_asked_for():
    """Those of tokens that gave no text come with the next that does, and at the end; ids stay hidden, bytes do not."""

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
    asked = {**BODY, "include": ["message.output_text.logprobs"]}
    events = events_of(stream_of(asked, chunks))
    (delta,) = [event for event in events if event["type"] == "response.output_text.delta"]
    (done,) = [event for event in events if event["type"] == "response.output_text.done"]

    assert ["t", "é"] == [told["token"] for told in delta["logprobs"]]
    assert ["t", "é", ""] == [told["token"] for told in done["logprobs"]]
    assert {"token", "bytes", "logprob", "top_logprobs"} == delta["logprobs"][1].keys()
    assert list("é".encode()) == delta["logprobs"][1]["bytes"]
    assert done["logprobs"] == events[-1]["response"]["output"][-1]["content"][0]["logprobs"]
    assert [] == events_of(stream_of(BODY, chunks))[-1]["response"]["output"][-1]["content"][0]["logprobs"]


def test_a_call_may_lack_its_id_and_its_name():
    """An id is made for it, which never changes; a name that never came is empty."""
    message = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "", "function": {"name": "look", "arguments": "{}"}}],
    }
    (item,) = RESPONSES.renderer(BODY, TOLD).whole(response_of(message))["output"]
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

    assert f"call_{TOLD.step_id}_0" == item["call_id"]
    assert [("", "{")] == [(told["name"], told["arguments"]) for told in nameless]


def test_thoughts_are_sealed_for_those_who_ask():
    """In the item's last event and in the answer, and for nobody else."""
    message = {"role": "assistant", "content": "a", "reasoning": "hm"}
    asked, unasked = (RESPONSES.renderer(body, TOLD).whole(response_of(message))["output"] for body in (SEALED, BODY))

    assert "hm" == unseal(asked[0]["encrypted_content"])
    assert ["encrypted_content" in item for item in (asked[1], *unasked)] == [False, False, False]


def test_arguments_that_are_no_text_are_told_as_text():
    """As a server may tell them that has objects there."""
    call = {"id": "c", "function": {"name": "look", "arguments": {"a": 1}}}
    (item,) = RESPONSES.renderer(BODY, TOLD).whole(response_of({"role": "assistant", "tool_calls": [call]}))["output"]

    assert '{"a":1}' == item["arguments"]


def test_an_answer_of_nothing_is_a_message_of_nothing():
    """So that it comes back: without a text if there was none, with an empty one if that was sampled."""
    none, empty = (
        RESPONSES.renderer(BODY, TOLD).whole(response_of({"role": "assistant", "content": content}))["output"]
        for content in (None, "")
    )

    assert [] == none[0]["content"]
    assert "" == empty[0]["content"][0]["text"]


def test_a_refusal_is_a_part_of_its_own():
    """As other servers than vLLM and SGLang tell it."""
    message = {"role": "assistant", "content": None, "refusal": "no"}
    (item,) = RESPONSES.renderer(BODY, TOLD).whole(response_of(message))["output"]

    assert [{"type": "refusal", "refusal": "no"}] == item["content"]
    assert [message] == RESPONSES.read({"input": [item]}, TranslationOptions())["messages"]
