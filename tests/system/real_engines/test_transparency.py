"""Agents get the same responses with and without the proxy; the steps have what the engine sampled."""

import re

import aiohttp
import orjson
import pytest

from .calls import CASES, CHAT, SGLANG_CASES, flagged, post, repeatable, sampled
from .test_replay import contents_from, keys
from .through import through_proxy

REFUSED_STREAMS = {"ids asked", "meta info asked"}  # by SGLang
NO_IDS = {"echo"}  # ids would replace the echoed text: recorded as text, and flagged
SHAPES = [("vllm", case) for case in CASES] + [("sglang", case) for case in CASES | SGLANG_CASES]
# Without a parser SGLang's chat streams lose logprobs: the call is sent unstreamed, and the stream is made from it.
SHAPES += [("sglang_without_parsers", case) for case in CASES | SGLANG_CASES]


@pytest.fixture
async def http():
    async with aiohttp.ClientSession() as session:
        yield session


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("engine", "case"), SHAPES, indirect=["engine"])
async def test_calls_are_recorded_exactly_and_responses_are_unchanged(engine, http, tmp_path, case, stream):
    """Field by field the direct response; the step has ids, logprobs and finish reasons of a direct one with all flags."""
    path, body = (CASES | SGLANG_CASES)[case]
    body = repeatable(engine.kind, body)
    async with through_proxy(engine.url, tmp_path) as proxy:
        direct = await post(http, engine.url + path, body, stream=stream)
        shown = await post(http, f"{proxy.url}/rollouts/r1{path}", body, stream=stream)
        whole = not stream or engine.kind == "sglang"
        _, direct_answers = await post(http, engine.url + path, flagged(engine.kind, path, body), stream=not whole)
        (step,) = await proxy.steps("r1")

    assert direct[0] == shown[0]
    if direct[0] != 200:
        assert direct[1] == shown[1]
        assert (True, "error") == (stream and case in REFUSED_STREAMS, step["status"])
        return
    if step["extra"].get("streaming") == "replay":
        assert contents_from(direct[1]) == contents_from(shown[1])
        assert keys(shown[1]) <= keys(direct[1])
    else:
        assert_near(_merged(direct[1]), _merged(shown[1]))
    if case in NO_IDS:
        assert "echo" in step["fidelity"]["problems"]
        return
    expected = sampled(direct_answers, stream=not whole)
    actual = {
        choice["index"]: {name: choice[name] for name in ("ids", "logprobs", "finish_reason")}
        for choice in step["choices"]
    }
    assert_near(expected, actual)
    assert step["fidelity"]["exact"], step["fidelity"]
    assert all(len(choice["ids"]) == len(choice["logprobs"]) > 0 for choice in step["choices"])


def assert_near(one, two):
    """Assert that two values are equal, numbers within 1e-4: batches of other sizes round differently."""
    assert type(one) is type(two), (one, two)
    if isinstance(one, dict):
        assert one.keys() == two.keys()
        for key in one:
            assert_near(one[key], two[key])
    elif isinstance(one, list):
        assert len(one) == len(two), (one, two)
        for first, second in zip(one, two, strict=True):
            assert_near(first, second)
    else:
        assert one == (pytest.approx(two, abs=1e-4) if isinstance(one, float) else two)


def _merged(chunks):
    """Return the contents of a list of chunks, independent of their grouping and of the order of choices.

    Text and lists are joined by path; of anything else, the values are listed in order. The keys of every object are
    included, in order, so that none is added, lost or moved.
    """
    merged: dict[tuple, object] = {}

    def gather(value, path):
        if isinstance(value, dict):
            # Which keys a delta has depends on how many tokens an event has (SGLang, under load).
            merged.setdefault((*path, "keys"), set()).update(value if path[-1] == "delta" else {tuple(value)} - {()})
            for key, inner in value.items():
                gather(inner, (*path, key))
        elif isinstance(value, list):
            merged.setdefault((*path, "list"), []).extend(value)
        elif isinstance(value, str) and path[-1] in ("content", "reasoning", "reasoning_content", "arguments", "text"):
            merged[path] = str(merged.get(path, "")) + value
        else:
            values = merged.setdefault((*path, "values"), [])
            if value not in values:
                values.append(value)

    for chunk in chunks:
        for choice in chunk.get("choices") or [{}]:
            gather({**chunk, "choices": None}, ("chunk",))
            gather(choice, ("choice", choice.get("index")))
            for call in choice.get("delta", {}).get("tool_calls") or []:
                gather(call["function"], ("choice", choice["index"], "call", call["index"]))
    # SGLang sends the line breaks around a tool call if they have an event of their own.
    return {
        path: value.strip() if path[-1] == "content" else value
        for path, value in merged.items()
        if not (path[-1] == "list" and "tool_calls" in path)
    }


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_reasoning_that_is_switched_off_is_recorded(vllm, http, tmp_path, stream):
    """The engine would omit ids, so the proxy requests reasoning; the client gets none of it."""
    path, body = CASES["reasoning"]
    async with through_proxy(vllm.url, tmp_path) as proxy:
        _, shown = await post(
            http, f"{proxy.url}/rollouts/r1{path}", body | {"include_reasoning": False}, stream=stream
        )
        _, direct_answers = await post(http, vllm.url + path, flagged("vllm", path, body), stream=stream)
        (step,) = await proxy.steps("r1")

    assert step["fidelity"]["exact"]
    assert sampled(direct_answers, stream=stream)[0]["ids"] == step["choices"][0]["ids"]
    text = orjson.dumps([choice for response in shown for choice in response["choices"]]).decode()
    assert '"reasoning":"' not in text
    assert _content(direct_answers) == _content(shown)


def _content(responses):
    messages = (choice.get("message") or choice["delta"] for response in responses for choice in response["choices"])
    return "".join(message.get("content") or "" for message in messages)


async def test_usage_is_included_on_request(engine, http, tmp_path):
    """stream_options are forwarded, and the count is that of the recorded ids."""
    path, body = CASES["tool call"]
    body = repeatable(engine.kind, body) | {"stream_options": {"include_usage": True}}
    async with through_proxy(engine.url, tmp_path) as proxy:
        direct = await post(http, engine.url + path, body, stream=True)
        shown = await post(http, f"{proxy.url}/rollouts/r1{path}", body, stream=True)
        (step,) = await proxy.steps("r1")

    assert (200, 200) == (direct[0], shown[0])
    assert_near(_merged(direct[1]), _merged(shown[1]))
    assert len(step["choices"][0]["ids"]) == shown[1][-1]["usage"]["completion_tokens"]


LONG, SHORT = [{"role": "user", "content": "word " * 3000}], [{"role": "user", "content": "hi"}]
ERRORS = {
    "too long": {"messages": LONG},
    "too long, streamed": {"messages": LONG, "stream": True},
    "no message": {"messages": []},
    "no messages": {},
    "temperature": {"messages": SHORT, "temperature": -1},
    "a text for a number": {"messages": SHORT, "max_tokens": "many"},
    "max_tokens": {"messages": SHORT, "max_tokens": 5000, "stream": True},
}
VLLM_ERRORS = {
    "unknown model": {"model": "unknown", "messages": SHORT},
    "top_logprobs": {"messages": SHORT, "top_logprobs": 2},
    "prompt_logprobs": {"messages": SHORT, "stream": True, "prompt_logprobs": 1},
}
SGLANG_ERRORS = {
    "ids of a stream": {"messages": SHORT, "stream": True, "return_prompt_token_ids": True},
    "grammars": {"messages": SHORT, "regex": "a", "ebnf": 'root ::= "a"'},
}


@pytest.mark.parametrize(
    ("engine", "name"),
    [("vllm", name) for name in ERRORS | VLLM_ERRORS] + [("sglang", name) for name in ERRORS | SGLANG_ERRORS],
    indirect=["engine"],
)
async def test_errors_of_the_engine_are_unchanged(engine, http, tmp_path, name):
    """Status, type and body are the engine's; the step has them."""
    body = {"model": "tiny"} | (ERRORS | VLLM_ERRORS | SGLANG_ERRORS)[name]
    async with through_proxy(engine.url, tmp_path) as proxy:
        async with http.post(engine.url + CHAT, json=body) as direct:
            expected = (direct.status, direct.content_type, await direct.read())
        async with http.post(f"{proxy.url}/rollouts/r1{CHAT}", json=body) as shown:
            actual = (shown.status, shown.content_type, await shown.read())
        (step,) = await proxy.steps("r1")

    assert expected[0] in (400, 404)
    assert expected == actual
    assert ("error", expected[0], expected[2].decode()) == (
        step["status"],
        step["response"]["status"],
        step["response"]["body"],
    )


async def test_an_error_within_a_stream_is_unchanged(sglang, http, tmp_path):
    """SGLang sends status 200, an event with the error and `[DONE]`; the step is an error."""
    body = {"model": "tiny", "messages": SHORT, "regex": "(", "stream": True}
    async with through_proxy(sglang.url, tmp_path) as proxy:
        direct, shown = [
            (response.status, re.sub(rb"\d\d:\d\d:\d\d", b"", await response.read()))
            for url in (sglang.url + CHAT, f"{proxy.url}/rollouts/r1{CHAT}")
            for response in [await http.post(url, json=body)]
        ]
        (step,) = await proxy.steps("r1")

    assert direct == shown
    assert (200, True) == (direct[0], b"Failed to compile regex grammar" in direct[1])
    assert "error" == step["status"]


async def test_prompt_logprobs_are_forwarded(vllm, http, tmp_path):
    """A client may request fields that the proxy never injects."""
    path, body = CASES["ids in"]
    async with through_proxy(vllm.url, tmp_path) as proxy:
        direct = await post(http, vllm.url + path, body | {"prompt_logprobs": 0}, stream=False)
        shown = await post(http, f"{proxy.url}/rollouts/r1{path}", body | {"prompt_logprobs": 0}, stream=False)

    assert direct == shown
    assert direct[1][0]["choices"][0]["prompt_logprobs"]
