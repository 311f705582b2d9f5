"""SGLang: what is asked in which framing, what is hidden, and where tokens, versions and losses are."""

import re

import orjson
import pytest
from recorded import http_cassettes, load_http, plan_of, play

from proxy.protocols.engines import ENGINES, Traits
from proxy.protocols.engines.base import StripRules
from proxy.protocols.plan import CallOptions

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PARSED, BARE = Traits("sglang", "0.5.23", has_parser=True), Traits("sglang", "0.5.23", has_parser=False)
OURS = ("return_token_ids", "return_meta_info", "return_input_ids_in_sglext", "return_output_ids_in_sglext", "logprobs")


def plan(path: str, body: dict, traits: Traits = PARSED, headers: dict | None = None, logprobs: str = "full"):
    body = {"messages": [], "prompt": "x"} | body
    before = orjson.dumps(body)
    made = plan_of(path, body, CallOptions(logprobs=logprobs), kind="sglang", traits=traits, headers=headers)
    assert before == orjson.dumps(body)
    return made


def as_asked_by_nobody(name: str):
    """A recorded answer to flags, and the plan of the same call by a client that set none."""
    cassette = load_http("sglang", name)
    body = {key: value for key, value in cassette.body.items() if key not in OURS}
    return plan_of(cassette.path, body, kind="sglang", traits=PARSED), cassette


def normal(answer: bytes) -> bytes:
    answer = re.sub(rb'"created":\d+', b'"created":0', answer)
    return re.sub(rb'"id":"call_[^"]*"', b'"id":""', answer)


COUNTED = {"stream_options": {"include_usage": True}}


@pytest.mark.parametrize(
    ("path", "body", "fields"),
    [
        (CHAT, {}, {"return_token_ids": True, "return_meta_info": True, "logprobs": True}),
        (CHAT, {"logprobs": True, "top_logprobs": 2}, {"return_token_ids": True, "return_meta_info": True}),
        (CHAT, {"return_token_ids": True, "return_meta_info": True, "logprobs": True}, {}),
        (
            CHAT,
            {"stream": True},
            {"return_input_ids_in_sglext": True, "return_output_ids_in_sglext": True, "logprobs": True} | COUNTED,
        ),
        (COMPLETIONS, {}, {"return_token_ids": True, "logprobs": 1}),
        (COMPLETIONS, {"stream": True, "logprobs": 0}, {"return_token_ids": True} | COUNTED),
        (COMPLETIONS, {"echo": True}, {}),
    ],
)
def test_each_framing_has_flags_of_its_own(path, body, fields):
    """The flags that a chat stream refuses are never sent with one."""
    assert fields == plan(path, body).sent["set"]


@pytest.mark.parametrize(
    ("path", "body", "logprobs", "added"),
    [
        (CHAT, {}, "sampled", {"logprobs": True}),
        (COMPLETIONS, {}, "sampled", {"logprobs": 0}),  # no alternative beside the token's own
        (CHAT, {}, "off", {}),
        (CHAT, {"stream": True}, "off", {}),
        (COMPLETIONS, {}, "off", {}),
    ],
)
def test_logprobs_are_asked_for_as_configured(path, body, logprobs, added):
    """The flags of the ids are the same."""
    asked = {key: value for key, value in plan(path, body).sent["set"].items() if key != "logprobs"}

    assert asked | added == plan(path, body, logprobs=logprobs).sent["set"]


@pytest.mark.parametrize("name", ["cmpl_token_prompt", "chat_sglext_header"])
def test_an_answer_without_logprobs_is_exact_where_none_are_wanted(name):
    """Seen: ids come without them."""
    cassette = load_http("sglang", name)
    _, _, step = play(plan_of(cassette.path, cassette.body, CallOptions(logprobs="off"), kind="sglang"), cassette)

    assert () == step.problems
    assert (8, 0) == (len(step.choices[0].ids), len(step.choices[0].logprobs))


def test_a_stream_is_not_replayed_for_logprobs_that_nobody_wants():
    """Without a parser it loses those alone; a client that asks for them wants them."""
    assert "live" == plan(CHAT, {"stream": True}, BARE, logprobs="off").framing
    assert "replay" == plan(CHAT, {"stream": True, "logprobs": True}, BARE, logprobs="off").framing


def test_a_body_without_its_prompt_is_left_alone():
    """The engine says what is missing."""
    assert {} == plan_of(CHAT, {"model": "m"}, kind="sglang").sent["set"]


def test_ids_of_a_stream_come_in_an_event_of_their_own():
    """Unless the client reads ids of sglext itself: it knows no such event."""
    assert {"x-sglext-ids-framed": "1"} == plan(CHAT, {"stream": True}).headers
    assert {} == plan(CHAT, {}).headers
    assert {} == plan(CHAT, {"stream": True, "return_output_ids_in_sglext": True}).headers
    assert {} == plan(CHAT, {"stream": True}, headers={"x-sglext-return-input-ids": "1"}).headers


@pytest.mark.parametrize(
    ("body", "traits", "framing"),
    [
        ({}, BARE, "whole"),
        ({"stream": True}, PARSED, "live"),
        ({"stream": True}, BARE, "replay"),
        ({"stream": True}, Traits("sglang", "0.5.23"), "replay"),
        ({"stream": True}, Traits("sglang", None, has_parser=True), "replay"),
        ({"stream": True}, Traits("sglang", "0.5.9.post1", has_parser=True), "replay"),
        ({"stream": True, "return_token_ids": True}, BARE, "live"),  # a 400 of the engine's that must stay one
    ],
)
def test_a_chat_stream_is_replayed_unless_it_is_known_to_lose_nothing(body, traits, framing):
    """A parser on the server, and a version that has ids in streams."""
    assert framing == plan(CHAT, body, traits).framing


def test_a_completions_stream_is_live():
    """Every token has its event there."""
    assert "live" == plan(COMPLETIONS, {"stream": True}, BARE).framing


@pytest.mark.parametrize(
    ("plain", "injected"),
    [
        ("chat_plain", "chat_return_token_ids"),
        ("chat_plain", "chat_return_meta_info"),
        ("chat_stream_plain", "chat_stream_sglext_framed"),
    ],
)
def test_hiding_gives_back_the_plain_answer_byte_for_byte(plain, injected):
    """Keys that flags brought are gone, logprobs are null again, the event of the ids is dropped whole."""
    planned, cassette = as_asked_by_nobody(injected)

    shown, end, _ = play(planned, cassette)

    assert normal(load_http("sglang", plain).response) == normal(shown + end)


def test_the_event_of_the_ids_is_dropped_in_its_unframed_form_too():
    """A client that reads choices[0] would fail on it; the usage that it asked for stays."""
    planned, cassette = as_asked_by_nobody("chat_stream_sglext")

    shown, end, _ = play(planned, cassette)

    plain = normal(load_http("sglang", "chat_stream_plain").response)
    assert plain.removesuffix(b"data: [DONE]\n\n") in normal(shown + end)
    assert 1 == (shown + end).count(b'"choices":[]')
    assert b"sglext" not in shown + end


def test_events_that_only_carry_logprobs_are_dropped_unless_asked_for():
    """With a parser there is one for each token whose text is held back."""
    planned, cassette = as_asked_by_nobody("chat_stream_tools")
    shown, end, step = play(planned, cassette)
    asked = plan_of(CHAT, cassette.body, kind="sglang", traits=PARSED)
    again, last, _ = play(asked, cassette)

    assert 5 == (shown + end).count(b"data: {")
    assert cassette.response == again + last
    assert () == step.problems
    assert 31 == len(step.choices[0].ids)


@pytest.mark.parametrize(
    "name",
    [
        "chat_return_meta_info", "chat_return_token_ids", "chat_tools", "chat_emoji_sglext", "chat_reasoning",
        "chat_stream_reasoning", "chat_stream_tools", "chat_stream_emoji_toolparser_notools", "cmpl_return_token_ids",
        "cmpl_stream_return_token_ids",
    ],
)  # fmt: skip
def test_what_came_whole_is_exact(name):
    """As many logprobs as ids, and both as many as the engine counts."""
    planned, cassette = as_asked_by_nobody(name)

    step = play(planned, cassette)[2]

    assert () == step.problems
    assert len(step.choices[0].ids) == len(step.choices[0].logprobs) > 0
    assert step.prompts[0]
    assert "after_temperature_logprobs" == step.sampling["logprobs_mode"]


@pytest.mark.parametrize(
    ("name", "problems"),
    [
        ("chat_stream_sglext", ("logprob_count",)),  # the EOS has none
        ("chat_stream_emoji_sglext", ("logprob_count",)),
        ("chat_stream_abort", ("aborted",)),
        ("chat_abort", ("aborted",)),
        # an older server ignores every flag
        ("chat_plain", ("no_token_ids", "no_prompt_ids", "no_logprobs", "completion_count", "prompt_count")),
        ("chat_input_ids", ("no_logprobs",)),  # recorded without
        ("chat_overlong", ("engine_error",)),
    ],
)
def test_what_did_not_is_flagged(name, problems):
    """Whatever was asked: the answer decides."""
    cassette = load_http("sglang", name)
    body = {"messages": [], **{key: value for key, value in (cassette.body or {}).items() if key not in OURS}}

    assert problems == play(plan_of(CHAT, body, kind="sglang", traits=PARSED), cassette)[2].problems


def test_the_spans_of_policy_versions_are_kept():
    """Weights may change while a call is in flight; an unstreamed answer says where."""
    planned, cassette = as_asked_by_nobody("chat_return_meta_info")

    step = play(planned, cassette)[2]

    assert [(0, 3, "step-41"), (3, 8, "step-42")] == [
        (span.start, span.end, span.policy_version) for span in step.choices[0].spans
    ]
    assert ("step-41", "step-42") == (step.policy_version, step.policy_version_end)


def test_ids_that_two_places_say_differently_are_flagged():
    """Nobody could say which were sampled."""
    planned, cassette = as_asked_by_nobody("chat_return_meta_info")
    odd = cassette.response.replace(b'"response_token_ids":[504', b'"response_token_ids":[505')

    assert ("ids_disagree",) == play(planned, cassette, [odd])[2].problems


def test_an_abort_before_the_first_token_has_no_logprobs():
    """One may come all the same (output_streamer.py:613)."""
    meta = {"output_token_logprobs": [[-1.0, 5, None]], "completion_tokens": 0, "num_retractions": 2}
    choice = {"index": 0, "response_token_ids": [], "finish_reason": "abort", "meta_info": meta}
    tokens = ENGINES["sglang"].tokens("chat", {}, {"choices": [choice]})

    assert ([], []) == (tokens.choices[0].ids, tokens.choices[0].logprobs)
    assert {"retractions": 2} == tokens.notes


def test_ids_in_sglext_of_a_whole_answer_go_as_well():
    """And nothing else does."""
    shown = ENGINES["sglang"].strip(
        "chat",
        orjson.loads(load_http("sglang", "chat_sglext").response),
        StripRules(logprobs=True, keys=frozenset({"input_ids", "output_ids"})),
    )

    assert normal(load_http("sglang", "chat_plain").response) == normal(orjson.dumps(shown))


def test_what_else_a_client_reads_of_sglext_stays():
    """Only the ids go."""
    engine, hidden = ENGINES["sglang"], StripRules(keys=frozenset({"input_ids", "output_ids"}))
    chunk = {"id": "x", "choices": [], "sglext": {"output_ids": [[1]], "routed_experts": "AA=="}}

    assert {"routed_experts": "AA=="} == engine.strip_chunk("chat", chunk, hidden)["sglext"]
    assert engine.strip_chunk("chat", {"choices": [], "sglext": {"output_ids": [[1]]}}, hidden) is None
    assert engine.strip_chunk("chat", {"choices": [], "usage": {}}, hidden) is not None


def planned(cassette):
    return plan_of(cassette.path, cassette.body, kind="sglang", traits=PARSED, headers=cassette.headers)


ASKED_ALL = [
    cassette for cassette in http_cassettes("sglang") if not planned(cassette).sent["set"].keys() - {"stream_options"}
]


@pytest.mark.parametrize("cassette", ASKED_ALL, ids=str)
def test_a_client_that_set_the_flags_itself_sees_every_byte(cassette):
    """The same bytes in, the same bytes out."""
    shown, end, _ = play(planned(cassette), cassette)

    assert cassette.response == shown + end


def test_there_are_clients_that_set_the_flags_themselves():
    """In every framing."""
    assert {"chat_return_meta_info", "chat_stream_sglext_framed", "cmpl_stream_return_token_ids"} <= set(
        map(str, ASKED_ALL)
    )


def test_ids_are_those_of_the_pairs_where_no_list_of_them_came():
    """A server that knows `return_meta_info` alone."""
    choice = {"index": 0, "meta_info": {"output_token_logprobs": [[-1.0, 5, None], [-2.0, 6, None]]}}
    (one,) = ENGINES["sglang"].tokens("chat", {}, {"choices": [choice]}).choices

    assert ([5, 6], [-1.0, -2.0]) == (one.ids, one.logprobs)


def test_an_answer_without_choices_is_hidden_as_far_as_it_goes():
    """Nothing is added to it."""
    hidden = StripRules(keys=frozenset({"output_ids"}))

    assert {"id": "x"} == ENGINES["sglang"].strip("chat", {"id": "x", "sglext": {"output_ids": [[1]]}}, hidden)


def test_an_index_that_is_no_number_is_refused():
    """Nothing could be paired by it."""
    with pytest.raises(TypeError, match="index"):
        ENGINES["sglang"].tokens("chat", {}, {"choices": [{"index": "0"}]})
