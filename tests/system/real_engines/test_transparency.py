"""Agents get the same responses with and without the proxy; the steps have what the engine sampled."""

import aiohttp
import orjson
import pytest

from .calls import CASES, CHAT, flagged, post, sampled
from .through import through_proxy

NO_IDS = {"echo"}  # ids would replace the echoed text: recorded as text, and flagged


@pytest.fixture
async def http():
    async with aiohttp.ClientSession() as session:
        yield session


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("case", CASES)
async def test_calls_are_recorded_exactly_and_responses_are_unchanged(vllm, http, tmp_path, case, stream):
    """Field by field the direct response; the step has ids, logprobs and finish reasons of a direct one with all flags."""
    path, body = CASES[case]
    async with through_proxy(vllm.url, tmp_path) as proxy:
        direct = await post(http, vllm.url + path, body, stream=stream)
        shown = await post(http, f"{proxy.url}/rollouts/r1{path}", body, stream=stream)
        _, direct_answers = await post(http, vllm.url + path, flagged(path, body), stream=stream)
        (step,) = await proxy.steps("r1")

    assert (direct[0], _merged(direct[1])) == (shown[0], _merged(shown[1]))
    if case in NO_IDS:
        assert "echo" in step["fidelity"]["problems"]
        return
    expected = sampled(direct_answers, stream=stream)
    actual = {
        choice["index"]: {name: choice[name] for name in ("ids", "logprobs", "finish_reason")}
        for choice in step["choices"]
    }
    assert expected == actual
    assert step["fidelity"]["exact"], step["fidelity"]
    assert all(len(choice["ids"]) == len(choice["logprobs"]) > 0 for choice in step["choices"])


def _merged(chunks):
    """Return the contents of a list of chunks, independent of their grouping and of the order of choices.

    Text and lists are joined by path; of anything else, the values are listed in order. The keys of every object are
    included, in order, so that none is added, lost or moved.
    """
    merged: dict[tuple, object] = {}

    def gather(value, path):
        if isinstance(value, dict):
            merged.setdefault((*path, "keys"), set()).update({tuple(value)} - {()})
            for key, inner in value.items():
                gather(inner, (*path, key))
        elif isinstance(value, list):
            merged.setdefault((*path, "list"), []).extend(value)
        elif isinstance(value, str) and path[-1] in ("content", "reasoning", "arguments", "text"):
            merged[path] = str(merged.get(path, "")) + value
        else:
            values = merged.setdefault((*path, "values"), [])
            if value not in values:
                values.append(value)

    for chunk in chunks:
        for choice in chunk["choices"] or [{}]:
            gather({**chunk, "choices": None}, ("chunk",))
            gather(choice, ("choice", choice.get("index")))
            for call in choice.get("delta", {}).get("tool_calls") or []:
                gather(call["function"], ("choice", choice["index"], "call", call["index"]))
    return {path: value for path, value in merged.items() if not (path[-1] == "list" and "tool_calls" in path)}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_reasoning_that_is_switched_off_is_recorded(vllm, http, tmp_path, stream):
    """The engine would omit ids, so the proxy requests reasoning; the client gets none of it."""
    path, body = CASES["reasoning"]
    async with through_proxy(vllm.url, tmp_path) as proxy:
        _, shown = await post(
            http, f"{proxy.url}/rollouts/r1{path}", body | {"include_reasoning": False}, stream=stream
        )
        _, direct_answers = await post(http, vllm.url + path, flagged(path, body), stream=stream)
        (step,) = await proxy.steps("r1")

    assert step["fidelity"]["exact"]
    assert sampled(direct_answers, stream=stream)[0]["ids"] == step["choices"][0]["ids"]
    text = orjson.dumps([choice for response in shown for choice in response["choices"]]).decode()
    assert '"reasoning":"' not in text
    assert _content(direct_answers) == _content(shown)


def _content(responses):
    messages = (choice.get("message") or choice["delta"] for response in responses for choice in response["choices"])
    return "".join(message.get("content") or "" for message in messages)


async def test_usage_is_included_on_request(vllm, http, tmp_path):
    """stream_options are forwarded, and the count is that of the recorded ids."""
    path, body = CASES["tool call"]
    body = body | {"stream_options": {"include_usage": True}}
    async with through_proxy(vllm.url, tmp_path) as proxy:
        direct = await post(http, vllm.url + path, body, stream=True)
        shown = await post(http, f"{proxy.url}/rollouts/r1{path}", body, stream=True)
        (step,) = await proxy.steps("r1")

    assert (direct[0], _merged(direct[1])) == (shown[0], _merged(shown[1]))
    assert len(step["choices"][0]["ids"]) == shown[1][-1]["usage"]["completion_tokens"]


@pytest.mark.parametrize(
    "body",
    [
        {"model": "tiny", "messages": [{"role": "user", "content": "word " * 3000}]},
        {"model": "tiny", "messages": [{"role": "user", "content": "word " * 3000}], "stream": True},
        {"model": "tiny", "messages": []},
        {"model": "tiny"},
        {"model": "unknown", "messages": [{"role": "user", "content": "hi"}]},
        {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "temperature": -1},
        {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": "many"},
        {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "top_logprobs": 2},
        {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True, "prompt_logprobs": 1},
    ],
    ids=lambda body: ",".join(body)[:60] + str(len(str(body))),
)
async def test_errors_of_the_engine_are_unchanged(vllm, http, tmp_path, body):
    """Status, type and body are the engine's; the step has them."""
    async with through_proxy(vllm.url, tmp_path) as proxy:
        async with http.post(vllm.url + CHAT, json=body) as direct:
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


async def test_prompt_logprobs_are_forwarded(vllm, http, tmp_path):
    """A client may request fields that the proxy never injects."""
    path, body = CASES["ids in"]
    async with through_proxy(vllm.url, tmp_path) as proxy:
        direct = await post(http, vllm.url + path, body | {"prompt_logprobs": 0}, stream=False)
        shown = await post(http, f"{proxy.url}/rollouts/r1{path}", body | {"prompt_logprobs": 0}, stream=False)

    assert direct == shown
    assert direct[1][0]["choices"][0]["prompt_logprobs"]
