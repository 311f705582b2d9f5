"""The training of the simulator's vocabulary."""

from benchmarks.train_vocabulary import learn_followers, learn_merges, merge
from proxy.simulator.tokenizer import Tokenizer

TEXTS = ["The cat sat.", "The cat ran.", "The cat sat, the dog ran."] * 3


def test_the_most_frequent_pair_is_merged_first():
    """Merges are ordered by frequency, then by the smaller ids, so that every run gives the same result."""
    merges = learn_merges(TEXTS, 4)

    assert merges == [(97, 116), (104, 101), (32, 99), (84, 257)]


def test_merging_replaces_each_occurrence():
    """Every occurrence of a pair is replaced from the left; overlapping occurrences are replaced once."""
    assert merge([1, 1, 1, 2, 1, 1], (1, 1), 9) == [9, 1, 2, 9]


def test_followers_and_starters():
    """A token's followers are the tokens that follow it more than once; starters are whole words that begin sentences."""
    tokenizer = Tokenizer(learn_merges(TEXTS, 12))
    followers, starters = learn_followers(TEXTS, tokenizer)
    the = tokenizer.encode("The")[-1]

    assert [tokenizer.decode([token]) for token in starters] == ["The"]
    assert [tokenizer.decode([token]) for token in followers[the]] == [" cat"]
