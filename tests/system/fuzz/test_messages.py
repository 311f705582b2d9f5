"""Anthropic Messages: odd bodies, and any sampled response, streamed in any pieces and sent back."""

import copy

import orjson
import pytest
from hypothesis import strategies as st
from tests.support.anthropic_bodies import BODIES
from tests.support.anthropic_events import (
    accumulated,
    atoms,
    chunks_of,
    folded,
    messages,
    plain,
    response_of,
    sampled_calls,
    sent_back,
)

from proxy.errors import UnprocessableRequest
from proxy.protocols.dialects.messages import MESSAGES
from proxy.protocols.dialects.messages.messages import tool_call_ids
from proxy.protocols.dialects.translation import CallIdentity, ResolvedReferences, TranslationOptions

pytestmark = [pytest.mark.timeout(3600), pytest.mark.filterwarnings("ignore::hypothesis.errors.HypothesisWarning")]
SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=4)
IDENTITY = CallIdentity("01a9", 1795229441, "m")


async def test_any_body_is_read_or_rejected_by_its_field(fuzz):
    """A valid body can be sent to an engine; the client's body is unchanged."""

    def check(body):
        before = copy.deepcopy(body)
        tool_call_ids(body)
        try:
            orjson.dumps(MESSAGES.read(body, TranslationOptions()))
        except UnprocessableRequest as refused:
            assert refused.message.startswith(f"{refused.param}: ")
        assert before == body

    await fuzz(0.01, BODIES, check)


async def test_any_sampled_response_is_sent_back_unchanged(fuzz):
    """However the stream is cut; and the stream equals the unstreamed response."""

    def check(drawn):
        message, sizes, apart = drawn
        chunks = chunks_of(atoms(message), sizes, response_of(message), apart=apart)
        response = folded(chunks)
        renderer = MESSAGES.renderer({}, IDENTITY)
        stream = b"".join(renderer.feed(chunk) for chunk in chunks) + renderer.finish(response)
        answer = accumulated(stream)
        assert plain(answer) == plain(MESSAGES.renderer({}, IDENTITY).whole(response))
        sampled = response["choices"][0]["message"]
        earlier = ResolvedReferences(calls=sampled_calls(sampled, IDENTITY.step_id))
        read = MESSAGES.read({"messages": sent_back(answer)}, TranslationOptions(), earlier)["messages"][1]
        assert sampled["content"] == read["content"]
        assert (sampled.get("reasoning") or sampled.get("reasoning_content")) == read.get("reasoning")
        calls = [[call["function"] for call in turn.get("tool_calls", [])] for turn in (sampled, read)]
        assert calls[0] == calls[1]

    await fuzz(0.01, st.tuples(messages(), SIZES, st.booleans()), check)
