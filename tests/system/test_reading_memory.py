"""The memory of reading large rollouts grows with the unique and the returned data."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")


def measured(*arguments):
    """Return the memory growth of a process that reads a rollout, and the size of what it returned, in MB."""
    words = [sys.executable, "-m", "tests.support.measured_reading", *arguments]
    run = subprocess.run(words, capture_output=True, text=True, check=True, cwd=ROOT)
    return tuple(map(float, run.stdout.split()))


@needs_proc
def test_growing_prompts_use_the_memory_of_their_unique_tokens():
    """With 2,000 steps, each prompt 100 tokens longer than the last, copies of all prompts would use 800 MB."""
    grown, handed_out = measured("growing", "sequences", "2000", "100")

    assert handed_out > 1
    assert grown < 80


@needs_proc
def test_rows_are_in_memory_one_at_a_time():
    """With 20 prompts of 100,000 tokens, all rows as Python lists would use 80 MB, and their text the same."""
    grown, handed_out = measured("wide", "steps", "20", "100000")

    assert handed_out > 10
    assert grown < 2 * handed_out + 25
