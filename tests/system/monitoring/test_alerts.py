"""Alerts that really come: an endpoint that is gone, a store that is killed, a proxy that ends."""

import pytest

pytestmark = pytest.mark.timeout(600)  # the first test waits for the whole run


def test_an_ejected_endpoint_is_told_of_by_its_name(seen):
    """And only that one; those that answer are not."""
    ejected = seen.good_day["TokenTapeEndpointEjected"]

    assert ["gone"] == [alert["labels"]["engine"] for alert in ejected]
    assert ["firing"] == [alert["state"] for alert in ejected]
    assert "passes gone over" in ejected[0]["annotations"]["summary"]
    assert "TokenTapeNoEndpoint" not in seen.good_day


def test_flagged_steps_are_told_of_with_their_share(seen):
    """A part of the whole answers was asked to echo its prompt."""
    (flagged,) = seen.good_day["TokenTapeStepsFlagged"]

    assert 0.01 < float(flagged["value"]) < 1
    assert "% of whole answers are not exact" in flagged["annotations"]["summary"]


def test_a_killed_store_is_told_of_with_the_verb_that_failed(seen):
    """It is away, it has failed, and steps wait in the journals."""
    assert {"critical"} == {alert["labels"]["severity"] for alert in seen.store_away["TokenTapeStoreAway"]}
    assert {"open", "append"} & {alert["labels"]["verb"] for alert in seen.store_away["TokenTapeStoreFailing"]}
    assert float(seen.store_away["TokenTapeSpoolNotEmpty"][0]["value"]) >= 1


def test_a_good_day_is_quiet_about_the_store_and_the_process(seen):
    """Before it was killed nothing was said of it."""
    quiet = {"TokenTapeStoreAway", "TokenTapeSpoolNotEmpty", "TokenTapeStoreFileNotWritten", "TokenTapeStoreFull"}
    quiet |= {
        "TokenTapeDown",
        "TokenTapeRestarting",
        "TokenTapeMemoryPressure",
        "TokenTapeAuditDiffers",
        "TokenTapeNoSteps",
    }

    assert set() == quiet & seen.good_day.keys()


def test_a_proxy_that_ends_is_told_of(seen):
    """Prometheus is the one that notices."""
    (down,) = seen.proxy_down["TokenTapeDown"]

    assert "tokentape" == down["labels"]["job"]
