"""Parts, finish reasons and token counts of candidates."""

import pytest

from proxy.protocols.dialects.gemini import CandidateParts, ending_of, usage_from
from proxy.protocols.dialects.gemini.contents import sign

CALL = {"id": "c1", "function": {"name": "f", "arguments": '{"a":1}'}}


def parts(*deltas, message=None, shows_thoughts=False, must_have_one=True):
    made = CandidateParts("s1", shows_thoughts=shows_thoughts)
    found = [part for delta in deltas for part in made.take(delta)]
    return [*found, *made.end(message or {}, must_have_one=must_have_one)]


def test_thoughts_are_shown_only_on_request_and_signed_in_any_case():
    """The first part that is no thought has the signature."""
    deltas = ({"reasoning": "Hm"}, {"reasoning_content": "."}, {"content": "a"}, {"content": "b"})
    signed = {"text": "a", "thoughtSignature": sign(thoughts="Hm.")}
    shown = [{"text": "Hm", "thought": True}, {"text": ".", "thought": True}]

    assert parts(*deltas) == [signed, {"text": "b"}, {"text": ""}]
    assert parts(*deltas, shows_thoughts=True) == [*shown, signed, {"text": "b"}, {"text": ""}]
    assert [{"text": "", "thoughtSignature": sign(thoughts="Hm")}] == parts({"reasoning": "Hm"}, must_have_one=False)


def test_thoughts_after_a_text_are_in_a_signature_at_the_end():
    last = parts({"reasoning": "a"}, {"content": "x"}, {"reasoning": "b"}, must_have_one=False)[-1]

    assert {"text": "", "thoughtSignature": sign(thoughts="ab")} == last


def test_calls_have_ids_and_their_ids_in_signatures():
    """A missing or repeated id is one of the step; thoughts are in the first signature."""
    message = {"tool_calls": [CALL, CALL, {}]}

    assert [
        {
            "functionCall": {"id": "c1", "name": "f", "args": {"a": 1}},
            "thoughtSignature": sign(call_id="c1", thoughts="Hm"),
        },
        {
            "functionCall": {"id": "call_s1_1", "name": "f", "args": {"a": 1}},
            "thoughtSignature": sign(call_id="call_s1_1"),
        },
        {"functionCall": {"id": "call_s1_2", "name": "", "args": {}}, "thoughtSignature": sign(call_id="call_s1_2")},
    ] == parts({"reasoning": "Hm"}, message=message)


def test_a_candidate_has_at_least_one_part():
    """SDKs drop a turn with a chunk without parts from their history."""
    assert parts() == parts(must_have_one=False) == [{"text": ""}]
    assert parts({"content": "x"}, must_have_one=False) == [{"text": "x"}]


@pytest.mark.parametrize(
    ("finish", "reason"),
    [
        ("stop", "STOP"),
        ("tool_calls", "STOP"),
        ("length", "MAX_TOKENS"),
        ("repetition", "MAX_TOKENS"),
        ("content_filter", "SAFETY"),
    ],
)
def test_finish_reasons(finish, reason):
    assert ending_of({"finish_reason": finish}) == {"finishReason": reason}


@pytest.mark.parametrize("finish", ["abort", None, ["odd"]])
def test_an_unknown_finish_reason_is_another_one(finish):
    """With a message."""
    ending = ending_of({"finish_reason": finish})

    assert (
        ending["finishReason"],
        ending["finishMessage"].startswith("The engine ended the response early"),
    ) == ("OTHER", True)


def test_requested_logprobs_are_texts_without_ids():
    entries = [
        {"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": [{"token": "b", "logprob": -1.5}]},
        {"token": "c", "logprob": -1.5, "top_logprobs": []},
    ]

    assert ending_of({"finish_reason": "stop", "logprobs": {"content": entries}}) == {
        "finishReason": "STOP",
        "avgLogprobs": -1.0,
        "logprobsResult": {
            "chosenCandidates": [{"token": "a", "logProbability": -0.5}, {"token": "c", "logProbability": -1.5}],
            "topCandidates": [{"candidates": [{"token": "b", "logProbability": -1.5}]}, {"candidates": []}],
        },
    }
    assert "topCandidates" not in ending_of({"logprobs": {"content": entries[1:]}})["logprobsResult"]
    assert ending_of({"finish_reason": "stop", "logprobs": {"content": []}}) == {"finishReason": "STOP"}


def test_a_logprob_may_be_null():
    """llama.cpp writes minus infinity as null; there is no average then."""
    entries = [{"token": "a", "logprob": -0.5}, {"token": "b", "logprob": None, "top_logprobs": [{"token": "c"}]}]

    ending = ending_of({"finish_reason": "stop", "logprobs": {"content": entries}})
    assert [token["logProbability"] for token in ending["logprobsResult"]["chosenCandidates"]] == [-0.5, None]
    assert "avgLogprobs" not in ending


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        ({"prompt_tokens": 5, "completion_tokens": 7}, (5, 7, 12, None, None)),
        ({"prompt_tokens": 5, "completion_tokens": 7, "reasoning_tokens": 3}, (5, 4, 12, None, 3)),
        (
            {
                "prompt_tokens": 5,
                "completion_tokens": 7,
                "prompt_tokens_details": {"cached_tokens": 2},
                "completion_tokens_details": {"reasoning_tokens": 7},
            },
            (5, 0, 12, 2, 7),
        ),
        ({"prompt_tokens": "x", "prompt_tokens_details": []}, (0, 0, 0, None, None)),
        (None, (0, 0, 0, None, None)),
    ],
)
def test_token_counts(usage, expected):
    """Thoughts are not counted twice."""
    names = (
        "promptTokenCount",
        "candidatesTokenCount",
        "totalTokenCount",
        "cachedContentTokenCount",
        "thoughtsTokenCount",
    )

    assert tuple(usage_from(usage).get(name) for name in names) == expected
