"""Keys that are missing, weak, or good for what they should not be."""

import pytest
from findings import graded

from proxy.cli.check.keys import check_keys
from proxy.config.settings import load

GOOD, OTHER = "v7pQ2mXw9sKd4TfR8zLb", "kJ3nYc6hWq1uGe5aPo0i"


def told(agents=(), control=(), control_listen=None, **said):
    return graded(
        list(
            check_keys(
                load(agents={"api_keys": agents}, control={"api_keys": control, "listen": control_listen}, **said)
            )
        )
    )


def test_good_keys_and_none_on_loopback_are_well():
    """Nothing is found where there is nothing to find."""
    assert {"ok": [], "note": [], "fault": []} == told()
    assert {"ok": [], "note": [], "fault": []} == told([GOOD], [OTHER], listen="0.0.0.0:8400")


def test_an_open_address_without_keys_is_pointed_out():
    """It was asked for with --insecure, and is still worth a word; each API by its own address."""
    (note,) = told(listen="0.0.0.0:0", insecure=True)["note"]
    assert "agents.api_keys and control.api_keys are empty" in note
    (note,) = told([GOOD], listen="127.0.0.1:0", control_listen="0.0.0.0:0", insecure=True)["note"]
    assert "control.api_keys is empty" in note


@pytest.mark.parametrize(
    "key", ["hunter2", "aaaaaaaaaaaaaaaaaaaaaaaa", "my-secret-key-of-ours", "CHANGEME-0123456789", "a-key-for-agents"]
)
def test_a_key_that_can_be_guessed_is_a_fault_where_others_can_try(key):
    """A note on loopback; never with the key itself."""
    (note,) = told([key])["note"]
    (fault,) = told([GOOD], [key], listen="0.0.0.0:8400")["fault"]

    assert "agents.api_keys[0] is weak" in note
    assert "control.api_keys[0] is weak" in fault
    assert key not in note + fault


def test_a_key_of_both_apis_is_a_fault():
    """Agents would control."""
    (fault,) = told([GOOD, OTHER], [OTHER])["fault"]

    assert "agents.api_keys and control.api_keys" in fault


def test_a_key_that_is_there_twice_is_a_note_and_one_like_a_rollouts_a_fault():
    """Taking the one away would leave the other; the proxy would look for the rollout that it names."""
    (note,) = told([GOOD, GOOD])["note"]
    (fault,) = told([], ["tt-cjE.0123456789abcdefghij"])["fault"]

    assert "agents.api_keys[1] is a duplicate" in note
    assert "control.api_keys[0] has the prefix of rollout keys" in fault
