"""SGLang: injected fields per framing, stripping, and where token ids, policy versions and known defects are."""

import re
from base64 import b64encode

import orjson
import pytest
from tests.support import worked
from tests.support.forests import make_step
from tests.support.recorded import dialect_cassettes, load, names, plan_of, play, prepared_of

from proxy.errors import InvalidValue
from proxy.export import FORMATS
from proxy.protocols.engines import ENGINES
from proxy.protocols.engines.base import CallOptions, FollowUpRequest, StripRules, Traits
from proxy.protocols.exchange import Exchange
from proxy.trajectory.arrays import unpack_mask
from proxy.trajectory.sequence import Options
from proxy.trajectory.step import Timing

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PARSED, BARE = Traits("sglang", "0.5.23", has_parser=True), Traits("sglang", "0.5.23", has_parser=False)
INJECTED = (
    "return_token_ids",
    "return_meta_info",
    "return_input_ids_in_sglext",
    "return_output_ids_in_sglext",
    "logprobs",
)


def plan(path: str, body: dict, traits: Traits = PARSED, headers: dict | None = None, logprobs: str = "full"):
    body = {"messages": [], "prompt": "x"} | body
    before = orjson.dumps(body)
    made = plan_of(path, body, CallOptions(logprobs=logprobs), kind="sglang", traits=traits, headers=headers)
    assert before == orjson.dumps(body)
    return made


def without_injected_fields(name: str):
    """Return the plan of a recorded call by a client that set none of the injected fields, and its cassette."""
    cassette = load(name, "sglang")
    body = {key: value for key, value in cassette.body.items() if key not in INJECTED}
    return plan_of(cassette.path, body, kind="sglang", traits=PARSED), cassette


def normal(response: bytes) -> bytes:
    """Blank the fields that differ between any two runs: ids of the response and of tool calls, times."""
    response = re.sub(rb'"created":\d+', b'"created":0', response)
    response = re.sub(rb'"id":"(call_[^"]*|[0-9a-f]{32})"', b'"id":""', response)
    return re.sub(rb'"\w+_(latency|throughput|time|ts|wait)":[0-9.e-]+', b"", response)


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
def test_each_framing_gets_the_fields_that_it_supports(path, body, fields):
    """SGLang rejects some of them in chat streams. `rid` is in a test of its own."""
    assert {name: value for name, value in plan(path, body).sent["set"].items() if name != "rid"} == fields


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/generate"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_call_with_one_choice_gets_an_id_by_which_it_is_aborted(path, stream):
    """It has the form of SGLang's own, and no other step has it; the response's `id` is this one."""
    made = plan(path, {"stream": stream, "text": "x"})
    other = prepared_of(path, made.request, kind="sglang").for_call(made.request, step_id="S2", rollout_id="r1")

    assert re.fullmatch("[0-9a-f]{32}", made.body["rid"])
    assert FollowUpRequest("/abort_request", {"rid": made.body["rid"]}) == made.abort
    assert made.body["rid"] != other.body["rid"]


@pytest.mark.parametrize(
    ("path", "more"),
    [
        (CHAT, {"n": 2}),
        (CHAT, {"rid": "mine"}),
        (COMPLETIONS, {"prompt": ["a", "b"]}),
        ("/generate", {"text": ["a", "b"]}),
        ("/generate", {"text": "a", "sampling_params": {"n": 2}}),
    ],
)
def test_a_call_with_the_clients_id_or_several_choices_is_not_aborted(path, more):
    """SGLang gives several choices other ids, and aborts by prefix."""
    made = plan(path, more)

    assert made.abort is None
    assert made.body.get("rid") == more.get("rid")


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
def test_the_logprobs_setting_changes_only_the_logprobs_field(path, body, logprobs, added):
    other_fields = {key: value for key, value in plan(path, body).sent["set"].items() if key != "logprobs"}

    assert plan(path, body, logprobs=logprobs).sent["set"] == other_fields | added


@pytest.mark.parametrize(("name", "count"), [("cmpl_token_ids", 3), ("chat_token_ids", 4), ("chat_sglext_header", 4)])
def test_a_response_without_logprobs_is_exact_with_logprobs_off(name, count):
    """Token ids do not depend on logprobs."""
    cassette = load(f"recorded/{name}_n_plain", "sglang")
    _, _, step = play(plan_of(cassette.path, cassette.body, CallOptions(logprobs="off"), kind="sglang"), cassette)

    assert step.problems == ()
    assert (len(step.choices[0].ids), len(step.choices[0].logprobs)) == (count, 0)


def test_logprobs_off_does_not_replay_a_stream_that_only_lacks_logprobs():
    """Without a parser, live streams lack logprobs only; a client that requests them gets a replay."""
    assert plan(CHAT, {"stream": True}, BARE, logprobs="off").framing == "live"
    assert plan(CHAT, {"stream": True, "logprobs": True}, BARE, logprobs="off").framing == "replay"


def test_a_body_without_messages_is_not_injected():
    """The engine rejects it."""
    assert plan_of(CHAT, {"model": "m"}, kind="sglang").sent["set"] == {}


def test_a_streams_ids_are_requested_in_an_event_of_their_own():
    """Not if the client itself reads ids from sglext: it does not know this event."""
    assert plan(CHAT, {"stream": True}).headers == {"x-sglext-ids-framed": "1"}
    assert plan(CHAT, {}).headers == {}
    assert plan(CHAT, {"stream": True, "return_output_ids_in_sglext": True}).headers == {}
    assert plan(CHAT, {"stream": True}, headers={"x-sglext-return-input-ids": "1"}).headers == {}


@pytest.mark.parametrize(
    ("body", "traits", "framing"),
    [
        ({}, BARE, "whole"),
        ({"stream": True}, PARSED, "live"),
        ({"stream": True}, BARE, "replay"),
        ({"stream": True}, Traits("sglang", "0.5.23"), "replay"),
        ({"stream": True}, Traits("sglang", None, has_parser=True), "replay"),
        ({"stream": True}, Traits("sglang", "0.5.9.post1", has_parser=True), "replay"),
        ({"stream": True, "return_token_ids": True}, BARE, "live"),  # an invalid request that must remain invalid
    ],
)
def test_a_chat_stream_is_live_only_with_a_parser_and_a_known_version(body, traits, framing):
    """Other chat streams lose tokens and are replayed; in completions each token has its own event."""
    assert plan(CHAT, body, traits).framing == framing
    assert plan(COMPLETIONS, {"stream": True}, traits).framing == "live"


def test_the_event_of_the_ids_is_dropped_without_framing_too():
    """A client that reads choices[0] would fail on it; the usage that it requested is forwarded."""
    planned, cassette = without_injected_fields("recorded/chat_sglext_s_inj")

    shown, end, _ = play(planned, cassette)

    plain = normal(load("recorded/chat_short_s_plain", "sglang").response)
    assert b"sglext" in cassette.response
    assert plain.removesuffix(b"data: [DONE]\n\n") in normal(shown + end)
    assert (shown + end).count(b'"choices":[]') == 1
    assert b"sglext" not in shown + end


def test_events_that_only_carry_logprobs_are_dropped_unless_requested():
    """With a parser, SGLang sends such an event for each token with withheld text."""
    planned, cassette = without_injected_fields("each_token/chat_tool_call_s_inj")
    shown, end, step = play(planned, cassette)
    requested = plan_of(CHAT, cassette.body, kind="sglang", traits=PARSED, headers=cassette.headers)
    again, last, _ = play(requested, cassette)

    plain = load("each_token/chat_tool_call_s_plain", "sglang").response
    assert plain.count(b"data: {") < cassette.response.count(b"data: {") - 20
    assert normal(plain).removesuffix(b"data: [DONE]\n\n") in normal(shown + end)
    assert cassette.response == again + last
    assert step.problems == ()
    assert step.usage["completion_tokens"] == len(step.choices[0].ids) == 37


@pytest.mark.parametrize(
    "name",
    [
        "recorded/chat_greedy_n_inj", "recorded/chat_sglext_n_inj", "recorded/chat_tool_call_n_inj",
        "recorded/chat_utf8_n_inj", "recorded/chat_thought_calls_n_inj", "recorded/cmpl_greedy_n_inj",
        "each_token/chat_greedy_s_inj", "each_token/chat_thought_s_inj", "each_token/chat_thought_calls_s_inj",
        "each_token/chat_tool_call_s_inj", "each_token/chat_utf8_s_inj", "each_token/cmpl_greedy_s_inj",
    ],
)  # fmt: skip
def test_a_complete_response_is_exact(name):
    """Ids and logprobs have the same count, and usage agrees."""
    planned, cassette = without_injected_fields(name)

    step = play(planned, cassette)[2]

    assert step.problems == ()
    assert len(step.choices[0].ids) == len(step.choices[0].logprobs) > 0
    assert step.prompts[0]
    assert step.sampling["logprobs_mode"] == "after_temperature_logprobs"


@pytest.mark.parametrize(
    ("name", "problems"),
    [
        ("unparsed/chat_short_s_inj", ("logprob_count",)),  # the EOS has none
        ("unparsed/chat_utf8_s_inj", ("logprob_count",)),
        ("recorded/midway_abort_s_inj", ("aborted",)),
        ("recorded/midway_abort_n_inj", ("aborted",)),
        # an older server ignores every flag
        (
            "recorded/chat_greedy_n_plain",
            ("no_token_ids", "no_prompt_ids", "no_logprobs", "completion_count", "prompt_count"),
        ),
        ("recorded/chat_token_ids_n_plain", ("no_logprobs",)),  # recorded without
        ("recorded/err_overlong_n_plain", ("engine_error",)),
    ],
)
def test_an_incomplete_response_is_flagged(name, problems):
    """The flags depend on the response, not on the request."""
    planned, cassette = without_injected_fields(name)

    assert play(planned, cassette)[2].problems == problems


@pytest.mark.parametrize("name", ["recorded/midway_versions_n_inj", "recorded/midway_cmpl_versions_n_inj"])
def test_policy_version_spans_are_recorded(name):
    """Weights may change during a call; an unstreamed response has the token positions."""
    planned, cassette = without_injected_fields(name)
    first, second = orjson.loads(cassette.response)["metadata"]["weight_versions"]

    step = play(planned, cassette)[2]

    assert [(0, first["end"], "default"), (first["end"], 300, "step-2")] == [
        (span.start, span.end, span.policy_version) for span in step.choices[0].spans
    ]
    assert (step.policy_version, step.policy_version_end) == ("default", "step-2")
    assert 0 < first["end"] == second["start"] < 300


def test_ids_that_differ_between_two_fields_are_flagged():
    planned, cassette = without_injected_fields("recorded/chat_greedy_n_inj")
    response = cassette.response.replace(b'"response_token_ids":[', b'"response_token_ids":[1')

    assert play(planned, cassette, [response])[2].problems == ("ids_disagree",)


def test_a_call_aborted_before_its_first_token_has_no_logprobs():
    """SGLang may send one all the same (output_streamer.py:613)."""
    meta = {"output_token_logprobs": [[-1.0, 5, None]], "completion_tokens": 0, "num_retractions": 2}
    choice = {"index": 0, "response_token_ids": [], "finish_reason": "abort", "meta_info": meta}
    tokens = ENGINES["sglang"].tokens("chat", {}, {"choices": [choice]})

    assert (tokens.choices[0].ids, tokens.choices[0].logprobs) == ([], [])
    assert tokens.notes == {"retractions": 2}


@pytest.mark.parametrize(("counted", "noted"), [(7, {"cached_tokens": 7}), (0, {}), (None, {}), (-1, {}), ("7", {})])
def test_the_cached_tokens_of_the_first_choice_are_noted(counted, noted):
    """The prompt of a further choice is in the cache as a whole."""
    choices = [
        {"index": index, "response_token_ids": [5], "meta_info": {"cached_tokens": cached}}
        for index, cached in enumerate([counted, 9])
    ]

    assert ENGINES["sglang"].tokens("chat", {}, {"choices": choices}).notes == noted


def test_ids_in_the_sglext_of_an_unstreamed_response_are_stripped():
    shown = ENGINES["sglang"].strip(
        "chat",
        orjson.loads(load("recorded/chat_sglext_n_plain", "sglang").response),
        StripRules(logprobs=True, keys=frozenset({"input_ids", "output_ids"})),
    )

    assert normal(load("recorded/chat_short_n_plain", "sglang").response) == normal(orjson.dumps(shown))


def test_other_fields_of_sglext_are_forwarded():
    engine, rules = ENGINES["sglang"], StripRules(keys=frozenset({"input_ids", "output_ids"}))
    chunk = {"id": "x", "choices": [], "sglext": {"output_ids": [[1]], "routed_experts": "AA=="}}

    assert engine.strip_chunk("chat", chunk, rules)["sglext"] == {"routed_experts": "AA=="}
    assert engine.strip_chunk("chat", {"choices": [], "sglext": {"output_ids": [[1]]}}, rules) is None
    assert engine.strip_chunk("chat", {"choices": [], "usage": {}}, rules) is not None
    assert engine.strip("chat", {"id": "x", "sglext": {"output_ids": [[1]]}}, rules) == {"id": "x"}  # without choices


def test_requested_meta_info_has_no_injected_logprobs():
    engine = ENGINES["sglang"]
    body = {"messages": [{"role": "user", "content": "hi"}], "return_meta_info": True}
    rules = engine.inject("chat", body, CallOptions(traits=PARSED)).strip_rules
    meta = {
        "id": "x",
        "output_token_logprobs": [[-1, 5, None]],
        "input_token_logprobs": [],
        "output_token_logprobs_length": 1,
    }
    response = {"choices": [{"index": 0, "logprobs": {"content": []}, "meta_info": meta}]}

    assert engine.strip("chat", response, rules)["choices"] == [
        {"index": 0, "logprobs": None, "meta_info": {"id": "x"}}
    ]
    assert response == engine.strip("chat", response, StripRules(keys=frozenset({"sglext"})))


def planned(cassette):
    return plan_of(cassette.path, cassette.body, kind="sglang", traits=PARSED, headers=cassette.headers)


WITH_ALL_FIELDS = [
    cassette
    for cassette in dialect_cassettes("sglang")
    if not planned(cassette).sent["set"].keys() - {"stream_options", "rid"}
]


@pytest.mark.parametrize("cassette", WITH_ALL_FIELDS, ids=str)
def test_a_client_that_sets_the_fields_itself_gets_every_byte(cassette):
    shown, end, _ = play(planned(cassette), cassette)

    assert cassette.response == shown + end


def test_recorded_calls_with_all_fields_exist_in_every_framing():
    assert {"recorded/chat_greedy_n_inj", "recorded/chat_greedy_s_inj", "recorded/cmpl_greedy_s_inj"} <= set(
        map(str, WITH_ALL_FIELDS)
    )


def test_ids_are_read_from_the_logprob_pairs_if_there_is_no_list_of_ids():
    """A server may support `return_meta_info` only."""
    choice = {"index": 0, "meta_info": {"output_token_logprobs": [[-1.0, 5, None], [-2.0, 6, None]]}}
    (sampled,) = ENGINES["sglang"].tokens("chat", {}, {"choices": [choice]}).choices

    assert (sampled.ids, sampled.logprobs) == ([5, 6], [-1.0, -2.0])


SIZED = Traits("sglang", "0.5.23", has_parser=True, vocabulary_size=4096)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"input_ids": [5, 4096, 7]}),
        (CHAT, {"input_ids": [-1]}),
        (CHAT, {"input_ids": [5, "4096"], "stream": True}),
        (CHAT, {"input_ids": [5.0, 4096.0]}),
        (COMPLETIONS, {"prompt": [2**40]}),
        (COMPLETIONS, {"prompt": [[5, 6], [4096]]}),
        (COMPLETIONS, {"prompt": [5, -7], "echo": True}),
        ("/generate", {"input_ids": [4096]}),
        ("/generate", {"input_ids": [[5], [6, 4096]], "stream": True}),
    ],
)
def test_a_prompt_id_beyond_the_vocabulary_is_not_sent(path, body):
    """SGLang 0.5.23 exits on it. Without a known size the call is sent."""
    with pytest.raises(InvalidValue, match="is no token id of the engine, which has 4096 of them"):
        plan(path, body, SIZED)

    assert plan(path, body, PARSED)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {}),
        (CHAT, {"input_ids": [0, 4095]}),
        (CHAT, {"input_ids": []}),
        (CHAT, {"input_ids": "9999"}),
        (CHAT, {"input_ids": [None, {}, "x", float("inf"), float("nan")]}),
        (CHAT, {"prompt": [9999]}),
        (COMPLETIONS, {"prompt": ["9999", "5"]}),
        (COMPLETIONS, {"prompt": [["9999"], [], 5]}),
        (COMPLETIONS, {"prompt": [[0], [4095]], "input_ids": [9999]}),
        ("/generate", {"text": "9999"}),
        ("/generate", {"input_ids": [[5], [4095]]}),
    ],
)
def test_other_prompts_are_sent(path, body):
    """The server itself rejects what is no list of ids."""
    assert plan(path, body, SIZED)


MASKED = CallOptions(sampling_masks=True)
TRUNCATED = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "top_k": 20, "top_p": 0.9}


def masked_response(mask, logprobs=(-0.5, -0.25)):
    """Return a response of two tokens with this mask: ids, and logprobs over all tokens of -3 and -2."""
    meta = {
        "output_token_logprobs": [[-3.0, 5, None], [-2.0, 6, None]],
        "completion_tokens": 2,
        "output_token_sampling_mask": mask,
        "output_token_sampling_logprobs": list(logprobs),
        "output_token_sampling_mask_length": 2,
    }
    choice = {
        "index": 0, "message": {"role": "assistant", "content": "x"}, "finish_reason": "stop", "logprobs": None,
        "prompt_token_ids": [1, 2], "response_token_ids": [5, 6], "meta_info": meta,
    }  # fmt: skip
    usage = {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4}
    return orjson.dumps({"id": "i", "object": "chat.completion", "model": "m", "choices": [choice], "usage": usage})


def outcome_of(response, body, options):
    """Return what the client of a chat receives, and the step."""
    exchange = Exchange(plan_of(CHAT, body, options, kind="sglang"), 200, "application/json")
    exchange.response.feed(response)
    outcome = exchange.finish(Timing(0.0))
    return orjson.loads(outcome.end), outcome.step


def masked_step(response, body=TRUNCATED):
    return outcome_of(response, body, MASKED)


@pytest.mark.parametrize(
    ("body", "requested"),
    [
        ({}, True),
        ({"stream": True}, True),
        ({"top_k": None}, False),
        ({"top_k": -1}, False),
        ({"top_k": 10_000}, False),
        ({"top_k": "20"}, False),
        ({"custom_logit_processor": "x"}, False),
    ],
)
def test_a_sampling_mask_is_requested_where_the_server_returns_one(body, requested):
    """It refuses a call without a bounded top_k. Streams have no masks, so they are replayed."""
    plan = plan_of(CHAT, TRUNCATED | body, MASKED, kind="sglang")

    assert requested is plan.body.get("return_sampling_mask", False)
    assert "return_sampling_mask" not in plan_of(CHAT, TRUNCATED | body, kind="sglang").body
    assert "stream" not in body or plan.framing == "replay"


def test_a_mask_is_recorded_with_the_logprobs_over_its_tokens():
    """The client receives neither; the step has the mode of these logprobs."""
    shown, step = masked_step(masked_response([[4, 5], [6, 7, 8]]))
    (choice,) = step.choices

    assert (unpack_mask(choice.sampling_mask), step.problems) == ([[4, 5], [6, 7, 8]], ())
    assert choice.logprobs.tolist() == [-0.5, -0.25]
    assert (step.sampling["logprobs_mode"], step.logprobs_over(choice)) == ("processed_logprobs", "mask")
    assert "meta_info" not in shown["choices"][0]


def test_a_client_that_requests_meta_info_receives_the_mask_only_if_it_requests_that_too():
    response, fields = masked_response([[4, 5], [6, 7, 8]]), TRUNCATED | {"return_meta_info": True}
    plain, _ = masked_step(response, fields)
    masked, _ = masked_step(response, fields | {"return_sampling_mask": True})

    assert plain["choices"][0]["meta_info"].keys() == {"completion_tokens"}
    assert masked["choices"][0]["meta_info"]["output_token_sampling_mask"] == [[4, 5], [6, 7, 8]]


@pytest.mark.parametrize(
    ("mask", "problem"),
    [
        ([[4, 5]], "mask_count"),
        ([[4, 5], [7, 8]], "bad_mask"),
        ([[4, 5], []], "bad_mask"),
        ([[4, 5], [6, -7]], "bad_mask"),
        ([[4, 5], [6, True]], "bad_mask"),
        ([[4, 5], [6, 2**40]], "bad_mask"),
        ([[4, 5], [[6]]], "bad_mask"),
        ([4, 6], "bad_mask"),
        ("56", "bad_mask"),
        ({"5": [5]}, "bad_mask"),
    ],
)
def test_a_wrong_mask_is_flagged_and_loses_no_token(mask, problem):
    _, step = masked_step(masked_response(mask))

    assert step.problems == (problem,)
    assert step.choices[0].ids.tolist() == [5, 6]


@pytest.mark.parametrize("logprobs", [[[-0.5], [-0.25]], [-1, -2], "ab", [None, -0.5]])
def test_logprobs_over_masks_that_are_no_numbers_are_not_recorded(logprobs):
    """With `sampling_logprobs_mode: support` they are lists."""
    _, step = masked_step(masked_response([[4, 5], [6, 7, 8]], logprobs))

    assert step.choices[0].logprobs.tolist() == [-3.0, -2.0]
    assert step.sampling["logprobs_mode"] == "after_temperature_logprobs"


@pytest.mark.parametrize(
    ("mode", "sampling", "over"),
    [
        ("processed_logprobs", {"top_p": 0.9}, "truncated"),
        ("processed_logprobs", {"top_k": 5}, "truncated"),
        ("processed_logprobs", {"min_p": 0.1}, "truncated"),
        ("processed_logprobs", {"top_p": 1, "top_k": -1, "min_p": 0}, None),
        ("processed_logprobs", {"top_k": 0, "temperature": 0.5}, None),
        ("raw_logprobs", {"top_p": 0.9}, None),
    ],
)
def test_logprobs_of_truncated_sampling_without_a_mask_are_named(mode, sampling, over):
    """They are over tokens that the engine does not report."""
    plan = plan_of("/v1/chat/completions", {"messages": [], **sampling}, kind="vllm", logprobs_mode=mode)
    step = make_step("a", [1], [2], sampling=plan.sampling)

    assert step.logprobs_over(step.choices[0]) == over
    (row,) = FORMATS["steps"].plan(worked.FACTS, [step], Options()).render()
    assert row.get("logprobs_over") == over
    (row,) = FORMATS["sequences"].plan(worked.FACTS, [step], Options()).render()
    assert row["spans"][0].get("logprobs_over") == over


REPLAYED = CallOptions(routed_experts=True)


def expert_step(raw, body=None, **changed):
    """Return what the client receives, and the step of a response with these experts in its meta_info."""
    response = orjson.loads(masked_response([[5], [6]]))
    meta = {"output_token_logprobs": [[-3.0, 5, None], [-2.0, 6, None]], "routed_experts": raw, **changed}
    response["choices"][0]["meta_info"] = meta
    return outcome_of(orjson.dumps(response), {"messages": [], **(body or {})}, REPLAYED)


@pytest.mark.parametrize(
    ("raw", "problems"),
    [
        (b64encode(bytes(4 * 3 * 6)).decode(), ()),  # two tokens of the prompt, two sampled: the last one has none
        (None, ()),
        (b64encode(bytes(4 * 3 * 6 - 4)).decode(), ("bad_experts",)),
        ("", ("bad_experts",)),
        ("no base64", ("bad_experts",)),
        ([[1, 2]], ("bad_experts",)),
        (True, ("bad_experts",)),
        ({"a": 1}, ("bad_experts",)),
    ],
)
def test_wrong_experts_are_flagged_and_lose_no_token(raw, problems):
    """The client receives none. A model that is no mixture of experts has none."""
    shown, step = expert_step(raw)

    assert step.problems == problems
    assert step.choices[0].ids.tolist() == [5, 6]
    assert "meta_info" not in shown["choices"][0]


def test_a_client_that_requests_meta_info_receives_it_without_experts():
    shown, _ = expert_step(b64encode(bytes(72)).decode(), {"return_meta_info": True})

    assert shown["choices"][0]["meta_info"] == {}


def test_a_client_that_requests_experts_receives_them_where_the_engine_has_them():
    """SGLang moves them from `sglext` to `meta_info` if that is requested, so it is not."""
    body = {"messages": [], "return_routed_experts": True}
    raw = b64encode(bytes(72)).decode()
    response = orjson.loads(masked_response([[5], [6]]))
    response["choices"][0] |= {"meta_info": None, "logprobs": {"content": [{"token": "a", "logprob": -1.0}] * 2}}
    shown, step = outcome_of(orjson.dumps({**response, "sglext": {"routed_experts": raw}}), body, REPLAYED)

    assert "return_meta_info" not in plan_of(CHAT, body, REPLAYED, kind="sglang").body
    assert shown["sglext"] == {"routed_experts": raw}
    assert ((), bytes(72)) == (step.problems, step.choices[0].routed_experts.raw)


def test_a_stream_is_replayed_if_experts_are_configured():
    assert plan_of(CHAT, {"messages": [], "stream": True}, REPLAYED, kind="sglang").framing == "replay"


def comparable(response: bytes, *, is_stream: bool) -> list[bytes]:
    """Return the events without ids and times, in any order of the choices."""
    return sorted(normal(response).split(b"\n\n")) if is_stream else [normal(response)]


PAIRS = sorted(
    name.removesuffix("_inj")
    for name in names("recorded/*_inj", "sglang")
    if not name.startswith(("recorded/native_", "recorded/midway_"))
)


@pytest.mark.parametrize("pair", PAIRS)
def test_a_stripped_response_of_a_real_server_is_the_plain_one(pair):
    """Byte for byte, and the step is exact."""
    plain, injected = load(f"{pair}_plain", "sglang"), load(f"{pair}_inj", "sglang")
    plan = plan_of(
        plain.path, plain.body, CallOptions(streaming="live"), kind="sglang", traits=PARSED, headers=plain.headers
    )
    # A call's id depends on its step.
    assert injected.body | {"rid": None} == plan.body | {"rid": None}
    assert (injected.headers or {}) == {**(plain.headers or {}), **plan.headers}

    shown, end, step = play(plan, injected)

    streams = {"is_stream": plain.is_stream}
    assert comparable(plain.response, **streams) == comparable(shown + end, **streams)
    assert step.exact or set(step.problems) & {"engine_error", "uncounted"}
