"""Calls within a session of Atropos' proxy, and texts and rendered prompts from its engine."""

import openai
import pytest
from aiohttp import web
from tests.support.sessions import HELLO, error, serving_sessions
from tests.support.stored import stored_steps

CHAT = "/v1/chat/completions"
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(params=["vllm", "sglang"])
async def proxy(request, store):
    async with serving_sessions(store, shape=request.param) as proxy:
        yield proxy


async def test_at_7_a_chat_response_has_the_shape_of_atropos_proxy_and_an_exact_step(proxy, store):
    """The response has no usage, logprobs or empty tool_calls."""
    uuid = await proxy.create()
    messages = [{"role": "user", "content": "Hello!", "tool_calls": None, "name": None}]
    status, payload = await proxy.request("POST", f"/{uuid}{CHAT}", {"messages": messages, "n": 2, "max_tokens": 6})
    (step,) = await stored_steps(store, uuid)

    assert (status, list(payload)) == (200, ["id", "object", "created", "model", "choices"])
    assert (payload["object"], len(payload["id"])) == ("chat.completion", 21)
    assert payload["model"] == ("default" if step.engine.kind == "sglang" else "simulated")  # none was requested
    assert payload["id"][:9] == "chatcmpl-"
    assert type(payload["created"]) is int
    assert [choice["index"] for choice in payload["choices"]] == [0, 1]
    assert all(list(choice) == ["index", "message", "finish_reason"] for choice in payload["choices"])
    assert all(list(choice["message"]) == ["role", "content"] for choice in payload["choices"])
    assert [choice.finish_reason for choice in step.choices] == [
        choice["finish_reason"] for choice in payload["choices"]
    ]
    assert (step.exact, step.request["messages"], len(step.choices)) == (True, messages, 2)


async def test_at_7_tool_calls_and_their_finish_reason_are_in_the_response(store, engine):
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    message = {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": None}
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
    engine.answers({"id": "x", "created": 7, "model": "m", "choices": [choice]})
    async with serving_sessions(store, engine.url) as proxy:
        uuid = await proxy.create()
        engine.requests.clear()
        _, payload = await proxy.request(
            "POST", f"/{uuid}{CHAT}", {"messages": HELLO, "tools": [ADD], "tool_choice": "auto"}
        )

    del message["reasoning"]
    assert choice == payload["choices"][0]
    assert (engine.requests[-1]["tools"], engine.requests[-1]["tool_choice"]) == ([ADD], "auto")


async def test_at_7_empty_messages_are_400_and_missing_messages_422(proxy):
    """Atropos' proxy and FastAPI return errors in these shapes."""
    uuid = await proxy.create()
    status, payload = await proxy.request("POST", f"/{uuid}{CHAT}", {})

    assert error(400, "messages must not be empty.") == await proxy.request("POST", f"/{uuid}{CHAT}", {"messages": []})
    assert (
        status,
        [(fault["type"], fault["loc"]) for fault in payload["detail"]],
    ) == (422, [("missing", ["body", "messages"])])


@pytest.mark.parametrize("status", [400, 500, 503])
async def test_at_7_an_engine_error_is_500_completion_failed(store, engine, status):
    """It has the engine's message; an error step and no node is recorded."""
    engine.answers({"error": {"message": "out of memory"}}, status)
    async with serving_sessions(store, engine.url) as proxy:
        uuid = await proxy.create()
        response = await proxy.request("POST", f"/{uuid}{CHAT}", {"messages": HELLO})
        nodes = await proxy.request("GET", f"/{uuid}/nodes")

    assert error(500, "Completion failed: out of memory") == response
    assert nodes == (200, {"nodes": []})
    assert [step.status for step in await stored_steps(store, uuid)] == ["error"]


async def test_at_7_an_unreachable_engine_is_500_completion_failed(store):
    async with serving_sessions(store, "http://127.0.0.1:1", engines={"endpoints": [
        {"url": "http://127.0.0.1:1", "kind": "vllm", "name": "gone"}
    ]}) as proxy:  # fmt: skip
        uuid = await proxy.create()
        status, payload = await proxy.request("POST", f"/{uuid}{CHAT}", {"messages": HELLO})

    assert (status, payload["error"]["type"]) == (500, "server_error")
    assert payload["error"]["message"].startswith("Completion failed: Engine gone is unreachable")


async def test_at_7_a_rendered_prompt_equals_the_prompt_of_the_call(proxy, store):
    """Rendering creates no node."""
    uuid = await proxy.create()
    body = {"messages": HELLO, "max_tokens": 2}
    status, payload = await proxy.request("POST", f"/{uuid}{CHAT}/render", body)
    steps_before = await stored_steps(store, uuid)
    await proxy.request("POST", f"/{uuid}{CHAT}", body)
    (step,) = await stored_steps(store, uuid)

    assert (status, list(payload)) == (200, ["prompt_text", "token_ids", "num_tokens"])
    assert (step.prompts[0].tolist(), len(step.prompts[0])) == (payload["token_ids"], payload["num_tokens"])
    assert "Hello!" in payload["prompt_text"]
    assert steps_before == []


async def test_at_7_a_prompt_that_cannot_be_rendered_is_400(store, engine):
    """It has the engine's message."""
    engine.answers({"message": "no template"}, 400)
    async with serving_sessions(store, engine.url) as proxy:
        uuid = await proxy.create()
        response = await proxy.request("POST", f"/{uuid}{CHAT}/render", {"messages": HELLO})

    assert error(400, 'Failed to render prompt: fake returned status 400: {"message":"no template"}') == response


async def test_an_invalid_rendered_prompt_of_the_engine_is_400(store, engine):
    """The error does not contain the engine's address."""
    texts = [
    b"", b"no", b"null", b"7", b"[]", b"{}", b'{"tokens": null}', b'{"tokens": "12"}', b'{"tokens": [[1]]}',
    b'{"tokens": [1, null]}', b'{"tokens": [true]}', b'{"tokens": {"1": 2}}',
]  # fmt: skip
    sent = []

    async def respond(request, body):
        sent.append(texts[len(sent)])
        return web.Response(body=sent[-1], content_type="application/json")

    async with serving_sessions(store, engine.url) as proxy:
        uuid = await proxy.create()
        engine.respond = respond
        for number, text in enumerate(texts):
            status, payload = await proxy.request("POST", f"/{uuid}{CHAT}/render", {"messages": HELLO})
            assert (status, len(sent)) == (400, number + 1), text
            assert "Failed to render prompt: The engine" in str(payload)
            assert "127.0.0.1" not in str(payload)


async def test_completions_of_a_session_are_recorded_and_have_the_engines_shape(proxy, store):
    """Atropos' proxy has no completions. The prompt may be ids."""
    uuid = await proxy.create()
    for prompt in ("Hello", [40, 41, 42]):
        status, payload = await proxy.request("POST", f"/{uuid}/v1/completions", {"prompt": prompt, "max_tokens": 3})
        assert (status, payload["object"]) == (200, "text_completion")

    assert [step.dialect for step in await stored_steps(store, uuid)] == ["completions"] * 2
    assert len((await proxy.request("GET", f"/{uuid}/nodes"))[1]["nodes"]) == 2


async def test_the_openai_client_streams_within_a_session(proxy, store):
    """Its base URL is `{proxy}/{uuid}/v1`, which also lists models."""
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
async def test_a_retry_with_an_idempotency_key_replays_the_response(proxy, store, streams):
    """One step is recorded."""
    uuid = await proxy.create()
    body, key = {"messages": HELLO, "max_tokens": 4, "stream": streams}, {"Idempotency-Key": "k"}
    _, first = await proxy.request("POST", f"/{uuid}{CHAT}", body, key)
    _, second = await proxy.request("POST", f"/{uuid}{CHAT}", body, key)

    assert len(await stored_steps(store, uuid)) == 1
    assert (first == second) if not streams else second.startswith(b"data: ") and second.endswith(b"data: [DONE]\n\n")


async def test_a_call_of_a_finished_session_is_409(proxy):
    uuid = await proxy.create()
    await proxy.request("POST", f"/rollouts/{uuid}/finish", {"status": "completed"})
    status, payload = await proxy.request("POST", f"/{uuid}{CHAT}", {"messages": HELLO})

    assert (status, payload["error"]["type"], payload["error"]["code"]) == (409, "invalid_request_error", 409)


async def test_a_minted_key_is_403_for_sessions_of_other_rollouts(proxy):
    uuid, other = await proxy.create(), await proxy.create()
    _, opened = await proxy.request("POST", "/rollouts", {"rollout_id": "r1"})
    headers = {"Authorization": f"Bearer {opened['api_key']}"}

    for name in (uuid, other):
        assert (await proxy.request("POST", f"/{name}{CHAT}", {"messages": HELLO}, headers))[0] == 403


USAGE = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}


async def test_without_detokenization_the_text_of_a_node_is_null(store, engine):
    """Its tokens are complete."""

    async def respond(request, body):
        if request.path != "/v1/completions":
            return web.json_response({"detail": "Not Found"}, status=404)
        logprobs = {"token_logprobs": [-0.5], "tokens": ["a"], "top_logprobs": [None], "text_offset": [0]}
        choice = {"index": 0, "text": "a", "finish_reason": "stop", "prompt_token_ids": [1], "token_ids": [5]}
        head = {"id": "c", "object": "text_completion", "created": 1, "model": "m", "usage": USAGE}
        return web.json_response({**head, "choices": [{**choice, "logprobs": logprobs}]})

    engine.respond = respond
    async with serving_sessions(store, engine.url) as proxy:
        uuid = await proxy.create()
        await proxy.request("POST", f"/{uuid}/v1/completions", {"prompt": [1], "max_tokens": 1})
        _, payload = await proxy.request("GET", f"/{uuid}/nodes")

    assert [(node["full_text"], node["tokens"]) for node in payload["nodes"]] == [(None, [1, 5])]


async def test_a_session_is_created_without_a_model_if_the_engine_lists_none(store, engine):
    async with serving_sessions(store, engine.url) as proxy:
        status, payload = await proxy.request("POST", "/sessions/create", {})

    assert (status, payload["model_name"]) == (200, None)


async def test_rendering_with_an_engine_that_cannot_tokenize_messages_is_400(store, engine):
    engines = {"endpoints": [{"url": engine.url, "kind": "plain", "name": "text"}]}
    async with serving_sessions(store, engine.url, engines=engines) as proxy:
        uuid = await proxy.create()
        status, payload = await proxy.request("POST", f"/{uuid}/v1/chat/completions/render", {"messages": HELLO})

    assert (
        status,
        payload["error"]["message"],
    ) == (400, "Failed to render prompt: the engine text (plain) does not support /tokenize for messages")
