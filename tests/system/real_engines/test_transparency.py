"""Agents get the errors of the engine; test_certified.py compares the responses of each shape."""

import re

import aiohttp
import pytest

from .calls import CHAT
from .through import through_proxy


@pytest.fixture
async def http():
    async with aiohttp.ClientSession() as session:
        yield session


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
    assert actual == expected
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
    assert (direct[0], b"Failed to compile regex grammar" in direct[1]) == (200, True)
    assert step["status"] == "error"
