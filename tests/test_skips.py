"""What was not tested is printed: how many tests, why, and how to have them run."""

import asyncio
import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CONNECTIONS = "tests/storage/redis/test_connections.py::"
SKIPPED = [
    CONNECTIONS + "test_all_callers_share_one_connection",
    CONNECTIONS + "test_long_commands_use_another_connection",
]
SELF_CONTAINED = CONNECTIONS + "test_a_reply_without_a_command_closes_the_connection"


async def printed(*words: str) -> str:
    """What pytest prints where nothing is installed but this environment."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *words,
        cwd=ROOT, env={**os.environ, "PATH": str(Path(sys.executable).parent)}, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    said, _ = await process.communicate()
    assert process.returncode == 0, said.decode()
    return said.decode()


@pytest.mark.parametrize("workers", ["0", "1"])
async def test_skipped_tests_are_counted_with_their_reason(workers):
    """Also quietly, and where tests run in several processes."""
    text = await printed("-n", workers, "-qq", *SKIPPED, SELF_CONTAINED)

    assert "2 skipped: redis-server is not installed (Debian: apt-get install redis-server)" in text


async def test_without_skipped_tests_there_is_no_summary():
    """The summary is about what is missing."""
    assert "not tested" not in await printed("-n", "0", SELF_CONTAINED)
