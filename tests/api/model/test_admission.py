"""Admission of calls: creation of rollouts, the policy of a call, and behaviour while the store is unavailable."""

import asyncio

import aiohttp
import pytest
from tests.support.fakes import settings_for
from tests.support.recorded import load
from tests.support.session import BODY, CHAT, chat_path, one_call, session_with
from tests.support.sessions import serving_sessions
from tests.support.stored import stored_rollout, stored_steps, wait_for_steps

from proxy.server.listener import running, simulating
from proxy.simulator.options import Options


@pytest.fixture(autouse=True)
def cassette(engine):
    """The engine responds to all requests with one completion."""
    engine.plays(load("chat_ids_lp"))


async def test_x_rollout_group_sets_the_group_of_a_new_rollout(store, engine):
    await one_call(engine, store, headers={"X-Rollout-Group": "g1"})

    assert (await stored_rollout(store, "r1")).group_id == "g1"


async def test_while_the_store_is_unreachable_calls_are_503_without_a_request_to_the_engine(store, engine):
    """The response has Retry-After and the dialect's shape; calls succeed again once the store is reachable."""
    async with session_with(engine, store) as session:
        store.failing |= {"append", "probe"}
        first = await session.post(CHAT, BODY)
        requests = len(engine.requests)
        second = await session.post(CHAT, BODY)
        requests_meanwhile = len(engine.requests) - requests
        store.failing.clear()
        async with asyncio.timeout(50):
            while (await session.post(CHAT, BODY)).status == 503:
                await asyncio.sleep(0.01)

    assert [first.status, second.status] == [503, 503]
    assert (second.json["error"]["code"], second.headers["Retry-After"]) == ("store_unavailable", "1")
    assert requests_meanwhile == 0
    assert len(await stored_steps(store, "r1")) == 1


async def test_with_a_journal_calls_of_cached_rollouts_succeed_while_the_store_is_unreachable(store, engine, tmp_path):
    """/ready reports the number of journaled steps; a call of another rollout is 503."""
    journal = {"on_failure": "spool", "spool_path": tmp_path / "spool"}
    outages = [("r1", ()), ("r1", ("append", "probe", "ping")), ("r1", ("open",)), ("r2", ())]
    statuses = []
    async with session_with(engine, store, store=journal) as session:
        for rollout, failing in outages:
            store.failing |= set(failing)
            statuses.append((await session.post(chat_path(rollout), BODY)).status)
        ready = await session.get("/ready")
        store.failing.clear()
        await wait_for_steps(store, "r1", 3)

    assert statuses == [200, 200, 200, 503]
    assert (ready.status, ready.json["spooled"], ready.json["store"]) == (200, 2, "the test took the store away")


MESSAGES = [{"role": "user", "content": "hi"}]
SETTINGS = {
    "policies": {"planner": {"models": ["planner-*"]}, "judge": {"models": ["judge"], "train": False}},
    "models": {"claude-*": "planner-7b", "gpt-5": "judge", "default": "planner-7b"},
}
IDS = [40, 41, 42]
CALLS = [
    ("/v1/chat/completions", {"messages": MESSAGES}),
    ("/v1/chat/completions", {"messages": MESSAGES, "stream": True}),
    ("/v1/completions", {"prompt": "hi"}),
    ("/v1/completions", {"prompt": [IDS, IDS]}),
    ("/inference/v1/generate", {"token_ids": IDS, "sampling_params": {"max_tokens": 4}}),
    ("/generate", {"prompt": {"prompt_token_ids": IDS}, "logprobs": 0, "max_tokens": 4}),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 4}),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 4, "stream": True}),
    ("/v1/responses", {"input": "hi", "max_output_tokens": 4}),
    ("/v1/responses", {"input": "hi", "max_output_tokens": 4, "stream": True}),
]


@pytest.fixture
def sections():
    return SETTINGS


@pytest.fixture
async def call(store, sections):
    """Make a call of a new rollout with these terms; return the policy and the model of its only step."""
    async with (
        simulating("127.0.0.1:0", Options(scale_out=True)) as engine,
        aiohttp.ClientSession() as http,
        running(settings_for(engine, **sections), store) as served,
    ):
        made = 0

        async def send(path, body, **terms):
            nonlocal made
            made += 1
            if terms:
                async with http.post(f"{served.url}/rollouts", json={"rollout_id": f"r{made}", **terms}) as response:
                    assert response.status == 201
            async with http.post(f"{served.url}/rollouts/r{made}{path}", json=body) as response:
                text = await response.read()
                assert response.status == 200, text
            (step,) = await stored_steps(store, f"r{made}")
            return step.policy, step.model_served

        yield send


@pytest.mark.parametrize(("path", "body"), CALLS)
async def test_every_dialect_has_the_policy_of_the_model_after_aliasing(call, path, body):
    found = [await call(path, {**body, "model": model}) for model in ("claude-x", "gpt-5", "planner-1", "other")]

    assert found == [("planner", "planner-7b"), ("judge", "judge"), ("planner", "planner-1"), ("default", "other")]


@pytest.mark.parametrize(("path", "body"), CALLS)
async def test_the_model_of_a_rollout_decides_for_all_its_calls(call, path, body):
    assert await call(path, {**body, "model": "planner-1"}, model="judge") == ("judge", "judge")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/inference/v1/generate", "/generate"])
async def test_a_call_without_a_model_has_the_policy_default(call, path):
    """The engine then uses its own model, under a name that the proxy does not choose."""
    body = dict(reversed(CALLS))[path]

    assert (await call(path, body))[0] == "default"


@pytest.mark.parametrize(
    ("rules", "model", "policy"),
    [
        ({"override": {"model": "judge"}}, "planner-1", "judge"),
        ({"default": {"model": "judge"}}, None, "judge"),
        ({"default": {"model": "judge"}}, "planner-1", "planner"),
    ],
)
async def test_a_model_that_sampling_rules_set_decides(call, store, rules, model, policy):
    """It is the one that the engine receives."""
    named = {} if model is None else {"model": model}
    assert policy == (await call("/v1/chat/completions", {"messages": MESSAGES, **named}, sampling=rules))[0]


async def test_the_osmosis_form_of_completions_has_the_policy_of_its_model(call):
    """The name `default` of Osmosis' servers is an alias here."""
    body = {"rollout_id": "o", "messages": MESSAGES, "max_tokens": 4}

    assert (await call("/v1/completions", {**body, "model": "default"}))[0] == "planner"
    assert (await call("/v1/completions", {**body, "model": "gpt-5"}))[0] == "judge"


async def test_a_call_of_atropos_without_a_model_has_the_policy_of_the_alias_of_any_model(call):
    """TokenTape adds the model to it."""
    body = dict(CALLS)["/generate"]

    assert await call("/generate", body, model="judge") == ("judge", "judge")


async def test_a_session_of_atropos_has_the_policy_of_the_alias_of_any_model(store):
    sections = {**SETTINGS, "models": {"*": "judge"}}
    async with serving_sessions(store, **sections) as sessions:
        session = await sessions.create()
        status, _ = await sessions.request("POST", f"/{session}/v1/chat/completions", {"messages": MESSAGES})
    (step,) = await stored_steps(store, session)

    assert (status, step.policy, step.model_served) == (200, "judge", "judge")
