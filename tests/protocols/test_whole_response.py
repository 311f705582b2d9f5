"""Unstreamed responses. Recorded ones: test_exchange.py."""

from proxy.protocols.dialects import DIALECTS
from proxy.protocols.engines import ENGINES, StripRules
from proxy.protocols.response import ClientView
from proxy.protocols.whole_response import WholeResponse


def test_a_response_of_another_shape_is_forwarded_and_flagged():
    """Nothing can be stripped from choices that are not objects."""
    reply = WholeResponse(ClientView(DIALECTS["/v1/chat/completions"], ENGINES["vllm"], StripRules(token_ids=True), 1))
    reply.feed(b'{"choices":[1]}')
    end, response = reply.finish()

    assert (b'{"choices":[1]}', None, ("unparsed_event",)) == (end, response.response, response.problems)
