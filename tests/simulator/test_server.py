"""The simulated engine from the clients' side."""

import asyncio

import openai
import orjson
import pytest
from aiohttp import ClientSession, web
from hypothesis import given
from hypothesis import strategies as st
from tests.support.json_bodies import BODIES

from proxy.simulator.options import Options
from proxy.simulator.server import make_engine

MESSAGES = [{"role": "user", "content": "Say hello."}]
RUNNING = 'vllm:num_requests_running{engine="0",model_name="simulated"} '


@pytest.fixture
async def agent(engine):
    """OpenAI's client of the engine."""
    url = str(engine.client.make_url("/v1"))
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


async def running(client, expected: int) -> float:
    """The number of running calls; waits up to 5 s until it is the expected one."""
    count = -1.0
    for _ in range(500):
        async with client.get("/metrics") as response:
            line = next(line for line in (await response.text()).splitlines() if line.startswith(RUNNING))
        count = float(line.removeprefix(RUNNING))
        if count == expected:
            break
        await asyncio.sleep(0.01)
    return count


async def test_openais_client_chats(agent):
    """OpenAI's client gets a chat completion, and the same one as a stream."""
    completion = await agent.chat.completions.create(model="any", messages=MESSAGES, seed=1, logprobs=True)
    stream = await agent.chat.completions.create(model="any", messages=MESSAGES, seed=1, stream=True)
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    assert completion.choices[0].message.content
    assert completion.choices[0].message.content == text
    assert completion.usage.completion_tokens == len(completion.choices[0].logprobs.content)
    assert completion.model == "any"


async def test_openais_client_calls_tools(agent, tools):
    """OpenAI's client gets a tool call, sends its result, and gets text."""
    messages = list(MESSAGES)
    completion = await agent.chat.completions.create(model="any", messages=messages, tools=tools, seed=1)
    call = completion.choices[0].message.tool_calls[0]
    messages += [completion.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    after = await agent.chat.completions.create(model="any", messages=messages, tools=tools, seed=1)

    assert call.function.name == "get_weather"
    assert after.choices[0].finish_reason == "stop"
    assert after.choices[0].message.content


async def test_openais_client_accumulates_a_streamed_tool_call(agent, tools):
    """OpenAI's client accumulates the tool call of a stream."""
    async with agent.chat.completions.stream(model="any", messages=MESSAGES, tools=tools, seed=1) as stream:
        completion = await stream.get_final_completion()

    assert completion.choices[0].finish_reason == "tool_calls"
    assert set(orjson.loads(completion.choices[0].message.tool_calls[0].function.arguments)) == {"city", "days"}


async def test_openais_client_completes(agent):
    """OpenAI's client gets completions, streamed or not, and the model list."""
    completion = await agent.completions.create(model="any", prompt="Return the", seed=1, n=2)
    stream = await agent.completions.create(model="any", prompt="Return the", seed=1, stream=True)

    assert completion.choices[0].text == "".join([chunk.choices[0].text async for chunk in stream])
    assert [model.id async for model in agent.models.list()] == ["simulated"]


@pytest.mark.parametrize("raw", [b'{"model": "tiny", ', b"\xff\xfe", b"nonsense", b"{}" * 2, b"[]", b"3", b"null"])
async def test_a_body_that_is_no_json_object_is_a_400_and_invalid_json_names_the_position(engine, raw):
    status, text = await engine.answer("/v1/chat/completions", data=raw, headers={"Content-Type": "application/json"})
    error = orjson.loads(text)["error"]

    assert status == 400
    assert raw in (b"[]", b"3", b"null") or (error["type"], error["param"][:5]) == ("Bad Request", "body.")


@pytest.mark.parametrize(("headers", "name"), [({"X-Request-Id": "a"}, "chatcmpl-a"), ({}, "chatcmpl-b")])
async def test_a_client_can_choose_the_id(engine, headers, name):
    """The response id is from the header X-Request-Id, else from the body's request_id."""
    body = {"messages": MESSAGES, "request_id": "b"}

    assert name == orjson.loads((await engine.answer("/v1/chat/completions", body, headers=headers))[1])["id"]


async def test_tokenize_and_detokenize(engine, tools):
    """`/tokenize` returns the ids of a chat's prompt, `/detokenize` their text."""
    chat = await engine.chat(MESSAGES, tools=tools, return_token_ids=True, return_prompt_text=True)
    tokenized = await engine("/tokenize", messages=MESSAGES, tools=tools, return_token_strs=True)

    assert chat["prompt_token_ids"] == tokenized["tokens"]
    assert tokenized["count"] == len(tokenized["token_strs"]) == len(tokenized["tokens"])
    assert chat["prompt_text"] == (await engine("/detokenize", tokens=tokenized["tokens"]))["prompt"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": 3}),
        ("/detokenize", {"tokens": ["a"]}),
        ("/detokenize", {"tokens": [99_999]}),
    ],
)
async def test_invalid_tokenize_bodies_are_errors(engine, path, body):
    """A `/tokenize` body without text and a `/detokenize` body without valid ids are 400 errors."""
    assert (await engine.answer(path, body))[0] == 400


async def test_the_version_shows_that_this_is_a_simulator(engine):
    assert await engine.get("/version") == (200, b'{"version":"simulator-0.1"}')


@pytest.fixture
async def slow():
    """A slow engine, run as the command line does: aiohttp does not cancel the handler when a client disconnects."""
    runner = web.AppRunner(make_engine(Options(token_delay_s=0.01)))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0]
    async with ClientSession(f"http://{host}:{port}") as session:
        yield session
    await runner.cleanup()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_disconnected_client_ends_the_sampling(slow, stream):
    """A call is no longer running after its client disconnects, streamed or not."""
    body = {"messages": MESSAGES, "ignore_eos": True, "stream": stream}
    call = asyncio.create_task(slow.post("/v1/chat/completions", json=body))
    assert await running(slow, 1) == 1

    if stream:
        response = await call
        await response.content.readany()
        response.close()
    call.cancel()

    assert await running(slow, 0) == 0


async def test_with_a_delay_each_token_is_written_at_once(start):
    """With a delay, the role chunk is written first and each token separately."""
    engine = await start(Options(token_delay_s=0.005))
    body = {"messages": MESSAGES, "stream": True, "max_tokens": 4, "seed": 1}
    async with engine.client.post("/v1/chat/completions", json=body) as response:
        pieces = [piece async for piece in response.content.iter_any()]

    assert len(pieces) >= 4
    assert b'"role"' in pieces[0]
    assert b'"content":""' in pieces[0]


async def test_concurrent_calls_are_independent(engine):
    """Concurrent calls get the replies that they get one after another."""
    alone = [(await engine.chat(seed=seed))["choices"][0]["message"] for seed in range(20)]
    together = await asyncio.gather(*(engine.chat(seed=seed) for seed in range(20)))

    assert alone == [completion["choices"][0]["message"] for completion in together]


@given(path=st.sampled_from(["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"]), body=BODIES)
async def test_every_body_gets_a_response(engine, path, body):
    """Any JSON body gets a 200 or a 400 with a message."""
    status, raw = await engine.answer(path, data=orjson.dumps(body), headers={"Content-Type": "application/json"})

    assert status == 200 or (status == 400 and orjson.loads(raw)["error"]["message"])
