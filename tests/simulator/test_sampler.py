"""The simulated language model, and sampling from it."""

import math
from array import array
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.simulator.sampler import (
    FREE,
    Prefix,
    RandomStream,
    Sampler,
    load_next_token_model,
    mix,
    plan_reply,
    prefix_from,
    words_from,
)
from proxy.simulator.tokenizer import load_tokenizer, load_vocabulary

TOKENIZER = load_tokenizer()
WORDS = words_from(load_vocabulary(), TOKENIZER)
END = TOKENIZER.id("<|im_end|>")
PROMPT = TOKENIZER.encode("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def sampled(seed: int, temperature: float = 1.0, count: int = 40, plan: tuple[int, ...] = ()) -> list[int]:
    sampler = Sampler(load_next_token_model(), WORDS, seed, temperature)
    return [token for token, _ in islice(sampler.sample(prefix_from(PROMPT), plan), count)]


def test_a_seed_determines_the_ids():
    """The same seed gives the same ids; another seed gives other ids."""
    assert sampled(1) == sampled(1)
    assert sampled(1) != sampled(2)


def test_temperature_0_takes_the_most_likely_token():
    """At temperature 0 each token is the most likely one, with any seed."""
    sampler = Sampler(load_next_token_model(), WORDS, 1, 0.0)
    pairs = list(islice(sampler.sample(prefix_from(PROMPT), ()), 40))

    assert [distribution.rank(token) for token, distribution in pairs] == [1] * 40
    assert sampled(1, 0.0) == sampled(2, 0.0)


@pytest.mark.parametrize("temperature", [1e-300, 0.2, 1.0, 5.0, 1e9])
def test_every_temperature_gives_words(temperature):
    """At very low and very high temperatures tokens are sampled, and none of them is special."""
    assert TOKENIZER.special_ids.isdisjoint(sampled(3, temperature))


def test_a_higher_temperature_varies_more():
    """Over many seeds, a higher temperature gives a greater variety of tokens."""
    cold = {sampled(seed, 0.3, 1)[0] for seed in range(300)}
    hot = {sampled(seed, 2.0, 1)[0] for seed in range(300)}

    assert len(cold) < len(hot)


def test_frequencies_follow_the_probabilities():
    """Over many seeds, the most likely token is sampled about as often as its probability."""
    distribution = load_next_token_model().distribution(prefix_from(PROMPT))
    first = distribution.top(1)[0]
    share = sum(sampled(seed, 1.0, 1)[0] == first for seed in range(4_000)) / 4_000

    assert distribution.probability(first) == pytest.approx(share, abs=0.03)


def test_encoding_the_text_gives_the_sampled_ids():
    """The text of sampled ids is encoded to the same ids, so that the turns of a conversation extend each other."""
    replies = [PROMPT + sampled(seed) for seed in range(200)]

    assert replies == [TOKENIZER.encode(TOKENIZER.decode(ids)) for ids in replies]


def test_each_part_of_a_split_token_has_its_own_distribution():
    """With a split, each sampled token has the distribution after all tokens before it, parts of tokens included."""
    model = load_next_token_model()
    sampler = Sampler(model, WORDS, 1, 1.0)
    pairs = list(
        islice(sampler.sample(prefix_from(PROMPT), (), lambda token, _: TOKENIZER.parts(token) or (token,)), 20)
    )
    ids = [token for token, _ in pairs]

    assert len(TOKENIZER.encode(TOKENIZER.decode(ids))) < len(ids)
    for index, (_, distribution) in enumerate(pairs):
        assert model.distribution(prefix_from(PROMPT + ids[:index])).likely == distribution.likely


def test_planned_ids_are_sampled():
    """Ids of the plan are sampled; free entries, and tokens after the plan, are drawn."""
    ids = sampled(1, count=5, plan=(7, FREE, 9))

    assert [ids[0], ids[2]] == [7, 9]


@given(st.integers(0, 1 << 64), st.integers(0, 90))
def test_a_planned_turn_ends(seed, min_tokens):
    """It has 8 to 60 tokens, or `min_tokens` and one if these are more, and the last one ends the turn."""
    plan = plan_reply(RandomStream(seed))
    sampler = Sampler(load_next_token_model(), WORDS, seed, 1.0)
    tokens = sampler.sample(prefix_from(PROMPT), plan, end=END, min_tokens=min_tokens)
    count = next(count for count, (token, _) in enumerate(tokens, 1) if token == END)

    assert {FREE} == set(plan)
    assert count == max(len(plan), min_tokens) + 1
    assert 8 <= len(plan) + 1 <= 60


def test_a_plan_can_have_reasoning_and_a_call():
    """Reasoning comes first, between its tags; forced ids replace the drawn words."""
    plan = plan_reply(RandomStream(1), forced=[5, 6], reasoning_tags=(3, 4))

    assert [token for token in plan if token != FREE] == [3, 4, 5, 6]
    assert plan[0] == 3
    assert plan[1] == FREE


@given(st.integers(), st.integers(-5, 5), st.integers(0, 5))
def test_random_numbers_are_within_their_bounds(seed, low, width):
    """A random number between two bounds is neither below nor above them."""
    assert low <= RandomStream(seed).between(low, low + width) <= low + width


def test_words_are_words():
    """Words consist of letters, and those for tool arguments have at least four."""
    assert len(WORDS.texts) > 300
    assert all(text.isalpha() and len(text) > 3 for text in WORDS.texts)
    assert WORDS.tokens[0] == WORDS.pick(0.0)
    assert WORDS.tokens[-1] == WORDS.pick(1.0)


MODEL = load_next_token_model()
SIZE = 2_048
IDS = st.lists(st.integers(0, SIZE - 1), max_size=20)


@given(IDS)
def test_probabilities_sum_to_one(ids):
    """After any prefix, the probabilities of all tokens sum to one."""
    distribution = MODEL.distribution(prefix_from(ids))

    assert math.isclose(1.0, math.fsum(distribution.probability(token) for token in range(SIZE)), abs_tol=1e-12)


@given(IDS, st.integers(0, SIZE - 1))
def test_a_logprob_is_a_negative_float32(ids, token):
    """Each logprob is negative, finite and exact in float32."""
    logprob = MODEL.distribution(prefix_from(ids)).logprob(token)

    assert logprob < 0
    assert logprob == array("f", [logprob])[0]


@given(IDS, IDS)
def test_the_distribution_depends_on_the_ids_alone(first, second):
    """A prefix that is extended token by token has the same distribution as one built at once."""
    extended = prefix_from(first)
    for token in second:
        extended = extended.with_token(token)

    assert MODEL.distribution(prefix_from([*first, *second])) == MODEL.distribution(extended)


def test_an_earlier_id_changes_the_distribution():
    """An id before the last one changes the distribution."""
    assert MODEL.distribution(prefix_from([1, 300])) != MODEL.distribution(prefix_from([2, 300]))


@given(IDS, st.integers(0, 30))
def test_top_tokens_are_the_most_likely(ids, count):
    """The top tokens have the highest probabilities, in descending order, each token once."""
    distribution = MODEL.distribution(prefix_from(ids))
    top = distribution.top(count)
    highest = sorted(map(distribution.probability, range(SIZE)), reverse=True)[:count]

    assert highest == [distribution.probability(token) for token in top]
    assert len(set(top)) == count


@given(IDS, st.integers(0, SIZE - 1))
def test_the_rank_counts_more_likely_tokens(ids, token):
    """A token's rank is one more than the number of more likely tokens."""
    distribution = MODEL.distribution(prefix_from(ids))
    probability = distribution.probability(token)

    assert 1 + sum(distribution.probability(other) > probability for other in range(SIZE)) == distribution.rank(token)


def test_an_empty_prefix_begins_a_sentence():
    """After an empty prefix, eight tokens that begin sentences are likely."""
    assert len(MODEL.distribution(Prefix()).likely) == 8


@given(st.integers())
def test_mixing_stays_within_64_bits(value):
    """A mixed number has at most 64 bits for any input."""
    assert 0 <= mix(value) < 1 << 64
