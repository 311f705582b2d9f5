"""Nothing is lost: the short form of `make test-faults`, every fault once."""

import pytest

from tests.system.faults.run import FAULTS, fail_over, fill_journal, kill_proxy, kill_worker, run, stop_store


@pytest.mark.timeout(300)  # each wait within is bounded by itself
@pytest.mark.parametrize(
    ("on_failure", "faults"),
    [
        ("fail", FAULTS),
        ("spool", [kill_proxy, stop_store, fill_journal]),
        ("fail", [fail_over]),
        ("fail", [kill_worker]),
    ],
    ids=["store", "journal", "replica", "workers"],
)
async def test_every_call_whose_client_saw_its_end_is_stored_once_and_as_the_engine_said(on_failure, faults, tmp_path):
    """Whatever is killed, stopped, filled or replaced; nothing is half-written or without an owner, and all goes on."""
    counted = await run(tmp_path, 1, on_failure, away_s=0.2, agents=3, faults=faults)

    assert counted["ended"] > 5
    assert counted["faults"] == len(faults)
