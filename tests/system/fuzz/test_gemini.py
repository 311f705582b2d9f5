"""Gemini: odd bodies, and any sampled response, streamed in any pieces and sent back."""

import copy

import orjson
import pytest
from hypothesis import strategies as st
from tests.support.anthropic_events import atoms, chunks_of, folded, messages, response_of
from tests.support.gemini_responses import BODIES, chunks_in, joined, sent_back

from proxy.errors import UnprocessableRequest
from proxy.protocols.dialects.gemini import GEMINI
from proxy.protocols.dialects.tool_arguments import call_ids
from proxy.protocols.dialects.translation import CallIdentity, ResolvedReferences, TranslationOptions

pytestmark = [pytest.mark.timeout(3600), pytest.mark.filterwarnings("ignore::hypothesis.errors.HypothesisWarning")]
SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=4)
IDENTITY = CallIdentity("01a9", 1795229441, "m")


async def test_any_body_is_read_or_rejected_by_its_field(fuzz):
    """A valid body can be sent to an engine; the client's body is unchanged."""

    def check(body):
        before = copy.deepcopy(body)
        GEMINI.references(body)
        try:
            orjson.dumps(GEMINI.read(body, TranslationOptions()))
        except UnprocessableRequest as refused:
            assert refused.message.startswith(f"{refused.param}: ")
        assert repr(before) == repr(body)

    await fuzz(0.01, BODIES, check)


async def test_any_sampled_response_is_sent_back_unchanged(fuzz):
    """However the stream is cut, in both formats; and the stream equals the unstreamed response."""

    def check(drawn):
        message, sizes, apart, is_array = drawn
        body = {} if is_array else {"alt": "sse"}
        chunks = chunks_of(atoms(message), sizes, response_of(message), apart=apart)
        response = folded(chunks)
        renderer = GEMINI.renderer(body, IDENTITY)
        stream = b"".join(renderer.feed(chunk) for chunk in chunks) + renderer.finish(response)
        found = chunks_in(stream, is_array=is_array)
        whole = joined([GEMINI.renderer(body, IDENTITY).whole(response)])[0]
        parts = joined(found)[0]
        assert whole == ([part for part in parts if part != {"text": ""}] or parts)
        sampled = response["choices"][0]["message"]
        calls = sampled.get("tool_calls") or []
        named = zip(call_ids(calls, "01a9", "call"), calls, strict=True)
        earlier = ResolvedReferences(calls={name: call["function"] for name, call in named})
        read = GEMINI.read({"contents": sent_back(found)}, TranslationOptions(), earlier)["messages"][1]
        assert (sampled["content"] or "") == (read["content"] or "")
        assert (sampled.get("reasoning") or sampled.get("reasoning_content")) == read.get("reasoning")
        assert [call["function"] for call in calls] == [call["function"] for call in read.get("tool_calls") or []]

    await fuzz(0.01, st.tuples(messages(), SIZES, st.booleans(), st.booleans()), check)
