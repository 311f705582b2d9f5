"""The routes of Atropos' proxy: sessions are created, looked at and deleted; engines are the configuration's alone."""

import asyncio
import logging
import time
import typing
import uuid as uuid_lib

import aiohttp
import pydantic
import pytest
from fakes import fake_engine
from openai.types.chat.chat_completion import ChatCompletion, ChatCompletionMessage, Choice
from recorded import load
from sessions import HELLO, error, serving_sessions
from stored import stored_rollout
from trainers import load_published

from proxy.server.listener import simulating
from proxy.simulator.options import Options
from storage.errors import StoreUnreachable

NO_SUCH = "00000000-0000-8000-8000-000000000000"
CONTROL = {"agents": {"api_keys": ["agent"]}, "control": {"api_keys": ["control"]}}


@pytest.fixture
async def proxy(store):
    async with serving_sessions(store) as proxy:
        yield proxy


async def test_at_7_and_at_9_health_tells_the_model_and_counts_and_is_recorded_nowhere(proxy, store):
    """Its fields, and our own `status`; a rollout that is no session is not counted."""
    await proxy.create()
    await proxy.request("POST", "/rollouts", {"rollout_id": "r1"})

    assert (
        200,
        {"status": "ok", "model": "simulated", "sessions": 1, "servers": 1, "healthy_servers": 1},
    ) == await proxy.request("GET", "/health")
    assert 2 == len([name async for name in store.names()])


async def test_at_7_setup_checks_that_it_names_configured_engines(proxy):
    """An empty list too is answered with what is configured; slashes and /v1 make no difference."""
    told = {"status": "ok", "servers": 1, "model_name": "simulated"}

    assert (200, told) == await proxy.request("POST", "/setup", {"model_name": "x", "servers": []})
    for url in (proxy.engine_url, f"{proxy.engine_url}/", f"{proxy.engine_url}/v1/"):
        assert (200, told) == await proxy.request(
            "POST", "/setup", {"servers": [{"base_url": url, "server_type": "vllm"}]}
        )


async def test_at_7_setup_cannot_name_another_engine(proxy, store):
    """It is not even connected to: the list of engines is the configuration's."""
    async with fake_engine() as elsewhere:
        answered = await proxy.request("POST", "/setup", {"servers": [{"base_url": elsewhere.url}]})

    assert error(404, (
        f"No server with base_url {elsewhere.url!r}. Available: {[proxy.engine_url]}. Only configured engines "
        "(engines.endpoints) can be used."
    )) == answered  # fmt: skip
    assert ([], 0) == (elsewhere.requests, elsewhere.probes)


async def test_at_7_setup_without_a_base_url_is_500(proxy):
    """As its proxy answers it."""
    assert error(500, "base_url is missing in one of the servers") == await proxy.request(
        "POST", "/setup", {"servers": [{"server_type": "vllm"}]}
    )


async def test_at_7_schema_errors_are_422_with_fastapis_detail(proxy):
    """Where, what, and what came."""
    status, told = await proxy.request("POST", "/setup", {"servers": 7})

    assert (422, ["detail"]) == (status, list(told))
    assert [("list_type", ["body", "servers"], 7)] == [
        (each["type"], each["loc"], each["input"]) for each in told["detail"]
    ]


async def test_at_7_servers_are_the_configured_engines(proxy):
    """Their index, URL, health, model and kind."""
    server = {
        "index": 0,
        "base_url": proxy.engine_url,
        "healthy": True,
        "model_name": "simulated",
        "server_type": "vllm",
    }

    await proxy.request("POST", "/sessions/create", {})
    assert (200, {"servers": [server]}) == await proxy.request("GET", "/servers")


async def test_at_7_a_session_is_created_and_its_terms_are_the_rollouts(proxy, store):
    """Its reply has the five fields; the store has what another replica needs."""
    status, told = await proxy.request("POST", "/sessions/create", {"tool_parser": "mistral", "track_tree": True})
    rollout = await stored_rollout(store, told["uuid"])

    assert 200 == status
    assert {
        "uuid": rollout.rollout_id, "model_name": "simulated", "tool_parser": "mistral", "base_url": None,
        "created_at": rollout.created_ms / 1000,
    } == told  # fmt: skip
    assert {
        "tool_parser": "mistral", "track_tree": True, "base_url": None, "model_name": "simulated"
    } == rollout.metadata["atropos"]  # fmt: skip


async def test_at_7_a_session_defaults_to_the_hermes_parser(proxy):
    """Also without a body."""
    status, told = await proxy.request("POST", "/sessions/create")

    assert (200, "hermes") == (status, told["tool_parser"])


async def test_a_session_of_an_engine_that_is_away_can_be_created(store, engine):
    """Its id is that engine's all the same, and its calls go elsewhere until it is back."""
    engine.plays(load("chat_ids_lp"))
    dead = "http://127.0.0.1:9"
    engines = {"endpoints": [{"url": dead, "name": "dead"}, {"url": engine.url, "name": "live"}], "eject_after": 1}
    async with serving_sessions(store, engine.url, engines=engines) as proxy:
        while all(one["ejected_until"] is None for one in (await proxy.request("GET", "/engines"))[1]["engines"]):
            pass
        uuid = await proxy.create(base_url=dead)
        said = {"messages": [{"role": "user", "content": "hi"}]}
        assert 200 == (await proxy.request("POST", f"/{uuid}/v1/chat/completions", said))[0]
        assert "messages" in engine.requests[-1]


async def test_at_7_a_session_of_an_unknown_engine_is_404_listing_those_there_are(proxy):
    """The available ones, by URL."""
    status, told = await proxy.request("POST", "/sessions/create", {"base_url": "http://10.0.0.1:9/v1"})

    assert (404, "invalid_request_error", 404) == (status, told["error"]["type"], told["error"]["code"])
    assert f"Available: {[proxy.engine_url]}" in told["error"]["message"]


@pytest.mark.parametrize("wanted", [0, 1])
async def test_at_7_a_session_of_an_engine_is_served_by_that_engine(store, wanted):
    """Whatever replica is asked: its id is one that falls to it."""
    async with (
        simulating("127.0.0.1:0", Options()) as first,
        simulating("127.0.0.1:0", Options()) as second,
    ):
        engines = {"endpoints": [{"url": first, "name": "first"}, {"url": second, "name": "second"}]}
        async with serving_sessions(store, first, engines=engines) as proxy:
            for _ in range(4):
                uuid = await proxy.create(base_url=f"{(first, second)[wanted]}/")
                await proxy.request("POST", f"/{uuid}/v1/chat/completions", {"messages": HELLO, "max_tokens": 2})
                _, told = await proxy.request("GET", f"/rollouts/{uuid}/steps")
                assert ("first", "second")[wanted] == told["steps"][0]["engine"]["name"]


async def test_at_7_sessions_are_listed_with_their_nodes_counted(proxy, store):
    """Newest first; other rollouts are none of them."""
    first, second = await proxy.create(), await proxy.create(base_url=proxy.engine_url)
    await proxy.request("POST", "/rollouts", {"rollout_id": "r1"})
    await proxy.request("POST", f"/{first}/v1/chat/completions", {"messages": HELLO, "n": 2, "max_tokens": 4})
    status, told = await proxy.request("GET", "/sessions")
    stored = {name: await stored_rollout(store, name) for name in (first, second)}

    assert 200 == status
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
    assert expected == sorted(told["sessions"], key=lambda session: -session["num_nodes"])


async def test_at_7_nodes_have_texts_and_the_sampled_tokens_of_every_turn(proxy):
    """A conversation of two turns is one node; what is not sampled is -100 and 1.0."""
    uuid = await proxy.create()
    _, first = await proxy.request("POST", f"/{uuid}/v1/chat/completions", {"messages": HELLO, "max_tokens": 8})
    reply = first["choices"][0]["message"]
    more = [*HELLO, reply, {"role": "user", "content": "And?"}]
    await proxy.request("POST", f"/{uuid}/v1/chat/completions", {"messages": more, "max_tokens": 8})
    status, told = await proxy.request("GET", f"/{uuid}/nodes")
    _, recorded = await proxy.request("GET", f"/rollouts/{uuid}/steps")
    sampled = [token for step in recorded["steps"] for token in step["choices"][0]["ids"]]
    _, text = await proxy.request("POST", "/detokenize", {"tokens": told["nodes"][0]["tokens"]})

    assert (200, ["nodes"]) == (status, list(told))
    (node,) = told["nodes"]
    assert ["full_text", "tokens", "masked_tokens", "logprobs", "metadata"] == list(node)
    assert sampled == [token for token in node["masked_tokens"] if token != -100]
    assert [token == -100 for token in node["masked_tokens"]] == [logprob == 1.0 for logprob in node["logprobs"]]
    assert text["prompt"] == node["full_text"]
    assert {"finish_reason": recorded["steps"][1]["choices"][0]["finish_reason"]} == node["metadata"]


async def test_at_7_nodes_of_a_tree_are_one_for_each_completion(proxy):
    """The first turn's tokens are prompt in the second's node: no mask is carried forward."""
    uuid = await proxy.create(track_tree=True)
    _, first = await proxy.request("POST", f"/{uuid}/v1/chat/completions", {"messages": HELLO, "max_tokens": 8})
    more = [*HELLO, first["choices"][0]["message"], {"role": "user", "content": "And?"}]
    await proxy.request("POST", f"/{uuid}/v1/chat/completions", {"messages": more, "max_tokens": 8})
    _, told = await proxy.request("GET", f"/{uuid}/nodes")
    _, recorded = await proxy.request("GET", f"/rollouts/{uuid}/steps")

    assert [step["choices"][0]["ids"] for step in recorded["steps"]] == [
        [token for token in node["masked_tokens"] if token != -100] for node in told["nodes"]
    ]


@pytest.mark.parametrize("shape", ["vllm", "sglang"])
async def test_at_10_concurrent_calls_in_one_session_give_a_correct_node_each(store, shape):
    """Their tokens and logprobs are those of their own steps."""
    async with serving_sessions(store, shape=shape) as proxy:
        uuid = await proxy.create()
        asked = [{"messages": [{"role": "user", "content": f"Say {n}"}], "max_tokens": 6} for n in range(2)]
        await asyncio.gather(*(proxy.request("POST", f"/{uuid}/v1/chat/completions", body) for body in asked))
        _, told = await proxy.request("GET", f"/{uuid}/nodes")
        _, recorded = await proxy.request("GET", f"/rollouts/{uuid}/steps")

    expected = [[*step["prompt_ids"], *step["choices"][0]["ids"]] for step in recorded["steps"]]
    assert 2 == len(expected)
    assert sorted(expected) == sorted(node["tokens"] for node in told["nodes"])


@pytest.mark.parametrize("as_tree", [False, True])
async def test_chats_of_a_session_have_logprobs_whatever_is_configured(store, as_tree):
    """Its nodes want them. A completions call is not asked for any more than configured, and then there are no nodes."""
    async with serving_sessions(store, record={"logprobs": "off"}) as proxy:
        uuid = await proxy.create(track_tree=as_tree)
        await proxy.request("POST", f"/{uuid}/v1/chat/completions", {"messages": HELLO, "max_tokens": 8})
        (node,) = (await proxy.request("GET", f"/{uuid}/nodes"))[1]["nodes"]
        await proxy.request("POST", f"/{uuid}/v1/completions", {"model": "simulated", "prompt": "x", "max_tokens": 8})
        status, told = await proxy.request("GET", f"/{uuid}/nodes")

    assert len(node["tokens"]) == len(node["logprobs"])
    assert min(node["logprobs"]) < 0
    assert 409 == status
    assert "record.logprobs: off" in told["error"]["message"]


@pytest.mark.parametrize("kept", [True, False])
async def test_at_7_a_deleted_session_is_gone(store, kept):
    """Whether its rollout is kept or not, all of its routes answer 404, a second DELETE too, and it is listed no more."""
    calls = [
        ("DELETE", "", None),
        ("GET", "/nodes", None),
        ("GET", "/v1/models", None),
        ("POST", "/v1/chat/completions", {"messages": HELLO}),
        ("POST", "/v1/chat/completions/render", {"messages": HELLO}),
        ("POST", "/v1/completions", {"prompt": "x"}),
    ]
    async with serving_sessions(store, atropos={"enabled": True, "keep_sessions": kept}) as proxy:
        uuid = await proxy.create()
        await proxy.request("POST", f"/{uuid}/v1/chat/completions", {"messages": HELLO, "max_tokens": 4})

        assert (200, {"status": "deleted", "uuid": uuid}) == await proxy.request("DELETE", f"/{uuid}")
        for method, path, body in calls:
            assert error(404, f"Session {uuid} not found") == await proxy.request(method, f"/{uuid}{path}", body)
        assert (200, {"sessions": []}) == await proxy.request("GET", "/sessions")
        assert (200 if kept else 404) == (await proxy.request("GET", f"/rollouts/{uuid}"))[0]


def atropos_client():
    """The client of Atropos' proxy as published."""
    folder = "atroposlib/envs/server_handling/"
    nodes = load_published(folder + "managed_server.py", "SequenceNode", **vars(typing), BaseModel=pydantic.BaseModel)
    given = {"aiohttp": aiohttp, "logger": logging.getLogger("atroposlib"), "time": time, "uuid_lib": uuid_lib}
    given |= {"ChatCompletion": ChatCompletion, "ChatCompletionMessage": ChatCompletionMessage, "Choice": Choice}
    names = ("ProxyManagedServer", "create_proxy_session")
    return load_published(folder + "proxy_client.py", *names, SequenceNode=nodes.SequenceNode, **given)


async def test_a_session_that_atropos_own_client_leaves_is_a_finished_rollout(proxy, store):
    """It deletes the session on leaving; what was recorded is there, complete, and its nodes are those the client had."""
    async with await atropos_client().create_proxy_session(proxy.url) as session:
        await session.chat_completion(messages=HELLO, max_tokens=6)
    (node,) = session.get_state()["nodes"]
    rollout = await stored_rollout(store, session.session_uuid)
    _, told = await proxy.request("GET", f"/rollouts/{rollout.rollout_id}/export?format=nodes")
    _, listed = await proxy.request("GET", "/rollouts?status=completed")

    assert ("completed", 1) == (rollout.status, rollout.counts["steps"])
    assert rollout.finished_ms is not None
    assert [rollout.rollout_id] == [one["rollout_id"] for one in listed["rollouts"]]
    assert [node.tokens] == [row["tokens"] for row in told["rows"]]
    assert "simulated" == rollout.metadata["atropos"]["model_name"]


async def finish_as_failed(proxy, store, uuid):
    """What a trainer says of the session's rollout."""
    metadata = {**(await stored_rollout(store, uuid)).metadata, "mine": 1}
    said = {"status": "failed", "reward": 0.5, "metadata": metadata}
    assert 200 == (await proxy.request("POST", f"/rollouts/{uuid}/finish", said))[0]


async def test_what_a_deleted_session_was_finished_as_stays(proxy, store):
    """A trainer knows how it ended; also one that is quicker by a moment than the session's client."""
    before, meanwhile = await proxy.create(), await proxy.create()
    await finish_as_failed(proxy, store, before)
    assert 200 == (await proxy.request("DELETE", f"/{before}"))[0]
    store.waiting["update_if"] = asyncio.Event()
    deleting = asyncio.create_task(proxy.request("DELETE", f"/{meanwhile}"))
    async with asyncio.timeout(10):
        while "update_if" not in store.reached:
            await asyncio.sleep(0.005)
    goes_on = store.waiting.pop("update_if")
    await finish_as_failed(proxy, store, meanwhile)
    goes_on.set()
    assert 200 == (await deleting)[0]

    for name in (before, meanwhile):
        rollout = await stored_rollout(store, name)
        assert ("failed", 0.5, 1) == (rollout.status, rollout.reward, rollout.metadata["mine"])
        assert 404 == (await proxy.request("DELETE", f"/{name}"))[0]


@pytest.mark.parametrize("uuid", [NO_SUCH, "nonexistent"])
@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/nodes", None),
        ("DELETE", "", None),
        ("POST", "/v1/chat/completions", {"messages": HELLO}),
        ("POST", "/v1/chat/completions/render", {"messages": HELLO}),
        ("POST", "/v1/completions", {"prompt": "x"}),
        ("GET", "/v1/models", None),
    ],
)
async def test_at_7_an_unknown_session_is_404_everywhere(proxy, uuid, method, path, body):
    """Nothing comes into being by being called."""
    assert error(404, f"Session {uuid} not found") == await proxy.request(method, f"/{uuid}{path}", body)


async def test_a_rollout_that_is_no_session_is_not_served_as_one(proxy):
    """Neither by its name nor by a name like a session's."""
    for name in ("r1", NO_SUCH):
        await proxy.request("POST", "/rollouts", {"rollout_id": name})
        assert 404 == (await proxy.request("DELETE", f"/{name}"))[0]
        assert 200 == (await proxy.request("GET", f"/rollouts/{name}"))[0]


@pytest.mark.parametrize("name", ["nodes", "v1"])
async def test_routes_of_ours_are_not_taken_by_sessions(proxy, name):
    """Whatever a rollout or a group is called."""
    for kind, key in (("rollouts", "rollout_id"), ("groups", "group_id")):
        await proxy.request("POST", f"/{kind}", {key: name, **({"size": 1} if kind == "groups" else {})})
        status, told = await proxy.request("GET", f"/{kind}/{name}")
        assert (200, name) == (status, told.get(key)), told


async def test_without_the_setting_there_are_no_such_routes(store):
    """And health is what it was."""
    async with serving_sessions(store, atropos={}) as proxy:
        for method, path in (
            ("POST", "/setup"),
            ("GET", "/servers"),
            ("POST", "/sessions/create"),
            ("GET", "/sessions"),
        ):
            assert 404 == (await proxy.request(method, path, {}))[0]
        assert (200, {"status": "ok"}) == await proxy.request("GET", "/health")


async def test_sessions_are_control_and_their_calls_are_agents(store):
    """Each API with its own keys; health with none."""
    agent, control = ({"Authorization": f"Bearer {key}"} for key in ("agent", "control"))
    async with serving_sessions(store, **CONTROL) as proxy:
        assert 401 == (await proxy.request("POST", "/sessions/create", {}))[0]
        assert 403 == (await proxy.request("POST", "/sessions/create", {}, agent))[0]
        _, told = await proxy.request("POST", "/sessions/create", {}, control)
        uuid = told["uuid"]
        chat = ("POST", f"/{uuid}/v1/chat/completions", {"messages": HELLO, "max_tokens": 2})
        statuses = [(await proxy.request(*chat, headers))[0] for headers in (None, agent)]
        nodes = [(await proxy.request("GET", f"/{uuid}/nodes", None, headers))[0] for headers in (None, agent, control)]

        assert ([401, 200], [401, 403, 200]) == (statuses, nodes)
        assert error(401, "An API key is required.") == await proxy.request(*chat)
        assert 200 == (await proxy.request("GET", "/health"))[0]


async def test_health_answers_without_the_store(proxy, store):
    """It says that the process lives; how many sessions there are is not known then."""

    async def names():
        raise StoreUnreachable("the test took the store away")
        yield

    store.names = names
    status, told = await proxy.request("GET", "/health")

    assert (200, "ok", None) == (status, told["status"], told["sessions"])


async def test_every_replica_serves_a_session(proxy, store):
    """Created at one, called at another, its nodes read at the first."""
    uuid = await proxy.create()
    async with serving_sessions(store, proxy.engine_url) as other:
        assert (
            200
            == (await other.request("POST", f"/{uuid}/v1/chat/completions", {"messages": HELLO, "max_tokens": 2}))[0]
        )

    assert 1 == len((await proxy.request("GET", f"/{uuid}/nodes"))[1]["nodes"])


async def test_a_control_api_of_its_own_has_the_sessions_and_not_their_calls(store, engine):
    """Each API answers for its own part alone."""
    async with serving_sessions(store, control={"listen": "127.0.0.1:0"}) as proxy:
        assert 404 == (await proxy.request("POST", "/sessions/create", {}))[0]
        status, told = await proxy.request("POST", "/sessions/create", {}, url=proxy.control_url)
        chat = (f"/{told['uuid']}/v1/chat/completions", {"messages": HELLO, "max_tokens": 2})

        assert 200 == status
        assert 200 == (await proxy.request("POST", *chat))[0]
        assert 404 == (await proxy.request("POST", *chat, url=proxy.control_url))[0]


async def test_a_store_that_is_away_is_told_in_their_shape(proxy, store):
    """503, and when to come again."""
    store.failing = {"open"}
    status, told = await proxy.request("POST", "/sessions/create", {})

    assert (503, "server_error", 503) == (status, told["error"]["type"], told["error"]["code"])
