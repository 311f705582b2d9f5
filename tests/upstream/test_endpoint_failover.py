"""Failover: the endpoints at which a call is attempted."""

from types import SimpleNamespace

import pytest

from proxy.errors import (
    EngineDisconnected,
    EngineEventTooLong,
    EngineResponseTooLarge,
    EngineTimeout,
    EngineUnreachable,
)
from proxy.upstream.endpoint import Failover


def endpoint(name):
    return SimpleNamespace(label=name)


ENDPOINTS = [endpoint("a"), endpoint("b"), endpoint("c")]


def test_endpoints_are_attempted_in_routing_order_up_to_max_attempts():
    failover = Failover(ENDPOINTS, 2)

    assert "a" == failover.next().label
    assert failover.has_next
    assert "b" == failover.next().label
    assert not failover.has_next


@pytest.mark.parametrize(
    ("fault", "can_retry"),
    [
        (EngineUnreachable("x"), True),
        (EngineDisconnected("x"), True),
        (EngineTimeout("x"), False),
        (EngineResponseTooLarge("x"), False),
        (EngineEventTooLong("x"), False),
    ],
)
def test_a_call_is_retried_at_the_next_endpoint_unless_that_does_not_help(fault, can_retry):
    """After a timeout the engine may still be processing the call; a response that is too large would be sent again."""
    failover = Failover(ENDPOINTS, 3)
    failover.next()

    assert can_retry is failover.can_retry(fault)


def test_a_fault_of_the_last_endpoint_is_not_retried():
    failover = Failover(ENDPOINTS, 1)
    failover.next()

    assert not failover.can_retry(EngineUnreachable("x"))


@pytest.mark.parametrize("status", [502, 503, 504])
def test_a_502_503_or_504_is_a_fault_unless_it_is_the_last_endpoints(status):
    """The last endpoint's response is forwarded."""
    failover = Failover(ENDPOINTS, 2)
    first = failover.next()
    with pytest.raises(EngineDisconnected, match=f"Engine a returned status {status}"):
        failover.check_status(first, status)

    failover.check_status(failover.next(), status)


@pytest.mark.parametrize("status", [200, 400, 429, 500])
def test_other_status_codes_are_forwarded(status):
    failover = Failover(ENDPOINTS, 2)

    failover.check_status(failover.next(), status)
