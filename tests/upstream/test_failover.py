"""The endpoints that a call is tried at."""

from types import SimpleNamespace

import pytest

from proxy.errors import EngineDisconnected, EngineTimeout, EngineUnreachable
from proxy.upstream.routing import Failover


def endpoint(name):
    return SimpleNamespace(label=name)


ENDPOINTS = [endpoint("a"), endpoint("b"), endpoint("c")]


def test_endpoints_come_in_routing_order_up_to_the_maximum():
    """`engines.max_attempts` bounds how many there are."""
    failover = Failover(ENDPOINTS, 2)

    assert "a" == failover.next().label
    assert failover.has_next
    assert "b" == failover.next().label
    assert not failover.has_next


@pytest.mark.parametrize(
    ("fault", "goes_on"), [(EngineUnreachable("x"), True), (EngineDisconnected("x"), True), (EngineTimeout("x"), False)]
)
def test_a_call_goes_on_to_the_next_endpoint_unless_the_last_one_was_silent(fault, goes_on):
    """A silent engine may still work on the call."""
    failover = Failover(ENDPOINTS, 3)
    failover.next()

    assert goes_on is failover.can_retry(fault)


def test_no_fault_goes_on_past_the_last_endpoint():
    """Its fault is the call's."""
    failover = Failover(ENDPOINTS, 1)
    failover.next()

    assert not failover.can_retry(EngineUnreachable("x"))


@pytest.mark.parametrize("status", [502, 503, 504])
def test_a_gateways_status_is_a_fault_while_an_endpoint_is_left(status):
    """The last endpoint's response is shown as it is."""
    failover = Failover(ENDPOINTS, 2)
    first = failover.next()
    with pytest.raises(EngineDisconnected, match=f"Engine a returned status {status}"):
        failover.check_status(first, status)

    failover.check_status(failover.next(), status)


@pytest.mark.parametrize("status", [200, 400, 429, 500])
def test_other_statuses_are_responses(status):
    """Also where another endpoint is left."""
    failover = Failover(ENDPOINTS, 2)

    failover.check_status(failover.next(), status)
