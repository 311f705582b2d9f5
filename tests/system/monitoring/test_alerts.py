"""Alerts that fire in a real Prometheus: an unreachable endpoint, a killed store, a stopped proxy."""

import pytest

pytestmark = pytest.mark.timeout(600)  # the first test runs the scene


def test_an_ejected_endpoint_fires_an_alert_with_its_name(seen):
    """Healthy endpoints do not."""
    ejected = seen.good_day["TokenTapeEndpointEjected"]

    assert [alert["labels"]["engine"] for alert in ejected] == ["gone"]
    assert [alert["state"] for alert in ejected] == ["firing"]
    assert "ejected endpoint gone" in ejected[0]["annotations"]["summary"]
    assert "TokenTapeNoHealthyEndpoint" not in seen.good_day


def test_flagged_steps_fire_an_alert_with_their_share(seen):
    """Some requests set `echo`, which flags the step."""
    (flagged,) = seen.good_day["TokenTapeStepsFlagged"]

    assert 0.01 < float(flagged["value"]) < 1
    assert "% of complete steps are not exact" in flagged["annotations"]["summary"]


def test_a_killed_store_fires_three_alerts(seen):
    """The store is down, an operation failed, and steps are in the journals."""
    assert {alert["labels"]["severity"] for alert in seen.store_down["TokenTapeStoreDown"]} == {"critical"}
    assert {"open", "append"} & {alert["labels"]["operation"] for alert in seen.store_down["TokenTapeStoreFailing"]}
    assert float(seen.store_down["TokenTapeJournalNotEmpty"][0]["value"]) >= 1


def test_normal_operation_fires_no_alert_of_the_store_or_the_process(seen):
    """Before the store is killed."""
    quiet = {"TokenTapeStoreDown", "TokenTapeJournalNotEmpty", "TokenTapeStoreAofFailing", "TokenTapeStoreFull"}
    quiet |= {
        "TokenTapeDown",
        "TokenTapeRestarting",
        "TokenTapeMemoryPressure",
        "TokenTapeAuditMismatch",
        "TokenTapeNoSteps",
    }

    assert quiet & seen.good_day.keys() == set()


def test_a_stopped_proxy_fires_an_alert(seen):
    """Its scrape target is down."""
    (down,) = seen.proxy_down["TokenTapeDown"]

    assert down["labels"]["job"] == "tokentape"
