"""vLLM's generate endpoint: injected fields, stripping, and where the tokens are."""

from copy import deepcopy

import orjson
import pytest
from tests.support.recorded import load

from proxy.protocols.dialects.generate import Generate
from proxy.protocols.engines.base import CallOptions, StripRules, Traits
from proxy.protocols.engines.vllm import Vllm

VLLM = Vllm()


def tokens(response, sampling=None):
    return VLLM.tokens("generate", {} if sampling is None else {"sampling_params": sampling}, response)


ALL = StripRules(token_ids=True, logprobs=True)
LP0 = {"seed": 1, "logprobs": 0}


def options_of(body, logprobs="full"):
    return CallOptions(traits=Traits("vllm"), requested=Generate().response_options(body), logprobs=logprobs)


def inject(sampling, logprobs="full", **more):
    body = {"token_ids": [1, 2], "sampling_params": sampling, **more}
    before = deepcopy(body)
    injection = VLLM.inject("generate", body, options_of(body, logprobs))
    assert before == body
    return injection


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
        ({"logprob_token_ids": [5, 6]}, {}, {"return_token_ids": True}),  # vLLM rejects it with logprobs 0
    ],
)
def test_prompt_ids_and_logprobs_are_injected_if_the_client_did_not_request_them(sampling, more, fields):
    """The client's other sampling parameters are unchanged."""
    injection = inject(sampling, **more)

    assert injection.fields == fields
    rules = injection.strip_rules
    assert (rules.token_ids, rules.logprobs) == ("return_token_ids" in fields, "sampling_params" in fields)
    assert injection.problems == ()


@pytest.mark.parametrize(("logprobs", "added"), [("sampled", {"sampling_params": LP0}), ("off", {})])
def test_the_logprobs_setting_limits_the_injected_logprobs(logprobs, added):
    """The response always has the sampled ids; the prompt's ids are requested."""
    injection = inject({"seed": 1}, logprobs)

    assert injection.fields == {"return_token_ids": True, **added}
    assert bool(added) == injection.strip_rules.logprobs


@pytest.mark.parametrize(
    "body", [{}, {"token_ids": [1]}, {"sampling_params": {}}, {"token_ids": [1], "sampling_params": 7}]
)
def test_an_invalid_body_is_not_injected(body):
    """vLLM's error message contains the number of fields."""
    assert VLLM.inject("generate", body, options_of(body)).fields == {}


def test_forced_tokens_are_flagged():
    """vLLM returns the tokens of `trace_decode_token_ids` with real logprobs; the response looks sampled."""
    assert inject({"trace_decode_token_ids": [5]}).problems == ("forced_tokens",)


def test_stripping_restores_the_plain_response():
    """Apart from the values that differ between two runs."""
    shown = VLLM.strip("generate", full := answer("scale_out/generate"), ALL)
    plain = answer("scale_out/generate_weightversion")

    assert full == answer("scale_out/generate")
    assert list(plain) == list(shown)
    assert list(plain["choices"][0]) == list(shown["choices"][0])
    changing = {"request_id": 0, "created": 0}
    (choice,), (other,) = shown["choices"], plain["choices"]
    assert {**plain, **changing, "choices": 0} == {**shown, **changing, "choices": 0}
    assert {**other, "weight_versions": 0} == {**choice, "weight_versions": 0}


def test_stripping_deletes_from_chunks_the_keys_that_plain_chunks_do_not_have():
    """Only the first chunk of an injected call has prompt ids; a chunk without injected keys is returned itself."""
    first, second, last = chunks("scale_out/generate_stream")
    shown = VLLM.strip_chunk("generate", first, ALL)

    assert list(shown) == ["request_id", "usage", "output_mode", "choices"]
    assert [choice["logprobs"] for choice in shown["choices"]] == [None]
    assert list(first["choices"][0]) == list(shown["choices"][0])
    assert "prompt_token_ids" in first
    assert first["choices"][0]["logprobs"] is not None
    assert VLLM.strip_chunk("generate", second, StripRules(token_ids=True)) is second
    assert VLLM.strip_chunk("generate", last, StripRules()) is last
    assert VLLM.strip_chunk("generate", usage := {"choices": [], "usage": {}}, ALL) is usage


def test_stripping_nothing_returns_the_same_object():
    full = answer("scale_out/generate")

    assert VLLM.strip("generate", full, StripRules()) is full


@pytest.mark.parametrize("key", ["prompt_token_ids", "mm_placeholders"])
def test_multimodal_placeholders_are_stripped_with_the_prompt_ids(key):
    """The same request field enables both."""
    assert VLLM.strip("generate", {key: [1]}, StripRules(token_ids=True)) == {key: None}
    assert VLLM.strip_chunk("generate", {key: [1]}, StripRules(token_ids=True)) == {}
    assert VLLM.strip("generate", {key: [1]}, StripRules(logprobs=True)) == {key: [1]}


def test_prompt_ids_ids_logprobs_and_version_spans_are_read():
    read = tokens(answer("scale_out/generate"))
    (choice,) = read.choices

    assert read.prompt_ids == [4088, 1686, 198, 50, 4089]
    assert choice.ids == [493, 2161, 263]
    assert choice.logprobs == [-9.929905891418457, -6.300331115722656, -6.24341344833374]
    assert choice.spans == ((0, 3, "default"),)
    assert (choice.finish_reason, choice.stop_reason) == ("length", None)
    assert (choice.routed_experts, choice.sampling_mask) == (None, None)
    assert read.problems == ()


def test_a_policy_version_that_changes_during_the_call_has_two_spans():
    """They are ranges of sampled tokens."""
    (choice,) = tokens(answer("abort/generate_midflight_version")).choices

    assert choice.spans == ((0, 178, "default"), (178, 400, "v2"))


def test_text_mode_has_ids_and_logprobs():
    """Its logprob entries have no ids to compare."""
    read = tokens(answer("scale_out/generate_text"))
    (choice,) = read.choices

    assert (choice.ids, len(choice.logprobs), read.problems) == ([493, 2161, 263], 3, ())


def test_logprob_entries_with_other_ids_are_flagged():
    response = answer("scale_out/generate")
    response["choices"][0]["token_ids"] = [493, 2161, 264]

    assert tokens(response).problems == ("ids_disagree",)


def test_fields_that_are_missing_are_none():
    """An interrupted stream has no version spans."""
    (choice,) = tokens({"choices": [{"index": 0}]}).choices

    assert (choice.ids, choice.logprobs, choice.spans, choice.finish_reason) == (None, None, None, None)


def test_sampling_masks_and_routed_experts_are_returned_unchanged():
    (choice,) = tokens({"choices": [{"index": 0, "routed_experts": "AA==", "sampling_mask": [[1]]}]}).choices

    assert (choice.routed_experts, choice.sampling_mask) == ("AA==", [[1]])


@pytest.mark.parametrize(
    ("sampling", "is_constrained"),
    [
        ({"top_k": 20, "top_p": 0.9, "min_p": 0.1, "temperature": 0.7, "bad_words": ["a"]}, False),
        ({"top_k": 20, "presence_penalty": 1}, True),
        ({"top_k": 20, "logit_bias": {"5": 1}}, True),
        ({"top_k": 20, "structured_outputs": {"regex": "a"}}, True),
        (None, False),
    ],
)
def test_logprobs_over_a_mask_are_constrained_by_what_changes_the_logits_of_its_tokens(sampling, is_constrained):
    """They can be scored again unless penalties, biases or a grammar were applied."""
    read = tokens({"choices": [{"index": 0, "token_ids": [1], "sampling_mask": [[1, 2]]}]}, sampling)

    assert read.sampling == {"logprobs_mode": "processed_logprobs", "constrained": is_constrained}
    without = tokens({"choices": [{"index": 0, "token_ids": [1]}]}, sampling)
    assert None is without.sampling


@pytest.mark.parametrize("choice", [{}, {"index": True}, {"index": 0, "weight_versions": [{}]}, 7])
def test_a_malformed_choice_raises(choice):
    """The caller expects these three exceptions."""
    with pytest.raises((TypeError, KeyError, AttributeError)):
        tokens({"choices": [choice]})
