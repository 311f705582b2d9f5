"""Health probes: told by what is configured, answered, and not recorded."""

import orjson
import pytest
from fakes import proxying
from recorded import load
from stored import steps_of

from proxy.config import ProbeSettings
from proxy.dialects import DIALECTS
from proxy.probes import is_probe

WHOLE = load("chat_ids_lp")
CHAT = "/v1/chat/completions"
PING = {"model": "tiny", "messages": [{"role": "user", "content": "ping"}], "max_tokens": 1}
ONE_TOKEN = ProbeSettings(one_token=True)


def probe(probes, body, *, path=CHAT, agent=""):
    headers = {"User-Agent": agent}
    return is_probe(probes, DIALECTS[path], headers, body, body_bytes=len(orjson.dumps(body)))


def test_nothing_is_a_probe_by_default():
    """A call of one token may be a turn: a judge's, a classifier's."""
    assert not probe(ProbeSettings(), PING, agent="kube-probe/1.30")


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
        for path in (CHAT, "/rollouts/r1" + CHAT):
            body = PING | {"rollout_id": "r1"}
            async with http.post(served.url + path, json=body, headers={"User-Agent": "probe/1"}) as answer:
                assert (200, WHOLE.answer) == (answer.status, await answer.read())
                assert "X-Step-Id" not in answer.headers
        async with http.get(served.url + "/metrics") as answer:
            assert 'tokentape_probes_total{dialect="chat"} 2.0' in await answer.text()

    assert [PING | {"model": "served"}] * 2 == engine.asked
    assert ((), []) == ((await store.list()).names, await steps_of(store, "r1"))


async def test_a_probe_needs_a_key_like_any_call(store, engine, http):
    """Its user agent opens no door."""
    said = {"agents": {"probes": {"user_agents": ["probe"]}, "api_keys": ["secret"]}}
    async with (
        proxying(engine.url, store, **said) as served,
        http.post(served.url + CHAT, json=PING, headers={"User-Agent": "probe/1"}) as answer,
    ):
        assert 401 == answer.status
    assert [] == engine.asked
