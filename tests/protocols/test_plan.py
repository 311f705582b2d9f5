"""The plan of a call: what is sent, and why it differs from what the client sent."""

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from recorded import plan_of

from proxy.protocols.engines.base import Traits
from proxy.protocols.plan import CallOptions
from proxy.protocols.sampling import Sampling

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BODY = {"model": "gpt-4o", "messages": [{"role": "user", "content": "hi"}]}


def sent(body: dict, **terms) -> dict:
    return plan_of(CHAT, BODY | body, CallOptions(**terms)).body


@pytest.mark.parametrize(
    ("models", "asked", "served"),
    [
        ({}, "gpt-4o", "gpt-4o"),
        ({"gpt-4o": "policy"}, "gpt-4o", "policy"),
        ({"*": "policy"}, "anything", "policy"),
        ({"*": "policy", "judge": "judge"}, "judge", "judge"),
        ({"*": "policy"}, 7, 7),
        ({"claude-*": "policy", "*": "judge"}, "claude-opus-4", "policy"),
        ({"claude-*": "policy", "claude-haiku-*": "small"}, "claude-haiku-4", "small"),
        ({"claude-*": "policy", "claude-opus": "large"}, "claude-opus", "large"),
        ({"claude-*": "policy"}, "gpt-5", "gpt-5"),
        ({"claude-*": "policy"}, "claude-*", "policy"),
    ],
)
def test_model_names_are_mapped(models, asked, served):
    """By name, else by the catch-all; what is no name is the engine's to refuse."""
    assert served == sent({"model": asked}, models=models)["model"]


def test_the_client_sees_its_own_model_name_only_where_another_was_sent():
    """Nothing is rewritten for nothing."""
    renamed = plan_of(CHAT, BODY, CallOptions(models={"*": "policy"}))

    assert ("gpt-4o", "policy", "gpt-4o") == (renamed.model_asked, renamed.model_served, renamed.view.model)
    assert plan_of(CHAT, BODY).view.model is None


def test_tools_of_the_rollout_are_sent_where_the_client_sends_none():
    """A client's own win."""
    tools = ({"type": "function", "function": {"name": "add"}},)

    assert list(tools) == sent({}, tools=tools)["tools"]
    assert ["mine"] == sent({"tools": ["mine"]}, tools=tools)["tools"]


def test_what_was_changed_is_recorded():
    """Fields that were set, and fields that were taken out; the client's own body stays as it came."""
    body = BODY | {"rollout_id": "r1", "metadata": {"rollout_id": "r1"}, "temperature": 0.5}
    before = orjson.dumps(body)
    plan = plan_of(CHAT, body, CallOptions(sampling=Sampling(override={"temperature": 1.0})))

    assert {
        "set": {"temperature": 1.0, "return_token_ids": True, "logprobs": True},
        "unset": ["rollout_id"],
    } == plan.sent
    assert {"rollout_id": "r1"} == plan.body["metadata"]
    assert before == orjson.dumps(body)
    assert plan.request is body


def test_an_override_does_not_decide_what_the_client_sees():
    """Logprobs that the configuration asks for are not the client's wish."""
    plan = plan_of(CHAT, BODY, CallOptions(sampling=Sampling(override={"logprobs": True, "n": 2})))

    assert (True, 2) == (plan.view.strip_rules.logprobs, plan.view.choices)


FIELDS = st.dictionaries(
    st.text(max_size=6).filter(lambda name: name != "rollout_id"),
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats(allow_nan=False) | st.text(max_size=4),
    max_size=6,
)


@given(FIELDS, st.sampled_from([CHAT, COMPLETIONS]))
def test_no_field_of_the_client_is_lost_reordered_or_coerced(fields, path):
    """Unknown ones, nulls and numbers pass as they are, in their order; ours come after."""
    body = fields | {"messages": [], "prompt": "x"}
    plan = plan_of(path, body)
    ours = plan.sent["set"]
    theirs = {key: value for key, value in plan.body.items() if key not in ours}

    assert [key for key in body if key not in ours] == list(theirs)
    assert orjson.dumps({key: value for key, value in body.items() if key not in ours}) == orjson.dumps(theirs)
    assert ours.keys() <= {"return_token_ids", "logprobs", "include_reasoning", "stream_options"}


@pytest.mark.parametrize(
    ("body", "temperature"), [({}, 0.6), ({"temperature": None}, 0.6), ({"temperature": 0}, 0), ({"temperature": 1}, 1)]
)
def test_a_field_that_is_not_sent_is_recorded_with_the_engines_default(body, temperature):
    """And nothing is sent that was not: the engine applies its default by itself."""
    traits = Traits("vllm", sampling_defaults={"temperature": 0.6, "top_k": 20})
    plan = plan_of(CHAT, BODY | body, traits=traits)

    recorded = {"temperature": temperature, "top_k": 20, "logprobs_mode": "raw_logprobs", "constrained": False}
    assert recorded == plan.sampling
    assert body.get("temperature") == plan.body.get("temperature")


def test_the_defaults_of_chat_are_not_those_of_generate():
    """vLLM's own sampling parameters have other ones."""
    traits = Traits("vllm", sampling_defaults={"temperature": 0.6})
    plan = plan_of("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"max_tokens": 5}}, traits=traits)

    assert "temperature" not in plan.sampling
