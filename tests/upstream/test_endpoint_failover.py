"""Failover: when the next endpoint is tried."""

from types import SimpleNamespace

import pytest

from proxy.errors import (
    EngineDisconnected,
    EngineEventTooLong,
    EngineResponseTooLarge,
    EngineTimeout,
    EngineUnreachable,
)
from proxy.upstream.endpoint import can_fail_over, check_status

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
