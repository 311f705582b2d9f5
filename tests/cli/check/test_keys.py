"""Checks of API keys: missing, weak, duplicate, or shared ones."""

import pytest
from tests.support.findings import graded

from proxy.cli.check.keys import check_keys
from proxy.config.settings import load

GOOD, OTHER = "v7pQ2mXw9sKd4TfR8zLb", "kJ3nYc6hWq1uGe5aPo0i"


def findings_for(agents=(), control=(), control_listen=None, **settings):
    return graded(
        list(
            check_keys(
                load(agents={"api_keys": agents}, control={"api_keys": control, "listen": control_listen}, **settings)
            )
        )
    )


def test_strong_keys_and_no_keys_on_loopback_have_no_findings():
    assert {"ok": [], "note": [], "fault": []} == findings_for()
    assert {"ok": [], "note": [], "fault": []} == findings_for([GOOD], [OTHER], listen="0.0.0.0:8400")


def test_an_open_address_without_keys_is_a_note():
    """It requires --insecure; each API is checked with its own address."""
    (note,) = findings_for(listen="0.0.0.0:0", insecure=True)["note"]
    assert "agents.api_keys and control.api_keys are empty" in note
    (note,) = findings_for([GOOD], listen="127.0.0.1:0", control_listen="0.0.0.0:0", insecure=True)["note"]
    assert "control.api_keys is empty" in note


def test_an_open_control_api_beside_agents_keys_is_a_note():
    """On one address it requires --insecure, on an address of its own it does not."""
    (shared,) = findings_for([GOOD], insecure=True)["note"]
    (own,) = findings_for([GOOD], control_listen="127.0.0.1:8401")["note"]

    assert "control API at 127.0.0.1:8400 requires no key" in shared
    assert "control API at 127.0.0.1:8401 requires no key" in own
    assert {"ok": [], "note": [], "fault": []} == findings_for([], [OTHER])


@pytest.mark.parametrize(
    "key", ["hunter2", "aaaaaaaaaaaaaaaaaaaaaaaa", "my-secret-key-of-ours", "CHANGEME-0123456789", "a-key-for-agents"]
)
def test_a_weak_key_is_a_fault_and_on_loopback_a_note(key):
    """The finding does not contain the key."""
    (note,) = findings_for([key], [OTHER])["note"]
    (fault,) = findings_for([GOOD], [key], listen="0.0.0.0:8400")["fault"]

    assert "agents.api_keys[0] is weak" in note
    assert "control.api_keys[0] is weak" in fault
    assert key not in note + fault


def test_a_key_of_both_apis_is_a_fault():
    """Agents could use the control API."""
    (fault,) = findings_for([GOOD, OTHER], [OTHER])["fault"]

    assert "agents.api_keys and control.api_keys" in fault


def test_a_duplicate_key_is_a_note_and_a_key_like_a_minted_one_a_fault():
    """The proxy would look up the rollout of such a key."""
    (note,) = findings_for([GOOD, GOOD], [OTHER])["note"]
    (fault,) = findings_for([], ["tt-cjE.0123456789abcdefghij"])["fault"]

    assert "agents.api_keys[1] is a duplicate" in note
    assert "control.api_keys[0] has the prefix of rollout keys" in fault
