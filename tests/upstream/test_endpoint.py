"""The detected and configured properties of an endpoint."""

import pytest
from pydantic import ValidationError

from proxy.config.engines import EndpointSettings, EnginesSettings
from proxy.protocols.engines.base import Traits
from proxy.upstream.endpoint import make_endpoint


def endpoint(**settings):
    return make_endpoint(EndpointSettings(url="http://127.0.0.1:1", **settings), EnginesSettings())


def test_configured_type_and_version_override_the_detected_ones():
    """Before detection, responses are recorded as text only."""
    detected, configured = endpoint(), endpoint(kind="vllm", version="0.1")
    assert (detected.kind, detected.engine.kind, detected.version) == ("auto", "plain", None)

    for item in (detected, configured):
        item.describe(Traits("sglang", "0.5.23", None))
    assert (detected.kind, detected.version) == ("sglang", "0.5.23")
    assert (configured.kind, configured.version) == ("vllm", "0.1")


def test_other_settings_or_traits_forget_the_prepared_plans():
    """Plans have what they describe."""
    described = endpoint()
    plans = [described.plans]
    described.describe(Traits("sglang", "0.5.23", None))
    plans.append(described.plans)
    described.change(described.settings)

    assert len({id(each) for each in (*plans, described.plans)}) == 3


def test_repr_does_not_contain_the_api_key():
    keyed = endpoint(api_key="planted")

    assert ("Authorization", "Bearer planted") in keyed.headers
    assert "planted" not in repr(keyed)


def test_configured_sampling_defaults_override_the_detected_ones_field_by_field():
    configured = endpoint(sampling_defaults={"temperature": 0.7})
    assert endpoint().sampling_defaults == {}

    configured.describe(Traits("vllm", sampling_defaults={"temperature": 1.0, "top_p": 0.9}))
    assert configured.sampling_defaults == configured.known().sampling_defaults == {"temperature": 0.7, "top_p": 0.9}


@pytest.mark.parametrize("invalid", [{"temperature": float("nan")}, {"temperature": "warm"}, {"heat": 1.0}])
def test_configured_sampling_defaults_are_numbers_of_known_fields(invalid):
    """Integers remain integers; other values are rejected at startup."""
    assert endpoint(sampling_defaults={"top_k": 20}).sampling_defaults["top_k"] == 20
    assert isinstance(endpoint(sampling_defaults={"top_k": 20}).sampling_defaults["top_k"], int)
    with pytest.raises(ValidationError, match="sampling_defaults"):
        endpoint(sampling_defaults=invalid)
