"""OpenAI Responses: calls with odd values anywhere, parsed and rendered without a proxy."""

import orjson
import pytest
from hypothesis import strategies as st
from tests.support.responses_drawn import EARLIER, IDENTITY, odd_bodies, response_of

from proxy.errors import BadRequest, UnprocessableRequest
from proxy.protocols.dialects.base import TranslationOptions
from proxy.protocols.dialects.responses import RESPONSES

pytestmark = [pytest.mark.timeout(3600), pytest.mark.filterwarnings("ignore::hypothesis.errors.HypothesisWarning")]
SHARE = 0.1
ANSWER = response_of({"role": "assistant", "content": "a"})


async def test_any_body_is_rejected_or_answered(fuzz):
    """An error names a field; a chat body is JSON and its response can be rendered; the client's body is unchanged."""
    read = 0

    def check(drawn):
        nonlocal read
        body, ignore = drawn
        before = orjson.dumps(body)
        found = RESPONSES.references(body)
        assert all(isinstance(name, str) for name in [*found.calls, *found.items])
        try:
            orjson.dumps(RESPONSES.read(body, TranslationOptions(ignore_hosted_tools=ignore), EARLIER))
        except UnprocessableRequest as refusal:
            assert refusal.param.split("[")[0].split(".")[0] in refusal.message
        except BadRequest as refusal:
            assert refusal.param
        else:
            read += 1
            orjson.dumps(RESPONSES.renderer(body, IDENTITY).whole(ANSWER))
        assert before == orjson.dumps(body)

    await fuzz(SHARE, st.tuples(odd_bodies(), st.booleans()), check)
    assert read > 5
