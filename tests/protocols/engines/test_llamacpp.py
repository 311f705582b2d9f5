"""llama.cpp: injected and stripped fields, replayed streams, and the flags of incomplete responses."""

import orjson
import pytest
from tests.support.recorded import Cassette, http_cassettes, load_http, plan_of, play

from proxy.protocols.engines import ENGINES
from proxy.protocols.engines.base import CallOptions, Traits

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
INJECTED = ("verbose", "return_tokens", "logprobs", "top_logprobs")
VERBOSE = {"verbose": True, "return_tokens": True}
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def plan(path: str, body: dict, logprobs: str = "full"):
    return plan_of(path, {"messages": [], "prompt": "x"} | body, CallOptions(logprobs=logprobs), kind="llamacpp")


def answer(response: dict) -> Cassette:
    return Cassette("made", CHAT, {}, orjson.dumps(response), 200, "application/json", "llamacpp")


def exact(**verbose) -> dict:
    """A response of three sampled tokens, the last of them the EOS."""
    entries = [{"id": token, "token": "", "bytes": [], "logprob": -0.5, "top_logprobs": []} for token in (5, 6, 2)]
    block = {"tokens": [5, 6, 2], "prompt": "hi", "tokens_predicted": 3, "tokens_evaluated": 2, "truncated": False}
    message = {"role": "assistant", "content": "ab"}
    choice = {"finish_reason": "stop", "index": 0, "message": message, "logprobs": {"content": entries}}
    usage = {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}
    return {"choices": [choice], "usage": usage, "__verbose": block | verbose}


@pytest.mark.parametrize(
    ("path", "body", "fields"),
    [
        (CHAT, {}, VERBOSE | {"logprobs": True, "top_logprobs": 1}),
        (CHAT, {"logprobs": True, "top_logprobs": 3}, VERBOSE),
        (CHAT, {"top_logprobs": 3}, VERBOSE),  # an invalid request (400) that must remain invalid
        (CHAT, {"verbose": True}, {"return_tokens": True, "logprobs": True, "top_logprobs": 1}),
        (CHAT, {"tools": TOOLS}, VERBOSE | {"logprobs": True, "top_logprobs": 1}),
        (COMPLETIONS, {}, VERBOSE | {"logprobs": 1}),
        (COMPLETIONS, {"logprobs": 2}, VERBOSE),
    ],
)
def test_fields_that_the_client_did_not_set_are_injected(path, body, fields):
    """With one alternative per token: llama.cpp's default is twenty."""
    assert plan(path, body).sent["set"] == fields


@pytest.mark.parametrize(
    ("path", "body", "fields"),
    [
        (CHAT, {}, VERBOSE),
        (CHAT, {"stream": True}, VERBOSE),  # replayed
        (COMPLETIONS, {}, VERBOSE),
        (CHAT, {"n": 2}, VERBOSE | {"logprobs": True, "top_logprobs": 1}),
        (COMPLETIONS, {"prompt": ["a", "b"]}, VERBOSE | {"logprobs": 1}),
        (COMPLETIONS, {"stream": True}, VERBOSE | {"logprobs": 1}),
        (CHAT, {"stream": True, "stream_options": {"odd": 1}}, VERBOSE | {"logprobs": True, "top_logprobs": 1}),
    ],
)
def test_logprobs_off_still_injects_logprobs_where_token_ids_need_them(path, body, fields):
    """`__verbose` is incomplete in live streams and for several choices."""
    assert plan(path, body, "off").sent["set"] == fields


def test_an_unstreamed_response_without_logprobs_is_exact_with_logprobs_off():
    """`__verbose` has the token ids without logprobs (seen on llama.cpp)."""
    cassette = load_http("llamacpp", "cmpl_return_tokens")
    body = {key: value for key, value in cassette.body.items() if key not in INJECTED}
    made = plan_of(cassette.path, body, CallOptions(logprobs="off"), kind="llamacpp")
    _, _, step = play(made, cassette, found={"tokens": list(range(12))})

    assert cassette.body == made.body
    assert step.problems == ()
    assert (len(step.choices[0].ids), len(step.choices[0].logprobs)) == (12, 0)


@pytest.mark.parametrize("body", [{}, {"tools": TOOLS}, {"stream_options": {"include_usage": True}}])
def test_chat_streams_are_replayed(body):
    """A live chat stream lacks the EOS and the list of ids; a live stream of completions lacks neither."""
    made = plan(CHAT, {"stream": True} | body)

    assert made.framing == "replay"
    assert not {"stream", "stream_options"} & made.body.keys()
    assert plan(COMPLETIONS, {"stream": True}).framing == "live"


def test_a_stream_that_the_engine_rejects_is_not_replayed():
    """llama.cpp returns 400 for tools with logprobs in a stream; replayed, it would succeed."""
    assert plan(CHAT, {"stream": True, "tools": TOOLS, "logprobs": True}).framing == "live"


def test_no_logprobs_are_injected_into_a_live_stream_with_tools():
    """llama.cpp would reject the request."""
    body = {"messages": [], "tools": TOOLS, "stream": True}
    injection = ENGINES["llamacpp"].inject("chat", body, CallOptions(traits=Traits("llamacpp")))

    assert injection.fields == VERBOSE


def test_an_unstreamed_response_is_exact():
    """Ids and logprobs have the same count, usage agrees, and the prompt's ids are found by tokenizing its text."""
    made = plan(CHAT, {})
    shown, end, step = play(made, answer(exact()), found={"tokens": [1, 2]})

    assert step.problems == ()
    assert (step.choices[0].ids.tolist(), step.prompts[0].tolist()) == ([5, 6, 2], [1, 2])
    assert step.extra["prompt_ids"] == "tokenized again"
    assert b"__verbose" not in shown + end
    assert b"logprobs" not in shown + end


@pytest.mark.parametrize(
    ("verbose", "found", "problem"),
    [
        ({}, None, "no_prompt_ids"),
        ({}, {"tokens": [1, 2, 3]}, "prompt_count"),
        ({"tokens_evaluated": 9}, {"tokens": [1, 2]}, "prompt_count"),
        ({"tokens": [5, 7, 2]}, {"tokens": [1, 2]}, "ids_disagree"),
        ({"tokens": [5, 6, 7, 2], "tokens_predicted": 4}, {"tokens": [1, 2]}, "logprob_count"),
        ({"tokens": [5, 6, 2], "tokens_predicted": 4}, {"tokens": [1, 2]}, "completion_count"),
    ],
)
def test_contradictions_in_a_response_are_flagged(verbose, found, problem):
    """Counts, ids and prompts are compared with the server's own."""
    step = play(plan(CHAT, {}), answer(exact(**verbose)), found=found)[2]

    assert problem in step.problems


def test_several_choices_are_flagged():
    """Usage counts one choice, and the list of ids belongs to one choice."""
    response = exact()
    response["choices"].append({**response["choices"][0], "index": 1})
    step = play(plan(CHAT, {"n": 2}), answer(response), found={"tokens": [1, 2]})[2]

    assert "uncounted" in step.problems


def test_a_prompt_of_token_ids_is_recorded_without_a_follow_up_request():
    made = plan(COMPLETIONS, {"prompt": [1, 2]})
    step = play(made, answer(exact()))[2]

    assert step.prompts[0].tolist() == [1, 2]
    assert ENGINES["llamacpp"].follow_up("completions", made.body, exact()) is None


@pytest.mark.parametrize("prompt", [["a", "b"], ["a", 5], [[1, 2], [3]]])
def test_several_prompts_and_mixed_ones_are_not_tokenized(prompt):
    """The server returns the text of the first prompt only; the text of a mixed one may tokenize differently."""
    step = play(plan(COMPLETIONS, {"prompt": prompt}), answer(exact()), found={"tokens": [1, 2]})[2]

    assert "no_prompt_ids" in step.problems


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("chat_verbose", set()),
        ("chat_stream_logprobs", {"completion_count", "uncounted"}),
        ("chat_stop_str", {"completion_count", "uncounted"}),
        ("chat_n2", {"completion_count", "uncounted"}),
        ("cmpl_stream_logprobs", {"uncounted"}),
    ],
)
def test_recorded_responses_get_their_known_flags(name, flags):
    """Unstreamed with `verbose` is exact but for the prompt; live streams lack the EOS."""
    cassette = load_http("llamacpp", name)
    body = {key: value for key, value in cassette.body.items() if key not in INJECTED}
    made = plan_of(cassette.path, body, kind="llamacpp")
    step = play(made, cassette, found={"tokens": list(range(made.body.get("max_tokens")))})[2]

    assert set(step.problems) - {"prompt_count", "no_prompt_ids"} == flags


@pytest.mark.parametrize("name", ["chat_plain", "chat_stream_plain", "cmpl_plain"])
def test_a_plain_response_is_forwarded_byte_for_byte(name):
    """Nothing is stripped, so nothing is serialized again."""
    cassette = load_http("llamacpp", name)
    body = {**cassette.body, "stream_options": {"unknown": 1}} if cassette.is_stream else cassette.body
    shown, end, _ = play(plan_of(cassette.path, body, kind="llamacpp"), cassette)

    if cassette.is_stream:
        assert cassette.response == shown + end
    else:
        assert orjson.loads(cassette.response) == orjson.loads(end)


def test_each_recorded_response_is_flagged_or_has_a_prompt():
    for cassette in http_cassettes("llamacpp"):
        step = play(plan_of(cassette.path, cassette.body, kind="llamacpp"), cassette)[2]
        assert step.problems or step.prompts
