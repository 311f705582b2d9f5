"""An index of id sequences by prefix, in time and memory linear in the unique ids."""

import tracemalloc
from array import array
from time import process_time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.trajectory.prefix_index import PIECE, Prefixes
from proxy.trajectory.shared_ids import Link, SharedIds

LENGTHS = st.sampled_from([0, 0, 1, 2, 255, 256, 257, 511, 512, 513])
RUN = st.builds(lambda token, count: [token] * count, st.sampled_from([1, 256, -1]), LENGTHS)
IDS = st.lists(RUN, max_size=3).map(lambda runs: [token for run in runs for token in run])


def shared(ids, links):
    """Return the ids as a prompt read from the store, with links of its own reader or cut into other pieces."""
    raw = array("i", ids).tobytes()
    link, size = None, PIECE if links is None else 512
    for start in range(0, len(raw) - len(raw) % size, size):
        link = Link(link, raw[start : start + size])
    return SharedIds(link, raw[len(raw) - len(raw) % size :])


def as_prompt(ids, how):
    return array("i", ids) if how == "array" else shared(ids, None if how == "chain" else how)


@given(
    st.lists(st.tuples(IDS, IDS, st.sampled_from(["array", "chain", "short pieces"])), max_size=6),
    IDS,
    st.sampled_from(["array", "chain", "short pieces"]),
)
def test_all_prefixes_of_a_prompt_are_found_longest_first(sequences, prompt, how):
    """In every representation of a prompt; of equal sequences the first one is found."""
    prefixes, fulls = Prefixes(), []
    for number, (start, sampled, kept) in enumerate(sequences):
        fulls.append([*start, *sampled])
        known = prefixes.add(prefixes.locate(as_prompt(start, kept)), array("i", sampled), number)
        assert fulls.index(fulls[number]) == known
    expected = {tuple(full): fulls.index(full) for full in fulls if prompt[: len(full)] == full}

    assert [expected[full] for full in sorted(expected, key=len, reverse=True)] == list(
        prefixes.beginnings(prefixes.locate(as_prompt(prompt, how)))
    )


@pytest.mark.parametrize("steps", [400])
def test_prompts_on_a_shared_chain_are_indexed_without_copies(steps):
    link, prompts = None, []
    for number in range(steps):
        link = Link(link, array("i", [number] * 256).tobytes())
        prompts.append(SharedIds(link, b""))
    tracemalloc.start()
    begun = process_time()
    prefixes = Prefixes()
    located = [prefixes.locate(prompt) for prompt in prompts]
    for number, location in enumerate(located):
        prefixes.add(location, array("i", [number + 1, -1]), number)
    found = [list(prefixes.beginnings(location)) for location in located]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert [[]] * steps == found
    assert peak < 1500 * steps  # copies of the prompts would be 200 times as much
    assert process_time() - begun < 1
