"""vLLM: what is asked beyond the client's wishes, and the traps of it. Hiding on recorded answers: wire/test_exchange.py."""

import orjson
import pytest
from recorded import load, plan_of, play

from proxy.protocols.dialects import DIALECTS
from proxy.protocols.engines.base import InjectionRequest, StripRules
from proxy.protocols.engines.vllm import Vllm
from proxy.protocols.plan import CallOptions

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BOTH = {"return_token_ids": True, "logprobs": True}
COUNTED = {"stream_options": {"include_usage": True}}
COUNTED_EACH = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}


def ask(path: str, body: dict, *, keep_reasoning: bool = True):
    body = {"messages": [], "prompt": "x"} | body
    before = orjson.dumps(body)
    dialect = DIALECTS[path]
    asked = Vllm().inject(InjectionRequest(dialect.name, body, dialect.response_options(body), keep_reasoning))
    assert before == orjson.dumps(body)
    return asked


@pytest.mark.parametrize(
    ("path", "body", "fields"),
    [
        (CHAT, {}, BOTH),
        (CHAT, {"stream": True}, BOTH | COUNTED),
        (CHAT, {"stream": True, "stream_options": None}, BOTH | COUNTED),
        (
            CHAT,
            {"stream": True, "stream_options": {"x": 1}},
            BOTH | {"stream_options": {"x": 1, "include_usage": True}},
        ),
        (CHAT, {"stream": True, "stream_options": {"include_usage": "yes"}}, BOTH),
        (CHAT, {"stream": True, "stream_options": {"include_usage": False}}, BOTH | COUNTED),
        # Without include_usage the second option counts for nothing, and must not begin to.
        (
            CHAT,
            {"stream": True, "stream_options": {"continuous_usage_stats": True}},
            BOTH | {"stream_options": {"include_usage": True, "continuous_usage_stats": False}},
        ),
        (CHAT, {"stream": True, "n": 2}, BOTH | COUNTED_EACH),
        (CHAT, {"stream": True, "n": 2, "stream_options": {"include_usage": True}}, BOTH | COUNTED_EACH),
        (COMPLETIONS, {"stream": True, "prompt": ["a", "b"]}, {"return_token_ids": True, "logprobs": 0} | COUNTED_EACH),
        # Refusals of vLLM's that must stay refusals.
        (CHAT, {"stream": True, "stream_options": "all"}, BOTH),
        (CHAT, {"stream": True, "stream_options": {"include_usage": "perhaps"}}, BOTH),
        (CHAT, {"stream": True, "n": 2, "stream_options": {"continuous_usage_stats": 7}}, BOTH),
        (CHAT, {"stream_options": {"include_usage": True}}, BOTH),
        (CHAT, {"return_token_ids": False, "logprobs": None}, BOTH),
        (CHAT, {"return_token_ids": True}, {"logprobs": True}),
        (CHAT, {"logprobs": True}, {"return_token_ids": True}),
        (CHAT, BOTH, {}),
        (CHAT, {"top_logprobs": 0}, BOTH),
        (CHAT, {"top_logprobs": None}, BOTH),
        (CHAT, {"top_logprobs": 2}, {"return_token_ids": True}),  # a 400 of vLLM's that must stay one
        (CHAT, {"logprobs": True, "top_logprobs": 2}, {"return_token_ids": True}),
        (COMPLETIONS, {}, {"return_token_ids": True, "logprobs": 0}),
        (COMPLETIONS, {"logprobs": 0}, {"return_token_ids": True}),
        (COMPLETIONS, {"logprobs": 3, "return_token_ids": True}, {}),
        (COMPLETIONS, {"echo": True}, {}),
        (COMPLETIONS, {"echo": False}, {"return_token_ids": True, "logprobs": 0}),
    ],
)
def test_what_is_missing_is_asked_and_nothing_else(path, body, fields):
    """Never prompt logprobs or token strings: those change what the client sees and cannot be hidden."""
    asked = ask(path, body)

    assert fields == asked.fields
    assert ("return_token_ids" in fields, "logprobs" in fields) == (
        asked.strip_rules.token_ids,
        asked.strip_rules.logprobs,
    )


@pytest.mark.parametrize(
    "name", ["chat_ids", "chat_ids_stream", "cmpl_ids", "cmpl_ids_stream", "tool_auto_ids_only_stream"]
)
def test_an_answer_without_logprobs_is_exact_where_none_are_wanted(name):
    """Only the ids are asked for, and the client sees the answer without them."""
    cassette = load(name)
    asks = {key: value for key, value in cassette.body.items() if key != "return_token_ids"}
    plan = plan_of(cassette.path, asks, CallOptions(logprobs="off"))
    shown, end, step = play(plan, cassette)

    assert {"return_token_ids": True} == plan.sent["set"]
    assert ((), 0) == (step.problems, len(step.choices[0].logprobs))
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
def test_what_cannot_be_exact_is_known_beforehand(path, body, problem):
    """The step is flagged, whatever the answer looks like."""
    assert (problem,) == ask(path, body).problems


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_body_without_its_prompt_is_left_alone(path):
    """vLLM's refusal counts the body's fields."""
    dialect = DIALECTS[path]

    assert {} == Vllm().inject(InjectionRequest(dialect.name, {"model": "m"}, dialect.response_options({}))).fields


def test_events_that_only_flags_cause_are_dropped_only_if_the_client_set_no_flag():
    """With either flag vLLM itself sends them."""
    assert ask(CHAT, {}).strip_rules.empty_deltas
    assert not ask(CHAT, {"logprobs": True}).strip_rules.empty_deltas
    assert not ask(CHAT, {"return_token_ids": True}).strip_rules.empty_deltas
    assert not ask(COMPLETIONS, {}).strip_rules.empty_deltas


def test_reasoning_switched_off_is_overridden_or_flagged():
    """It would cost the ids (seen on vLLM 0.32)."""
    overridden = ask(CHAT, {"include_reasoning": False})
    left = ask(CHAT, {"include_reasoning": False}, keep_reasoning=False)

    assert (True, True, ()) == (
        overridden.fields["include_reasoning"],
        overridden.strip_rules.reasoning,
        overridden.problems,
    )
    assert ("include_reasoning" in left.fields, left.problems) == (False, ("reasoning_withheld",))


def messages(answer: bytes) -> list[tuple[dict, str | None]]:
    """The message or the deltas of an answer, each with its finish reason."""
    payloads = [line.removeprefix(b"data: ") for line in answer.splitlines()]
    chunks = [orjson.loads(payload) for payload in payloads if payload.startswith(b"{")]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return [(choice.get("message", choice.get("delta")), choice["finish_reason"]) for choice in choices]


@pytest.mark.parametrize("name", ["reasoning/r_end_early", "reasoning/r_end_early_stream"])
def test_overridden_reasoning_is_not_shown_and_content_is(name):
    """Null in a message, gone from deltas; ids are recorded whole."""
    cassette = load(name)
    body = {key: value for key, value in cassette.body.items() if key not in BOTH} | {"include_reasoning": False}
    shown, end, step = play(plan_of(cassette.path, body), cassette)
    before, after = messages(cassette.response), messages(shown + end)

    assert any(message.get("reasoning") for message, _ in before)
    assert not any(message.get("reasoning") for message, _ in after)
    assert [content for message, _ in before if (content := message.get("content"))] == [
        content for message, _ in after if (content := message.get("content"))
    ]
    assert all(message or finish_reason for message, finish_reason in after)
    assert step.exact


def test_nothing_to_hide_gives_the_same_objects():
    """So that bytes pass as they came."""
    engine, chunk = Vllm(), {"choices": [{"index": 0, "delta": {}, "token_ids": [1]}]}

    assert chunk is engine.strip_chunk("chat", chunk, StripRules())
    assert chunk is engine.strip("chat", chunk, StripRules())


def test_a_response_without_choices_loses_no_more_than_was_asked():
    """Its prompt ids; what else it holds stays, in its order."""
    shown = Vllm().strip("chat", {"id": "x", "prompt_token_ids": [1], "usage": None}, StripRules(token_ids=True))

    assert [("id", "x"), ("prompt_token_ids", None), ("usage", None)] == list(shown.items())


def test_an_event_with_a_finish_reason_or_the_engines_own_empty_content_stays():
    """Only a delta of `{}` without a finish reason is caused by flags."""
    engine, hidden = Vllm(), StripRules(token_ids=True, logprobs=True, empty_deltas=True)

    def shown(delta, finish=None):
        return engine.strip_chunk("chat", {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}, hidden)

    assert shown({}) is None
    assert shown({}, "stop")
    assert shown({"content": ""})
    assert shown({"content": None})


def test_an_index_that_is_no_number_is_refused():
    """Nothing could be paired by it."""
    with pytest.raises(TypeError, match="index"):
        Vllm().tokens("chat", {}, {"choices": [{"index": "0"}]})
