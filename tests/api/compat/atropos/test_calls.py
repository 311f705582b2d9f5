"""What agents call within a session: chat in its shape, and what its proxy lacks."""

import openai
import pytest
from aiohttp import web
from sessions import HELLO, error, serving_sessions
from stored import stored_steps

CHAT = "/v1/chat/completions"
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(params=["vllm", "sglang"])
async def proxy(request, store):
    async with serving_sessions(store, shape=request.param) as proxy:
        yield proxy


async def test_at_7_a_chat_is_answered_in_its_shape_and_recorded(proxy, store):
    """No usage, no logprobs, no tool_calls where there are none; the step has the ids all the same."""
    uuid = await proxy.create()
    messages = [{"role": "user", "content": "Hello!", "tool_calls": None, "name": None}]
    status, told = await proxy.request("POST", f"/{uuid}{CHAT}", {"messages": messages, "n": 2, "max_tokens": 6})
    (step,) = await stored_steps(store, uuid)

    assert (200, ["id", "object", "created", "model", "choices"]) == (status, list(told))
    assert ("chat.completion", "simulated", 21) == (told["object"], told["model"], len(told["id"]))
    assert "chatcmpl-" == told["id"][:9]
    assert type(told["created"]) is int
    assert [0, 1] == [choice["index"] for choice in told["choices"]]
    assert all(["index", "message", "finish_reason"] == list(choice) for choice in told["choices"])
    assert all(["role", "content"] == list(choice["message"]) for choice in told["choices"])
    assert [choice.finish_reason for choice in step.choices] == [each["finish_reason"] for each in told["choices"]]
    assert (True, messages, 2) == (step.exact, step.request["messages"], len(step.choices))


async def test_at_7_tool_calls_are_told_where_there_are_some(store, engine):
    """As the engine parsed them; why it ended too."""
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}

    async def respond(request, body):
        message = {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": None}
        told = {"index": 0, "message": message, "finish_reason": "tool_calls"}
        return web.json_response({"id": "x", "created": 7, "model": "m", "choices": [told]})

    engine.respond = respond
    async with serving_sessions(store, engine.url) as proxy:
        uuid = await proxy.create()
        engine.requests.clear()
        _, told = await proxy.request(
            "POST", f"/{uuid}{CHAT}", {"messages": HELLO, "tools": [ADD], "tool_choice": "auto"}
        )

    assert {
        "index": 0,
        "message": {"role": "assistant", "content": None, "tool_calls": [call]},
        "finish_reason": "tool_calls",
    } == told["choices"][0]
    assert ([ADD], "auto") == (engine.requests[-1]["tools"], engine.requests[-1]["tool_choice"])


async def test_at_7_empty_messages_are_400_and_no_messages_422(proxy):
    """The one in its own error body, the other in FastAPI's."""
    uuid = await proxy.create()
    status, told = await proxy.request("POST", f"/{uuid}{CHAT}", {})

    assert error(400, "messages must not be empty.") == await proxy.request("POST", f"/{uuid}{CHAT}", {"messages": []})
    assert (422, [("missing", ["body", "messages"])]) == (
        status,
        [(each["type"], each["loc"]) for each in told["detail"]],
    )


@pytest.mark.parametrize("status", [400, 500, 503])
async def test_at_7_a_failing_engine_is_500_completion_failed(store, engine, status):
    """In its words; the step is recorded as the error that it is, and no node comes of it."""

    async def respond(request, body):
        return web.json_response({"error": {"message": "out of memory"}}, status=status)

    engine.respond = respond
    async with serving_sessions(store, engine.url) as proxy:
        uuid = await proxy.create()
        answered = await proxy.request("POST", f"/{uuid}{CHAT}", {"messages": HELLO})
        nodes = await proxy.request("GET", f"/{uuid}/nodes")

    assert error(500, "Completion failed: out of memory") == answered
    assert (200, {"nodes": []}) == nodes
    assert ["error"] == [step.status for step in await stored_steps(store, uuid)]


async def test_at_7_an_engine_that_is_away_is_500_completion_failed(store):
    """Nothing listens there."""
    async with serving_sessions(store, "http://127.0.0.1:1", engines={"endpoints": [
        {"url": "http://127.0.0.1:1", "kind": "vllm", "name": "gone"}
    ]}) as proxy:  # fmt: skip
        uuid = await proxy.create()
        status, told = await proxy.request("POST", f"/{uuid}{CHAT}", {"messages": HELLO})

    assert (500, "server_error") == (status, told["error"]["type"])
    assert told["error"]["message"].startswith("Completion failed: Engine gone is unreachable")


async def test_at_7_a_rendered_prompt_is_the_one_that_is_sampled_from(proxy, store):
    """Text, ids and their count; it creates no node."""
    uuid = await proxy.create()
    body = {"messages": HELLO, "max_tokens": 2}
    status, told = await proxy.request("POST", f"/{uuid}{CHAT}/render", body)
    none = await stored_steps(store, uuid)
    await proxy.request("POST", f"/{uuid}{CHAT}", body)
    (step,) = await stored_steps(store, uuid)

    assert (200, ["prompt_text", "token_ids", "num_tokens"]) == (status, list(told))
    assert (step.prompts[0].tolist(), len(step.prompts[0])) == (told["token_ids"], told["num_tokens"])
    assert "Hello!" in told["prompt_text"]
    assert [] == none


async def test_at_7_a_prompt_that_cannot_be_rendered_is_400(store, engine):
    """In its words, with the engine's."""

    async def respond(request, body):
        return web.json_response({"message": "no template"}, status=400)

    engine.respond = respond
    async with serving_sessions(store, engine.url) as proxy:
        uuid = await proxy.create()
        answered = await proxy.request("POST", f"/{uuid}{CHAT}/render", {"messages": HELLO})

    assert error(400, 'Failed to render prompt: fake returned status 400: {"message": "no template"}') == answered


@pytest.mark.parametrize("junk", [
    b"", b"no", b"null", b"7", b"[]", b"{}", b'{"tokens": null}', b'{"tokens": "12"}', b'{"tokens": [[1]]}',
    b'{"tokens": [1, null]}', b'{"tokens": [true]}', b'{"tokens": {"1": 2}}',
])  # fmt: skip
async def test_a_rendered_prompt_that_is_none_is_400(store, engine, junk):
    """Whatever the engine answers; its address is not said."""

    async def respond(request, body):
        return web.Response(body=junk, content_type="application/json")

    engine.respond = respond
    async with serving_sessions(store, engine.url) as proxy:
        uuid = await proxy.create()
        status, told = await proxy.request("POST", f"/{uuid}{CHAT}/render", {"messages": HELLO})

    assert 400 == status
    assert "Failed to render prompt: The engine" in str(told)
    assert "127.0.0.1" not in str(told)


async def test_completions_of_a_session_are_recorded_and_told_as_the_engine_tells_them(proxy, store):
    """Its proxy has none; a prompt of ids is as good as a text."""
    uuid = await proxy.create()
    for prompt in ("Hello", [40, 41, 42]):
        status, told = await proxy.request("POST", f"/{uuid}/v1/completions", {"prompt": prompt, "max_tokens": 3})
        assert (200, "text_completion") == (status, told["object"])

    assert ["completions"] * 2 == [step.dialect for step in await stored_steps(store, uuid)]
    assert 2 == len((await proxy.request("GET", f"/{uuid}/nodes"))[1]["nodes"])


async def test_the_official_client_streams_within_a_session(proxy, store):
    """Its base URL is `{proxy}/{uuid}/v1`; models are listed there too."""
    uuid = await proxy.create()
    async with openai.AsyncOpenAI(base_url=f"{proxy.url}/{uuid}/v1", api_key="x") as client:
        models = await client.models.list()
        stream = await client.chat.completions.create(
            model=models.data[0].id, messages=HELLO, max_tokens=6, stream=True
        )
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])
    (step,) = await stored_steps(store, uuid)

    assert step.response["choices"][0]["message"]["content"] == text
    assert step.exact


@pytest.mark.parametrize("streams", [False, True])
async def test_a_retry_with_a_key_is_told_as_the_first_was(proxy, store, streams):
    """Whole or as a stream; the engine is asked once."""
    uuid = await proxy.create()
    body, key = {"messages": HELLO, "max_tokens": 4, "stream": streams}, {"Idempotency-Key": "k"}
    _, once = await proxy.request("POST", f"/{uuid}{CHAT}", body, key)
    _, again = await proxy.request("POST", f"/{uuid}{CHAT}", body, key)

    assert 1 == len(await stored_steps(store, uuid))
    assert (once == again) if not streams else again.startswith(b"data: ") and again.endswith(b"data: [DONE]\n\n")


async def test_a_session_that_is_finished_takes_no_more_calls(proxy):
    """409, in its shape."""
    uuid = await proxy.create()
    await proxy.request("POST", f"/rollouts/{uuid}/finish", {"status": "completed"})
    status, told = await proxy.request("POST", f"/{uuid}{CHAT}", {"messages": HELLO})

    assert (409, "invalid_request_error", 409) == (status, told["error"]["type"], told["error"]["code"])


async def test_a_minted_key_is_of_one_session(proxy):
    """Another's is 403."""
    uuid, other = await proxy.create(), await proxy.create()
    _, opened = await proxy.request("POST", "/rollouts", {"rollout_id": "r1"})
    headers = {"Authorization": f"Bearer {opened['api_key']}"}

    for name in (uuid, other):
        assert 403 == (await proxy.request("POST", f"/{name}{CHAT}", {"messages": HELLO}, headers))[0]
