"""Plain: a server that speaks OpenAI's protocol, recorded as text without token ids."""

import pytest
from tests.support.recorded import load, plan_of, play

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize("name", ["chat_plain", "chat_plain_stream", "chat_ids_lp"])
def test_a_response_is_forwarded_unchanged_and_flagged(name):
    """Nothing is injected or stripped, and token ids in the response are not trusted."""
    cassette = load(name)
    plan = plan_of(cassette.path, cassette.body, kind="plain")
    shown, end, step = play(plan, cassette)

    assert (plan.sent["set"], plan.headers) == ({}, {})
    assert cassette.response == shown + end
    assert "no_token_ids" in step.problems
    assert (step.sampled, step.prompts) == (0, ())
    assert "logprobs_mode" in step.sampling
    assert step.response["choices"][0]["message"]["content"]


def test_streams_are_live_by_default():
    assert plan_of(CHAT, {"messages": [], "stream": True}, kind="plain").framing == "live"
