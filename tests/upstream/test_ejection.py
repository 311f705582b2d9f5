"""When an endpoint is passed over."""

import pytest

from proxy.upstream.endpoint import EjectionState


@pytest.fixture
def health():
    return EjectionState(eject_after=3, base_ejection_s=1, max_ejection_s=5)


def fail(health, times, now):
    for _ in range(times):
        health.failed(now)


def test_faults_in_a_row_eject(health):
    """Not those with an answered call between them."""
    fail(health, 2, 0)
    health.answered()
    fail(health, 2, 0)
    assert not health.is_ejected

    fail(health, 1, 10)
    assert 11 == health.ejected_until


def test_a_thousand_faults_at_once_eject_once(health):
    """The calls that an engine took with it prolong nothing."""
    fail(health, 1000, 10)

    assert (1, 11) == (health.ejections, health.ejected_until)


def test_each_ejection_in_a_row_is_twice_as_long_up_to_the_bound(health):
    """Whatever the number of them; an answered call begins anew."""
    fail(health, 3, 0)
    lasted = []
    for _ in range(100):
        now = health.ejected_until
        health.failed(now)
        lasted.append(health.ejected_until - now)
    assert [2, 4, 5, 5] == lasted[:4]
    assert 5 == lasted[-1]

    health.answered()
    assert not health.is_ejected
    fail(health, 3, 0)
    assert 1 == health.ejected_until


def test_a_good_check_brings_it_back_when_its_time_is_over(health):
    """Not before: an engine whose calls fail is not called more often because its checks are good."""
    fail(health, 3, 0)
    health.passed(0.5)
    assert health.is_ejected
    health.passed(1)
    assert not health.is_ejected

    health.failed(1)
    assert 3 == health.ejected_until


def test_a_good_check_forgives_no_faults_of_calls(health):
    """Else an engine that fails slowly would never be passed over."""
    fail(health, 2, 0)
    health.passed(0)
    fail(health, 1, 0)

    assert health.is_ejected
