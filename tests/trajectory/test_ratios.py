"""Warnings of tokens with importance ratios that are wrong by how they were recorded."""

from array import array
from math import nan

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.any_json import JSON
from tests.support.forests import make_choice, make_step

from proxy.trajectory.arrays import Mask
from proxy.trajectory.ratios import RATIO_WARNINGS, Recorded, Trained, ratio_warnings, recorded_as, tally
from proxy.trajectory.retokenize import RETOKENIZED
from proxy.trajectory.step import ANNOUNCED, EngineFacts, Span

RAW, AFTER, PROCESSED = "raw_logprobs", "after_temperature_logprobs", "processed_logprobs"
NEUTRAL = {"temperature": 1, "top_p": 1.0, "top_k": -1, "min_p": 0, "presence_penalty": 0, "repetition_penalty": 1.0}


def trained(sampling, *, tokens=4, mask=None, **facts):
    """Return four sampled tokens of a step, of which the first `tokens` are trained."""
    choice = make_choice(0, [5, 6, 7, 8], sampling_mask=mask, **facts.pop("choice", {}))
    return Trained(make_step("s", [1], choice, sampling=sampling, **{"extra": {}, **facts}), choice, tokens)


def codes(sampling, **facts):
    return {warning.code: warning.tokens for warning in ratio_warnings(tally([trained(sampling, **facts)]))}


@pytest.mark.parametrize(
    "sampling",
    [
        {"logprobs_mode": RAW},  # the parameters are unknown
        {"logprobs_mode": RAW, **NEUTRAL},
        {"logprobs_mode": RAW, "temperature": 1.0, "top_k": 0},
        {"logprobs_mode": AFTER, **NEUTRAL, "temperature": 0.7},
        {"logprobs_mode": AFTER, "temperature": 0.7, "presence_penalty": 1},
        {"logprobs_mode": PROCESSED, "temperature": 0.7, "repetition_penalty": 1.2},
        {"logprobs_mode": None, "temperature": 0.7, "top_p": 0.9},
        {},
    ],
)
def test_logprobs_of_the_distribution_that_was_sampled_give_no_warning(sampling):
    assert codes(sampling) == {}


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        ({"logprobs_mode": RAW, "temperature": 0.7}, ["raw_temperature"]),
        ({"logprobs_mode": RAW, "temperature": 0}, ["greedy"]),
        ({"logprobs_mode": AFTER, "temperature": 0.0, "top_p": 0.9}, ["greedy"]),
        ({"logprobs_mode": PROCESSED, "temperature": 0, "top_k": 5}, ["greedy"]),
        ({"logprobs_mode": RAW, "frequency_penalty": 0.5}, ["raw_penalties"]),
        ({"logprobs_mode": RAW, "temperature": 1, "top_p": 0.9}, ["untruncated_logprobs"]),
        ({"logprobs_mode": AFTER, "temperature": 0.7, "min_p": 0.05}, ["untruncated_logprobs"]),
        ({"logprobs_mode": PROCESSED, "top_k": 20}, ["no_sampling_mask"]),
        ({"logprobs_mode": "raw_logits"}, ["logits"]),
        ({"logprobs_mode": "processed_logits", "top_k": 20}, ["logits"]),
        (
            {"logprobs_mode": RAW, "temperature": 0.8, "top_k": 40, "repetition_penalty": 1.1},
            ["raw_temperature", "raw_penalties", "untruncated_logprobs"],
        ),
    ],
)
def test_logprobs_of_another_distribution_give_a_warning_of_all_their_tokens(sampling, expected):
    assert dict.fromkeys(expected, 4) == codes(sampling)


def test_recorded_sampling_masks_and_tokens_without_logprobs_give_no_warning():
    """A trainer computes the logprobs of the latter itself."""
    mask = Mask(array("i", [5, 6, 7, 8]), array("i", [0, 1, 2, 3, 4]))
    sampling = {"logprobs_mode": RAW, "temperature": 0.7}

    assert codes({"logprobs_mode": PROCESSED, "top_k": 1}, mask=mask) == {}
    assert codes(sampling, choice={"logprobs": array("f")}) == {}
    assert codes(sampling, problems=(RETOKENIZED,)) == {}


def test_tokens_are_counted_up_to_the_end_of_what_is_trained():
    """By span: `max_len` may cut a turn."""
    raw = {"logprobs_mode": RAW, "temperature": 0.7}
    spans = (Span(0, 2, "1"), Span(2, 4, "2", epoch=1))
    parts = [trained(raw, tokens=3, choice={"spans": spans}), trained({"logprobs_mode": RAW}), trained(raw, tokens=0)]
    counts = tally(parts)

    assert counts.total() == 7
    assert [(it.code, it.tokens, it.of) for it in ratio_warnings(counts)] == [("raw_temperature", 3, 7)]
    assert {epoch: sum(n for it, n in counts.items() if it.epoch == epoch) for epoch in (0, 1)} == {0: 6, 1: 1}


def test_tokens_of_an_earlier_epoch_give_a_warning():
    counts = {Recorded("e", "vllm", RAW, epoch=epoch): 10 + epoch for epoch in range(4)}

    assert [(it.code, it.tokens, it.of) for it in ratio_warnings(counts, 2)] == [("earlier_epoch", 21, 46)]
    assert "epoch 0, 1 of" in ratio_warnings(counts, 2)[0].why


@pytest.mark.parametrize(
    ("reported", "announced", "expected"),
    [("6", "7", 4), ("7", "7", 0), ("10", "7", 0), (None, "7", 0), ("6", None, 0), ("default", "7", 0), ("6", 7, 0)],
)
def test_an_engine_that_reports_an_older_version_than_the_announced_one_gives_a_warning(reported, announced, expected):
    found = codes({}, extra={ANNOUNCED: announced}, choice={"spans": (Span(0, 4, reported),)})

    assert ({"older_version": expected} if expected else {}) == found


def test_the_announced_version_of_a_resumed_call_is_not_compared():
    """It is of one of its parts."""
    extra = {ANNOUNCED: "7", "resumed": 1}

    assert codes({}, extra=extra, choice={"spans": (Span(0, 4, "6"),)}) == {}


def test_texts_have_what_was_recorded_and_the_fix_for_the_kind_of_engine():
    terms = [recorded_as("e", kind, {"logprobs_mode": RAW, "temperature": 0.7}) for kind in ("vllm", "llamacpp")]
    llamacpp, vllm = ratio_warnings(dict.fromkeys(terms, 5))

    assert (vllm.code, vllm.tokens, vllm.of) == ("raw_temperature", 5, 10)
    assert "at temperature 0.7, with logprobs of temperature 1 (raw_logprobs of vllm)" in vllm.why
    assert "--logprobs-mode processed_logprobs" in vllm.fix
    assert llamacpp.fix == "sample at temperature 1 (sampling.override)"


def test_a_text_lists_three_values_and_none_that_the_client_wrote():
    temperatures = (0.1, 0.2, 0.3, 0.4)
    counts = {recorded_as("e", "vllm", {"logprobs_mode": RAW, "temperature": each}): 1 for each in temperatures}
    counts[recorded_as("e", "vllm", {"logprobs_mode": RAW, "top_p": "\x1b[2J"})] = 1
    temperature, truncation = ratio_warnings(counts)

    assert "at temperature 0.1, 0.2, 0.3, …, with" in temperature.why
    assert "sampled with top_p, with" in truncation.why


@given(st.dictionaries(st.sampled_from([*NEUTRAL, "logprobs_mode"]), JSON | st.sampled_from([nan, 10**400, RAW])))
def test_any_value_of_a_parameter_can_be_counted(sampling):
    engine = EngineFacts("e" * 1000, "sglang", None, "")
    for warning in ratio_warnings(tally([trained(sampling, engine=engine)])):
        assert warning.code in RATIO_WARNINGS
        assert len(warning.why) < 1000
