"""The validation of an engine's answer: what fits becomes arrays and checked values, and what does not is flagged."""

import pytest

from proxy.protocols.engines.base import Sampled, Tokens
from proxy.protocols.response_validation import check_messages, check_usage, pack_tokens


def test_a_choice_without_its_own_prompt_is_never_given_anothers():
    """Of two prompts one is missing: its choice points to nothing, and the step is flagged."""
    one, two = Sampled(0, [1], [7], [-1.0], "stop", None), Sampled(1, None, [8], [-1.0], "stop", None)
    packed = pack_tokens(Tokens(None, (one, two)), 1, None)
    prompts, choices = packed.prompts, packed.choices

    assert (1, [0, 1]) == (len(prompts), [choice.prompt for choice in choices])


def test_prompts_that_do_not_fit_their_places_are_flagged():
    """A choice's prompt is never guessed: if the places do not add up, there are no prompts."""
    one, two = (Sampled(i, [i], [7], [-1.0], "stop", None) for i in (0, 1))

    packed = pack_tokens(Tokens(None, (one, two)), 2, None)

    assert ((), {"mixed_prompts"}) == (packed.prompts, packed.problems)


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ({"counted": 3}, "completion_count"),
        ({"sampling_mask": [[7]]}, "mask_count"),
        ({"spans": ((0, 1, "a"),)}, "version_spans"),
        ({"spans": ((0, 1, "a"), (0, 2, "b"))}, "version_spans"),
        ({"spans": ((1, 2, "a"),)}, "version_spans"),
    ],
)
def test_what_does_not_fit_the_sampled_ids_is_flagged(said, problem):
    """A count, a mask, or spans of policy versions that are not those of the ids."""
    packed = pack_tokens(Tokens([1], (Sampled(0, None, [7, 8], [-1.0, -1.0], "stop", None, **said),)), 1, "v")

    assert {problem} == packed.problems


def test_spans_that_cover_the_ids_are_kept():
    """Empty ones say nothing."""
    spans = ((0, 1, "a"), (1, 1, "b"), (1, 2, "c"))
    packed = pack_tokens(Tokens([1], (Sampled(0, None, [7, 8], [-1.0, -1.0], "stop", None, spans=spans),)), 1, "v")

    assert [(0, 1, "a"), (1, 2, "c")] == [
        (span.start, span.end, span.policy_version) for span in packed.choices[0].spans
    ]


def one(**fields):
    return pack_tokens(Tokens([1], (Sampled(**{**BARE, **fields}),)), 1, "v")


BARE = {
    "index": 0,
    "prompt_ids": None,
    "ids": [7, 8],
    "logprobs": [-1.0, -1.0],
    "finish_reason": "stop",
    "stop_reason": None,
}


@pytest.mark.parametrize(("version", "kept"), [(5, "5"), ("5", "5"), (None, None), (0, "0")])
def test_a_policy_version_is_text(version, kept):
    """A number is kept as its digits, as `PUT /policy` keeps it."""
    packed = one(spans=((0, 2, version),))

    assert ([kept], set()) == ([span.policy_version for span in packed.choices[0].spans], packed.problems)


@pytest.mark.parametrize(
    "spans", [((0, 2, True),), ((0, 2, 1.5),), ((0, 2, ["v"]),), (("0", 2, "v"),), ((0, 2.0, "v"),)]
)
def test_spans_of_odd_types_are_flagged(spans):
    """No reader meets them."""
    packed = one(spans=spans)

    assert ((), {"version_spans"}) == (packed.choices[0].spans, packed.problems)


@pytest.mark.parametrize(
    ("given", "kept", "problem"),
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
def test_a_finish_reason_is_text_and_a_known_one(given, kept, problem):
    """What another version of an engine may give is kept and flagged."""
    packed = one(finish_reason=given)

    assert (kept, {problem} - {None}) == (packed.choices[0].finish_reason, packed.problems)


@pytest.mark.parametrize(
    ("given", "kept"), [("END", "END"), (151645, 151645), (True, None), (-1, None), ({}, None), (1.0, None)]
)
def test_a_stop_reason_is_a_string_or_the_id_of_a_token(given, kept):
    """Anything else is flagged."""
    packed = one(stop_reason=given)

    assert (kept, kept is None) == (packed.choices[0].stop_reason, "unparsed_event" in packed.problems)


@pytest.mark.parametrize(
    ("usage", "is_sound"),
    [
        (None, True),
        ({}, True),
        ({"prompt_tokens": 1, "completion_tokens": 0, "prompt_tokens_details": {"cached_tokens": None}}, True),
        ({"prompt_tokens": "1"}, False),
        ({"completion_tokens": -1}, False),
        ({"total_tokens": 1.0}, False),
        ({"details": {"a": {"b": {}}}}, False),
        ([1], False),
        (7, False),
    ],
)
def test_usage_has_whole_numbers(usage, is_sound):
    """What is nested deeper than any engine nests it is not recorded."""
    assert is_sound == check_usage(usage)[1]


def test_generate_has_no_messages():
    """Tokens in, tokens out."""
    assert set() == check_messages("generate", {"choices": [{"index": 0}]})
