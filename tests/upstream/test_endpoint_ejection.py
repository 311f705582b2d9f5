"""Ejection of endpoints."""

import pytest

from proxy.upstream.endpoint import EjectionState


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
