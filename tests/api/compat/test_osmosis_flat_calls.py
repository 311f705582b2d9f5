"""Flat calls: bodies, parsing, response, and comparison of the claimed mask with the ids."""

from array import array
from dataclasses import replace

import orjson
import pytest
from hypothesis import given
from tests.support.forests import full_ids, make_choice, make_step, rollouts

from proxy.api.compat.osmosis import FlatCallBody, InitAnswer, RolloutResult, added_since, flat_answer, read_flat
from proxy.api.requests import validated
from proxy.errors import UnprocessableRequest
from proxy.protocols.dialects.base import TranslationOptions
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
def test_only_completions_with_messages_and_without_a_prompt_are_flat_calls(endpoint, body):
    assert read_flat(endpoint, body, TranslationOptions()) is None


@pytest.mark.parametrize(
    "field",
    [
        {"temperature": 2.5}, {"temperature": None}, {"top_p": -0.1}, {"max_tokens": 0}, {"max_tokens": 32769},
        {"stop": "x"}, {"logprobs": 1}, {"messages": []}, {"messages": [{"role": "critic"}]}, {"n": 2}, {"stream": True},
    ],
)  # fmt: skip
def test_a_value_outside_the_schemas_range_is_rejected_and_names_the_field(field):
    with pytest.raises(UnprocessableRequest) as refused:
        read_flat("/v1/completions", BODY | field, TranslationOptions())

    assert next(iter(field)) == refused.value.param


def test_the_model_name_default_is_not_sent_unless_an_alias_maps_it():
    """Osmosis' clients always send `default`; engines then use the model that they serve."""
    form = read_flat("/v1/completions", BODY, TranslationOptions())
    named = read_flat("/v1/completions", BODY | {"model": "policy"}, TranslationOptions())

    assert "model" not in form.native({"gpt-4o": "policy"})
    assert form.native({"*": "policy"})["model"] == form.native({"default": "policy"})["model"] == "default"
    assert named.native({})["model"] == "policy"


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
    """The protocol allows both, and vLLM accepts text only; other types are sent unchanged."""
    body = BODY | {"messages": [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [call]}]}

    assert read_flat("/v1/completions", body, TranslationOptions()).native({})["messages"][1:] == [
        {"role": "assistant", "tool_calls": [sent]}
    ]


def test_the_finish_reason_and_logprobs_of_a_flat_response_are_never_null():
    """Usage is computed if the engine returned none."""
    choice = make_choice(0, [5, 6], logprobs=array("d", [-0.5, float("nan")]))
    payload = orjson.loads(flat_answer(make_step("a", [1, 2, 3], choice, response=RESPONSE, model_asked=None)))

    assert (payload["choices"][0]["finish_reason"], payload["logprobs"]) == ("stop", [-0.5, -9999.0])
    assert payload["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    assert (
        payload["model"],
        payload["id"],
        payload["created"],
        payload["prompt_token_ids"],
    ) == ("default", "c1", 7, [1, 2, 3])


def test_a_flat_response_of_an_engine_without_ids_has_empty_lists():
    payload = orjson.loads(flat_answer(replace(make_step("a", []), prompts=(), choices=(), response=RESPONSE)))

    assert (payload["token_ids"], payload["logprobs"], payload["prompt_token_ids"]) == ([], [], [])


@pytest.mark.parametrize("facts", [{"status": "partial"}, {"response": None}, {"response": {"choices": []}}])
def test_an_incomplete_response_is_returned_unchanged(facts):
    step = make_step("a", [1], [2], **{"response": RESPONSE, **facts})
    form = read_flat("/v1/completions", BODY, TranslationOptions())

    assert flat_answer(step) is None
    assert form.reshape(Outcome(b"as it was", step, broken=True)).end == b"as it was"


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
def test_a_claimed_mask_is_compared_with_the_recorded_ids(mask, before, reported):
    """The report has the claimed and exact lengths, and the number of tokens claimed as sampled."""
    form = replace(read_flat("/v1/completions", BODY | {"response_mask": mask}, TranslationOptions()), before=before)
    payload = form.reshape(Outcome(b"", NOW, broken=False)).step.extra.get("mask_mismatch")

    assert reported == (payload and (payload["claimed"], payload["exact"], payload["claimed_sampled"]))


@pytest.mark.parametrize(
    ("rendered", "mask", "reported"),
    [
        (None, [0, 0], None),
        (9, [0] * 5, None),
        (5, [0], None),
        (9, [0, 0], (2, 5, 0)),
        (4, None, None),
        (3, [0], (1, None, 0)),
    ],
)
def test_the_claimed_mask_of_a_continued_call_is_compared_with_the_rendering_of_the_template(rendered, mask, reported):
    """Clients count the tokens of the rendering. One that is shorter than the earlier step adds no known number."""
    form = replace(read_flat("/v1/completions", BODY | {"response_mask": mask}, TranslationOptions()), before=[FIRST])
    facts = {"kept": 4, "bridge": 2, **({} if rendered is None else {"rendered": rendered})}
    step = replace(NOW, extra={**NOW.extra, "continuation": facts})
    payload = form.reshape(Outcome(b"", step, broken=False)).step.extra.get("mask_mismatch")

    assert reported == (payload and (payload["claimed"], payload["exact"], payload["claimed_sampled"]))


def test_a_call_without_a_mask_is_not_compared():
    body = {name: value for name, value in BODY.items() if name != "response_mask"}
    form = replace(read_flat("/v1/completions", body, TranslationOptions()), before=[FIRST])

    assert "mask_mismatch" not in form.reshape(Outcome(b"", NOW, broken=False)).step.extra


def test_a_step_without_prompt_ids_is_not_compared():
    form = read_flat("/v1/completions", BODY | {"response_mask": [0]}, TranslationOptions())
    step = replace(NOW, prompts=(), choices=())

    assert "mask_mismatch" not in form.reshape(Outcome(b"", step, broken=False)).step.extra


@given(rollouts())
def test_added_tokens_are_counted_from_the_latest_step_that_the_prompt_continues(steps):
    """A computation with plain lists has the same result."""
    *before, now = steps
    prompt = list(now.prompts[0])
    fulls = [full_ids(step, choice) for step in before for choice in step.choices if choice.ids]
    lengths = [len(prompt) - len(full) for full in fulls if prompt[: len(full)] == full]

    assert (lengths[-1] if lengths else None) == added_since(now.prompts[0], before)


def test_unknown_fields_of_a_flat_call_are_accepted():
    """Osmosis' schemas accept them; engines may know them."""
    call = validated(FlatCallBody, {"messages": [{"role": "user", "content": "x", "name": "y"}], "top_k": 3})

    assert (call.model_extra["top_k"], call.messages[0].model_extra["name"]) == (3, "y")


@pytest.mark.parametrize("fields", [{"new": 1}, {"final_messages": None, "extra_fields": None, "reward": None}])
def test_optional_fields_of_a_result_may_be_null_or_missing(fields):
    result = validated(RolloutResult, {"rollout_id": "r1", "status": "ERROR"} | fields)

    assert result.model_dump(exclude_none=True) == {"rollout_id": "r1", "status": "ERROR"}


@pytest.mark.parametrize(
    ("model", "body", "named"),
    [
        (RolloutResult, {"rollout_id": "r1", "status": "DONE"}, "status"),
        (RolloutResult, {"rollout_id": "", "status": "ERROR"}, "rollout_id"),
        (RolloutResult, {"rollout_id": "r1", "status": "ERROR", "reward": float("nan")}, "reward"),
        (InitAnswer, {"rollout_id": "r1", "tools": ["add"]}, "tools"),
        (FlatCallBody, {}, "messages"),
    ],
)
def test_an_error_names_the_invalid_field(model, body, named):
    with pytest.raises(UnprocessableRequest, match=f"^{named}") as refused:
        validated(model, body)

    assert named == refused.value.param


def test_an_error_lists_at_most_five_fields():
    """The others are counted; of a list with many invalid items the first is named."""
    wrong = {name: [] for name in ("model", "temperature", "top_p", "max_tokens", "logprobs", "n", "stream")}
    with pytest.raises(UnprocessableRequest, match="and 2 more$"):
        validated(FlatCallBody, {"messages": [{"role": "user"}], **wrong})
    with pytest.raises(UnprocessableRequest, match=r"^messages\.0\.role: [^;]*$"):
        validated(FlatCallBody, {"messages": [{"role": "unknown"}] * 1000})
