"""Routes that accept calls in several shapes."""

import pytest

from proxy.api.http import CallRoute
from proxy.protocols.dialects import DIALECTS
from proxy.protocols.dialects.base import TranslationOptions

CHAT = DIALECTS["/v1/chat/completions"]


@pytest.mark.parametrize(("body", "adapter"), [({"a": 1}, "first"), ({"b": 1}, "second"), ({}, None)])
def test_the_first_adapter_that_accepts_a_body_reads_it(body, adapter):
    """An adapter that returns None leaves the body to the next."""
    route = CallRoute(
        CHAT,
        (lambda _e, body, _w: "first" if "a" in body else None, lambda _e, body, _w: "second" if "b" in body else None),
    )

    assert adapter == route.read("/v1/chat/completions", body, TranslationOptions())
