"""Replies whose parts do not show them: a cut was inside a stop string, a character, or what a parser reads."""

import asyncio

import orjson
import pytest
from tests.support.cut_calls import MESSAGES, REPLIES, answer_of, content_of, read, replied, resuming
from tests.support.fakes import listening, proxying
from tests.support.scripted_engine import REPLY, ScriptedEngine, tokens_of

from proxy.api.model import telling

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


async def test_texts_of_many_calls_that_are_cut_at_once_are_requested_a_few_at_a_time(store, http):
    """One for each call: the end of their prompts is read once, by the first ones."""
    engine, texts, most, running = ScriptedEngine(), 0, 0, 0
    engine.ends = [(12, "abort")] * 100

    async def handle(request):
        nonlocal texts, most, running
        if request.path != "/detokenize":
            return await engine.handle(request)
        texts, running = texts + 1, running + 1
        most = max(most, running)
        await asyncio.sleep(0.01)  # several are open at once
        running -= 1
        return await engine.handle(request)

    async with listening(handle) as url, resuming(url, store) as served:
        body = {"model": "m", "messages": MESSAGES, "stream": True}
        replies = await asyncio.gather(*(answer_of(http, served, body, f"r{number}") for number in range(100)))

    assert {read(raw, is_stream=True)[0] for _, raw in replies} == {REPLY}
    assert most <= 32
    assert 100 <= texts <= 100 + 32


async def test_calls_whose_texts_an_engine_does_not_return_go_on_with_those_of_another(store, http, monkeypatch):
    """It takes all requests and returns nothing, and reads have no timeout: the calls behind do not wait for them."""
    monkeypatch.setattr(telling, "_TEXT_TIMEOUT_S", 0.3)
    first, second, hanging = ScriptedEngine(), ScriptedEngine(), asyncio.Event()
    first.ends = second.ends = [(12, "abort")] * 100

    async def handle(request):
        if request.path == "/detokenize":
            await hanging.wait()
        return await first.handle(request)

    async with listening(handle) as one, listening(second.handle) as other:
        engines = {"endpoints": [{"url": one, "name": "a"}, {"url": other, "name": "b"}]}
        async with proxying(None, store, engines=engines, agents={"max_resumes": 9}) as served, asyncio.timeout(30):
            body = {"model": "m", "messages": MESSAGES, "stream": True}
            calls = (answer_of(http, served, body, f"r{number}") for number in range(100))
            replies = await asyncio.gather(*calls)
            hanging.set()

    assert {read(raw, is_stream=True)[:2][0] for _, raw in replies} == {REPLY}


async def test_a_call_whose_text_no_engine_returns_waits_only_so_long(store, http):
    """For `agents.resume_timeout_s` it reads comments; then it ends as its engine ended it."""
    engine, hanging = ScriptedEngine(), asyncio.Event()
    engine.ends = [(12, "abort")]

    async def handle(request):
        if request.path == "/detokenize":
            await hanging.wait()
        return await engine.handle(request)

    body = {"model": "m", "messages": MESSAGES, "stream": True}
    async with listening(handle) as url, resuming(url, store, resume_timeout_s=0.3) as served, asyncio.timeout(30):
        _, raw = await answer_of(http, served, body)
        async with http.get(f"{served.url}/metrics") as response:
            counted = await response.text()
        hanging.set()

    assert read(raw, is_stream=True)[:2] == (REPLY[:12], ["abort"])
    assert 'tokentape_resumed_calls_total{engine="fake",reason="tokenize",result="ended"} 1.0' in counted
