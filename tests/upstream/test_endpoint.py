"""The detected and configured properties of an endpoint."""

from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from proxy.config.engines import EndpointSettings, EnginesSettings
from proxy.errors import (
    EngineDisconnected,
    EngineEventTooLong,
    EngineResponseTooLarge,
    EngineTimeout,
    EngineUnreachable,
)
from proxy.protocols.engines.base import Traits
from proxy.upstream.endpoint import EjectionState, can_fail_over, check_status, make_endpoint


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


@pytest.fixture
def health():
    return EjectionState(eject_after=3, base_ejection_s=1, max_ejection_s=5)


def fail(health, times, now):
    for _ in range(times):
        health.failed(now)


def test_consecutive_faults_eject(health):
    """A successful call in between resets the count."""
    fail(health, 2, 0)
    health.answered()
    fail(health, 2, 0)
    assert not health.is_ejected

    fail(health, 1, 10)
    assert health.ejected_until == 11


def test_faults_during_an_ejection_do_not_extend_it(health):
    fail(health, 1000, 10)

    assert (health.ejections, health.ejected_until) == (1, 11)


def test_ejection_time_doubles_up_to_the_maximum(health):
    """A successful call resets it."""
    fail(health, 3, 0)
    lasted = []
    for _ in range(100):
        now = health.ejected_until
        health.failed(now)
        lasted.append(health.ejected_until - now)
    assert lasted[:4] == [2, 4, 5, 5]
    assert lasted[-1] == 5

    health.answered()
    assert not health.is_ejected
    fail(health, 3, 0)
    assert health.ejected_until == 1


def test_a_passed_check_ends_an_ejection_after_its_time(health):
    """Not before: calls may fail although checks pass."""
    fail(health, 3, 0)
    health.passed(0.5)
    assert health.is_ejected
    health.passed(1)
    assert not health.is_ejected

    health.failed(1)
    assert health.ejected_until == 3


def test_a_passed_check_does_not_reset_the_fault_count(health):
    """Otherwise an engine with rare calls would never be ejected."""
    fail(health, 2, 0)
    health.passed(0)
    fail(health, 1, 0)

    assert health.is_ejected


ENDPOINT = SimpleNamespace(label="a")


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (EngineUnreachable("x"), True),
        (EngineDisconnected("x"), True),
        (EngineTimeout("x"), False),
        (EngineResponseTooLarge("x"), False),
        (EngineEventTooLong("x"), False),
    ],
)
def test_a_call_fails_over_unless_that_does_not_help(fault, expected):
    """After a timeout the engine may still be processing the call; a response that is too large would be sent again."""
    assert expected is can_fail_over(fault)


@pytest.mark.parametrize("status", [502, 503, 504])
def test_a_502_503_or_504_is_a_fault_unless_it_is_the_last_endpoints(status):
    """The last endpoint's response is forwarded."""
    with pytest.raises(EngineDisconnected, match=f"Engine a returned status {status}"):
        check_status(ENDPOINT, status, is_last=False)

    check_status(ENDPOINT, status, is_last=True)


@pytest.mark.parametrize("status", [301, 308])
@pytest.mark.parametrize("is_last", [False, True])
def test_a_redirect_is_a_fault(status, is_last):
    with pytest.raises(EngineDisconnected, match="is not followed"):
        check_status(ENDPOINT, status, is_last=is_last)


@pytest.mark.parametrize("status", [200, 304, 400, 429, 500])
def test_other_status_codes_are_forwarded(status):
    check_status(ENDPOINT, status, is_last=False)
