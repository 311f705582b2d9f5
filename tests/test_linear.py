"""Every function of the pure packages takes time linear in the text, the bytes and the ids of agents and engines."""

import gc
import sys
from contextlib import suppress
from time import thread_time
from types import FrameType
from typing import Any

import pytest
from tests.support.fed_calls import plan
from tests.support.fed_rollouts import OF_ROLLOUTS
from tests.support.feeders import FEEDERS, public_functions

SIZES = [1024 * 4**power for power in range(6)]  # 1 kB to 1 MB
ENOUGH_S = 0.006  # of CPU, which can be compared
LONGER_S = 0.015  # for the first fragment of each feeder
LONGEST_S = 0.25  # for whole rollouts: in shorter times, their linear part hides another one
GROWTH = 64  # of the time of 16 times the size: 16 if it is linear, 256 if it is quadratic
REPEATS = 3

# Public functions that no feeder calls, and why no client decides the size of their input.
NOT_FED = {
    "it takes numbers, names or settings": (
        "arrays.floats_with_gaps", "facts.RolloutFacts.split", "thread_rules.rules_of",
        "response.TokenAnnotations.fields", "export.with_threads", "sequence_view.RowSource.refuse_unlogged",
        "sequence_view.SequenceView.placed", "areal.ArealFormat.placed",
    ),
    "it looks at single fields of a body": ("vllm.Vllm.template_fields",),
    "it returns what it is given, or nothing": (
        "plan.CallAdapter.native", "plan.CallAdapter.with_steps",
        "plan.CallAdapter.reshape", "plan.CallAdapter.answer", "turn_view.TurnView.bare",
    ),
    "it compares a text with a few names of an enum": ("gemini.request.one_of_names",),
    "it compares two sets of words": ("openings.System.resembles",),
    "it is a part of functions that are fed: `rendering_of`, `plant`, `turns`, `_grouped`": (
        "turns.own_rendering", "arrays.SharedIds.after", "marin.MarinFormat.order",
        "sequence_view.SequenceView.packed", "sequences.SequencesFormat.packed",
    ),
    "its rows are those of other formats, with one more list": (
        "verl.VerlDataProtoFormat.with_scores", "verifiers.VerifiersFormat.bare",
    ),
    "it changes two fields of the only choice": (
        "exchange.Exchange.complete", "response.StreamResponse.complete", "whole_response.Withheld.complete",
    ),
    "pyarrow writes the columns": (
        "containers.Arrow.write", "containers.Arrow.closing", "containers.Parquet.write", "containers.Parquet.closing",
    ),
}  # fmt: skip


def spent(work: Any) -> float:
    """Return the CPU time of some work in seconds. What it raises for an invalid input is tested elsewhere."""
    gc.disable()
    started = thread_time()
    try:
        with suppress(Exception):
            work()
        return thread_time() - started
    finally:
        gc.enable()


def growth(feed: Any, fragment: str, enough_s: float) -> float:
    """Return how many times longer the work takes with 16 times the size, at the size that takes long enough or the largest."""
    times: list[float] = []
    for size in SIZES:
        times.append(spent(feed(fragment, size)))
        if times[-1] > enough_s and len(times) > 2:
            break
    return times[-1] / times[-3] if times[-1] > ENOUGH_S else 1.0


@pytest.mark.parametrize("name", FEEDERS)
def test_time_is_linear_in_the_input(name):
    """Sixteen times the text, messages, calls or ids take sixteen times as long, and never hundreds of times."""
    feed, fragments = FEEDERS[name]
    for number, fragment in enumerate(fragments):
        first = LONGEST_S if name in OF_ROLLOUTS else LONGER_S
        for _ in range(REPEATS):  # something else may have taken the time once
            found = growth(feed, fragment, ENOUGH_S if number else first)
            if found < GROWTH:
                break
        else:
            pytest.fail(f"16 times as much of {fragment!r} takes {found:.0f} times as long")


def test_quadratic_work_is_found():
    """Such as one that copies the rest of a text for each character."""

    def feed(fragment: str, size: int):
        def work() -> None:
            rest = fragment * size
            while rest:
                rest = rest[1:]

        return work

    assert growth(feed, "a", LONGEST_S) > GROWTH


def test_every_public_function_is_fed():
    """Each one is called by a feeder, or is in `NOT_FED` with a reason; a new one has to be in one of both."""
    called = set()
    for function in (plan, *(function for _, function, _ in public_functions())):
        getattr(function, "cache_clear", int)()  # what other tests called is called again

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            called.add(frame.f_code)

    sys.setprofile(note)
    try:
        for feed, fragments in FEEDERS.values():
            with suppress(Exception):
                feed(fragments[0], SIZES[0])()
    finally:
        sys.setprofile(None)
    missed = {name for name, function, _ in public_functions() if _code(function) not in called}
    excused = {suffix for suffixes in NOT_FED.values() for suffix in suffixes}

    assert not {name for name in missed if not any(name.endswith(f".{suffix}") for suffix in excused)}
    assert not {suffix for suffix in excused if not any(name.endswith(f".{suffix}") for name in missed)}


def _code(function: Any) -> Any:
    return getattr(getattr(function, "__wrapped__", function), "__code__", None)
