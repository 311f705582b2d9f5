"""vLLM: injected fields and their exceptions. Stripping of recorded responses: test_exchange.py."""

import re

import orjson
import pytest
from tests.support.recorded import load, plan_of, play, prepared_of

from proxy.protocols.dialects import DIALECTS
from proxy.protocols.engines.base import CallOptions, FollowUpRequest, StripRules, Traits
from proxy.protocols.engines.vllm import Vllm

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
STREAM = {"stream": True}
BOTH = {"return_token_ids": True, "logprobs": True}
ABORTS = Traits("vllm", abort_path="/abort_requests")
COUNTED = {"stream_options": {"include_usage": True}}
COUNTED_ONCE = {"stream_options": {"include_usage": True, "continuous_usage_stats": False}}
COUNTED_EACH = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}


def inject(path: str, body: dict, *, keep_reasoning: bool = True):
    body = {"messages": [], "prompt": "x"} | body
    before = orjson.dumps(body)
    dialect = DIALECTS[path]
    requested = dialect.response_options(body)
    options = CallOptions(traits=Traits("vllm"), requested=requested, keep_reasoning=keep_reasoning)
    injection = Vllm().inject(dialect.name, body, options)
    assert before == orjson.dumps(body)
    return injection


@pytest.mark.parametrize(
    ("path", "body", "fields"),
    [
        (CHAT, {}, BOTH),
        (CHAT, {"stream": True}, BOTH | COUNTED),
        (CHAT, {**STREAM, "stream_options": None}, BOTH | COUNTED),
        (CHAT, {**STREAM, "stream_options": {"x": 1}}, BOTH | {"stream_options": {"x": 1, "include_usage": True}}),
        (CHAT, {**STREAM, "stream_options": {"include_usage": "yes"}}, BOTH),
        (CHAT, {**STREAM, "stream_options": {"include_usage": False}}, BOTH | COUNTED),
        # Without include_usage vLLM ignores continuous_usage_stats; injecting include_usage would enable it.
        (CHAT, {**STREAM, "stream_options": {"continuous_usage_stats": True}}, BOTH | COUNTED_ONCE),
        (CHAT, {**STREAM, "n": 2}, BOTH | COUNTED_EACH),
        (CHAT, {**STREAM, "n": 2, "stream_options": {"include_usage": True}}, BOTH | COUNTED_EACH),
        (COMPLETIONS, {**STREAM, "prompt": ["a", "b"]}, {"return_token_ids": True, "logprobs": 0} | COUNTED_EACH),
        # Invalid requests that must remain invalid.
        (CHAT, {**STREAM, "stream_options": "all"}, BOTH),
        (CHAT, {**STREAM, "stream_options": {"include_usage": "perhaps"}}, BOTH),
        (CHAT, {**STREAM, "n": 2, "stream_options": {"continuous_usage_stats": 7}}, BOTH),
        (CHAT, {"stream_options": {"include_usage": True}}, BOTH),
        (CHAT, {"return_token_ids": False, "logprobs": None}, BOTH),
        (CHAT, {"return_token_ids": True}, {"logprobs": True}),
        (CHAT, {"logprobs": True}, {"return_token_ids": True}),
        (CHAT, BOTH, {}),
        (CHAT, {"top_logprobs": 0}, BOTH),
        (CHAT, {"top_logprobs": None}, BOTH),
        (CHAT, {"top_logprobs": 2}, {"return_token_ids": True}),  # an invalid request that must remain invalid
        (CHAT, {"logprobs": True, "top_logprobs": 2}, {"return_token_ids": True}),
        (COMPLETIONS, {}, {"return_token_ids": True, "logprobs": 0}),
        (COMPLETIONS, {"logprobs": 0}, {"return_token_ids": True}),
        (COMPLETIONS, {"logprobs": 3, "return_token_ids": True}, {}),
        (COMPLETIONS, {"echo": True}, {}),
        (COMPLETIONS, {"echo": False}, {"return_token_ids": True, "logprobs": 0}),
    ],
)
def test_only_fields_that_the_client_did_not_set_are_injected(path, body, fields):
    """Prompt logprobs and token strings are not: they change fields that the client sees and cannot be stripped."""
    injection = inject(path, body)

    assert injection.fields == fields
    rules = injection.strip_rules
    assert (rules.token_ids, rules.logprobs) == ("return_token_ids" in fields, "logprobs" in fields)


@pytest.mark.parametrize(
    "name", ["chat_ids", "chat_ids_stream", "cmpl_ids", "cmpl_ids_stream", "tool_auto_ids_only_stream"]
)
def test_a_response_without_logprobs_is_exact_with_logprobs_off(name):
    """Only the ids are injected, and stripped from the response."""
    cassette = load(name)
    fields = {key: value for key, value in cassette.body.items() if key != "return_token_ids"}
    plan = plan_of(cassette.path, fields, CallOptions(logprobs="off"))
    shown, end, step = play(plan, cassette)

    assert plan.sent["set"] == {"return_token_ids": True}
    assert (step.problems, len(step.choices[0].logprobs)) == ((), 0)
    assert step.sampled == step.usage["completion_tokens"] if step.usage else step.sampled > 0
    assert b'"token_ids":[' not in shown + end


@pytest.mark.parametrize(
    ("path", "body", "problem"),
    [
        (COMPLETIONS, {"echo": True}, "echo"),
        (COMPLETIONS, {"max_tokens": 0}, "phantom_token"),
        (COMPLETIONS, {"use_beam_search": True}, "beam_search"),
        (CHAT, {"use_beam_search": True}, "beam_search"),
    ],
)
def test_a_request_that_cannot_be_exact_is_flagged_before_it_is_sent(path, body, problem):
    assert inject(path, body).problems == (problem,)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_body_without_messages_or_prompt_is_not_injected(path):
    """vLLM's error message contains the number of fields."""
    assert Vllm().inject(DIALECTS[path].name, {"model": "m"}, CallOptions(traits=Traits("vllm"))).fields == {}


def test_empty_deltas_are_dropped_only_if_the_client_set_neither_field():
    """With either field, vLLM sends them."""
    calls = [(CHAT, {}), (CHAT, {"logprobs": True}), (CHAT, {"return_token_ids": True}), (COMPLETIONS, {})]

    assert [inject(*call).strip_rules.empty_deltas for call in calls] == [True, False, False, False]


def test_include_reasoning_false_is_overridden_or_flagged():
    """vLLM omits the token ids of withheld reasoning (seen on 0.32)."""
    overridden = inject(CHAT, {"include_reasoning": False})
    kept = inject(CHAT, {"include_reasoning": False}, keep_reasoning=False)

    assert (overridden.fields["include_reasoning"], overridden.problems) == (True, ())
    assert overridden.strip_rules.reasoning
    assert ("include_reasoning" in kept.fields, kept.problems) == (False, ("reasoning_withheld",))


def messages(response: bytes) -> list[tuple[dict, str | None]]:
    """Return the message or the deltas of a response, each with its finish reason."""
    payloads = [line.removeprefix(b"data: ") for line in response.splitlines()]
    chunks = [orjson.loads(payload) for payload in payloads if payload.startswith(b"{")]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return [(choice.get("message", choice.get("delta")), choice["finish_reason"]) for choice in choices]


@pytest.mark.parametrize("name", ["reasoning/r_end_early", "reasoning/r_end_early_stream"])
def test_overridden_reasoning_is_stripped_and_content_is_forwarded(name):
    """Reasoning is null where a message or a delta has more, as vLLM sends it then; all ids are recorded."""
    cassette = load(name)
    body = {key: value for key, value in cassette.body.items() if key not in BOTH} | {"include_reasoning": False}
    shown, end, step = play(plan_of(cassette.path, body), cassette)
    before, after = messages(cassette.response), messages(shown + end)

    assert any(message.get("reasoning") for message, _ in before)
    assert not any(message.get("reasoning") for message, _ in after)
    assert all(
        list(message)[:2] == ["content", "reasoning"]
        for message, _ in after
        if message.get("content") and "role" not in message
    )
    assert [content for message, _ in before if (content := message.get("content"))] == [
        content for message, _ in after if (content := message.get("content"))
    ]
    assert all(message or finish_reason for message, finish_reason in after)
    assert step.exact


def test_stripping_nothing_returns_the_same_object():
    """The caller then forwards the original bytes."""
    engine, chunk = Vllm(), {"choices": [{"index": 0, "delta": {}, "token_ids": [1]}]}

    assert chunk is engine.strip_chunk("chat", chunk, StripRules())
    assert chunk is engine.strip("chat", chunk, StripRules())


def test_a_response_without_choices_is_stripped():
    """Its prompt ids become null; other fields and their order do not change."""
    shown = Vllm().strip("chat", {"id": "x", "prompt_token_ids": [1], "usage": None}, StripRules(token_ids=True))

    assert list(shown.items()) == [("id", "x"), ("prompt_token_ids", None), ("usage", None)]


def test_only_empty_deltas_without_a_finish_reason_are_dropped():
    """Injected fields cause these; vLLM sends `content: ""` without them too."""
    engine, rules = Vllm(), StripRules(token_ids=True, logprobs=True, empty_deltas=True)

    def shown(delta, finish=None):
        return engine.strip_chunk("chat", {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}, rules)

    assert shown({}) is None
    assert shown({}, "stop")
    assert shown({"content": ""})
    assert shown({"content": None})


@pytest.mark.parametrize(
    ("path", "name"),
    [(CHAT, "chatcmpl-{}"), (COMPLETIONS, "cmpl-{}-0"), ("/inference/v1/generate", "generate-tokens-{}")],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_call_gets_an_id_by_which_a_server_that_can_aborts_it(path, name, stream):
    """It has the form of vLLM's own, and no other step has it. Another server gets none."""
    body = {"messages": [], "prompt": "x", "token_ids": [1], "sampling_params": {}, "stream": stream}
    made = plan_of(path, body, traits=ABORTS)
    other = prepared_of(path, body, traits=ABORTS).for_call(body, step_id="S2", rollout_id="r1")

    assert re.fullmatch("[0-9a-f]{32}", made.body["request_id"])
    assert FollowUpRequest("/abort_requests", {"request_ids": [name.format(made.body["request_id"])]}) == made.abort
    assert made.body["request_id"] == made.sent["set"]["request_id"] != other.body["request_id"]
    assert plan_of(path, body, traits=Traits("vllm")).abort is None


@pytest.mark.parametrize(
    ("path", "body", "headers"),
    [
        (CHAT, {"request_id": "mine"}, {}),
        (CHAT, {"request_id": None}, {}),  # a 400 that must remain one
        (CHAT, {}, {"x-request-id": "mine"}),
        (COMPLETIONS, {}, {"x-request-id": ""}),
        (CHAT, {"n": 2}, {}),
        (CHAT, {"use_beam_search": True}, {}),
        (COMPLETIONS, {"prompt": ["a", "b"]}, {}),
        (COMPLETIONS, {"echo": True}, {}),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"n": 2}}, {}),
    ],
)
def test_a_call_with_the_clients_id_or_several_choices_gets_none(path, body, headers):
    """The header precedes the body's id. vLLM gives several choices other ids."""
    made = plan_of(path, {"messages": [], "prompt": "x"} | body, traits=ABORTS, headers=headers)

    assert made.abort is None
    assert body.get("request_id") == made.body.get("request_id")
