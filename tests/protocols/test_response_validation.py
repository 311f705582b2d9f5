"""Valid fields of an engine's response become arrays and checked values; invalid ones flag the step."""

from array import array

import pytest

from proxy.protocols.engines.base import Sampled, Tokens
from proxy.protocols.exchange import check_messages, check_usage, pack_tokens


def packed_choice(**fields):
    """Return what becomes of a response with this choice, which has two tokens."""
    bare = {"index": 0, "prompt_ids": None, "ids": [7, 8], "logprobs": [-1.0, -1.0]}
    return pack_tokens(
        Tokens([1], (Sampled(**{**bare, "finish_reason": "stop", "stop_reason": None, **fields}),)), 1, "v"
    )


def test_a_choice_without_its_own_prompt_gets_none():
    """Of two prompts packed_choice is missing: no choice refers to the other's prompt."""
    complete, missing = Sampled(0, [1], [7], [-1.0], "stop", None), Sampled(1, None, [8], [-1.0], "stop", None)
    packed = pack_tokens(Tokens(None, (complete, missing)), 1, None)
    prompts, choices = packed.prompts, packed.choices

    assert (1, [0, 1]) == (len(prompts), [choice.prompt for choice in choices])


def test_prompts_that_cannot_be_matched_to_choices_are_flagged_and_not_recorded():
    first, second = (Sampled(i, [i], [7], [-1.0], "stop", None) for i in (0, 1))

    packed = pack_tokens(Tokens(None, (first, second)), 2, None)

    assert ((), {"mixed_prompts"}) == (packed.prompts, packed.problems)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"counted": 3}, "completion_count"),
        ({"sampling_mask": [[7]]}, "mask_count"),
        ({"spans": ((0, 1, "a"),)}, "version_spans"),
        ({"spans": ((0, 1, "a"), (0, 2, "b"))}, "version_spans"),
        ({"spans": ((1, 2, "a"),)}, "version_spans"),
    ],
)
def test_fields_that_do_not_match_the_sampled_ids_are_flagged(fields, problem):
    """A count, a mask, or policy version spans of another length."""
    assert {problem} == packed_choice(**fields).problems


def test_version_spans_that_cover_the_ids_are_recorded():
    """Empty spans are dropped."""
    packed = packed_choice(spans=((0, 1, "a"), (1, 1, "b"), (1, 2, "c")))

    assert [(0, 1, "a"), (1, 2, "c")] == [
        (span.start, span.end, span.policy_version) for span in packed.choices[0].spans
    ]


@pytest.mark.parametrize(("version", "kept"), [(5, "5"), ("5", "5"), (None, None), (0, "0")])
def test_a_policy_version_is_recorded_as_text(version, kept):
    """A number becomes its digits, as in `PUT /policy`."""
    packed = packed_choice(spans=((0, 2, version),))

    assert ([kept], set()) == ([span.policy_version for span in packed.choices[0].spans], packed.problems)


@pytest.mark.parametrize(
    "spans", [((0, 2, True),), ((0, 2, 1.5),), ((0, 2, ["v"]),), (("0", 2, "v"),), ((0, 2.0, "v"),)]
)
def test_malformed_version_spans_are_flagged_and_not_recorded(spans):
    packed = packed_choice(spans=spans)

    assert ((), {"version_spans"}) == (packed.choices[0].spans, packed.problems)


@pytest.mark.parametrize(
    ("value", "kept", "problem"),
    [
        (None, None, None),
        ("stop", "stop", None),
        ({"type": "length", "length": 3}, "length", None),
        ({"type": "because"}, "because", "unknown_finish_reason"),
        ("because", "because", "unknown_finish_reason"),
        ("x" * 101, None, "unknown_finish_reason"),
        ({}, None, "unknown_finish_reason"),
        ([], None, "unknown_finish_reason"),
        (7, None, "unknown_finish_reason"),
    ],
)
def test_a_finish_reason_that_is_unknown_or_no_string_is_flagged(value, kept, problem):
    packed = packed_choice(finish_reason=value)

    assert (kept, {problem} - {None}) == (packed.choices[0].finish_reason, packed.problems)


@pytest.mark.parametrize(
    ("value", "kept"), [("END", "END"), (151645, 151645), (True, None), (-1, None), ({}, None), (1.0, None)]
)
def test_a_stop_reason_that_is_neither_a_string_nor_a_token_id_is_flagged(value, kept):
    packed = packed_choice(stop_reason=value)

    assert (kept, kept is None) == (packed.choices[0].stop_reason, "unparsed_event" in packed.problems)


COUNTS = {"prompt_tokens": 1, "completion_tokens": 2}


@pytest.mark.parametrize(
    ("usage", "problem"),
    [
        (None, None),
        ({}, "bad_usage"),
        ({"prompt_tokens": 1}, "bad_usage"),
        ({"completion_tokens": 1, "prompt_tokens": None}, "bad_usage"),
        ({"prompt_tokens": 1, "completion_tokens": 0, "prompt_tokens_details": {"cached_tokens": None}}, None),
        (COUNTS | {"prompt_tokens_details": {"cached_tokens": 0, "multimodal_tokens": {"image": 4}}}, None),
        ({"prompt_tokens_details": {"cached_tokens": 0}}, "bad_usage"),
        (COUNTS | {"total_tokens": 3}, None),
        (COUNTS | {"total_tokens": 4}, "usage_sum"),
        (COUNTS | {"total_tokens": 0}, "usage_sum"),
        (COUNTS | {"total_tokens": "3"}, "bad_usage"),
        ({"prompt_tokens": "1"}, "bad_usage"),
        ({"completion_tokens": -1}, "bad_usage"),
        ({"total_tokens": 1.0}, "bad_usage"),
        (COUNTS | {"details": {"a": {"b": {}}}}, "bad_usage"),
        ([1], "bad_usage"),
        (7, "bad_usage"),
    ],
)
def test_usage_with_values_that_are_no_counts_or_a_wrong_sum_is_rejected(usage, problem):
    """Each has its own code. It must have both counts, and may not be nested deeper than any engine nests it."""
    assert problem == check_usage(usage)[1]


def test_responses_of_generate_need_no_message():
    assert set() == check_messages("generate", {"choices": [{"index": 0}]})


@pytest.mark.parametrize("returned", [[1, 2], array("i", [1, 2]), (1, 2)])
def test_the_prompt_of_the_response_is_compared_with_the_requests(returned):
    """It is an array if it was parsed apart."""
    complete = Sampled(0, None, [7], [-1.0], "stop", None)

    assert not pack_tokens(Tokens(returned, (complete,)), 1, None, [[1, 2]]).problems
    assert {"other_prompt"} == pack_tokens(Tokens(returned, (complete,)), 1, None, [[1, 3]]).problems
