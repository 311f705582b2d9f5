"""What is known of one engine."""

import pytest
from pydantic import ValidationError

from proxy.config.sections import EndpointSettings, EnginesSettings
from proxy.protocols.engines import Traits
from proxy.upstream.endpoint import make_endpoint


def endpoint(**said):
    return make_endpoint(EndpointSettings(url="http://127.0.0.1:1", **said), EnginesSettings())


def test_what_is_found_out_holds_unless_something_is_configured():
    """Kind and version; before, nobody knows, and only text can be had."""
    found, told = endpoint(), endpoint(kind="vllm", version="0.1")
    assert ("auto", "plain", None) == (found.kind, found.engine.kind, found.version)

    for one in (found, told):
        one.traits = Traits("sglang", "0.5.23", None)
    assert ("sglang", "0.5.23") == (found.kind, found.version)
    assert ("vllm", "0.1") == (told.kind, told.version)


def test_its_key_is_not_printed():
    """Whoever logs it logs no secret."""
    keyed = endpoint(api_key="planted")

    assert "planted" == keyed.api_key
    assert "planted" not in repr(keyed)


def test_configured_sampling_defaults_win_over_those_that_the_server_shows():
    """Field by field; without either nothing is known."""
    one = endpoint(sampling_defaults={"temperature": 0.7})
    assert {} == endpoint().sampling_defaults

    one.traits = Traits("vllm", sampling_defaults={"temperature": 1.0, "top_p": 0.9})
    assert {"temperature": 0.7, "top_p": 0.9} == one.sampling_defaults == one.known.sampling_defaults


@pytest.mark.parametrize("odd", [{"temperature": float("nan")}, {"temperature": "warm"}, {"heat": 1.0}])
def test_configured_sampling_defaults_are_numbers_of_known_fields(odd):
    """A whole number stays whole, as requests have it; what is no number is refused at the start."""
    assert 20 == endpoint(sampling_defaults={"top_k": 20}).sampling_defaults["top_k"]
    assert isinstance(endpoint(sampling_defaults={"top_k": 20}).sampling_defaults["top_k"], int)
    with pytest.raises(ValidationError, match="sampling_defaults"):
        endpoint(sampling_defaults=odd)
