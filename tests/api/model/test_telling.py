"""Replies whose parts do not show them: a cut was inside a stop string, a character, or what a parser reads."""

import orjson
import pytest
from tests.support.cut_calls import MESSAGES, REPLIES, content_of, read, replied
from tests.support.scripted_engine import tokens_of

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
CALLS = 'I look: <call>look {"word": "a < b"}</call><call>find {"n": [1, 2]}</call>'


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize("kind", ["stop", "many stops", "characters"])
async def test_a_stop_string_or_a_character_that_straddles_a_cut_is_found(store, http, kind, is_stream):
    """At each token; nothing of the stop string is shown, and no token after it is recorded."""
    reply, stops = REPLIES[kind]
    body = {"model": "m", "messages": MESSAGES, "max_tokens": 99, "stop": stops, "stream": is_stream}
    _, expected_raw, expected = await replied(http, store, body, reply)
    for at in range(1, len(expected.choices[0].ids)):
        _, raw, step = await replied(http, store, body, reply, [(at, "abort")])

        assert read(expected_raw, is_stream=is_stream)[:2] == read(raw, is_stream=is_stream)[:2], at
        ((choice,), (own,)) = step.choices, expected.choices
        assert (own.ids, own.logprobs, own.stop_reason) == (choice.ids, choice.logprobs, choice.stop_reason), at
        assert ((), content_of(expected), expected.usage) == (step.problems, content_of(step), step.usage), at
        assert step.extra["resumed"] == 1


def told(raw: bytes, *, is_stream: bool) -> tuple[str, list[tuple[str, str]], list[str]]:
    """Return the text, the tool calls and the finish reasons of a chat response. Each call has one id."""
    if not is_stream:
        (choice,) = orjson.loads(raw)["choices"]
        message = choice["message"]
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        named = [(call["name"], call["arguments"]) for call in calls]
        return message["content"] or "", named, [choice["finish_reason"]]
    text, reasons, calls = "", [], {}
    for line in raw.split(b"\n\n"):
        for choice in orjson.loads(line[6:])["choices"] if line.startswith(b"data: {") else ():
            text += choice["delta"].get("content") or ""
            reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
            for call in choice["delta"].get("tool_calls") or ():
                name, arguments = calls.setdefault(call["index"], ["", ""])
                calls[call["index"]] = [
                    name + (call["function"].get("name") or ""),
                    arguments + (call["function"].get("arguments") or ""),
                ]
    return text, [(name, arguments) for name, arguments in calls.values()], reasons


@pytest.mark.parametrize("is_stream", [True, False])
async def test_a_call_of_tools_is_parsed_as_a_whole(store, http, is_stream):
    """By its engine, at each token: two parts that are parsed alone have other calls, or a call as a text."""
    body = {"model": "m", "messages": MESSAGES, "max_tokens": 99, "tools": TOOLS, "stream": is_stream}
    _, expected_raw, expected = await replied(http, store, body, CALLS, parses=True)
    for at in range(1, len(tokens_of(CALLS))):
        status, raw, step = await replied(http, store, body, CALLS, [(at, "abort")], parses=True)

        assert (200, told(expected_raw, is_stream=is_stream)) == (status, told(raw, is_stream=is_stream)), at
        ((choice,), (own,)) = step.choices, expected.choices
        assert (own.ids, own.logprobs, own.finish_reason) == (choice.ids, choice.logprobs, choice.finish_reason), at
        assert ((), expected.usage, 1) == (step.problems, step.usage, step.extra["resumed"]), at
        functions = [call["function"] for call in step.response["choices"][0]["message"]["tool_calls"]]
        assert [function["name"] for function in functions] == ["look", "find"]


@pytest.mark.parametrize("is_stream", [True, False])
async def test_an_engine_that_cannot_parse_ids_resumes_no_call_of_tools(store, http, is_stream):
    """It starts again if its client has received nothing, and else ends as its engine ended it."""
    body = {"model": "m", "messages": MESSAGES, "max_tokens": 99, "tools": TOOLS, "stream": is_stream}
    _, raw, step = await replied(http, store, body, CALLS, [(9, "abort")])

    text, _, reasons = told(raw, is_stream=is_stream)
    assert (CALLS[:9], ["abort"]) == (text, reasons) if is_stream else (text, reasons) == (CALLS, ["stop"])
    assert "resumed" not in step.extra
