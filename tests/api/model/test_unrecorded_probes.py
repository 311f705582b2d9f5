"""Health probes of clients: known and configured ones are forwarded and not recorded."""

import asyncio
from types import SimpleNamespace

import aiohttp
import openai
import orjson
import pytest
from tests.support.fakes import proxying
from tests.support.recorded import load
from tests.support.stored import stored_steps
from tests.support.trainers import load_published

from proxy.api.model.unrecorded import KNOWN, is_probe
from proxy.config.sections import ProbeSettings
from proxy.protocols.dialects import DIALECTS
from proxy.server.listener import simulating
from proxy.simulator.options import Options

WHOLE = load("chat_ids_lp")
CHAT = "/v1/chat/completions"
PING = {"model": "tiny", "messages": [{"role": "user", "content": "ping"}], "max_tokens": 1}
ONE_TOKEN = ProbeSettings(one_token=True)
PATHS = {"chat": CHAT, "completions": "/v1/completions"}
SHAPES = [pytest.param(PATHS[dialect], body, id=repr(body)) for dialect, bodies in KNOWN.items() for body in bodies]
HI = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}


def probe(probes, body, *, path=CHAT, agent=""):
    headers = {"User-Agent": agent}
    return is_probe(probes, DIALECTS[path], headers, body, body_bytes=len(orjson.dumps(body)))


def test_by_default_a_call_with_max_tokens_1_is_not_a_probe():
    """It may be a judge's or a classifier's call."""
    assert not probe(ProbeSettings(), PING, agent="kube-probe/1.30")


@pytest.mark.parametrize(("path", "body"), SHAPES)
def test_a_known_probe_is_recognised_by_its_complete_body_except_the_model(path, body):
    """With another field, value or dialect it is an ordinary call."""
    settings, other_path = ProbeSettings(), next(candidate for candidate in PATHS.values() if candidate != path)

    assert probe(settings, body | {"model": "m"}, path=path)
    assert not probe(ProbeSettings(known=False), body, path=path)
    assert not probe(settings, body | {"temperature": 0.5}, path=path)
    assert not probe(settings, body | {"max_tokens": 2}, path=path)
    assert not probe(settings, {key: value for key, value in body.items() if key != "max_tokens"}, path=path)
    assert not probe(settings, body, path=other_path)


class ApiServer:
    """The part of the base class that Atropos' servers use: the configuration."""

    def __init__(self, config, reasoning_config=None):
        self.config, self.server_healthy = config, False


def atropos_server(name, url):
    """Return a published server class of atroposlib; its tokenizer is used for prompts only."""
    file = f"atroposlib/envs/server_handling/{name.lower().removesuffix('server')}_server.py"
    tokenizer = SimpleNamespace(from_pretrained=lambda _name: None)
    names_used = {
        "asyncio": asyncio,
        "aiohttp": aiohttp,
        "openai": openai,
        "APIServer": ApiServer,
        "AutoTokenizer": tokenizer,
    }
    config = SimpleNamespace(api_key="x", base_url=f"{url}/v1", timeout=50, model_name="m", tokenizer_name="none")
    return getattr(load_published(file, name, **names_used), name)(config)


@pytest.mark.parametrize("chats", [True, False])
@pytest.mark.parametrize("name", ["OpenAIServer", "SGLangServer", "VLLMServer"])
async def test_at_9_status_checks_of_an_atropos_server_create_no_rollout(store, name, chats):
    """The check succeeds with the default configuration."""
    async with (
        simulating("127.0.0.1:0", Options(model="m")) as engine_url,
        proxying(engine_url, store) as served,
    ):
        server = atropos_server(name, served.url)
        checking = asyncio.create_task(server.check_server_status_task(chat_completion=chats))
        async with asyncio.timeout(50):
            while not server.server_healthy:
                await asyncio.sleep(0.005)
        checking.cancel()
        await asyncio.wait([checking])
        await server.openai.close()

    assert () == (await store.list()).names


async def test_the_logprobs_check_of_verifiers_creates_no_rollout(store):
    file = load_published("verifiers/envs/experimental/rlm_env.py", "RLMEnv._test_logprobs_support")
    async with (
        simulating("127.0.0.1:0", Options(model="m")) as engine_url,
        proxying(engine_url, store) as served,
        openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="x") as client,
    ):
        assert await file._test_logprobs_support(None, client, "m")

    assert () == (await store.list()).names


@pytest.mark.parametrize("unnamed_rollouts", ["new", "pass", "reject"])
async def test_a_probe_succeeds_with_every_setting_of_unnamed_rollouts(store, engine, http, unnamed_rollouts):
    engine.plays(WHOLE)
    async with (
        proxying(engine.url, store, agents={"unnamed_rollouts": unnamed_rollouts}) as served,
        http.post(served.url + CHAT, json=HI) as response,
    ):
        assert 200 == response.status

    assert ([HI], ()) == (engine.requests, (await store.list()).names)


@pytest.mark.parametrize(
    ("prefix", "headers", "fields"),
    [
        ("/rollouts/r1", {}, {}),
        ("/sessions/r1", {}, {}),
        ("", {"X-Rollout-Id": "r1"}, {}),
        ("", {"Authorization": "Bearer rollout:r1"}, {}),
        ("", {"Authorization": "Bearer minted"}, {}),
        ("", {"X-Api-Key": "minted"}, {}),
        ("", {}, {"rollout_id": "r1"}),
        ("", {}, {"metadata": {"rollout_id": "r1"}}),
    ],
)
async def test_a_call_that_names_a_rollout_is_not_a_probe(store, engine, http, prefix, headers, fields):
    """This holds for known and configured probes."""
    engine.plays(WHOLE)
    probes = {"one_token": True, "user_agents": ["probe"]}
    async with proxying(engine.url, store, agents={"probes": probes}) as served:
        async with http.post(f"{served.url}/rollouts", json={"rollout_id": "r1"}) as response:
            key = (await response.json())["api_key"]
        sent = {name: value.replace("minted", key) for name, value in headers.items()} | {"User-Agent": "probe/1"}
        async with http.post(served.url + prefix + CHAT, json=HI | fields, headers=sent) as response:
            assert (200, "r1") == (response.status, response.headers["X-Rollout-Id"])

    assert 1 == len(await stored_steps(store, "r1"))


@pytest.mark.parametrize(
    ("body", "path", "expected"),
    [
        (PING, CHAT, True),
        ({**PING, "max_tokens": None, "max_completion_tokens": 1}, CHAT, True),
        ({**PING, "max_completion_tokens": 9}, CHAT, False),
        ({**PING, "max_tokens": 2}, CHAT, False),
        ({**PING, "max_tokens": True}, CHAT, False),
        ({"messages": PING["messages"]}, CHAT, False),
        ({**PING, "messages": [{"role": "user", "content": "long " * 200}]}, CHAT, False),
        ({"prompt": "hi", "max_tokens": 1}, "/v1/completions", True),
        ({"token_ids": [1], "sampling_params": {"max_tokens": 1}}, "/inference/v1/generate", True),
        ({"token_ids": [1], "max_tokens": 1}, "/inference/v1/generate", False),
    ],
)
def test_with_one_token_a_short_call_with_max_tokens_1_is_a_probe(body, path, expected):
    assert expected == probe(ONE_TOKEN, body, path=path)


def test_a_user_agent_matches_by_a_case_insensitive_substring():
    """The body does not matter."""
    probes = ProbeSettings(user_agents=["kube-probe", "GoogleHC"])

    assert probe(probes, {"messages": []}, agent="Kube-Probe/1.30")
    assert probe(probes, PING, agent="googlehc/1.0")
    assert not probe(probes, PING, agent="OpenAI/Python 2.0")


async def test_a_probe_is_forwarded_counted_and_not_recorded(store, engine, http):
    """The engine gets its own name of the model."""
    engine.plays(WHOLE)
    sections = {"agents": {"probes": {"user_agents": ["probe"]}}, "models": {"tiny": "served"}}
    async with proxying(engine.url, store, **sections) as served:
        async with http.post(served.url + CHAT, json=PING, headers={"User-Agent": "probe/1"}) as response:
            assert (200, WHOLE.response) == (response.status, await response.read())
            assert "X-Step-Id" not in response.headers
        async with http.get(served.url + "/metrics") as response:
            assert 'tokentape_health_probes_total{dialect="chat"} 1.0' in await response.text()

    assert [PING | {"model": "served"}] == engine.requests
    assert () == (await store.list()).names


async def test_a_probe_requires_an_api_key(store, engine, http):
    sections = {
        "agents": {"probes": {"user_agents": ["probe"]}, "api_keys": ["secret"]},
        "control": {"api_keys": ["boss"]},
    }
    async with (
        proxying(engine.url, store, **sections) as served,
        http.post(served.url + CHAT, json=PING, headers={"User-Agent": "probe/1"}) as response,
    ):
        assert 401 == response.status
    assert [] == engine.requests
