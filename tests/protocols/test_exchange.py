"""Request and response of one call: forwarded bytes and recorded step, for recorded responses, images and invalid values."""

import json
import re
from array import array
from dataclasses import replace

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.each_cassette import of_each
from tests.support.recorded import (
    CASSETTES,
    ROOTS,
    Cassette,
    dialect_cassettes,
    http_cassettes,
    load,
    names,
    plan_of,
    play,
)

from proxy.protocols.dialects import DIALECTS
from proxy.protocols.engines import ENGINES
from proxy.protocols.engines.base import CallOptions, Sampled, StripRules, Tokens, Traits
from proxy.protocols.exchange import Exchange, check_messages, check_usage, pack_tokens, response_stream_for
from proxy.protocols.plan import with_image_tokens
from proxy.protocols.response import ClientView, StreamResponse
from proxy.protocols.whole_response import RawResponse, WholeResponse
from proxy.trajectory.codec import encode
from proxy.trajectory.images import names_in, placed
from proxy.trajectory.step import Timing

PAIRS = sorted(
    name.removesuffix("_plain")
    for folder in ("pairs_hermes", "pairs_hermes_qwen3")
    for name in names(f"{folder}/*_plain")
)
# Choices interleave differently in any two runs of the engine; equal as a multiset of events.
INTERLEAVED = {"pairs_hermes_qwen3/chat_n2_s", "pairs_hermes_qwen3/cmpl_multi_s"}
EVERY = dialect_cassettes()


def normal(response: bytes) -> bytes:
    """Blank the fields that differ between any two runs: ids of the response and of tool calls, creation time."""
    response = re.sub(rb'"(id|request_id)":"(chatcmpl|cmpl|generate-tokens)-[^"]*"', b'"id":""', response)
    return re.sub(rb'"created":\d+', b'"created":0', response)


def played(cassette, reads=None):
    """Return what the client gets before and at the end, and the step, of a recorded call."""
    return play(plan_of(cassette.path, cassette.body), cassette, reads)


def aborted(cassette, response, why="the client disconnected", *, delivered=False):
    """Return the outcome of a recorded call that is aborted after this part of its response."""
    exchange = Exchange(plan_of(cassette.path, cassette.body), 200, cassette.content_type)
    exchange.response.feed(response)
    return exchange.abort(why, Timing(received=1.0), delivered=delivered)


def without_call_ids(response):
    return re.sub(rb"chatcmpl-tool-\w+", b"", normal(response))


@pytest.mark.parametrize("pair", PAIRS)
def test_stripping_restores_the_plain_response_byte_for_byte(pair):
    """Without the fields that TokenTape injects, the response equals one to a request without injection."""
    plain, injected = load(f"{pair}_plain"), load(f"{pair}_inj")
    # The servers of this set send usage with each event, requested or not (tests/cassettes/README.md).
    traits = Traits("vllm", "0.32.0", forces_usage=pair.startswith("pairs_hermes/"))
    plan = plan_of(plain.path, plain.body, traits=traits)
    if "echo" in pair:
        assert plain.body == plan.body
        return
    requested = {key: value for key, value in injected.body.items() if key in plan.body and key != "stream_options"}
    assert requested == {key: value for key, value in plan.body.items() if key != "stream_options"}

    shown, end, step = play(plan, injected)

    expected, actual = normal(plain.response), normal(shown + end)
    if pair in INTERLEAVED:
        expected, actual = sorted(expected.split(b"\n\n")), sorted(actual.split(b"\n\n"))
    assert actual == expected
    assert step.problems == ()


@pytest.mark.parametrize("pair", sorted(name.removesuffix("_inj") for name in names("recorded/*_inj")))
def test_stripping_removes_the_usage_that_was_injected(pair):
    """The bytes equal a plain call's without usage, streamed too; the fingerprint is on the finish chunk again.

    Recorded with --stream-interval=64: otherwise two runs of the engine group tokens into different events.
    """
    plain, injected = load(f"{pair}_plain"), load(f"{pair}_inj")
    plan = plan_of(plain.path, plain.body, CallOptions(streaming="live"))
    assert injected.body == plan.body

    shown, end, step = play(plan, injected)

    assert without_call_ids(plain.response) == without_call_ids(shown + end)
    assert step.exact or "engine_error" in step.problems


@pytest.mark.parametrize("name", ["forced_usage/si3_utf8_stream", "forced_usage/si5_tool_stream"])
def test_usage_that_a_server_always_sends_is_forwarded(name):
    """With --enable-force-include-usage, the client sees usage in each event although it did not request it."""
    cassette = load(name)
    plan = plan_of(cassette.path, {key: value for key, value in cassette.body.items() if key != "stream_options"})
    exchange = Exchange(plan, 200, cassette.content_type)
    shown = exchange.response.feed(cassette.response)
    outcome = exchange.finish(Timing(received=1.0))

    assert plan.view.strip_rules.usage
    assert cassette.response == shown + outcome.end
    assert (exchange.response.forces_usage, outcome.step.problems) == (True, ())


FLAGS = orjson.loads((CASSETTES / "flags.json").read_bytes())


def responses_with_flags():
    kinds = ("vllm", "llamacpp", "sglang")
    every = [*(item for kind in kinds for item in dialect_cassettes(kind)), *http_cassettes("llamacpp")]
    return [item for item in every if not (item.kind == "vllm" and item.name.startswith("recorded/"))]


@of_each(responses_with_flags())
def test_a_recorded_response_gets_exactly_its_listed_flags(cassette):
    """A new check must flag no response of a real engine that it did not flag before."""
    plan = plan_of(cassette.path, cassette.body, kind=cassette.kind, headers=cassette.headers)

    assert FLAGS[f"{cassette.kind}/{cassette.name}"] == list(play(plan, cassette)[2].problems)


def test_each_listed_flag_has_a_cassette():
    assert FLAGS.keys() == {f"{item.kind}/{item.name}" for item in responses_with_flags()}


@pytest.mark.parametrize("pair", [pair for pair in PAIRS if "echo" in pair])
def test_a_call_with_echo_is_not_injected_and_is_flagged(pair):
    """vLLM omits the echoed text if token ids are requested, so the call is forwarded unchanged and recorded without ids."""
    plain = load(f"{pair}_plain")
    shown, end, step = played(plain)

    assert plain.response == shown + end
    assert {"echo", "no_token_ids"} <= set(step.problems)


@pytest.mark.parametrize(
    "name",
    ["chat_ids_lp", "cmpl_ids_lp0", "chat_ids_lp_stream", "tool_auto_regex_stream", "tool_auto_regex",
     "tool_auto_ids_only_stream", "reasoning/r_regex_after_stream"],
)  # fmt: skip
def test_a_client_that_sets_the_engines_flags_gets_the_engines_bytes(name):
    cassette = load(name)
    shown, end, step = played(cassette)

    assert cassette.response == shown + end
    assert step.choices[0].ids


@pytest.mark.parametrize("name", ["tool_auto_ids_only_stream", "tool_auto_lp_only_stream"])
def test_a_client_that_requests_only_ids_or_only_logprobs_gets_only_these(name):
    """What was injected is stripped; the events that only carry ids are forwarded."""
    requested, full = load(name), load("tool_auto_regex_stream")
    shown, end, _ = play(plan_of(requested.path, requested.body), full)

    assert without_call_ids(requested.response) == without_call_ids(shown + end)


def test_an_engine_that_disconnects_midstream_leaves_a_partial_step():
    """The tokens received so far are recorded, and the step is not marked as delivered."""
    cassette = load("chat_ids_lp_stream")
    half = cassette.response[: len(cassette.response) // 2]
    outcome = aborted(cassette, half, "Engine e disconnected", delivered=True)

    assert (outcome.step.status, outcome.step.reason, outcome.broken) == ("partial", "Engine e disconnected", True)
    assert 0 < outcome.step.sampled < 24
    assert not outcome.step.delivered
    assert "stream_cut" in outcome.step.problems


def test_a_client_that_disconnects_after_the_terminal_event_leaves_a_complete_undelivered_step():
    cassette = load("chat_ids_lp_stream")
    exchange = Exchange(plan_of(cassette.path, cassette.body), 200, cassette.content_type)
    exchange.response.feed(cassette.response.removesuffix(b"data: [DONE]\n\n"))
    before = exchange.response.is_over
    exchange.response.feed(b"data: [DONE]\n\n")
    step = exchange.abort("the client disconnected", Timing(received=1.0), delivered=False).step

    assert (before, exchange.response.is_over) == (False, True)
    assert (step.status, step.reason, step.delivered, step.exact) == ("complete", None, False, True)


def test_a_stream_without_its_terminal_event_is_partial():
    """A cleanly closed connection without [DONE] counts as cut off."""
    cassette = load("chat_ids_lp_stream")
    cut_off = cassette.response.removesuffix(b"data: [DONE]\n\n")
    shown, end, step = played(cassette, [cut_off])

    assert cut_off == shown + end
    assert (step.status, step.problems, step.delivered) == ("partial", ("stream_cut",), False)


def test_a_truncated_unstreamed_body_is_partial_and_not_an_engine_error():
    cassette = load("chat_ids_lp")
    step = aborted(cassette, cassette.response[:200]).step

    assert (step.status, step.delivered) == ("partial", False)


UNREADABLE = [
    Cassette(text.decode(), "/v1/chat/completions", {"messages": []}, text, 200, content_type)
    for text, content_type in [
        (b"<html>502</html>", "text/html"),
        (b"not json", "application/json"),
        (b"[]", "application/json"),
    ]
]
# vLLM formats these events with other whitespace.
ERROR_EVENTS = [load("spec_ngram/s_bias_rep_stream"), load("spec_ngram/s_stop_rep_stream")]


@pytest.mark.parametrize("cassette", [*(c for c in EVERY if c.status != 200), *ERROR_EVENTS, *UNREADABLE], ids=str)
def test_an_engines_error_or_what_is_no_completion_is_forwarded_byte_for_byte_and_recorded(cassette):
    """After the step is stored. The step of an error response has the engine's status and body."""
    shown, end, step = played(cassette)

    assert (b"", cassette.response) == (shown, end)
    assert step.status == "error"
    if cassette.status != 200:
        assert (cassette.status, cassette.response.decode()) == (step.response["status"], step.response["body"])


def test_an_unreadable_event_is_forwarded_and_flags_the_step():
    cassette = load("chat_ids_lp_stream")
    unreadable = b'data: {"choices":[{"delta":{}}]}\n\ndata: 7\n\ndata: {oops\n\n'
    shown, end, step = played(cassette, [unreadable, cassette.response])

    assert unreadable + cassette.response == shown + end
    assert step.problems == ("unparsed_event",)


def test_nan_logprobs_are_forwarded_unchanged_and_flag_the_step():
    """Engines in Python may write NaN, which is not JSON."""
    cassette = load("chat_ids_lp")
    response = cassette.response.replace(b'"logprob":-6.792507648468018', b'"logprob":NaN', 1)
    shown, end, step = played(cassette, [response])

    assert response == shown + end
    assert step.problems == ("bad_logprob",)


@pytest.mark.parametrize("name", ["cmpl_multi_prompt_stream", "cmpl_multi_prompt", "cmpl_n3", "cmpl_n3_stream"])
def test_a_choices_prompt_is_its_index_divided_by_n(name):
    cassette = load(name)
    _, _, step = played(cassette)
    n = cassette.body.get("n", 1)
    prompts = cassette.body["prompt"] if isinstance(cassette.body["prompt"], list) else [cassette.body["prompt"]]

    assert len(prompts) == len(step.prompts)
    assert [choice.index // n for choice in step.choices] == [choice.prompt for choice in step.choices]
    assert "mixed_prompts" not in step.problems


KEYS = [
    "choices", "index", "delta", "message", "text", "token_ids", "prompt_token_ids", "logprobs", "content", "logprob",
    "tool_calls", "function", "arguments", "finish_reason", "usage", "completion_tokens", "error", "token_logprobs",
    "meta_info", "output_token_logprobs", "weight_versions", "metadata", "sglext", "output_ids", "input_ids", "id",
    "response_token_ids", "matched_stop", "__verbose", "tokens", "prompt", "tokens_predicted", "sampling_mask",
    "routed_experts", "num_retractions",
]  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 2**33) | st.floats() | st.sampled_from(["", "stop", "a"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=5),
    max_leaves=12,
)


# Shaped like a response, with random values in random fields.
CHOICE = st.dictionaries(st.sampled_from(KEYS), JSON, max_size=6).map(lambda odd: {"index": 0, "message": {}} | odd)
ANSWER = JSON | st.lists(CHOICE, max_size=3).flatmap(
    lambda choices: st.dictionaries(st.sampled_from(KEYS), JSON, max_size=4).map(lambda odd: {"choices": choices} | odd)
)


@given(
    st.sampled_from(["vllm", "sglang", "llamacpp", "plain"]),
    st.lists(ANSWER, max_size=5),
    st.sampled_from(["/v1/chat/completions", "/v1/completions", "/inference/v1/generate"]),
    st.booleans(),
    st.sampled_from([{}, {"return_token_ids": True, "logprobs": True}, {"stream": True}]),
    JSON,
)
def test_any_response_of_an_engine_leaves_a_step(kind, responses, path, stream, requested, found):
    """For any JSON from an engine, in any framing, stripped or not: a step is made and encoded, and it is not exact."""
    texts = [json.dumps(response).encode() for response in responses]
    text = b"".join(b"data: " + event + b"\n\n" for event in texts) + b"data: [DONE]\n\n" if stream else b"".join(texts)
    content_type = "text/event-stream" if stream else "application/json"
    body = {"messages": [], "prompt": "x", "token_ids": [1], "sampling_params": {}} | requested
    plan = plan_of(path, body, kind=kind)
    shown, end, step = play(plan, Cassette("any", path, body, text, 200, content_type), found=found)

    is_forwarded = text == shown + end or plan.view.strip_rules.anything or plan.framing == "replay"
    assert is_forwarded or (step.status, b"engine_disconnected" in end) == ("error", True)
    assert not step.exact
    assert encode(step)


@pytest.mark.parametrize(
    ("status", "content_type", "expected"),
    [
        (200, "application/json", WholeResponse),
        (200, "Application/JSON; charset=utf-8", WholeResponse),
        (200, "text/event-stream; charset=utf-8", StreamResponse),
        (200, "text/html", RawResponse),
        (200, "", RawResponse),
        (400, "application/json", RawResponse),
        (500, "text/event-stream", RawResponse),
    ],
)
def test_the_responses_content_type_decides_the_framing(status, content_type, expected):
    """Not the request: an engine may return an unstreamed response to a streaming request."""
    view = ClientView(DIALECTS["/v1/chat/completions"], ENGINES["vllm"], StripRules(), 1)

    assert expected is type(response_stream_for(status, content_type, view))


@pytest.mark.parametrize("size", [1000, 2**18 + 1000])
def test_a_long_incomplete_body_or_event_is_not_parsed_when_a_call_ends_early(size):
    """It would block the event loop; a short one is parsed as far as it goes."""
    whole, stream = load("chat_ids_lp"), load("chat_ids_lp_stream")
    padded = orjson.dumps(orjson.loads(whole.response) | {"padding": "x" * size})
    first, second, *_ = stream.response.split(b"\n\n")
    cut = first + b"\n\n" + b": " + b"x" * size + b"\n" + second
    steps = [aborted(whole, padded).step, aborted(stream, cut).step]

    assert [(step.status, step.sampled > 0) for step in steps] == [("partial", size < 2**18)] * 2


def test_a_part_without_an_image_makes_no_call_with_images():
    """Clients that dump all fields send a null."""
    parts = [{"type": "text", "text": "hi", "image_url": None}]

    assert plan_of("/v1/chat/completions", {"messages": [{"role": "user", "content": parts}]}).extra == {}


NATIVE = {"text": "a", "sampling_params": {"max_new_tokens": 40_000}}


def native_response(count: int) -> bytes:
    """Return a response of SGLang's `/generate` to an aborted call, of 50 bytes per token."""
    meta = {
        "id": "x", "prompt_tokens": 2, "completion_tokens": count, "finish_reason": {"type": "abort"},
        "output_token_logprobs": [[-0.123456789, 12345, None]] * count,
    }  # fmt: skip
    return orjson.dumps({"text": "t", "output_ids": [12345] * count, "prompt_token_ids": [1, 2], "meta_info": meta})


@pytest.mark.parametrize("is_read", [True, False])
def test_of_an_aborted_call_a_long_response_is_parsed_if_all_of_it_arrived(is_read):
    """A truncated one would block the event loop for nothing."""
    exchange = Exchange(plan_of("/generate", NATIVE, kind="sglang"), 200, "application/json")
    body = native_response(20_000)
    exchange.response.feed(body if is_read else body[:-1])
    exchange.is_read = is_read
    step = exchange.abort("the client disconnected", Timing(1.0), delivered=False, is_aborted=True).step

    assert (step.status, step.delivered, step.sampled) == ("partial", False, 20_000 if is_read else 0)


def test_a_stream_that_ends_because_it_was_aborted_is_partial():
    """Without the abort, a stream is complete if its terminal event arrived."""
    response = b"data: " + native_response(3) + b"\n\ndata: [DONE]\n\n"
    steps = []
    for is_aborted in (True, False):
        plan = plan_of("/generate", NATIVE | {"stream": True}, kind="sglang")
        exchange = Exchange(plan, 200, "text/event-stream")
        exchange.response.feed(response)
        steps.append(exchange.abort("left", Timing(1.0), delivered=False, is_aborted=is_aborted).step)

    assert [(step.status, step.reason, step.sampled) for step in steps] == [
        ("partial", "left", 3),
        ("complete", None, 3),
    ]


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
@pytest.mark.parametrize(("penalty", "is_constrained"), [(0, False), (1, True)])
def test_logprobs_over_a_sampling_mask_are_constrained_only_by_what_changes_the_logits_of_its_tokens(
    mode, penalty, is_constrained
):
    """Whether the mode of vLLM's logprobs is configured or not; top-k, top-p and min-p are in the mask."""
    cassette = load("scale_out/generate")
    sampling = cassette.body["sampling_params"] | {"top_k": 5, "top_p": 0.9, "presence_penalty": penalty}
    response = json.loads(cassette.response)
    (choice,) = response["choices"]
    choice["sampling_mask"] = [[token, 4000] for token in choice["token_ids"]]
    plan = plan_of(cassette.path, cassette.body | {"sampling_params": sampling}, logprobs_mode=mode)
    *_, step = play(plan, replace(cassette, response=json.dumps(response).encode()))

    assert (step.sampling["logprobs_mode"], step.constrained) == ("processed_logprobs", is_constrained)
    assert step.logprobs_over(step.choices[0]) == "mask"


FOLDER = ROOTS["vllm"] / "images"
CASES = ["one_image", "two_images", "repeated_image", "image_in_tool_result"]
PLACEHOLDER = 4096


def step_of(name, candidates=(PLACEHOLDER,)):
    cassette = load(f"images/{name}")
    plan = with_image_tokens(plan_of(cassette.path, cassette.body), candidates)
    return play(plan, cassette)[2]


@pytest.mark.parametrize("framing", ["n", "s"])
@pytest.mark.parametrize("name", CASES)
def test_each_image_has_a_place_in_the_prompt_of_the_engine(name, framing):
    step = step_of(f"{name}_{framing}_inj")
    images = placed(step, step.prompts[0])

    assert step.exact
    assert names_in(step.request["messages"]) == [image.image for image in images]
    for image in images:
        assert list(step.prompts[0][image.start : image.start + image.length]) == [PLACEHOLDER] * 4
    assert 4 * len(images) == step.usage["prompt_tokens_details"]["multimodal_tokens"]["image"] if step.usage else True


@pytest.mark.parametrize("name", ["one_image", "two_images"])
def test_the_places_are_those_that_the_engine_renders(name):
    step = step_of(f"{name}_n_inj")
    rendered = orjson.loads((FOLDER / f"{name}_render.response.json").read_bytes())
    expected = [(place["offset"], place["length"]) for place in rendered["features"]["mm_placeholders"]["image"]]

    assert rendered["token_ids"] == list(step.prompts[0])
    assert [(image.start, image.length) for image in placed(step, step.prompts[0])] == expected


def test_a_placeholder_in_a_text_is_a_problem():
    """vLLM expands the first one, which is the text's."""
    step = step_of("placeholder_in_text_n_inj")

    assert step.problems == ("image_count",)
    assert [(image.start, image.length) for image in placed(step, step.prompts[0])] == [(None, None)]


def test_images_of_an_unknown_placeholder_have_no_places_and_no_problem():
    step = step_of("two_images_n_inj", ())

    assert step.exact
    assert {"ids": names_in(step.request["messages"]), "token": None} == step.extra["images"]


@pytest.mark.parametrize("name", names("images/*invalid*") + names("images/no_image*"))
def test_what_the_engine_rejects_is_recorded_with_its_error(name):
    step = play(plan_of(load(name).path, load(name).body), load(name))[2]

    assert (step.status, step.response["status"]) == ("error", 400)
    assert names_in(step.request["messages"]) == step.extra["images"]["ids"]


@pytest.mark.parametrize(("name", "count"), [("image", 1), ("other", 10)])
def test_the_name_of_a_placeholder_is_one_token(name, count):
    body = orjson.loads((FOLDER / f"lookup_{name}.response.json").read_bytes())

    assert len(body["tokens"]) == count
    assert (PLACEHOLDER in body["tokens"]) == (name == "image")


def packed_choice(**fields):
    """Return what becomes of a response with this choice, which has two tokens."""
    bare = {"index": 0, "prompt_ids": None, "ids": [7, 8], "logprobs": [-1.0, -1.0]}
    return pack_tokens(
        Tokens([1], (Sampled(**{**bare, "finish_reason": "stop", "stop_reason": None, **fields}),)), 1, "v"
    )


def test_a_choice_without_its_own_prompt_gets_none():
    """Of two prompts packed_choice is missing: no choice refers to the other's prompt."""
    complete, missing = Sampled(0, [1], [7], [-1.0], "stop", None), Sampled(1, None, [8], [-1.0], "stop", None)
    packed = pack_tokens(Tokens(None, (complete, missing)), 1, None)
    prompts, choices = packed.prompts, packed.choices

    assert (len(prompts), [choice.prompt for choice in choices]) == (1, [0, 1])


def test_prompts_that_cannot_be_matched_to_choices_are_flagged_and_not_recorded():
    first, second = (Sampled(i, [i], [7], [-1.0], "stop", None) for i in (0, 1))

    packed = pack_tokens(Tokens(None, (first, second)), 2, None)

    assert (packed.prompts, packed.problems) == ((), {"mixed_prompts"})


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"counted": 3}, "completion_count"),
        ({"sampling_mask": [[7]]}, "mask_count"),
        ({"spans": ((0, 1, "a"),)}, "version_spans"),
        ({"spans": ((0, 1, "a"), (0, 2, "b"))}, "version_spans"),
        ({"spans": ((1, 2, "a"),)}, "version_spans"),
    ],
)
def test_fields_that_do_not_match_the_sampled_ids_are_flagged(fields, problem):
    """A count, a mask, or policy version spans of another length."""
    assert packed_choice(**fields).problems == {problem}


def test_version_spans_that_cover_the_ids_are_recorded():
    """Empty spans are dropped."""
    packed = packed_choice(spans=((0, 1, "a"), (1, 1, "b"), (1, 2, "c")))

    assert [(span.start, span.end, span.policy_version) for span in packed.choices[0].spans] == [
        (0, 1, "a"),
        (1, 2, "c"),
    ]


@pytest.mark.parametrize(("version", "kept"), [(5, "5"), ("5", "5"), (None, None), (0, "0")])
def test_a_policy_version_is_recorded_as_text(version, kept):
    """A number becomes its digits, as in `PUT /policy`."""
    packed = packed_choice(spans=((0, 2, version),))

    assert ([kept], set()) == ([span.policy_version for span in packed.choices[0].spans], packed.problems)


@pytest.mark.parametrize(
    "spans", [((0, 2, True),), ((0, 2, 1.5),), ((0, 2, ["v"]),), (("0", 2, "v"),), ((0, 2.0, "v"),)]
)
def test_malformed_version_spans_are_flagged_and_not_recorded(spans):
    packed = packed_choice(spans=spans)

    assert (packed.choices[0].spans, packed.problems) == ((), {"version_spans"})


@pytest.mark.parametrize(
    ("value", "kept", "problem"),
    [
        (None, None, None),
        ("stop", "stop", None),
        ({"type": "length", "length": 3}, "length", None),
        ({"type": "because"}, "because", "unknown_finish_reason"),
        ("because", "because", "unknown_finish_reason"),
        ("x" * 101, None, "unknown_finish_reason"),
        ({}, None, "unknown_finish_reason"),
        ([], None, "unknown_finish_reason"),
        (7, None, "unknown_finish_reason"),
    ],
)
def test_a_finish_reason_that_is_unknown_or_no_string_is_flagged(value, kept, problem):
    packed = packed_choice(finish_reason=value)

    assert (packed.choices[0].finish_reason, packed.problems) == (kept, {problem} - {None})


@pytest.mark.parametrize(
    ("value", "kept"), [("END", "END"), (151645, 151645), (True, None), (-1, None), ({}, None), (1.0, None)]
)
def test_a_stop_reason_that_is_neither_a_string_nor_a_token_id_is_flagged(value, kept):
    packed = packed_choice(stop_reason=value)

    assert (packed.choices[0].stop_reason, "unparsed_event" in packed.problems) == (kept, kept is None)


COUNTS = {"prompt_tokens": 1, "completion_tokens": 2}


@pytest.mark.parametrize(
    ("usage", "problem"),
    [
        (None, None),
        ({}, "bad_usage"),
        ({"prompt_tokens": 1}, "bad_usage"),
        ({"completion_tokens": 1, "prompt_tokens": None}, "bad_usage"),
        ({"prompt_tokens": 1, "completion_tokens": 0, "prompt_tokens_details": {"cached_tokens": None}}, None),
        (COUNTS | {"prompt_tokens_details": {"cached_tokens": 0, "multimodal_tokens": {"image": 4}}}, None),
        ({"prompt_tokens_details": {"cached_tokens": 0}}, "bad_usage"),
        (COUNTS | {"total_tokens": 3}, None),
        (COUNTS | {"total_tokens": 4}, "usage_sum"),
        (COUNTS | {"total_tokens": 0}, "usage_sum"),
        (COUNTS | {"total_tokens": "3"}, "bad_usage"),
        ({"prompt_tokens": "1"}, "bad_usage"),
        ({"completion_tokens": -1}, "bad_usage"),
        ({"total_tokens": 1.0}, "bad_usage"),
        (COUNTS | {"details": {"a": {"b": {}}}}, "bad_usage"),
        ([1], "bad_usage"),
        (7, "bad_usage"),
    ],
)
def test_usage_with_values_that_are_no_counts_or_a_wrong_sum_is_rejected(usage, problem):
    """Each has its own code. It must have both counts, and may not be nested deeper than any engine nests it."""
    problems = set()
    check_usage(usage, problems)

    assert problems == ({problem} - {None})


def test_responses_of_generate_need_no_message():
    assert check_messages("generate", {"choices": [{"index": 0}]}) == set()


@pytest.mark.parametrize("returned", [[1, 2], array("i", [1, 2]), (1, 2)])
def test_the_prompt_of_the_response_is_compared_with_the_requests(returned):
    """It is an array if it was parsed apart."""
    complete = Sampled(0, None, [7], [-1.0], "stop", None)

    assert not pack_tokens(Tokens(returned, (complete,)), 1, None, [[1, 2]]).problems
    assert pack_tokens(Tokens(returned, (complete,)), 1, None, [[1, 3]]).problems == {"other_prompt"}
