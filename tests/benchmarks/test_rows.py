"""The rows of the table of targets."""

import pytest

from benchmarks import load
from benchmarks.rows import LOADS


@pytest.mark.parametrize("name", LOADS)
async def test_each_call_of_a_row_is_an_exact_step(proxied, name):
    """Benchmarks measure the recording of token ids, so a row with failing calls or lost ids measures nothing."""
    url, http = proxied
    calls = LOADS[name][0].calls
    await load.throughput(int(url.rpartition(":")[2]), calls, clients=1, rollouts=1)
    async with http.get(f"{url}/rollouts") as response:
        [rollout] = (await response.json())["rollouts"]

    assert len(calls.bodies) == rollout["counts"]["exact"]
