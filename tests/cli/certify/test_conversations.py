"""Conversations, agents that leave, the mode of logprobs and admin routes, with simulated engines."""

from math import log

import pytest
from aiohttp import web
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.support.certifying import suite_of
from tests.support.tampering import tampered

from proxy.cli.certify import conversations
from proxy.cli.certify.conversations import (
    aborted,
    continued,
    left,
    logprobs_mode,
    measured_mode,
    new_version,
    paused,
    reports_versions,
)
from proxy.server.listener import simulating
from proxy.simulator.options import Faults, Options

CHAT = "/v1/chat/completions"
SLOW_S = 0.02  # of a token, so that a call can be interrupted


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("tools", [False, True], ids=["chat", "tools"])
async def test_a_conversation_is_one_sequence_in_append(tools, stream):
    """In faithful the template decides, and the result has the step's reason."""
    async with simulating("127.0.0.1:0", Options()) as engine, suite_of(engine) as suite:
        await suite.result(continued(suite, "append", tools=False, stream=False))  # shows the stop token
        append = await suite.result(continued(suite, "append", tools=tools, stream=stream))
        faithful = await suite.result(continued(suite, "faithful", tools=tools, stream=stream))

    assert append.verdict == "exact"
    assert (faithful.verdict, faithful.problems) == ("forks", ("history",))
    assert faithful.why.startswith("2 of 2 later calls: The template renders earlier turns differently")


async def test_an_engine_that_takes_no_prompt_ids_forks_with_the_reason():
    options = Options(faults=Faults(prompt_ids="rejected"))
    async with simulating("127.0.0.1:0", options) as engine, suite_of(engine) as suite:
        cell = await suite.result(continued(suite, "append", tools=False, stream=False))

    assert cell.verdict == "forks"
    assert "refused_ids" in cell.problems


async def test_a_tool_loop_without_a_parser_is_not_served():
    async with (
        simulating("127.0.0.1:0", Options(shape="sglang", has_parser=False)) as engine,
        suite_of(engine) as suite,
    ):
        cell = await suite.result(continued(suite, "append", tools=True, stream=False))

    assert (
        cell.verdict,
        cell.why,
    ) == ("not served", "the engine parses no tool call: it needs the tool parser of its model")


async def test_an_agent_that_leaves_has_a_partial_step():
    async with simulating("127.0.0.1:0", Options(token_delay_s=SLOW_S)) as engine, suite_of(engine) as suite:
        cell = await suite.result(left(suite))

    assert (cell.verdict, cell.why) == ("ok", "a partial step with its ids")


@pytest.mark.parametrize(("shape", "mode"), [("vllm", "raw_logprobs"), ("sglang", "after_temperature_logprobs")])
async def test_the_mode_of_logprobs_is_measured(shape, mode):
    async with simulating("127.0.0.1:0", Options(shape=shape)) as engine, suite_of(engine) as suite:
        cell = await suite.result(logprobs_mode(suite))
        suite.logprobs_mode = "processed_logprobs"
        other = await suite.result(logprobs_mode(suite))

    assert (cell.verdict, cell.why) == ("ok", mode)
    assert (other.verdict, other.fix) == ("wrong", f"set engines.endpoints[].logprobs_mode: {mode}")


@given(st.lists(st.floats(-20, 20), min_size=3, max_size=30))
def test_each_mode_is_recognized_from_the_likely_tokens(logits):
    """Of any distribution with two tokens that differ."""
    top = sorted(range(len(logits)), key=lambda token: -logits[token])[:5]
    assume(logits[top[0]] - logits[top[-1]] > 0.2)

    def likely(temperature=1.0, keep=None, *, normal=True):
        scaled = [logit / temperature for logit in logits]
        kept = top[:keep] if keep else range(len(logits))
        most = max(scaled)
        total = most + log(sum(2.718281828459045 ** (scaled[token] - most) for token in kept)) if normal else 0.0
        return {str(token): scaled[token] - total for token in (top if keep is None else top[:keep])}

    plain, cold = likely(), likely(0.5)
    assert measured_mode(plain, plain, plain) == "raw_logprobs"
    assert measured_mode(plain, cold, plain) == "after_temperature_logprobs"
    if max(plain.values()) < -0.01:
        assert measured_mode(plain, cold, likely(keep=1)) == "processed_logprobs"
    raw = likely(normal=False)
    if max(raw.values()) > 0:
        assert measured_mode(raw, raw, raw) == "raw_logits"
        assert measured_mode(raw, likely(0.5, normal=False), raw) == "processed_logits"


@pytest.mark.parametrize("found", [{}, {"a": -1.0}, {"a": -1.0, "b": -1.01}, {"a": float("-inf"), "b": -1.0}])
def test_a_mode_that_the_tokens_do_not_show_is_unknown(found):
    assert measured_mode(found, found, found) is None


async def test_versions_are_reported_where_the_engine_names_them():
    async with simulating("127.0.0.1:0", Options()) as engine, suite_of(engine) as suite:
        named = await suite.result(reports_versions(suite))
    async with simulating("127.0.0.1:0", Options(scale_out=False)) as engine, suite_of(engine) as suite:
        unnamed = await suite.result(reports_versions(suite))

    assert (named.verdict, named.why) == ("ok", "for each token, in /inference/v1/generate")
    assert (unnamed.verdict, "PUT /policy" in unnamed.fix) == ("not served", True)


async def test_a_new_version_within_a_call_is_in_the_step_and_is_restored():
    async with simulating("127.0.0.1:0", Options(token_delay_s=SLOW_S)) as engine, suite_of(engine) as suite:
        cell = await suite.result(new_version(suite))
        after = (await suite.access.engine.get("/weight_info")).json()

    assert cell.verdict == "exact"
    assert after == {"weight_version": "default"}


async def test_a_version_is_restored_if_the_call_fails(monkeypatch):
    """Such as by Ctrl-C."""

    async def interrupted(suite, path, body, act):
        await act()
        raise KeyboardInterrupt

    monkeypatch.setattr(conversations, "_interrupted", interrupted)
    async with simulating("127.0.0.1:0", Options()) as engine, suite_of(engine) as suite:
        with pytest.raises(KeyboardInterrupt):
            await suite.result(new_version(suite))
        after = (await suite.access.engine.get("/weight_info")).json()

    assert after == {"weight_version": "default"}


@pytest.mark.parametrize("test", [paused, aborted])
async def test_admin_routes_that_the_engine_lacks_are_not_served(test):
    async def missing(_request):
        return web.json_response({"detail": "Not Found"}, status=404)

    routes = dict.fromkeys(("/pause", "/resume"), missing)
    async with (
        simulating("127.0.0.1:0", Options(token_delay_s=SLOW_S)) as engine,
        tampered(engine, lambda _path, _body, answer: answer, routes, is_streaming=True) as url,
        suite_of(url) as suite,
    ):
        cell = await suite.result(test(suite))

    assert (cell.verdict, cell.why) == ("not served", "the engine returns 404: Not Found")


async def test_a_pause_ends_with_the_test():
    """The engine is resumed once more at the end, in any case."""
    requests = []

    def change(path, body, answer):
        return answer

    async def admin(request):
        requests.append(request.path)
        return web.json_response({})

    async with (
        simulating("127.0.0.1:0", Options(token_delay_s=SLOW_S)) as engine,
        tampered(engine, change, {"/pause": admin, "/resume": admin}, is_streaming=True) as url,
        suite_of(url) as suite,
    ):
        cell = await suite.result(paused(suite))

    assert cell.verdict == "exact"
    assert requests == ["/pause", "/resume", "/resume"]
