"""The plan of a call: the request that is sent to the engine, and its difference from the client's."""

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.recorded import plan_of, prepared_of

from proxy.protocols.dialects import DIALECTS
from proxy.protocols.engines.base import CallOptions, Traits
from proxy.protocols.plan import PreparedPlans, SessionPlace, has_lists, template_of, with_session
from proxy.protocols.sampling import Sampling

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BODY = {"model": "gpt-4o", "messages": [{"role": "user", "content": "hi"}]}


def sent(body: dict, **terms) -> dict:
    return plan_of(CHAT, BODY | body, CallOptions(**terms)).body


@pytest.mark.parametrize(
    ("models", "requested", "served"),
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
def test_a_model_name_is_mapped_by_name_or_else_by_the_catch_all(models, requested, served):
    """A model that is not a string is left to the engine to reject."""
    assert sent({"model": requested}, models=models)["model"] == served


def test_the_models_name_is_mapped_back_only_if_it_was_mapped():
    renamed = plan_of(CHAT, BODY, CallOptions(models={"*": "policy"}))

    assert (renamed.model_asked, renamed.model_served, renamed.view.model) == ("gpt-4o", "policy", "gpt-4o")
    assert plan_of(CHAT, BODY).view.model is None


def test_the_rollouts_tools_are_sent_unless_the_client_sends_its_own():
    tools = ({"type": "function", "function": {"name": "add"}},)

    assert sent({}, tools=tools)["tools"] == list(tools)
    assert sent({"tools": ["mine"]}, tools=tools)["tools"] == ["mine"]


def test_added_and_removed_fields_are_recorded():
    """The client's own body is recorded unchanged."""
    body = BODY | {"rollout_id": "r1", "metadata": {"rollout_id": "r1"}, "temperature": 0.5}
    before = orjson.dumps(body)
    plan = plan_of(CHAT, body, CallOptions(sampling=Sampling(override={"temperature": 1.0})))

    assert plan.sent == {
        "set": {"temperature": 1.0, "return_token_ids": True, "logprobs": True},
        "unset": ["rollout_id"],
    }
    assert plan.body["metadata"] == {"rollout_id": "r1"}
    assert before == orjson.dumps(body)
    assert plan.request is body


def test_a_sampling_override_does_not_change_what_the_client_sees():
    """Logprobs requested by an override are stripped from the response."""
    plan = plan_of(CHAT, BODY, CallOptions(sampling=Sampling(override={"logprobs": True, "n": 2})))

    assert (plan.view.strip_rules.logprobs, plan.view.choices) == (True, 2)


FIELDS = st.dictionaries(
    st.text(max_size=6).filter(lambda name: name != "rollout_id"),
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats(allow_nan=False) | st.text(max_size=4),
    max_size=6,
)


@given(FIELDS, st.sampled_from([CHAT, COMPLETIONS]))
def test_no_field_of_the_client_is_lost_reordered_or_coerced(fields, path):
    """Unknown fields, nulls and numbers are forwarded as they are, in order; injected fields follow."""
    body = fields | {"messages": [], "prompt": "x"}
    plan = plan_of(path, body)
    injected = plan.sent["set"]
    forwarded = {key: value for key, value in plan.body.items() if key not in injected}

    assert [key for key in body if key not in injected] == list(forwarded)
    assert orjson.dumps({key: value for key, value in body.items() if key not in injected}) == orjson.dumps(forwarded)
    assert injected.keys() <= {"return_token_ids", "logprobs", "include_reasoning", "stream_options"}


@pytest.mark.parametrize(
    ("body", "temperature"), [({}, 0.6), ({"temperature": None}, 0.6), ({"temperature": 0}, 0), ({"temperature": 1}, 1)]
)
def test_the_engines_default_is_recorded_for_a_field_that_is_not_sent(body, temperature):
    """The default itself is not sent: the engine applies it."""
    traits = Traits("vllm", sampling_defaults={"temperature": 0.6, "top_k": 20})
    plan = plan_of(CHAT, BODY | body, traits=traits)

    recorded = {"temperature": temperature, "top_k": 20, "logprobs_mode": "raw_logprobs", "constrained": False}
    assert recorded == plan.sampling
    assert body.get("temperature") == plan.body.get("temperature")


def test_chat_defaults_are_not_recorded_for_generate():
    """vLLM's SamplingParams have other defaults than generation_config.json."""
    traits = Traits("vllm", sampling_defaults={"temperature": 0.6})
    plan = plan_of("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"max_tokens": 5}}, traits=traits)

    assert "temperature" not in plan.sampling


def session_of(place: SessionPlace, body: dict, headers: dict | None = None):
    """Return the headers and the body of the planned call."""
    plan = with_session(plan_of(CHAT, BODY | body), place, headers or {})
    return plan.headers, plan.body


def test_a_session_is_named_by_a_hash_of_the_rollout():
    """The ID of the rollout itself is not sent: it is the user's."""
    headers, body = session_of(SessionPlace("X-Session-ID", None), {})
    (value,) = headers.values()

    assert (headers.keys(), len(value), "r1" not in value) == ({"X-Session-ID"}, 32, True)
    assert (
        session_of(SessionPlace(None, "user"), {})[0],
        session_of(SessionPlace(None, "user"), {})[1]["user"],
    ) == ({}, value)
    assert "user" not in body


@pytest.mark.parametrize(
    ("field", "body", "sent"),
    [
        ("user", {"user": "mine"}, {"user": "mine"}),
        ("metadata.session_id", {"metadata": {"a": 1}}, {"metadata": {"a": 1, "session_id": ...}}),
        ("metadata.session_id", {"metadata": {"session_id": "mine"}}, {"metadata": {"session_id": "mine"}}),
        ("metadata.session_id", {"metadata": None}, {"metadata": {"session_id": ...}}),
        ("metadata.session_id", {"metadata": "text"}, {"metadata": "text"}),
    ],
)
def test_a_session_that_the_client_names_is_kept(field, body, sent):
    """An object beside the field keeps its other fields; any other value is left to the engine to reject."""
    name = session_of(SessionPlace("X-S", None), {})[0]["X-S"]
    expected = orjson.loads(orjson.dumps(sent, default=lambda _: name))
    (outer,) = body

    assert expected[outer] == session_of(SessionPlace(None, field), body)[1][outer]
    assert session_of(SessionPlace("X-S", None), {}, {"x-s": "mine"})[0] == {}


def test_a_session_of_a_thread_is_named_by_its_agent_or_its_first_messages():
    """Later turns of a thread have the same session, another thread has another one."""

    def named(*messages, agent=None):
        place = SessionPlace("X-S", None, of_thread=True, agent=agent)
        return session_of(place, {"messages": list(messages)})[0]["X-S"]

    system, task = {"role": "system", "content": "s"}, {"role": "user", "content": "t"}
    assert named(system, task) == named(system, task, {"role": "assistant", "content": "a"}, task)
    assert named(system, task) != named(system, {"role": "user", "content": "other"})
    assert named(system, task, agent="a") == named(task, agent="a") != named(task, agent="b")
    assert named() != named(task)


# Values on which plans depend, with equal ones of other types.
VALUES = {
    "model": ["m", "gpt-4o", None, 7],
    "n": [None, 1, 1.0, True, 2, "1"],
    "stream": [False, True, 1, "no"],
    "stream_options": [None, {}, {"include_usage": True}, {"include_usage": 1, "continuous_usage_stats": True}],
    "logprobs": [None, False, True, 0, 1, 1.0],
    "temperature": [0, 0.0, -0.0, 1, 1.0, True, None],
    "max_tokens": [0, 16, 16.0, None],
    "tools": [[], [{"function": {"strict": True}}], [{"function": {"strict": 1}}]],
    "rollout_id": ["r1"],
    "rid": [None, "mine"],
    "sampling_params": [{}, {"n": 2}, {"n": 2.0}, [{"n": 1}, {"n": 1}], {"logprobs": 1}, None],
    "return_logprob": [True, 1, [True, False]],
}
PARTS = [
    [{"type": "text", "text": "a"}],
    [{"type": "image_url", "image_url": {"url": "data:,a"}}],
    [{"type": "audio"}],
    [],
    [3],
]
MESSAGES = [[], [{"role": "user", "content": "hi"}], [{"role": "tool"}, 7], None, "text", 7, {}]
MESSAGES += [[{"role": "user", "content": parts}] for parts in PARTS]
PROMPTS = {
    CHAT: ("messages", MESSAGES),
    COMPLETIONS: ("prompt", ["a", "", ["a"], ["a", "b"], [1, 2], [True], [], None, [[1], [2]]]),
    "/inference/v1/generate": ("token_ids", [[1, 2], [], "text", None]),
    "/generate": ("text", ["a", "", ["a", "b"], None]),
}
RULES = [
    Sampling(),
    Sampling(override={"temperature": 1.0, "max_tokens": 7}, default={"top_p": 0.9}, cap={"n": 1}),
    Sampling(override={"messages": MESSAGES[1], "text": "a"}, default={"prompt": "a"}),
]
OPTIONS = [CallOptions(sampling=rules, streaming=how) for rules in RULES for how in ("auto", "replay")]


def template(path: str, body: dict, rules: Sampling) -> dict | None:
    return template_of(body, DIALECTS[path], rules, has_lists=has_lists(body.get("messages")))


def variants(path: str) -> list[dict]:
    """Return bodies with each prompt, and with each value of each field."""
    name, prompts = PROMPTS[path]
    found = [{"model": "m", name: prompt} for prompt in prompts] + [{name: prompts[1], "model": "m"}, {}]
    return found + [{field: value, name: prompts[1]} for field, values in VALUES.items() for value in values]


@pytest.mark.parametrize("path", PROMPTS)
@pytest.mark.parametrize("kind", ["vllm", "sglang", "llamacpp", "plain"])
def test_a_plan_that_was_prepared_for_another_call_equals_the_calls_plan(path, kind):
    """Every field has the same value of the same type, if the templates of the calls are equal as JSON texts."""
    for options in OPTIONS:
        templates: dict[bytes, list[dict]] = {}
        for body in variants(path):
            if (found := template(path, body, options.sampling)) is not None:
                templates.setdefault(orjson.dumps(found), []).append(body)
        for alike in templates.values():
            for prepared in [prepared_of(path, body, options, kind=kind) for body in alike]:
                for body in alike:
                    fresh = plan_of(path, body, options, kind=kind)
                    assert repr(fresh) == repr(prepared.for_call(body, step_id="S1", rollout_id="r1"))


@given(st.data(), st.sampled_from(list(PROMPTS)), st.sampled_from(["vllm", "sglang", "llamacpp", "plain"]))
def test_a_plan_with_several_fields_is_prepared_for_other_prompts(data, path, kind):
    name, prompts = PROMPTS[path]
    options = data.draw(st.sampled_from(OPTIONS))
    fields = {
        field: data.draw(st.sampled_from(VALUES[field])) for field in data.draw(st.sets(st.sampled_from(list(VALUES))))
    }
    earlier, body = ({**fields, name: data.draw(st.sampled_from(prompts))} for _ in range(2))
    templates = [template(path, each, options.sampling) for each in (earlier, body)]
    if None not in templates and templates[0] == templates[1]:
        prepared = prepared_of(path, earlier, options, kind=kind)

        assert repr(plan_of(path, body, options, kind=kind)) == repr(
            prepared.for_call(body, step_id="S1", rollout_id="r1")
        )


@pytest.mark.parametrize("prompt", [[{"role": "user", "content": "other"}], [{"role": "tool"}], []])
def test_messages_of_text_have_one_template(prompt):
    assert template(CHAT, BODY, Sampling()) == template(CHAT, BODY | {"messages": prompt}, Sampling())


def test_prepared_plans_are_dropped_when_there_are_too_many():
    plans, prepared = PreparedPlans(2**22), prepared_of(CHAT, BODY)
    for number in range(100):
        plans.keep(b"%3d" % number + bytes(2**16), prepared)

    assert 0 < len(plans) < 25
    plans.keep(bytes(2**24), prepared)
    assert not plans
