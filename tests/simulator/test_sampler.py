"""Draws along the plan of a reply."""

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.simulator.distribution import load_distribution, prefix_of
from proxy.simulator.sampler import FREE, Draws, Sampler, plan_reply, words_of
from proxy.simulator.tokenizer import load_tokenizer, load_vocabulary

TOKENIZER = load_tokenizer()
WORDS = words_of(load_vocabulary(), TOKENIZER)
END = TOKENIZER.id("<|im_end|>")
PROMPT = TOKENIZER.encode("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def sampled(seed: int, temperature: float = 1.0, count: int = 40, plan: tuple[int, ...] = ()) -> list[int]:
    sampler = Sampler(load_distribution(), WORDS, seed, temperature)
    return [token for token, _ in islice(sampler.sample(prefix_of(PROMPT), plan), count)]


def test_a_seed_gives_the_same_ids():
    """The same seed gives the same ids, another seed gives others."""
    assert sampled(1) == sampled(1)
    assert sampled(1) != sampled(2)


def test_no_temperature_takes_the_most_likely():
    """With temperature 0 each token is the most likely one, whatever the seed."""
    sampler = Sampler(load_distribution(), WORDS, 1, 0.0)
    pairs = list(islice(sampler.sample(prefix_of(PROMPT), ()), 40))

    assert [odds.rank(token) for token, odds in pairs] == [1] * 40
    assert sampled(1, 0.0) == sampled(2, 0.0)


@pytest.mark.parametrize("temperature", [1e-300, 0.2, 1.0, 5.0, 1e9])
def test_any_temperature_is_taken(temperature):
    """However low or high the temperature, tokens come, and none of them is special."""
    assert TOKENIZER.special.isdisjoint(sampled(3, temperature))


def test_a_higher_temperature_varies_more():
    """Over many seeds, a higher temperature gives more different tokens."""
    cold = {sampled(seed, 0.3, 1)[0] for seed in range(300)}
    hot = {sampled(seed, 2.0, 1)[0] for seed in range(300)}

    assert len(cold) < len(hot)


def test_shares_follow_the_chances():
    """Over many seeds, the likeliest token is drawn about as often as its chance says."""
    odds = load_distribution().odds(prefix_of(PROMPT))
    first = odds.best(1)[0]
    drawn = sum(sampled(seed, 1.0, 1)[0] == first for seed in range(4_000)) / 4_000

    assert odds.chance(first) == pytest.approx(drawn, abs=0.03)


def test_encoding_the_text_gives_the_sampled_ids():
    """What is sampled is what its text is encoded to, so that turns of a conversation extend each other."""
    replies = [PROMPT + sampled(seed) for seed in range(200)]

    assert replies == [TOKENIZER.encode(TOKENIZER.decode(ids)) for ids in replies]


def test_planned_ids_are_sampled():
    """Where the plan has an id it is sampled; where it is free, and after it, tokens are drawn."""
    ids = sampled(1, count=5, plan=(7, FREE, 9))

    assert [ids[0], ids[2]] == [7, 9]


@given(st.integers(0, 1 << 64), st.integers(0, 90))
def test_a_plan_ends_the_turn_in_time(seed, min_tokens):
    """A reply has 8 to 60 tokens and ends with the end of the turn, unless more are demanded."""
    plan = plan_reply(Draws(seed), end=END, min_tokens=min_tokens)

    assert max(8, min_tokens + 1) <= len(plan) <= max(60, min_tokens + 1)
    assert plan[-1] == END
    assert {FREE} == set(plan[:-1])


def test_a_plan_can_think_and_call():
    """A thought comes first, within its two tokens; a tool call stands in place of words."""
    plan = plan_reply(Draws(1), end=None, call=[5, 6], think=(3, 4))

    assert [token for token in plan if token != FREE] == [3, 4, 5, 6]
    assert plan[0] == 3
    assert plan[1] == FREE


@given(st.integers(), st.integers(-5, 5), st.integers(0, 5))
def test_draws_stay_between_their_bounds(seed, low, width):
    """A number drawn between two bounds is neither below nor above them."""
    assert low <= Draws(seed).between(low, low + width) <= low + width


def test_words_are_words():
    """Words are letters only, and long enough to be told from each other."""
    assert len(WORDS.texts) > 300
    assert all(text.isalpha() and len(text) > 3 for text in WORDS.texts)
    assert WORDS.tokens[0] == WORDS.pick(0.0)
    assert WORDS.tokens[-1] == WORDS.pick(1.0)
