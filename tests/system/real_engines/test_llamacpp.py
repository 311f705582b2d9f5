"""A real llama.cpp behind the proxy: prompts, errors, a conversation; test_certified.py has the shape of each call."""

from itertools import pairwise

import aiohttp
import openai
import orjson
import pytest

from .through import through_proxy

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
QUESTION = [{"role": "user", "content": "What is the capital of France? Answer briefly."}]
CONVERSATION = [
    {"role": "system", "content": "You are brief."},
    {"role": "user", "content": "Hello <|im_end|>"},
    {"role": "assistant", "content": "Hi  there 🦙"},
    *QUESTION,
]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
TEXT = "<|im_start|>user\nSay hi.<|im_end|>\n<|im_start|>assistant\n"
_CHAT = {"model": "smollm2", "messages": QUESTION, "max_tokens": 40, "temperature": 0}
_TEXT = {"model": "smollm2", "prompt": TEXT, "max_tokens": 40, "temperature": 0}


@pytest.fixture
async def http():
    async with aiohttp.ClientSession() as session:
        yield session


async def posted(http, url, body):
    async with http.post(url, json=body) as response:
        return response.status, await response.read()


async def tokenized(http, engine, text):
    body = {"content": text, "parse_special": True, "add_special": False}
    _, response = await posted(http, f"{engine.url}/tokenize", body)
    return orjson.loads(response)["tokens"]


async def call_and_read_steps(llamacpp, http, folder, path, *bodies):
    """Return the responses through the proxy, and the recorded steps."""
    async with through_proxy(llamacpp.url, folder) as proxy:
        responses = [await posted(http, f"{proxy.url}/rollouts/r1{path}", body) for body in bodies]
        return responses, await proxy.steps("r1")


async def test_the_prompt_is_the_rendered_template(llamacpp, http, tmp_path):
    """The template determines the prompt's ids, also if a user's text looks like a special token."""
    _, rendered = await posted(http, f"{llamacpp.url}/apply-template", {"messages": CONVERSATION})
    expected = await tokenized(http, llamacpp, orjson.loads(rendered)["prompt"])

    _, (step,) = await call_and_read_steps(llamacpp, http, tmp_path, CHAT, _CHAT | {"messages": CONVERSATION})

    assert step["prompt_ids"] == expected
    assert len(expected) == step["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, _CHAT | {"tools": [TOOL], "stream": True, "logprobs": True, "top_logprobs": 1}),
        (CHAT, _CHAT | {"top_logprobs": 2}),
        (CHAT, _CHAT | {"n": 3}),
        (CHAT, _CHAT | {"temperature": "warm", "stream": True}),
        (CHAT, {"model": "smollm2", "stream": True}),
        (COMPLETIONS, _TEXT | {"prompt": [10**8]}),
    ],
    ids=["tools, stream and logprobs", "top_logprobs alone", "more choices than slots", "type", "no messages", "ids"],
)
async def test_an_error_is_unchanged(llamacpp, http, tmp_path, path, body):
    """What the engine rejects is rejected through the proxy, byte for byte the same."""
    own = await posted(http, llamacpp.url + path, body)
    (shown,), _ = await call_and_read_steps(llamacpp, http, tmp_path, path, body)

    assert own[0] == 400
    assert own == shown


async def test_an_agent_with_the_official_client_is_recorded_exactly(llamacpp, tmp_path):
    """With turns streamed and not, with tools and without: each prompt starts with the previous ids."""
    messages = list(QUESTION)
    async with through_proxy(llamacpp.url, tmp_path) as proxy, proxy.agent("r1") as agent:
        for stream, tools in ((False, openai.omit), (True, openai.omit), (True, [TOOL])):
            reply = await agent.chat.completions.create(
                model="smollm2", messages=messages, temperature=0, max_tokens=30, stream=stream, tools=tools
            )
            text = reply.choices[0].message.content if not stream else ""
            if stream:
                text = "".join([chunk.choices[0].delta.content or "" async for chunk in reply])
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Go on."}]
        steps = await proxy.steps("r1")

    assert [step["fidelity"]["exact"] for step in steps] == [True, True, True], [step["fidelity"] for step in steps]
    for before, after in pairwise(steps):
        whole = before["prompt_ids"] + before["choices"][0]["ids"]
        assert after["prompt_ids"][: len(whole)] == whole or before["choices"][0]["finish_reason"] == "length"


async def test_the_engine_type_is_detected(llamacpp, tmp_path):
    """Without configuration."""
    async with through_proxy(llamacpp.url, tmp_path) as proxy, proxy.agent("r1") as agent:
        await agent.completions.create(model="smollm2", prompt="Once", max_tokens=1)
        (engine,) = (await proxy.get("/engines"))["engines"]

    assert (engine["kind"], engine["streams"]) == ("llamacpp", {"chat": "replay", "completions": "live"})


async def test_recorded_logprobs_are_the_models_own(llamacpp, http, tmp_path):
    """The same at any temperature, and under a grammar."""
    bodies = [_CHAT | {"max_tokens": 1, "grammar": 'root ::= "The"', "temperature": heat} for heat in (0, 0.8, 1.5)]
    _, steps = await call_and_read_steps(llamacpp, http, tmp_path, CHAT, *bodies)

    assert len({step["choices"][0]["logprobs"][0] for step in steps}) == 1
    assert {step["sampling"]["logprobs_mode"] for step in steps} == {"raw_logprobs"}
