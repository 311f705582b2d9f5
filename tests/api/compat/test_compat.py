"""The endpoints that sample, and the adapters of their call shapes."""

import pytest

from proxy.api.compat import CALL_ROUTES
from proxy.api.compat.atropos_generate import TokensInCall
from proxy.api.compat.osmosis import FlatCall
from proxy.protocols.dialects.base import TranslationOptions
from proxy.protocols.plan import TranslatedCall

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("endpoint", "body", "kind"),
    [
        ("/generate", {"input_ids": [1]}, TokensInCall),
        ("/v1/completions", {"messages": MESSAGES}, FlatCall),
        ("/v1/completions", {"prompt": "x"}, type(None)),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 1}, TranslatedCall),
        ("/v1/responses", {"input": "hi"}, TranslatedCall),
    ],
)
def test_the_adapter_is_chosen_by_endpoint_then_by_body(endpoint, body, kind):
    """A body in the endpoint's own shape has no adapter."""
    assert kind is type(CALL_ROUTES[endpoint].adapt(endpoint, body, TranslationOptions()))


def test_chat_completions_have_no_adapter():
    assert CALL_ROUTES["/v1/chat/completions"].adapt is None


def test_errors_have_the_dialect_of_the_endpoint():
    """`/generate` is SGLang's own, also if its calls are translated."""
    assert CALL_ROUTES["/generate"].errors.name == "sglang_generate"
    assert CALL_ROUTES["/v1/chat/completions"].errors.name == "chat"
    assert CALL_ROUTES["/v1/messages"].errors.name == "messages"
    assert "/tokenize" not in CALL_ROUTES
