"""The short form of `make test-faults`: nothing is lost by any fault."""

import pytest
from tests.system.faults.run import FAULTS, fail_over, fill_journal, kill_proxy, kill_worker, run, stop_store


@pytest.mark.timeout(300)  # each wait within has its own timeout
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
async def test_every_completed_call_is_stored_once_with_the_sampled_ids(on_failure, faults, tmp_path):
    """After each kill, stop, full disk or failover, no step is half-written or without an owner, and calls continue."""
    counted = await run(tmp_path, 1, on_failure, away_s=0.2, agents=3, faults=faults)

    assert counted["ended"] >= 3  # of each agent, after the last fault
    assert counted["faults"] == len(faults)
