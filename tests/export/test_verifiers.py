"""The formats `verifiers` and `training_examples`: verifiers' TrajectoryStep and TrainingExample."""

from array import array
from dataclasses import replace

import pytest
from tests.support import worked
from tests.support.forests import make_step

from proxy.export import FORMATS, Inexpressible
from proxy.trajectory.sequence import Options
from proxy.trajectory.step import Choice

TOKENS = {
    "prompt_ids": [101, 102, 103],
    "prompt_mask": [0, 0, 0],
    "completion_ids": [201, 202, 9],
    "completion_mask": [1, 1, 1],
    "completion_logprobs": [-0.5, -0.25, -0.125],
    "overlong_prompt": False,
    "is_truncated": False,
}


def without_ids(**facts):
    """Return a step of an engine without token ids."""
    choice = Choice(0, array("i"), array("f"), "stop")
    return replace(worked.first(choice, problems=("no_token_ids",), **facts), prompts=())


def test_a_step_has_its_messages_its_response_and_its_tokens():
    first, second = worked.rows("verifiers")

    assert {
        "prompt": worked.QUESTION,
        "completion": [worked.REPLY],
        "response": worked.STEPS[0].response,
        "tokens": TOKENS,
        "reward": 1.0,
        "advantage": 0.5,
        "is_truncated": False,
        "trajectory_id": "r1",
        "extras": {"step_id": "a", "choice": 0, "policy_version": "3"},
    } == first
    assert ([*worked.QUESTION, worked.REPLY, worked.TOOL], [worked.ANSWER]) == (second["prompt"], second["completion"])
    assert FORMATS["verifiers"].whole


@pytest.mark.parametrize(
    ("max_len", "expected"),
    [
        (12, {"completion_ids": [203, 9], "overlong_prompt": False, "is_truncated": False}),
        (11, {"completion_ids": [203], "completion_logprobs": [-1.0], "is_truncated": True}),
        (10, {"completion_ids": [], "overlong_prompt": False, "is_truncated": True}),
        (
            9,
            {
                "prompt_ids": [101, 102, 103, 201, 202, 9, 301, 302, 303],
                "prompt_mask": [0] * 9,
                "completion_ids": [],
                "completion_mask": [],
                "completion_logprobs": [],
                "overlong_prompt": True,
                "is_truncated": True,
            },
        ),
    ],
)
def test_max_len_cuts_the_completion_as_max_seq_len_does(max_len, expected):
    """Of a longer prompt, only its beginning is left."""
    tokens = worked.rows("verifiers", options=Options(max_len=max_len))[1]["tokens"]

    assert {key: tokens[key] for key in expected} == expected


def test_an_interrupted_response_is_truncated():
    """A response cut by length has it in its finish reason only, as in verifiers."""
    broken = worked.first(worked.sampled(worked.S1, worked.L1, finish_reason=None), status="partial")
    length = worked.second(worked.sampled(worked.S2, worked.L2, finish_reason="length"))
    rows = worked.rows("verifiers", [broken, length], options=Options(include="flagged"))

    assert [row["tokens"]["is_truncated"] for row in rows] == [True, False]


def replied(message, finish_reason="stop"):
    """Return the worked rollout's first step with another reply."""
    response = {"choices": [{"index": 0, "message": message, "finish_reason": finish_reason}]}
    return worked.first(worked.sampled(worked.S1, worked.L1, finish_reason=finish_reason), response=response)


def test_null_and_empty_fields_of_a_message_are_omitted():
    """At any depth; null content becomes "", as in verifiers' own parser."""
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}", "strict": None}, "index": None}
    silent = {"refusal": None, "annotations": None, "audio": None, "function_call": None}
    call_message = {"role": "assistant", "content": None, "reasoning": "Hm.", "tool_calls": [call], **silent}
    text_message = {"role": "assistant", "content": "Hi", "reasoning": None, "tool_calls": [], **silent}
    messages = (call_message, text_message)
    calling, talking = (worked.rows("verifiers", [replied(message)])[0]["completion"] for message in messages)
    kept = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}

    assert calling == [{"role": "assistant", "content": "", "reasoning": "Hm.", "tool_calls": [kept]}]
    assert talking == [{"role": "assistant", "content": "Hi"}]


@pytest.mark.parametrize(
    ("finish_reason", "max_len", "expected"),
    [("stop", None, False), ("length", None, True), ("stop", 5, True), ("stop", 6, False), ("length", 5, True)],
)
def test_a_step_is_truncated_by_the_engine_or_by_max_len(finish_reason, max_len, expected):
    """Its tokens are truncated by max_len only."""
    (row,) = worked.rows("verifiers", [replied(worked.REPLY, finish_reason)], options=Options(max_len=max_len))

    assert (row["is_truncated"], row["tokens"]["is_truncated"]) == (expected, max_len == 5)


def test_a_step_without_token_ids_is_truncated_by_its_finish_reason():
    choice = Choice(0, array("i"), array("f"), "length")
    step = replace(worked.first(choice, problems=("no_token_ids",)), prompts=())

    assert [(row["is_truncated"], row["trajectory_id"]) for row in worked.rows("verifiers", [step])] == [(True, "r1")]


def test_overlong_keep_cuts_nothing_and_drop_skips_the_step():
    keep, drop = (worked.rows("verifiers", options=Options(max_len=9, overlong=how)) for how in ("keep", "drop"))

    assert (worked.rows("verifiers"), worked.rows("verifiers")[:1]) == (keep, drop)


def test_a_step_without_token_ids_has_null_tokens_and_is_reported():
    found = FORMATS["verifiers"].rows(worked.FACTS, [without_ids(), worked.second()], Options())
    nothing = worked.rows("verifiers", [replace(without_ids(), choices=())])

    assert [row["tokens"] and row["tokens"]["completion_ids"] for row in found.rows] == [None, [203, 9]]
    assert found.skipped == [{"step_id": "a", "why": "no_token_ids"}]
    assert [row["tokens"] for row in nothing] == [None]


def test_each_choice_is_a_step_with_its_own_response():
    choices = [{"index": index, "text": text, "finish_reason": "stop"} for index, text in enumerate("xy")]
    step = make_step(
        "a", [1], [2], [3], dialect="completions", request={"prompt": "?"}, response={"id": "c", "choices": choices}
    )
    rows = worked.rows("verifiers", [step])

    assert [("?", "x", [choices[0]]), ("?", "y", [choices[1]])] == [
        (row["prompt"], row["completion"], row["response"]["choices"]) for row in rows
    ]


@pytest.mark.parametrize(
    ("advantages", "expected"), [(None, [None, None]), ({"a": 0.5}, [0.5, None]), ([1.0, 2.0], [None, None])]
)
def test_a_step_has_one_advantage_or_null(advantages, expected):
    rows = worked.rows("verifiers", facts=replace(worked.FACTS, advantages=advantages))

    assert [row["advantage"] for row in rows] == expected


def test_a_missing_reward_is_null():
    """As in verifiers' own steps and state (0.1.9) until its rubric scores them; a reward of a step is its own."""
    rows = worked.rows("verifiers", facts=replace(worked.FACTS, reward=None))
    mixed = worked.rows("verifiers", facts=replace(worked.FACTS, reward=None, step_rewards={"a": 0.25}))

    assert [row["reward"] for row in rows] == [None, None]
    assert [row["reward"] for row in mixed] == [0.25, None]
    assert FORMATS["verifiers"].reward == "optional"


@pytest.mark.parametrize(("reason", "truncated"), [("stop", False), ("length", True), ("abort", True)])
def test_a_response_ended_by_length_or_abort_is_truncated(reason, truncated):
    (row,) = worked.rows("verifiers", [worked.first(worked.sampled(worked.S1, worked.L1, finish_reason=reason))])

    assert truncated is row["is_truncated"]


EXAMPLES = [
    {
        "token_ids": [101, 102, 103, 201, 202, 9],
        "logprobs": [0.0, 0.0, 0.0, -0.5, -0.25, -0.125],
        "mask": [0, 0, 0, 1, 1, 1],
        "reward": 1.0,
    },
    {
        "token_ids": [101, 102, 103, 201, 202, 9, 301, 302, 303, 304, 203, 9],
        "logprobs": [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0, -0.0625],
        "mask": [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1],
        "reward": 1.0,
    },
]


def test_each_step_is_an_example_with_its_prompt_and_completion():
    assert worked.rows("training_examples") == EXAMPLES


def test_a_step_reward_overrides_the_rollouts_reward():
    """The reward is never null."""
    rows = worked.rows("training_examples", facts=replace(worked.FACTS, step_rewards={"a": 0.25}))
    with pytest.raises(Inexpressible, match="requires a reward; rollout .* has none"):
        worked.rows("training_examples", facts=replace(worked.FACTS, reward=None))

    assert [row["reward"] for row in rows] == [0.25, 1.0]


def test_the_completion_is_cut_to_max_len():
    """A step without a completion is skipped and reported."""
    cut = worked.rows("training_examples", options=Options(max_len=11))
    found = FORMATS["training_examples"].rows(worked.FACTS, worked.STEPS, Options(max_len=10))

    assert (cut[1]["token_ids"][10:], cut[1]["mask"]) == ([203], [0] * 10 + [1])
    skipped = [{"step_id": "b", "why": "longer than max_len=10", "dropped_tokens": 2}]
    assert (EXAMPLES[:1], skipped) == (found.rows, found.skipped)


def test_a_superseded_call_has_no_example():
    lost = make_step("a", [1], [10], delivered=False, extra={"request_key": "x"})
    again = make_step("b", [1], [10], extra={"request_key": "x"})

    assert [row["token_ids"] for row in worked.rows("training_examples", [lost, again, make_step("c", [5], [6])])] == [
        [1, 10],
        [5, 6],
    ]
