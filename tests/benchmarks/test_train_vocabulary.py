"""How the vocabulary is learnt."""

from benchmarks.train_vocabulary import learn_followers, learn_merges, merge
from proxy.simulator.tokenizer import Tokenizer

TEXTS = ["The cat sat.", "The cat ran.", "The cat sat, the dog ran."] * 3


def test_the_most_frequent_pair_is_merged_first():
    """Merges come most frequent first, ties by the smaller ids, so that each run learns the same."""
    merges = learn_merges(TEXTS, 4)

    assert merges == [(97, 116), (104, 101), (32, 99), (84, 257)]


def test_merging_replaces_each_occurrence():
    """Every occurrence of a pair is replaced, from the left, overlapping ones once."""
    assert merge([1, 1, 1, 2, 1, 1], (1, 1), 9) == [9, 1, 2, 9]


def test_followers_are_what_followed():
    """A token's followers are what came after it more than once, and a sentence begins with a whole word."""
    tokenizer = Tokenizer(learn_merges(TEXTS, 12))
    followers, starters = learn_followers(TEXTS, tokenizer)
    the = tokenizer.encode("The")[-1]

    assert [tokenizer.decode([token]) for token in starters] == ["The"]
    assert [tokenizer.decode([token]) for token in followers[the]] == [" cat"]
