"""What the soak reports as growth, and that each of its requests works."""

import pytest
from tests.system.faults.soak import LIMITS, Sample, grown, soak

FLAT = {"calls": 1, "resident_mb": 250, "descriptors": 150, "threads": 17, "keys": 1000, "store_mb": 5, "series": 714}


def samples(name: str, *, more_each: float):
    return [Sample(seconds=number, **FLAT | {name: FLAT[name] + more_each * number}) for number in range(60)]


@pytest.mark.parametrize("name", LIMITS)
def test_growth_after_the_warm_up_is_reported(name):
    """A warm-up is none, and neither is noise."""
    warm = [Sample(seconds=0, **FLAT | {name: FLAT[name] / 2}) for _ in range(20)] + samples(name, more_each=0)[20:]
    noise = [Sample(seconds=number, **FLAT | {name: FLAT[name] + number % 3}) for number in range(60)]

    assert grown(warm) == grown(noise) == []
    assert [found.split()[0] for found in grown(samples(name, more_each=0.05 * FLAT[name]))] == [name]


@pytest.mark.timeout(120)
async def test_a_short_soak_has_all_traffic(tmp_path):
    found = await soak(tmp_path, 1, seconds=6, interval_s=2)

    assert found[-1].calls > 20
    assert found[-1].keys > 20
