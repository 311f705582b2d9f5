"""The flat form: what is read of a call, what is answered, and what a claimed mask is worth."""

from array import array
from dataclasses import replace

import orjson
import pytest
from forests import full_ids, make_choice, make_step, rollouts
from hypothesis import given

from proxy.api.compat.osmosis.flat_call import added_since, flat_answer, read_flat
from proxy.errors import UnprocessableRequest
from proxy.protocols.dialects.translation import TranslationOptions
from proxy.protocols.exchange import Outcome

MESSAGES = [{"role": "user", "content": "hi"}]
BODY = {"model": "default", "messages": MESSAGES, "rollout_id": "r1", "response_mask": None}
RESPONSE = {
    "id": "c1",
    "created": 7,
    "choices": [{"message": {"role": "assistant", "content": "x"}, "finish_reason": None}],
}


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/completions", {"prompt": "x", "messages": MESSAGES}),
        ("/v1/chat/completions", BODY),
    ],
)
def test_only_completions_with_messages_and_no_prompt_are_flat(endpoint, body):
    """Everything else is what it was."""
    assert read_flat(endpoint, body, TranslationOptions()) is None


@pytest.mark.parametrize(
    "field",
    [
        {"temperature": 2.5}, {"temperature": None}, {"top_p": -0.1}, {"max_tokens": 0}, {"max_tokens": 32769},
        {"stop": "x"}, {"logprobs": 1}, {"messages": []}, {"messages": [{"role": "critic"}]}, {"n": 2}, {"stream": True},
    ],
)  # fmt: skip
def test_values_out_of_their_schemas_ranges_are_refused(field):
    """By the name of the field."""
    with pytest.raises(UnprocessableRequest) as refused:
        read_flat("/v1/completions", BODY | field, TranslationOptions())

    assert next(iter(field)) == refused.value.param


def test_a_call_of_no_model_is_sent_without_one_unless_the_name_is_mapped():
    """Its clients say `default` of every model; engines take the one they serve."""
    form = read_flat("/v1/completions", BODY, TranslationOptions())
    named = read_flat("/v1/completions", BODY | {"model": "policy"}, TranslationOptions())

    assert "model" not in form.native({"gpt-4o": "policy"})
    assert "default" == form.native({"*": "policy"})["model"] == form.native({"default": "policy"})["model"]
    assert "policy" == named.native({})["model"]


@pytest.mark.parametrize(
    ("call", "sent"),
    [
        ({"function": {"name": "f", "arguments": {"a": None}}}, {"function": {"name": "f", "arguments": '{"a":null}'}}),
        ({"function": {"name": "f", "arguments": '{"a": 1}'}}, {"function": {"name": "f", "arguments": '{"a": 1}'}}),
        ({"function": {"name": "f"}}, {"function": {"name": "f"}}),
        ({"function": 7}, {"function": 7}),
    ],
)
def test_arguments_that_are_objects_are_sent_as_text(call, sent):
    """Its protocol allows both; vLLM takes text only. What is neither is the engine's to refuse."""
    body = BODY | {"messages": [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [call]}]}

    assert [{"role": "assistant", "tool_calls": [sent]}] == read_flat(
        "/v1/completions", body, TranslationOptions()
    ).native({})["messages"][1:]


def test_a_finish_reason_and_logprobs_are_never_null():
    """Their schema refuses nulls; usage is counted where the engine told none."""
    choice = make_choice(0, [5, 6], logprobs=array("d", [-0.5, float("nan")]))
    told = orjson.loads(flat_answer(make_step("a", [1, 2, 3], choice, response=RESPONSE, model_asked=None)))

    assert ("stop", [-0.5, -9999.0]) == (told["choices"][0]["finish_reason"], told["logprobs"])
    assert {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5} == told["usage"]
    assert ("default", "c1", 7, [1, 2, 3]) == (told["model"], told["id"], told["created"], told["prompt_token_ids"])


def test_an_answer_without_ids_is_told_without_ids():
    """A text-only engine: nothing is made up, and the step says what is missing."""
    told = orjson.loads(flat_answer(replace(make_step("a", []), prompts=(), choices=(), response=RESPONSE)))

    assert ([], [], []) == (told["token_ids"], told["logprobs"], told["prompt_token_ids"])


@pytest.mark.parametrize("facts", [{"status": "partial"}, {"response": None}, {"response": {"choices": []}}])
def test_what_is_no_whole_answer_is_not_made_one(facts):
    """The end is then the engine's own."""
    step = make_step("a", [1], [2], **{"response": RESPONSE, **facts})
    form = read_flat("/v1/completions", BODY, TranslationOptions())

    assert flat_answer(step) is None
    assert b"as it was" == form.reshape(Outcome(b"as it was", step, broken=True)).end


FIRST = make_step("a", [1, 2], [3, 4])
NOW = make_step("b", [1, 2, 3, 4, 9, 9], [5], response=RESPONSE)


@pytest.mark.parametrize(
    ("mask", "before", "reported"),
    [
        ([0, 0], [FIRST], None),
        ([0], [FIRST], (1, 2, 0)),
        ([0, 1], [FIRST], (2, 2, 1)),
        (None, [FIRST], (0, 2, 0)),
        (None, [], None),
        ([0], [], (1, None, 0)),
        (None, [make_step("a", [1, 2], [3, 7])], None),
        ([0, 0], [make_step("a", [1], [2]), FIRST, make_step("c", [7], [8])], None),
    ],
)
def test_a_claim_is_compared_with_the_ids(mask, before, reported):
    """Claimed, exact, and how many it claims to be sampled; with nothing to go on from, there is no exact number."""
    form = replace(read_flat("/v1/completions", BODY | {"response_mask": mask}, TranslationOptions()), before=before)
    told = form.reshape(Outcome(b"", NOW, broken=False)).step.extra.get("mask_mismatch")

    assert reported == (told and (told["claimed"], told["exact"], told["claimed_sampled"]))


def test_a_call_that_claims_nothing_is_not_judged():
    """A mask that is absent is no claim of none."""
    body = {name: value for name, value in BODY.items() if name != "response_mask"}
    form = replace(read_flat("/v1/completions", body, TranslationOptions()), before=[FIRST])

    assert "mask_mismatch" not in form.reshape(Outcome(b"", NOW, broken=False)).step.extra


def test_a_step_without_prompt_ids_says_nothing_about_a_claim():
    """There is nothing to compare."""
    form = read_flat("/v1/completions", BODY | {"response_mask": [0]}, TranslationOptions())
    step = replace(NOW, prompts=(), choices=())

    assert "mask_mismatch" not in form.reshape(Outcome(b"", step, broken=False)).step.extra


@given(rollouts())
def test_what_was_added_is_counted_from_the_latest_step_gone_on_from(steps):
    """As plain lists say it."""
    *before, now = steps
    prompt = list(now.prompts[0])
    fulls = [full_ids(step, choice) for step in before for choice in step.choices if choice.ids]
    lengths = [len(prompt) - len(full) for full in fulls if prompt[: len(full)] == full]

    assert (lengths[-1] if lengths else None) == added_since(now.prompts[0], before)
