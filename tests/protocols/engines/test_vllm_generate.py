"""vLLM's generate endpoint: what is asked beyond the client's wishes, what is hidden again, and where the tokens are."""

from copy import deepcopy

import orjson
import pytest
from recorded import load

from proxy.protocols.dialects.generate import Generate
from proxy.protocols.engines.base import InjectionRequest, StripRules
from proxy.protocols.engines.vllm import inject_generate, strip_generate, strip_generate_chunk, tokens_of_generate

ALL = StripRules(token_ids=True, logprobs=True)
LP0 = {"seed": 1, "logprobs": 0}


def wish(body, logprobs="full"):
    return InjectionRequest("generate", body, Generate().response_options(body), logprobs=logprobs)


def ask(sampling, logprobs="full", **more):
    body = {"token_ids": [1, 2], "sampling_params": sampling, **more}
    before = deepcopy(body)
    asked = inject_generate(wish(body, logprobs))
    assert before == body
    return asked


def answer(name):
    return orjson.loads(load(name).response)


def chunks(name):
    events = [event.removeprefix(b"data: ") for event in load(name).response.split(b"\n\n")]
    return [orjson.loads(event) for event in events if event.startswith(b"{")]


@pytest.mark.parametrize(
    ("sampling", "more", "fields"),
    [
        ({"seed": 1}, {}, {"return_token_ids": True, "sampling_params": LP0}),
        (
            {"seed": 1},
            {"stream": True, "output_mode": "text"},
            {"return_token_ids": True, "sampling_params": LP0, "stream_options": {"include_usage": True}},
        ),
        (
            {"seed": 1, "n": 2, "logprobs": 0},
            {"stream": True},
            {"return_token_ids": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        ),
        ({"seed": 1, "logprobs": None}, {}, {"return_token_ids": True, "sampling_params": LP0}),
        ({"seed": 1}, {"return_token_ids": True}, {"sampling_params": LP0}),
        ({"logprobs": 0}, {}, {"return_token_ids": True}),
        ({"logprobs": 3}, {"return_token_ids": True}, {}),
        ({"logprob_token_ids": [5, 6]}, {}, {"return_token_ids": True}),  # with logprobs 0 a 400 (seen)
    ],
)
def test_what_is_missing_is_asked_and_nothing_else(sampling, more, fields):
    """The ids of the prompt and the logprobs; what the client said of sampling stays as it is."""
    asked = ask(sampling, **more)

    assert fields == asked.fields
    assert ("return_token_ids" in fields, "sampling_params" in fields) == (
        asked.strip_rules.token_ids,
        asked.strip_rules.logprobs,
    )
    assert () == asked.problems


@pytest.mark.parametrize(("logprobs", "added"), [("sampled", {"sampling_params": LP0}), ("off", {})])
def test_logprobs_are_left_out_where_none_are_wanted(logprobs, added):
    """Sampled ids come in any case, and those of the prompt are asked for."""
    asked = ask({"seed": 1}, logprobs)

    assert {"return_token_ids": True, **added} == asked.fields
    assert bool(added) == asked.strip_rules.logprobs


@pytest.mark.parametrize(
    "body", [{}, {"token_ids": [1]}, {"sampling_params": {}}, {"token_ids": [1], "sampling_params": 7}]
)
def test_a_body_that_will_be_refused_is_left_alone(body):
    """vLLM's refusal counts the body's fields."""
    assert {} == inject_generate(wish(body)).fields


def test_forced_tokens_are_known_not_to_be_sampled():
    """vLLM emits what `trace_decode_token_ids` says, with real logprobs: nothing else would give it away."""
    assert ("forced_tokens",) == ask({"trace_decode_token_ids": [5]}).problems


def test_hiding_undoes_asking():
    """An answer with everything becomes, but for the hidden values, the one that was asked for nothing."""
    shown = strip_generate(full := answer("scale_out/generate"), ALL)
    plain = answer("scale_out/generate_weightversion")

    assert full == answer("scale_out/generate")
    assert list(plain) == list(shown)
    assert list(plain["choices"][0]) == list(shown["choices"][0])
    changing = {"request_id": 0, "created": 0}
    (choice,), (other,) = shown["choices"], plain["choices"]
    assert {**plain, **changing, "choices": 0} == {**shown, **changing, "choices": 0}
    assert {**other, "weight_versions": 0} == {**choice, "weight_versions": 0}


def test_hiding_deletes_from_chunks_what_chunks_do_not_have():
    """The first chunk has ids of the prompt only where they were asked for; later chunks stay the very same."""
    first, second, last = chunks("scale_out/generate_stream")
    shown = strip_generate_chunk(first, ALL)

    assert ["request_id", "usage", "output_mode", "choices"] == list(shown)
    assert [None] == [choice["logprobs"] for choice in shown["choices"]]
    assert list(first["choices"][0]) == list(shown["choices"][0])
    assert "prompt_token_ids" in first
    assert first["choices"][0]["logprobs"] is not None
    assert strip_generate_chunk(second, StripRules(token_ids=True)) is second
    assert strip_generate_chunk(last, StripRules()) is last
    assert strip_generate_chunk(usage := {"choices": [], "usage": {}}, ALL) is usage


def test_nothing_to_hide_changes_nothing():
    """The same dict comes back."""
    full = answer("scale_out/generate")

    assert strip_generate(full, StripRules()) is full


@pytest.mark.parametrize("key", ["prompt_token_ids", "mm_placeholders"])
def test_what_comes_with_the_prompts_ids_is_hidden_with_them(key):
    """Placeholders of images come by the same flag."""
    assert {key: None} == strip_generate({key: [1]}, StripRules(token_ids=True))
    assert {} == strip_generate_chunk({key: [1]}, StripRules(token_ids=True))
    assert {key: [1]} == strip_generate({key: [1]}, StripRules(logprobs=True))


def test_tokens():
    """Ids, logprobs and spans of versions, as they stand in the response."""
    tokens = tokens_of_generate(answer("scale_out/generate"))
    (choice,) = tokens.choices

    assert [4088, 1686, 198, 50, 4089] == tokens.prompt_ids
    assert [493, 2161, 263] == choice.ids
    assert [-9.929905891418457, -6.300331115722656, -6.24341344833374] == choice.logprobs
    assert ((0, 3, "default"),) == choice.spans
    assert ("length", None, None, None) == (
        choice.finish_reason,
        choice.stop_reason,
        choice.routed_experts,
        choice.sampling_mask,
    )
    assert () == tokens.problems


def test_a_version_that_changed_in_flight_has_two_spans():
    """Over the positions of the sampled ids."""
    (choice,) = tokens_of_generate(answer("abort/generate_midflight_version")).choices

    assert ((0, 178, "default"), (178, 400, "v2")) == choice.spans


def test_text_mode_has_ids_and_logprobs_as_well():
    """Its logprobs name no ids, and so cannot disagree with any."""
    tokens = tokens_of_generate(answer("scale_out/generate_text"))
    (choice,) = tokens.choices

    assert ([493, 2161, 263], 3, ()) == (choice.ids, len(choice.logprobs), tokens.problems)


def test_logprobs_of_other_ids_are_found():
    """Each entry names the id that it is of."""
    response = answer("scale_out/generate")
    response["choices"][0]["token_ids"] = [493, 2161, 264]

    assert ("ids_disagree",) == tokens_of_generate(response).problems


def test_what_the_engine_does_not_say_is_none():
    """A stream that broke off has no spans yet, and no logprobs where none came."""
    (choice,) = tokens_of_generate({"choices": [{"index": 0}]}).choices

    assert (None, None, None, None) == (choice.ids, choice.logprobs, choice.spans, choice.finish_reason)


def test_masks_and_experts_are_given_as_they_came():
    """Packing them is not the engine's."""
    (choice,) = tokens_of_generate(
        {"choices": [{"index": 0, "routed_experts": "AA==", "sampling_mask": [[1]]}]}
    ).choices

    assert ("AA==", [[1]]) == (choice.routed_experts, choice.sampling_mask)


@pytest.mark.parametrize("choice", [{}, {"index": True}, {"index": 0, "weight_versions": [{}]}, 7])
def test_what_is_no_choice_is_refused(choice):
    """By an exception that the exchange expects."""
    with pytest.raises((TypeError, KeyError, AttributeError)):
        tokens_of_generate({"choices": [choice]})
