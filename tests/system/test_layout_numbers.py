"""The bounds of the measured layout of the sources."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
MAXIMA = {
    "rooms": 18,
    "floors": 9,
    "arrows upwards": 0,
    "modules in import circles": 0,
    "entries at proxy's root": 16,
}
# Of each kind of call before its response ends: files, own calls, moves, and all Python calls.
CALLS = {
    "streamed": (30, 270, 122, 545),
    "unstreamed": (32, 195, 105, 440),
    "continued": (38, 380, 195, 860),
    "messages": (36, 495, 240, 800),
}
ATTEMPTS = 3  # a read of the socket may return a part of the response, which adds moves


def numbers_in(text: str) -> dict[str, int]:
    return {name: int(number) for name, number in re.findall(r"^(\S[^\d\n]*?) +(\d+)$", text, re.MULTILINE)}


def calls_in(text: str) -> dict[str, tuple[int, ...]]:
    rows = re.findall(r"^(\w+) +(\d+) +(\d+) +(\d+) +(\d+)$", text, re.MULTILINE)
    return {name: tuple(map(int, numbers)) for name, *numbers in rows}


def measured() -> str:
    return subprocess.run(
        [sys.executable, "-m", "docs.layout"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout


def are_within(printed: str) -> bool:
    numbers, calls = numbers_in(printed), calls_in(printed)
    return all(numbers[name] <= most for name, most in MAXIMA.items()) and all(
        number <= most for kind, maxima in CALLS.items() for number, most in zip(calls[kind], maxima, strict=True)
    )


def test_the_layout_is_within_its_bounds():
    """The second call of a rollout is traced from the socket to the end of its response."""
    assert any(are_within(measured()) for _ in range(ATTEMPTS))
