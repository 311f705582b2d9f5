"""The routes of Atropos' proxy: setup, servers, and creating, listing and deleting sessions."""

import asyncio
import logging
import time
import typing
import uuid as uuid_lib

import aiohttp
import pydantic
import pytest
from openai.types.chat.chat_completion import ChatCompletion, ChatCompletionMessage, Choice
from tests.support.fakes import fake_engine
from tests.support.recorded import load
from tests.support.sessions import HELLO, error, serving_sessions
from tests.support.stored import stored_rollout
from tests.support.trainers import load_published

from proxy.server.listener import simulating
from proxy.simulator.options import Options
from storage.errors import StoreUnreachable

UNKNOWN = "00000000-0000-8000-8000-000000000000"
ROUTES = [
    ("DELETE", "", None),
    ("GET", "/nodes", None),
    ("GET", "/v1/models", None),
    ("POST", "/v1/chat/completions", {"messages": HELLO}),
    ("POST", "/v1/chat/completions/render", {"messages": HELLO}),
    ("POST", "/v1/completions", {"prompt": "x"}),
]
CONTROL = {"agents": {"api_keys": ["agent"]}, "control": {"api_keys": ["control"]}}


@pytest.fixture
async def proxy(store):
    async with serving_sessions(store) as proxy:
        yield proxy


async def test_at_7_and_at_9_health_has_the_model_and_the_counts_of_sessions_and_servers(proxy, store):
    """Rollouts that are not sessions are not counted."""
    await proxy.create()
    await proxy.request("POST", "/rollouts", {"rollout_id": "r1"})

    health = {"status": "ok", "model": "simulated", "sessions": 1, "servers": 1, "healthy_servers": 1}
    assert await proxy.request("GET", "/health") == (200, health)
    assert len([name async for name in store.names()]) == 2


async def test_at_7_setup_accepts_configured_engines(proxy):
    """An empty list is accepted; trailing slashes and /v1 are ignored."""
    payload = {"status": "ok", "servers": 1, "model_name": "simulated"}

    assert await proxy.request("POST", "/setup", {"model_name": "x", "servers": []}) == (200, payload)
    for url in (proxy.engine_url, f"{proxy.engine_url}/", f"{proxy.engine_url}/v1/"):
        assert await proxy.request("POST", "/setup", {"servers": [{"base_url": url, "server_type": "vllm"}]}) == (
            200,
            payload,
        )


async def test_at_7_setup_with_another_engine_is_404(proxy, store):
    """The proxy does not connect to it."""
    async with fake_engine() as elsewhere:
        response = await proxy.request("POST", "/setup", {"servers": [{"base_url": elsewhere.url}]})

    assert error(404, (
        f"No server with base_url {elsewhere.url!r}. Available: {[proxy.engine_url]}. Only configured engines "
        "(engines.endpoints) can be used."
    )) == response  # fmt: skip
    assert (elsewhere.requests, elsewhere.probes) == ([], 0)


async def test_at_7_setup_without_a_base_url_is_500(proxy):
    """Atropos' proxy has the same status."""
    assert error(500, "base_url is missing in one of the servers") == await proxy.request(
        "POST", "/setup", {"servers": [{"server_type": "vllm"}]}
    )


async def test_at_7_schema_errors_are_422_with_fastapis_detail(proxy):
    status, payload = await proxy.request("POST", "/setup", {"servers": 7})

    assert (status, list(payload)) == (422, ["detail"])
    assert [(fault["type"], fault["loc"], fault["input"]) for fault in payload["detail"]] == [
        ("list_type", ["body", "servers"], 7)
    ]


async def test_at_7_servers_are_the_configured_engines(proxy):
    server = {
        "index": 0,
        "base_url": proxy.engine_url,
        "healthy": True,
        "model_name": "simulated",
        "server_type": "vllm",
    }

    await proxy.request("POST", "/sessions/create", {})
    assert await proxy.request("GET", "/servers") == (200, {"servers": [server]})


async def test_at_7_a_session_is_a_rollout_with_the_sessions_terms_in_its_metadata(proxy, store):
    status, payload = await proxy.request("POST", "/sessions/create", {"tool_parser": "mistral", "track_tree": True})
    rollout = await stored_rollout(store, payload["uuid"])

    assert status == 200
    assert {
        "uuid": rollout.rollout_id, "model_name": "simulated", "tool_parser": "mistral", "base_url": None,
        "created_at": rollout.created_ms / 1000,
    } == payload  # fmt: skip
    assert rollout.metadata["atropos"] == {
        "tool_parser": "mistral", "track_tree": True, "base_url": None, "model_name": "simulated"
    }  # fmt: skip


async def test_at_7_a_session_defaults_to_the_hermes_parser(proxy):
    status, payload = await proxy.request("POST", "/sessions/create")

    assert (status, payload["tool_parser"]) == (200, "hermes")


async def test_a_session_of_an_unreachable_engine_can_be_created(store, engine):
    """Its calls go to another engine meanwhile."""
    engine.plays(load("chat_ids_lp"))
    dead = "http://127.0.0.1:9"
    engines = {"endpoints": [{"url": dead, "name": "dead"}, {"url": engine.url, "name": "live"}], "eject_after": 1}
    async with serving_sessions(store, engine.url, engines=engines) as proxy:
        while all(shown["ejected_until"] is None for shown in (await proxy.request("GET", "/engines"))[1]["engines"]):
            pass
        uuid = await proxy.create(base_url=dead)
        body = {"messages": [{"role": "user", "content": "hi"}]}
        assert (await proxy.request("POST", f"/{uuid}/v1/chat/completions", body))[0] == 200
        assert "messages" in engine.requests[-1]


async def test_at_7_a_session_of_an_unknown_engine_is_404_and_lists_the_available_engines(proxy):
    status, payload = await proxy.request("POST", "/sessions/create", {"base_url": "http://10.0.0.1:9/v1"})

    assert (status, payload["error"]["type"], payload["error"]["code"]) == (404, "invalid_request_error", 404)
    assert f"Available: {[proxy.engine_url]}" in payload["error"]["message"]


@pytest.mark.parametrize("index", [0, 1])
async def test_at_7_a_session_of_an_engine_is_served_by_that_engine(store, index):
    """Its ID is routed to that engine at every process."""
    async with (
        simulating("127.0.0.1:0", Options()) as first,
        simulating("127.0.0.1:0", Options()) as second,
    ):
        engines = {"endpoints": [{"url": first, "name": "first"}, {"url": second, "name": "second"}]}
        async with serving_sessions(store, first, engines=engines) as proxy:
            for _ in range(4):
                uuid = await proxy.create(base_url=f"{(first, second)[index]}/")
                await proxy.request("POST", f"/{uuid}/v1/chat/completions", {"messages": HELLO, "max_tokens": 2})
                _, payload = await proxy.request("GET", f"/rollouts/{uuid}/steps")
                assert ("first", "second")[index] == payload["steps"][0]["engine"]["name"]


async def test_at_7_sessions_are_listed_with_their_numbers_of_nodes(proxy, store):
    """Other rollouts are not listed."""
    first, second = await proxy.create(), await proxy.create(base_url=proxy.engine_url)
    await proxy.request("POST", "/rollouts", {"rollout_id": "r1"})
    await proxy.request("POST", f"/{first}/v1/chat/completions", {"messages": HELLO, "n": 2, "max_tokens": 4})
    status, payload = await proxy.request("GET", "/sessions")
    stored = {name: await stored_rollout(store, name) for name in (first, second)}

    assert status == 200
    expected = [
        {
            "uuid": name,
            "model_name": "simulated",
            "base_url": url,
            "created_at": stored[name].created_ms / 1000,
            "last_accessed": stored[name].touched_ms / 1000,
            "num_nodes": nodes,
        }
        for name, url, nodes in ((first, None, 2), (second, proxy.engine_url, 0))
    ]
    assert sorted(payload["sessions"], key=lambda session: -session["num_nodes"]) == expected


async def test_at_7_a_conversation_is_one_node_with_its_text_and_sampled_tokens(proxy):
    """Tokens that were not sampled are -100 with logprob 1.0."""
    uuid = await proxy.create()
    _, first = await proxy.request("POST", f"/{uuid}/v1/chat/completions", {"messages": HELLO, "max_tokens": 8})
    reply = first["choices"][0]["message"]
    more = [*HELLO, reply, {"role": "user", "content": "And?"}]
    await proxy.request("POST", f"/{uuid}/v1/chat/completions", {"messages": more, "max_tokens": 8})
    status, payload = await proxy.request("GET", f"/{uuid}/nodes")
    _, recorded = await proxy.request("GET", f"/rollouts/{uuid}/steps")
    sampled = [token for step in recorded["steps"] for token in step["choices"][0]["ids"]]
    _, text = await proxy.request("POST", "/detokenize", {"tokens": payload["nodes"][0]["tokens"]})

    assert (status, list(payload)) == (200, ["nodes"])
    (node,) = payload["nodes"]
    assert list(node) == ["full_text", "tokens", "masked_tokens", "logprobs", "metadata"]
    assert sampled == [token for token in node["masked_tokens"] if token != -100]
    assert [token == -100 for token in node["masked_tokens"]] == [logprob == 1.0 for logprob in node["logprobs"]]
    assert text["prompt"] == node["full_text"]
    assert {"finish_reason": recorded["steps"][1]["choices"][0]["finish_reason"]} == node["metadata"]


async def test_at_7_with_track_tree_each_completion_is_a_node(proxy):
    """The tokens of the first turn are prompt in the second node."""
    uuid = await proxy.create(track_tree=True)
    _, first = await proxy.request("POST", f"/{uuid}/v1/chat/completions", {"messages": HELLO, "max_tokens": 8})
    more = [*HELLO, first["choices"][0]["message"], {"role": "user", "content": "And?"}]
    await proxy.request("POST", f"/{uuid}/v1/chat/completions", {"messages": more, "max_tokens": 8})
    _, payload = await proxy.request("GET", f"/{uuid}/nodes")
    _, recorded = await proxy.request("GET", f"/rollouts/{uuid}/steps")

    assert [step["choices"][0]["ids"] for step in recorded["steps"]] == [
        [token for token in node["masked_tokens"] if token != -100] for node in payload["nodes"]
    ]


@pytest.mark.parametrize("shape", ["vllm", "sglang"])
async def test_at_10_concurrent_calls_of_a_session_have_one_correct_node_each(store, shape):
    async with serving_sessions(store, shape=shape) as proxy:
        uuid = await proxy.create()
        bodies = [{"messages": [{"role": "user", "content": f"Say {n}"}], "max_tokens": 6} for n in range(2)]
        await asyncio.gather(*(proxy.request("POST", f"/{uuid}/v1/chat/completions", body) for body in bodies))
        _, payload = await proxy.request("GET", f"/{uuid}/nodes")
        _, recorded = await proxy.request("GET", f"/rollouts/{uuid}/steps")

    expected = [[*step["prompt_ids"], *step["choices"][0]["ids"]] for step in recorded["steps"]]
    assert len(expected) == 2
    assert sorted(expected) == sorted(node["tokens"] for node in payload["nodes"])


@pytest.mark.parametrize("as_tree", [False, True])
async def test_chats_of_a_session_have_logprobs_with_every_setting_of_record_logprobs(store, as_tree):
    """Nodes require them. Completions follow the setting; without logprobs nodes are 409."""
    async with serving_sessions(store, record={"logprobs": "off"}) as proxy:
        uuid = await proxy.create(track_tree=as_tree)
        await proxy.request("POST", f"/{uuid}/v1/chat/completions", {"messages": HELLO, "max_tokens": 8})
        (node,) = (await proxy.request("GET", f"/{uuid}/nodes"))[1]["nodes"]
        await proxy.request("POST", f"/{uuid}/v1/completions", {"model": "simulated", "prompt": "x", "max_tokens": 8})
        status, payload = await proxy.request("GET", f"/{uuid}/nodes")

    assert len(node["tokens"]) == len(node["logprobs"])
    assert min(node["logprobs"]) < 0
    assert status == 409
    assert "record.logprobs: off" in payload["error"]["message"]


@pytest.mark.parametrize("keep_sessions", [True, False])
async def test_at_7_routes_of_a_deleted_session_are_404(store, keep_sessions):
    """This holds whether its rollout is kept or not."""
    async with serving_sessions(store, atropos={"enabled": True, "keep_sessions": keep_sessions}) as proxy:
        uuid = await proxy.create()
        await proxy.request("POST", f"/{uuid}/v1/chat/completions", {"messages": HELLO, "max_tokens": 4})

        assert await proxy.request("DELETE", f"/{uuid}") == (200, {"status": "deleted", "uuid": uuid})
        for method, path, body in ROUTES:
            assert error(404, f"Session {uuid} not found") == await proxy.request(method, f"/{uuid}{path}", body)
        assert await proxy.request("GET", "/sessions") == (200, {"sessions": []})
        assert (200 if keep_sessions else 404) == (await proxy.request("GET", f"/rollouts/{uuid}"))[0]


def atropos_client():
    """Return the published client of Atropos' proxy."""
    folder = "atroposlib/envs/server_handling/"
    nodes = load_published(folder + "managed_server.py", "SequenceNode", **vars(typing), BaseModel=pydantic.BaseModel)
    names_used = {"aiohttp": aiohttp, "logger": logging.getLogger("atroposlib"), "time": time, "uuid_lib": uuid_lib}
    names_used |= {"ChatCompletion": ChatCompletion, "ChatCompletionMessage": ChatCompletionMessage, "Choice": Choice}
    names = ("ProxyManagedServer", "create_proxy_session")
    return load_published(folder + "proxy_client.py", *names, SequenceNode=nodes.SequenceNode, **names_used)


async def test_a_session_closed_by_atropos_client_is_a_completed_rollout(proxy, store):
    """The client deletes the session; the rollout has the client's nodes."""
    async with await atropos_client().create_proxy_session(proxy.url) as session:
        await session.chat_completion(messages=HELLO, max_tokens=6)
    (node,) = session.get_state()["nodes"]
    rollout = await stored_rollout(store, session.session_uuid)
    _, payload = await proxy.request("GET", f"/rollouts/{rollout.rollout_id}/export?format=nodes")
    _, listed = await proxy.request("GET", "/rollouts?status=completed")

    assert (rollout.status, rollout.counts["steps"]) == ("completed", 1)
    assert rollout.finished_ms is not None
    assert [rollout.rollout_id] == [entry["rollout_id"] for entry in listed["rollouts"]]
    assert [node.tokens] == [row["tokens"] for row in payload["rows"]]
    assert rollout.metadata["atropos"]["model_name"] == "simulated"


async def finish_as_failed(proxy, store, uuid):
    """Finish the session's rollout as a trainer does."""
    metadata = {**(await stored_rollout(store, uuid)).metadata, "mine": 1}
    body = {"status": "failed", "reward": 0.5, "metadata": metadata}
    assert (await proxy.request("POST", f"/rollouts/{uuid}/finish", body))[0] == 200


async def test_deleting_a_session_does_not_change_how_its_rollout_was_finished(proxy, store):
    """This holds also if the finish is concurrent with the deletion."""
    before, meanwhile = await proxy.create(), await proxy.create()
    await finish_as_failed(proxy, store, before)
    assert (await proxy.request("DELETE", f"/{before}"))[0] == 200
    reached, proceed = store.pauses("update_if")
    deleting = asyncio.create_task(proxy.request("DELETE", f"/{meanwhile}"))
    await reached.wait()
    del store.waiting["update_if"]
    await finish_as_failed(proxy, store, meanwhile)
    proceed.set()
    assert (await deleting)[0] == 200

    for name in (before, meanwhile):
        rollout = await stored_rollout(store, name)
        assert (rollout.status, rollout.reward, rollout.metadata["mine"]) == ("failed", 0.5, 1)
        assert (await proxy.request("DELETE", f"/{name}"))[0] == 404


async def test_at_7_an_unknown_session_is_404_on_every_route(proxy):
    for uuid in [UNKNOWN, "nonexistent"]:
        for method, path, body in ROUTES:
            assert error(404, f"Session {uuid} not found") == await proxy.request(method, f"/{uuid}{path}", body)


async def test_a_rollout_that_is_not_a_session_is_404_on_session_routes(proxy):
    """This includes a rollout named like a session."""
    for name in ("r1", UNKNOWN):
        await proxy.request("POST", "/rollouts", {"rollout_id": name})
        assert (await proxy.request("DELETE", f"/{name}"))[0] == 404
        assert (await proxy.request("GET", f"/rollouts/{name}"))[0] == 200


@pytest.mark.parametrize("name", ["nodes", "v1"])
async def test_session_routes_do_not_shadow_routes_of_the_control_api(proxy, name):
    for kind, key in (("rollouts", "rollout_id"), ("groups", "group_id")):
        await proxy.request("POST", f"/{kind}", {key: name, **({"size": 1} if kind == "groups" else {})})
        status, payload = await proxy.request("GET", f"/{kind}/{name}")
        assert (status, payload.get(key)) == (200, name), payload


async def test_with_atropos_disabled_its_routes_are_404(store):
    async with serving_sessions(store, atropos={}) as proxy:
        for route in ("POST /setup", "GET /servers", "POST /sessions/create", "GET /sessions"):
            assert (await proxy.request(*route.split(), {}))[0] == 404
        assert await proxy.request("GET", "/health") == (200, {"status": "ok"})


async def test_session_routes_require_control_keys_and_their_calls_agent_keys(store):
    """Health requires no key."""
    agent, control = ({"Authorization": f"Bearer {key}"} for key in ("agent", "control"))
    async with serving_sessions(store, **CONTROL) as proxy:
        assert (await proxy.request("POST", "/sessions/create", {}))[0] == 401
        assert (await proxy.request("POST", "/sessions/create", {}, agent))[0] == 403
        _, payload = await proxy.request("POST", "/sessions/create", {}, control)
        uuid = payload["uuid"]
        chat = ("POST", f"/{uuid}/v1/chat/completions", {"messages": HELLO, "max_tokens": 2})
        statuses = [(await proxy.request(*chat, headers))[0] for headers in (None, agent)]
        nodes = [(await proxy.request("GET", f"/{uuid}/nodes", None, headers))[0] for headers in (None, agent, control)]

        assert (statuses, nodes) == ([401, 200], [401, 403, 200])
        assert error(401, "An API key is required.") == await proxy.request(*chat)
        assert (await proxy.request("GET", "/health"))[0] == 200


async def test_health_is_200_while_the_store_is_unreachable(proxy, store):
    """The number of sessions is null."""

    async def names():
        raise StoreUnreachable("the test took the store away")
        yield

    store.names = names
    status, payload = await proxy.request("GET", "/health")

    assert (status, payload["status"], payload["sessions"]) == (200, "ok", None)


async def test_a_session_is_served_by_every_replica(proxy, store):
    uuid = await proxy.create()
    async with serving_sessions(store, proxy.engine_url) as other:
        chat = ("POST", f"/{uuid}/v1/chat/completions", {"messages": HELLO, "max_tokens": 2})
        assert (await other.request(*chat))[0] == 200

    assert len((await proxy.request("GET", f"/{uuid}/nodes"))[1]["nodes"]) == 1


async def test_with_separate_ports_sessions_are_on_the_control_api_and_calls_on_the_model_api(store, engine):
    async with serving_sessions(store, control={"listen": "127.0.0.1:0"}) as proxy:
        assert (await proxy.request("POST", "/sessions/create", {}))[0] == 404
        status, payload = await proxy.request("POST", "/sessions/create", {}, url=proxy.control_url)
        chat = (f"/{payload['uuid']}/v1/chat/completions", {"messages": HELLO, "max_tokens": 2})

        assert status == 200
        assert (await proxy.request("POST", *chat))[0] == 200
        assert (await proxy.request("POST", *chat, url=proxy.control_url))[0] == 404


async def test_an_unreachable_store_is_503_in_the_shape_of_atropos_proxy(proxy, store):
    store.failing = {"open"}
    status, payload = await proxy.request("POST", "/sessions/create", {})

    assert (status, payload["error"]["type"], payload["error"]["code"]) == (503, "server_error", 503)
