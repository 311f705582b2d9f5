"""Health probes: known ones and those that are configured are answered, and not recorded."""

import asyncio
from types import SimpleNamespace

import aiohttp
import openai
import orjson
import pytest
from fakes import proxying
from recorded import load
from stored import stored_steps
from trainers import load_published

from proxy.api.model.probes import KNOWN, is_probe
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


def test_a_call_of_one_token_is_no_probe_by_default():
    """It may be a turn: a judge's, a classifier's."""
    assert not probe(ProbeSettings(), PING, agent="kube-probe/1.30")


@pytest.mark.parametrize(("path", "body"), SHAPES)
def test_known_probes_are_recognised_by_their_whole_body(path, body):
    """The model may be any; with a field more, another value or in another dialect it is a call like any other."""
    settings, other = ProbeSettings(), next(each for each in PATHS.values() if each != path)

    assert probe(settings, body | {"model": "m"}, path=path)
    assert not probe(ProbeSettings(known=False), body, path=path)
    assert not probe(settings, body | {"temperature": 0.5}, path=path)
    assert not probe(settings, body | {"max_tokens": 2}, path=path)
    assert not probe(settings, {key: value for key, value in body.items() if key != "max_tokens"}, path=path)
    assert not probe(settings, body, path=other)


class ApiServer:
    """What Atropos' servers need of their base class: the configuration."""

    def __init__(self, config, reasoning_config=None):
        self.config, self.server_healthy = config, False


def atropos_server(name, url):
    """A server class of atroposlib as published; its tokenizer is used for prompts only."""
    file = f"atroposlib/envs/server_handling/{name.lower().removesuffix('server')}_server.py"
    tokenizer = SimpleNamespace(from_pretrained=lambda _name: None)
    given = {
        "asyncio": asyncio,
        "aiohttp": aiohttp,
        "openai": openai,
        "APIServer": ApiServer,
        "AutoTokenizer": tokenizer,
    }
    config = SimpleNamespace(api_key="x", base_url=f"{url}/v1", timeout=5, model_name="m", tokenizer_name="none")
    return getattr(load_published(file, name, **given), name)(config)


@pytest.mark.parametrize("chats", [True, False])
@pytest.mark.parametrize("name", ["OpenAIServer", "SGLangServer", "VLLMServer"])
async def test_at_9_an_idle_server_of_atropos_leaves_no_rollout(store, name, chats):
    """Its own check of the server's status finds us healthy, with nothing configured."""
    async with (
        simulating("127.0.0.1:0", Options(model="m")) as engine_url,
        proxying(engine_url, store) as served,
    ):
        server = atropos_server(name, served.url)
        checking = asyncio.create_task(server.check_server_status_task(chat_completion=chats))
        async with asyncio.timeout(10):
            while not server.server_healthy:
                await asyncio.sleep(0.005)
        checking.cancel()
        await asyncio.wait([checking])
        await server.openai.close()

    assert () == (await store.list()).names


async def test_the_check_of_verifiers_leaves_no_rollout(store):
    """Its environment asks once whether logprobs are to be had."""
    file = load_published("verifiers/envs/experimental/rlm_env.py", "RLMEnv._test_logprobs_support")
    async with (
        simulating("127.0.0.1:0", Options(model="m")) as engine_url,
        proxying(engine_url, store) as served,
        openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="x") as client,
    ):
        assert await file._test_logprobs_support(None, client, "m")

    assert () == (await store.list()).names


@pytest.mark.parametrize("unnamed_rollouts", ["new", "pass", "reject"])
async def test_a_probe_is_answered_whatever_calls_without_a_rollout_get(store, engine, http, unnamed_rollouts):
    """Else a server that checks us would think us dead."""
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
async def test_a_call_that_names_a_rollout_is_never_a_probe(store, engine, http, prefix, headers, fields):
    """Not by what is known, nor by what is configured; whichever way it names it."""
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
def test_probes_of_one_token(body, path, expected):
    """Where it is set: one token at most, asked of a tiny body, wherever the dialect says so."""
    assert expected == probe(ONE_TOKEN, body, path=path)


def test_probes_by_user_agent():
    """A part of the name is enough, in any case of letters; what the body says does not matter."""
    probes = ProbeSettings(user_agents=["kube-probe", "GoogleHC"])

    assert probe(probes, {"messages": []}, agent="Kube-Probe/1.30")
    assert probe(probes, PING, agent="googlehc/1.0")
    assert not probe(probes, PING, agent="OpenAI/Python 2.0")


async def test_a_probe_is_answered_and_not_recorded(store, engine, http):
    """The engine answers it under its own name for the model; no rollout comes of it, and it is counted."""
    engine.plays(WHOLE)
    said = {"agents": {"probes": {"user_agents": ["probe"]}}, "models": {"tiny": "served"}}
    async with proxying(engine.url, store, **said) as served:
        async with http.post(served.url + CHAT, json=PING, headers={"User-Agent": "probe/1"}) as response:
            assert (200, WHOLE.response) == (response.status, await response.read())
            assert "X-Step-Id" not in response.headers
        async with http.get(served.url + "/metrics") as response:
            assert 'tokentape_health_probes_total{dialect="chat"} 1.0' in await response.text()

    assert [PING | {"model": "served"}] == engine.requests
    assert () == (await store.list()).names


async def test_a_probe_needs_a_key_like_any_call(store, engine, http):
    """Its user agent opens no door."""
    said = {"agents": {"probes": {"user_agents": ["probe"]}, "api_keys": ["secret"]}}
    async with (
        proxying(engine.url, store, **said) as served,
        http.post(served.url + CHAT, json=PING, headers={"User-Agent": "probe/1"}) as response,
    ):
        assert 401 == response.status
    assert [] == engine.requests
