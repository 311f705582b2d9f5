"""Where forms come in: by the path and the body."""

import pytest

from proxy.api.compat.atropos.generate import GenerateForm
from proxy.api.compat.osmosis.flat_call import FlatForm
from proxy.api.compat.registry import dialect_of, read_form
from proxy.protocols.dialects.translation import Ways

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("endpoint", "body", "kind"),
    [
        ("/generate", {"input_ids": [1]}, GenerateForm),
        ("/v1/completions", {"messages": MESSAGES}, FlatForm),
        ("/v1/completions", {"prompt": "x"}, type(None)),
        ("/v1/chat/completions", {"messages": MESSAGES}, type(None)),
    ],
)
def test_a_form_is_told_by_its_path_and_its_body(endpoint, body, kind):
    """Everything else is what it looks like."""
    assert kind is type(read_form(endpoint, body, Ways()))


def test_a_path_of_our_own_has_the_dialect_that_it_is_sent_in():
    """Others have their own, or none."""
    assert "completions" == dialect_of("/generate").name
    assert "chat" == dialect_of("/v1/chat/completions").name
    assert dialect_of("/tokenize") is None
