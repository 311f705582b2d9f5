"""Plain: whatever speaks OpenAI's protocol is recorded as text, and never taken for more."""

import orjson
import pytest
from recorded import load, plan_of, play

from proxy.protocols.engines import ENGINES

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize("name", ["chat_plain", "chat_plain_stream", "chat_ids_lp"])
def test_an_answer_passes_untouched_and_is_flagged(name):
    """Nothing is asked, nothing hidden, and ids that somebody gives all the same are not believed."""
    cassette = load(name)
    plan = plan_of(cassette.path, cassette.body, kind="plain")
    shown, end, step = play(plan, cassette)

    assert ({}, {}) == (plan.sent["set"], plan.headers)
    assert cassette.response == shown + end
    assert "no_token_ids" in step.problems
    assert (0, ()) == (step.sampled, step.prompts)
    assert "logprobs_mode" in step.sampling
    assert step.response["choices"][0]["message"]["content"]


def test_no_streams_are_replayed_unless_told_to():
    """There is nothing to gain."""
    assert "live" == plan_of(CHAT, {"messages": [], "stream": True}, kind="plain").framing


def test_an_index_that_is_no_number_is_refused():
    """As of any engine."""
    body = orjson.loads(b'{"choices": [{"index": "0"}]}')
    with pytest.raises(TypeError, match="index"):
        ENGINES["plain"].tokens("chat", {}, body)
