"""What is common to feeders: inputs of strangers for the functions of the pure packages.

A feeder makes its input from a fragment and a size in characters, and returns the work that is measured.
"""

from collections.abc import Callable, Generator
from functools import cache
from pathlib import Path
from typing import Any

from proxy.protocols.dialects.base import TranslationOptions
from proxy.trajectory.facts import RolloutFacts

Work = Callable[[], object]
Feeder = Callable[[str, int], Work]

ROOT = Path(__file__).parents[2]
PURE = ("trajectory", "protocols", "continuation", "export")
FRAGMENTS = (
    "<think>", "</think>", "<think>a</think>", "<", "{", "[", "[],", "\\", "\\u00", '"', '\\"', "data: ", "\n", "\r", " ",
    "a", "a b\n", "0", "1,", "-1e9", "\N{GRINNING FACE}", "e\N{COMBINING ACUTE ACCENT}", "data: {}\n\n",
)  # fmt: skip
FEW = ("a", "<think>a</think>", '\\"', "0")  # for feeders that repeat messages, calls or steps
FACTS_OF_ROLLOUT = RolloutFacts("r1", "g", "completed", 1.0, {}, 0.5, {"env_name": "e"})
OPTIONS = TranslationOptions(ignore_hosted_tools=True)
ANSWERED = {"id": "x", "object": "chat.completion", "created": 1, "model": "m"}
FEEDERS: dict[str, tuple[Feeder, tuple[str, ...]]] = {}


def feeder(*fragments: str) -> Callable[[Feeder], Feeder]:
    """Register a feeder for these fragments; for all of them if there are none."""

    def register(feed: Feeder) -> Feeder:
        FEEDERS[feed.__name__] = feed, fragments or FRAGMENTS
        return feed

    return register


@cache
def text(fragment: str, size: int) -> str:
    """Return the fragment, repeated to this size."""
    return (fragment * (size // len(fragment) + 1))[:size]


def many(fragment: str, size: int, each: int = 64) -> range:
    """Return a range with an index for each so many characters of a size."""
    return range(max(1, size // max(each, len(fragment))))


def run(generator: Generator[Any, Any, Any], answer: Callable[[Any], Any]) -> Any:
    """Run a generator of lookups to its end."""
    result = None
    while True:
        try:
            result = answer(generator.send(result))
        except StopIteration as end:
            return end.value
