"""The laws of the protocols, on every recorded response: split, accumulate, transparency, order, once, ids, round trip."""

import re
from dataclasses import replace

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.each_cassette import of_each
from tests.support.recorded import Cassette, cut, dialect_cassettes, http_cassettes, load, names, plan_of, play

from proxy.protocols.dialects import DIALECTS
from proxy.protocols.exchange import Exchange
from proxy.protocols.plan import Plan
from proxy.trajectory.blocks import BlockReader
from proxy.trajectory.codec import decode, encode
from proxy.trajectory.facts import RolloutFacts
from proxy.trajectory.sequence import Options, sequences
from proxy.trajectory.step import Step

# The options that the proxy sets on requests.
INJECTED = (
    "return_token_ids", "logprobs", "return_meta_info", "return_input_ids_in_sglext", "return_output_ids_in_sglext",
    "verbose", "return_tokens", "return_logprob", "return_prompt_token_ids", "rid",
)  # fmt: skip
KINDS = ("vllm", "sglang", "llamacpp")
EVERY = [
    *http_cassettes("llamacpp"),
    *(
        cassette for kind in KINDS for cassette in dialect_cassettes(kind)
    ),  # including those recorded by `make cassettes`
]
STREAMS = [cassette for cassette in EVERY if cassette.is_stream]
FACTS = RolloutFacts("r1", None, "open", None, {}, None, {})
LIVE = {"stream": True, "stream_options": {"unknown": True}}  # an unknown option, which prevents a synthetic stream


def plan_as_recorded(cassette: Cassette) -> Plan:
    """Return the plan of the recorded call, streamed as recorded."""
    body = cassette.body | (LIVE if cassette.is_stream and cassette.body.get("stream") else {})
    return plan_of(cassette.path, body, kind=cassette.kind)


def plan_without_options(cassette: Cassette) -> Plan:
    """Return the plan of the same call by a client that requests no ids and no logprobs."""
    body = {key: value for key, value in cassette.body.items() if key not in (*INJECTED, "top_logprobs")}
    return plan_of(cassette.path, body | (LIVE if cassette.is_stream else {}), kind=cassette.kind)


def recorded_values(step: Step) -> tuple:
    return step.prompts, repr(step.choices), step.problems, step.status, orjson.dumps(step.response), step.usage


PLANS = st.sampled_from([plan_as_recorded, plan_without_options])


@of_each(EVERY)
def test_split_byte_by_byte(cassette: Cassette):
    """Reading the response byte by byte yields the same bytes for the client, and the same step."""
    plan = plan_without_options(cassette)
    shown, end, step = play(plan, cassette)
    pieces = play(plan, cassette, [cassette.response[i : i + 1] for i in range(len(cassette.response))])

    assert (shown, end, recorded_values(step)) == (*pieces[:2], recorded_values(pieces[2]))


@given(st.sampled_from(EVERY), PLANS, st.lists(st.integers(0, 900), max_size=40))
def test_split_anywhere(cassette: Cassette, planned, sizes):
    """So does any other split: within events, within characters, with several events in a read, with empty reads."""
    plan = planned(cassette)
    shown, end, step = play(plan, cassette)
    pieces = play(plan, cassette, cut(cassette.response, sizes))

    assert (shown, end, recorded_values(step)) == (*pieces[:2], recorded_values(pieces[2]))


@of_each(c for c in STREAMS if re.search(rb"[\x80-\xff]", c.response))
def test_split_within_every_character(cassette: Cassette):
    """So does a split before each continuation byte of UTF-8."""
    positions = [i for i, byte in enumerate(cassette.response) if 0x80 <= byte < 0xC0]
    reads = [cassette.response[a:b] for a, b in zip([0, *positions], [*positions, None], strict=True)]
    plan = plan_without_options(cassette)

    assert play(plan, cassette)[:2] == play(plan, cassette, reads)[:2]
    assert recorded_values(play(plan, cassette)[2]) == recorded_values(play(plan, cassette, reads)[2])


@of_each(STREAMS)
def test_line_ends_may_be_crlf(cassette: Cassette):
    """The client gets the engine's line ends."""
    plan = plan_without_options(cassette)
    shown, end, step = play(plan, cassette)
    other_shown, other_end, other = play(plan, cassette, [cassette.response.replace(b"\n", b"\r\n")])

    assert (shown + end).replace(b"\n", b"\r\n") == other_shown + other_end
    assert recorded_values(step) == recorded_values(other)


@given(st.sampled_from(STREAMS), st.randoms(use_true_random=False))
def test_comments_are_forwarded_and_do_not_change_the_step(cassette: Cassette, random):
    comment = b": ping\n\n"
    events = cassette.response.split(b"\n\n")[:-1]
    with_comments = b"".join(event + b"\n\n" + comment * random.randint(0, 2) for event in events)
    plan = plan_without_options(cassette)
    shown, end, step = play(plan, cassette)
    other_shown, other_end, other = play(plan, cassette, [with_comments])

    assert (other_shown + other_end).replace(comment, b"") == shown + end
    assert with_comments.count(comment) == (other_shown + other_end).count(comment)
    assert recorded_values(step) == recorded_values(other)


@given(st.sampled_from(STREAMS), PLANS, st.lists(st.integers(0, 900), max_size=40))
def test_order_nothing_shows_the_last_finish_reason_before_the_step_is_stored(cassette: Cassette, planned, sizes):
    """This holds for every split."""
    plan = planned(cassette)
    exchange = Exchange(plan, cassette.status, cassette.content_type)
    shown = b"".join(map(exchange.response.feed, cut(cassette.response, sizes)))
    chunks = [orjson.loads(line.removeprefix(b"data: ")) for line in shown.split(b"\n") if line.startswith(b"data: {")]
    finished = {
        choice["index"]
        for chunk in chunks
        for choice in chunk.get("choices") or ()
        if choice["finish_reason"] is not None
    } | {chunk.get("index", 0) for chunk in chunks if chunk.get("meta_info", {}).get("finish_reason")}

    assert b"[DONE]" not in shown
    assert len(finished) < (plan.response_options.choices or 2)


PROMPTS = {"tokens": list(range(30))}  # the result of a lookup of any prompt
SAMPLED = [
    step
    for cassette in EVERY
    if (step := play(plan_without_options(cassette), cassette, found=PROMPTS)[2]).sampled and step.status == "complete"
]


@given(st.lists(st.sampled_from(SAMPLED), min_size=1, max_size=8), st.sampled_from(["exact", "flagged"]))
def test_once_and_ids(steps, include):
    """Over all rows each sampled token is trained at most once; the spans of a row are the recorded ids in order."""
    # Separate calls: of two equal calls one may be a retry of the other, and only one of them is trained.
    steps = [replace(step, step_id=f"{n}", extra={"request_key": f"{n}"}) for n, step in enumerate(steps)]
    recorded = {(step.step_id, choice.index): (step, choice) for step in steps for choice in step.choices}
    trained = dict.fromkeys(recorded, 0)
    rows = sequences(steps, FACTS, Options(include=include)).rows
    for row in rows:
        for span in row.spans:
            step, choice = recorded[span.step_id, span.choice]
            first = step.prompts[choice.prompt]
            assert first.tolist() == row.token_ids[: len(first)]
            assert choice.ids.tolist() == row.token_ids[len(first) : len(first) + len(choice.ids)]
            trained[span.step_id, span.choice] += (span.end - span.start) * span.owned
        assert sum(row.mask) == sum(span.end - span.start for span in row.spans if span.owned)
        assert len(row.token_ids) == len(row.mask) == len(row.logprobs)

    for name, (step, choice) in recorded.items():
        assert trained[name] in (0, len(choice.ids))
        assert trained[name] or not step.exact or not choice.ids


@of_each(EVERY)
def test_round_trip(cassette: Cassette):
    """`decode(encode(step)) == step`."""
    step = play(plan_without_options(cassette), cassette)[2]
    record = encode(step)

    assert repr(step) == repr(decode(record.record, BlockReader(record.blocks), None))


@of_each(c for c in EVERY if not plan_as_recorded(c).view.strip_rules.anything)
def test_transparency_a_client_that_requests_the_injected_options_gets_the_engines_bytes(cassette: Cassette):
    """So does a client of a call for which nothing is injected."""
    assert cassette.response == b"".join(play(plan_as_recorded(cassette), cassette)[:2])


# What the flags of SGLang's `/generate` add to `meta_info`.
LOGPROBS = ("input_token_logprobs", "output_token_logprobs", "output_token_logprobs_length", "output_top_logprobs")

# The proxy requests ids in `sglext` for streams only; these were recorded unstreamed.
UNSTREAMED_SGLEXT = {c.response for c in EVERY if b'"sglext"' in c.response and not c.is_stream}


@of_each(c for c in EVERY if c.status == 200 and c.response not in UNSTREAMED_SGLEXT)
def test_transparency_a_client_without_the_options_gets_no_ids_and_no_logprobs(cassette: Cassette):
    """All it gets is in the engine's response."""
    plan = plan_without_options(cassette)
    shown = b"".join(play(plan, cassette)[:2])
    lines = [line.removeprefix(b"data: ") for line in shown.split(b"\n") if line.startswith(b"data: {")]
    for text in lines if cassette.is_stream else [shown]:
        response = orjson.loads(text)
        if cassette.path == "/generate":
            for choice in response if isinstance(response, list) else [response]:
                assert not {"prompt_token_ids", *LOGPROBS} & {*choice, *choice.get("meta_info", ())}
            continue
        assert not {"sglext", "__verbose"} & response.keys()
        for choice in response.get("choices") or ():
            for key in ("token_ids", "response_token_ids", "meta_info", "logprobs"):
                assert (
                    not plan.view.strip_rules.anything
                    or not choice.get(key)
                    or cassette.path == "/inference/v1/generate"
                )
    assert shown == cassette.response or plan.view.strip_rules.anything


# With --stream-interval=64, SGLang's streams lose the arguments of calls (0.5.23), which `each_token` has.
WITHOUT_TWIN = (
    "recorded/chat_tool_call", "recorded/chat_tool_required", "recorded/chat_thought_calls",
)  # fmt: skip
SGLANG_TWINS = [
    (name.replace("each_token", "recorded").replace("_s_", "_n_"), name)
    for of_set in ("recorded", "each_token", "unparsed")
    for name in names(f"{of_set}/chat_*_s_*", "sglang")
    if load(name, "sglang").status == 200 and "unparsed/chat_sglext" not in name and not name.startswith(WITHOUT_TWIN)
]


@pytest.mark.parametrize(("whole", "stream"), SGLANG_TWINS)
def test_accumulating_a_stream_of_sglang_yields_the_unstreamed_response(whole, stream):
    """Around calls, a stream has spaces that its twin has not, and the stop token."""
    accumulator = DIALECTS["/v1/chat/completions"].accumulator()
    for event in load(stream, "sglang").response.split(b"\n\n"):
        payload = event.rpartition(b"data: ")[2].strip()
        if payload not in (b"", b"[DONE]"):
            accumulator.feed(orjson.loads(payload))
    accumulated, expected = accumulator.finish(), orjson.loads(load(whole, "sglang").response)
    extension = accumulated.get("sglext") or {}

    for whole_choice, choice in zip(expected["choices"], accumulated["choices"], strict=True):
        # Only streams have null as the text of a tool call; the ids of calls are random.
        first, second = content_of(whole_choice["message"]), content_of(choice["message"])
        stops = [whole_choice["matched_stop"], choice["matched_stop"]]
        if first["calls"]:
            second["content"], stops[1] = (second["content"] or "").strip() or None, None
        assert (first, whole_choice["finish_reason"]) == (second, choice["finish_reason"])
        assert stops[0] == stops[1]
        if "output_ids" in extension and "response_token_ids" in whole_choice:
            assert whole_choice["response_token_ids"] == extension["output_ids"][choice["index"]]
            assert whole_choice["prompt_token_ids"] == extension["input_ids"]


LLAMACPP_TWINS = [
    (name, name.replace("_n_", "_s_"))
    for name in names("recorded/*_n_*", "llamacpp")
    if load(name, "llamacpp").path in DIALECTS and load(name.replace("_n_", "_s_"), "llamacpp").status == 200
]
# The engine has different entries in streams and unstreamed responses (observed with 2026.10).
OTHER_ENTRIES = {
    "chat_schema": "entries are missing in the middle of the stream",
    "chat_stop": "in streams, some tokens of a stop string have entries",
    "cmpl_stop": "as chat_stop",
    "chat_tool": "with tools, a stream has none, and requesting them is an error",
}


@pytest.mark.parametrize(("whole", "stream"), LLAMACPP_TWINS)
def test_accumulating_a_stream_of_llamacpp_yields_the_unstreamed_response(whole, stream):
    """The entries of a chat's EOS differ."""
    accumulator = DIALECTS[load(stream, "llamacpp").path].accumulator()
    for event in load(stream, "llamacpp").response.split(b"\n\n"):
        payload = event.removeprefix(b"data: ").strip()
        if payload not in (b"", b"[DONE]", b"null"):
            accumulator.feed(orjson.loads(payload))
    accumulated, expected = accumulator.finish(), orjson.loads(load(whole, "llamacpp").response)

    for whole_choice, choice in zip(expected["choices"], accumulated["choices"], strict=True):
        assert content_of(whole_choice.get("message") or {}) == content_of(choice.get("message") or {})
        assert (whole_choice.get("text"), whole_choice["finish_reason"]) == (
            choice.get("text"),
            choice["finish_reason"],
        )
        if not any(f"/{name}" in whole for name in OTHER_ENTRIES):
            assert ids_of(choice) in (ids_of(whole_choice), ids_of(whole_choice)[:-1])


def ids_of(choice: dict) -> list[int]:
    return [entry["id"] for entry in (choice.get("logprobs") or {}).get("content") or ()]


def content_of(message: dict) -> dict:
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return {key: message.get(key) or None for key in ("role", "content", "reasoning_content")} | {"calls": calls}


def test_the_laws_cover_many_responses_of_every_engine():
    counted = {kind: sum(cassette.kind == kind for cassette in EVERY) for kind in KINDS}

    assert counted["sglang"] > 270
    assert counted["vllm"] > 250
    assert counted["llamacpp"] > 120
