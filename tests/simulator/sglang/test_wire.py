"""The small objects inside of SGLang's answers."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.simulator.distribution import load_distribution, prefix_of
from proxy.simulator.errors import bad_value
from proxy.simulator.generation import Token
from proxy.simulator.sglang.wire import Behind, Scoring, Tempered, flat, matched, output_logprobs
from proxy.simulator.tokenizer import load_tokenizer, load_vocabulary
from proxy.simulator.weights import Versions, Weights

SIZE = len(load_vocabulary()["counts"])
IDS = st.lists(st.integers(0, SIZE - 1), max_size=5)
ODDS = load_distribution().odds(prefix_of([5]))


def token(token_id=7, finish=None, stop=None):
    return Token(token_id, "", (), ODDS, finish, stop)


def test_a_refusal_is_flat():
    """An error is one object, not nested, and names no param."""
    assert list(flat(bad_value("No.", "x")).items()) == [
        ("object", "error"),
        ("message", "No. (parameter=x)"),
        ("type", "BadRequestError"),
        ("param", None),
        ("code", 400),
    ]


@pytest.mark.parametrize(
    ("ended", "told"),
    [
        (token(finish="stop"), 7),
        (token(finish="stop", stop="end"), "end"),
        (token(finish="length"), None),
        (token(), None),
    ],
)
def test_what_matched_is_an_id_or_a_string(ended, told):
    """The end of a turn is told by its id, a stop string by itself, and nothing else matched anything."""
    assert told == matched(ended)


def test_a_split_character_has_its_true_bytes():
    """The bytes of a token are its own, even where they are no character; its text has U+FFFD for them."""
    scoring = Scoring(load_tokenizer(), 1.0)
    entry = scoring.entry(token(0xF0), 0)

    assert (entry["bytes"], entry["token"], entry["top_logprobs"]) == ([0xF0], "\ufffd", [])


def test_pairs_have_texts_if_asked():
    """A pair is a logprob, an id, and its text or null; likely tokens are told likely first."""
    scoring = Scoring(load_tokenizer(), 1.0)
    told = output_logprobs(scoring, [token()], 3, with_text=False)
    likely = [logprob for logprob, _, _ in told["output_top_logprobs"][0]]

    assert told["output_token_logprobs"] == [[ODDS.logprob(7), 7, None]]
    assert scoring.pair(token(), with_text=True)[2] == load_tokenizer().decode([7])
    assert likely == sorted(likely, reverse=True)
    assert told["output_token_logprobs_length"] == 1


def test_metadata_tells_the_version_now_and_those_that_sampled():
    """The version is the one at the end of the call, the spans are those of its tokens."""
    versions, weights = Versions(), Weights("b")
    versions.note(0, "a")
    behind = Behind("r", versions, weights)

    assert behind.metadata(2) == {
        "weight_version": "b",
        "weight_versions": [{"version": "a", "start": 0, "end": 2}],
    }
    assert behind.meta_info([1, 2], [token(), token(finish="abort")])["finish_reason"]["type"] == "abort"


@given(IDS, st.sampled_from([0.3, 0.7, 1.0, 1.5]))
def test_the_chances_sum_to_one(ids, temperature):
    """At any temperature the probabilities of the whole vocabulary sum to one."""
    tempered = Tempered(load_distribution().odds(prefix_of(ids)), temperature)

    assert math.fsum(math.exp(tempered.logprob(token)) for token in range(SIZE)) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_zero_and_one_change_nothing(temperature):
    """Greedy calls and those at temperature 1 are told the model's own logprobs, bit by bit."""
    odds = load_distribution().odds(prefix_of([5]))

    assert all(odds.logprob(token) == Tempered(odds, temperature).logprob(token) for token in range(SIZE))


def test_a_low_temperature_lifts_the_likely():
    """Below 1 the likeliest token gets likelier, however low; above 1 less so."""
    odds = load_distribution().odds(prefix_of([5]))
    (best,) = odds.best(1)
    logprobs = [Tempered(odds, temperature).logprob(best) for temperature in (0.0001, 0.5, 1.0, 2.0)]

    assert logprobs == sorted(logprobs, reverse=True)
    assert logprobs[0] == pytest.approx(0, abs=1e-6)
