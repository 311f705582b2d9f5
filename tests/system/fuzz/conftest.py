"""The number of cases: a few with a fixed seed in `make test-system`, up to 250,000 with new seeds in `make fuzz`."""

import asyncio

import pytest
from hypothesis import HealthCheck, Phase, given, settings

CASES = 800  # without --cases; each test has a share of it, and the shares are 2.3 together


def pytest_addoption(parser):
    parser.addoption("--cases", type=int, help="number of cases of which each test has a share, with new seeds")


@pytest.fixture
def fuzz(request, record_property):
    """Try a share of all cases: `await fuzz(share, strategy, check)`, where `check` may be a coroutine function."""
    cases = request.config.getoption("cases", None)

    async def fuzz(share, strategy, check):
        loop, tried = asyncio.get_running_loop(), 0

        @settings(
            max_examples=max(1, round((cases or CASES) * share)),
            derandomize=cases is None,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=(Phase.generate, Phase.shrink),
            print_blob=True,
        )
        @given(strategy)
        def case(drawn):
            nonlocal tried
            tried += 1
            if asyncio.iscoroutinefunction(check):
                asyncio.run_coroutine_threadsafe(check(drawn), loop).result(60)
            else:
                check(drawn)

        await asyncio.to_thread(case)
        record_property("cases", tried)

    fuzz.is_whole = cases is not None
    return fuzz


def pytest_terminal_summary(terminalreporter):
    """Print the number of cases."""
    passed = terminalreporter.stats.get("passed", [])
    counts = [value for report in passed for name, value in report.user_properties if name == "cases"]
    if counts and report_wanted(terminalreporter.config):
        terminalreporter.write_line(f"{sum(counts):,} cases were tried")


def report_wanted(config):
    return config.getoption("cases", None) is not None
