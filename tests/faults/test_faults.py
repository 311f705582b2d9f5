"""Nothing is lost: the short form of `make test-faults`, every fault once."""

import pytest

from tests.faults.run import run


@pytest.mark.parametrize("on_failure", ["fail", "spool"])
async def test_every_call_whose_client_saw_its_end_is_stored_once_and_as_the_engine_said(on_failure, tmp_path):
    """Whatever is killed, stopped or filled; nothing is half-written or without an owner, and all goes on by itself."""
    counted = await run(tmp_path, 1, on_failure, 0, away_s=0.3, agents=3)

    assert counted["ended"] > 20
    assert counted["faults"] == 8
