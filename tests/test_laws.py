"""The seven laws, on every answer recorded from every engine: split, fold, transparency, order, once, ids, round trip.

*Once* and *ids* are tried on random forests as well, in trajectory/test_sequence.py and trajectory/test_shapes.py.
"""

import re
from dataclasses import replace

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from recorded import Cassette, cut, dialect_cassettes, http_cassettes, load, load_http, names, plan_of, play

from proxy.protocols.dialects import DIALECTS
from proxy.protocols.exchange import Exchange
from proxy.protocols.plan import Plan
from proxy.trajectory.blocks import BlockReader
from proxy.trajectory.codec import decode, encode
from proxy.trajectory.facts import RolloutFacts
from proxy.trajectory.sequence import Options, sequences
from proxy.trajectory.step import Step

# What the proxy itself asks, by whatever engine: a client that set none of it.
OURS = (
    "return_token_ids", "logprobs", "return_meta_info", "return_input_ids_in_sglext", "return_output_ids_in_sglext",
    "verbose", "return_tokens",
)  # fmt: skip
KINDS = ("vllm", "sglang", "llamacpp")
EVERY = [
    *http_cassettes("sglang"),
    *http_cassettes("llamacpp"),
    *(cassette for kind in KINDS for cassette in dialect_cassettes(kind)),  # with those recorded by `make cassettes`
]
STREAMS = [cassette for cassette in EVERY if cassette.is_stream]
FACTS = RolloutFacts("r1", None, "open", None, {}, None, {})
LIVE = {"stream": True, "stream_options": {"told live": True}}  # options that nobody replays


def name_of(cassette: Cassette) -> str:
    return f"{cassette.kind}-{cassette}"


def as_it_was(cassette: Cassette) -> Plan:
    """The plan of the recorded call, streamed as it was."""
    body = cassette.body | (LIVE if cassette.is_stream and cassette.body.get("stream") else {})
    return plan_of(cassette.path, body, kind=cassette.kind)


def by_nobody(cassette: Cassette) -> Plan:
    """The plan of the same call, by a client that asked for no ids and no logprobs."""
    body = {key: value for key, value in cassette.body.items() if key not in (*OURS, "top_logprobs")}
    return plan_of(cassette.path, body | (LIVE if cassette.is_stream else {}), kind=cassette.kind)


def kept(step: Step) -> tuple:
    return step.prompts, repr(step.choices), step.problems, step.status, orjson.dumps(step.response), step.usage


PLANS = st.sampled_from([as_it_was, by_nobody])


@pytest.mark.parametrize("cassette", EVERY, ids=name_of)
def test_split_byte_by_byte(cassette: Cassette):
    """However the upstream bytes are cut, the same bytes come out and the same step is kept: at its sharpest."""
    plan = by_nobody(cassette)
    shown, end, step = play(plan, cassette)
    pieces = play(plan, cassette, [cassette.response[i : i + 1] for i in range(len(cassette.response))])

    assert (shown, end, kept(step)) == (*pieces[:2], kept(pieces[2]))


@given(st.sampled_from(EVERY), PLANS, st.lists(st.integers(0, 900), max_size=40))
def test_split_anywhere(cassette: Cassette, planned, sizes):
    """Cut at random: within events, within characters, several events in one read, empty reads."""
    plan = planned(cassette)
    shown, end, step = play(plan, cassette)
    pieces = play(plan, cassette, cut(cassette.response, sizes))

    assert (shown, end, kept(step)) == (*pieces[:2], kept(pieces[2]))


@pytest.mark.parametrize("cassette", [c for c in STREAMS if re.search(rb"[\x80-\xff]", c.response)], ids=name_of)
def test_split_within_every_character(cassette: Cassette):
    """Before each continuation byte of UTF-8."""
    places = [i for i, byte in enumerate(cassette.response) if 0x80 <= byte < 0xC0]
    reads = [cassette.response[a:b] for a, b in zip([0, *places], [*places, None], strict=True)]
    plan = by_nobody(cassette)

    assert play(plan, cassette)[:2] == play(plan, cassette, reads)[:2]
    assert kept(play(plan, cassette)[2]) == kept(play(plan, cassette, reads)[2])


@pytest.mark.parametrize("cassette", STREAMS, ids=name_of)
def test_split_by_crlf_as_well_as_lf(cassette: Cassette):
    """Lines of an event stream may end either way, and the client gets the ends that the engine wrote."""
    plan = by_nobody(cassette)
    shown, end, step = play(plan, cassette)
    again, last, other = play(plan, cassette, [cassette.response.replace(b"\n", b"\r\n")])

    assert (shown + end).replace(b"\n", b"\r\n") == again + last
    assert kept(step) == kept(other)


@given(st.sampled_from(STREAMS), st.randoms(use_true_random=False))
def test_comments_pass_and_change_nothing(cassette: Cassette, random):
    """An engine may send comments between events; they reach the client, and no step."""
    comment = b": ping\n\n"
    events = cassette.response.split(b"\n\n")[:-1]
    spoken = b"".join(event + b"\n\n" + comment * random.randint(0, 2) for event in events)
    plan = by_nobody(cassette)
    shown, end, step = play(plan, cassette)
    again, last, other = play(plan, cassette, [spoken])

    assert shown + end == (again + last).replace(comment, b"")
    assert spoken.count(comment) == (again + last).count(comment)
    assert kept(step) == kept(other)


@given(st.sampled_from(STREAMS), PLANS, st.lists(st.integers(0, 900), max_size=40))
def test_order(cassette: Cassette, planned, sizes):
    """Whatever the cuts: nothing shown before the step is stored tells that the last choice is finished."""
    plan = planned(cassette)
    exchange = Exchange(plan, cassette.status, cassette.content_type)
    shown = b"".join(map(exchange.feed, cut(cassette.response, sizes)))
    finished = {
        choice["index"]
        for line in shown.split(b"\n")
        if line.startswith(b"data: {")
        for choice in orjson.loads(line.removeprefix(b"data: ")).get("choices") or ()
        if choice["finish_reason"] is not None
    }

    assert b"[DONE]" not in shown
    assert len(finished) < (plan.response_options.choices or 2)


PROMPTS = {"tokens": list(range(30))}  # what a lookup finds, of whatever prompt
SAMPLED = [
    step
    for cassette in EVERY
    if (step := play(by_nobody(cassette), cassette, found=PROMPTS)[2]).sampled and step.status == "complete"
]


@given(st.lists(st.sampled_from(SAMPLED), min_size=1, max_size=8), st.sampled_from(["exact", "flagged"]))
def test_once_and_ids(steps, include):
    """Over all rows each sampled token is trained once; a row's tokens, cut at its spans, are the recorded ids in order."""
    # Each a call of its own: of two that ask the same, one may be a retry of the other, and only one of those is trained.
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


@pytest.mark.parametrize("cassette", EVERY, ids=name_of)
def test_round_trip(cassette: Cassette):
    """`decode(encode(step)) == step`."""
    step = play(by_nobody(cassette), cassette)[2]
    record = encode(step)

    assert repr(step) == repr(decode(record.record, BlockReader(record.blocks), None))


@pytest.mark.parametrize("cassette", [c for c in EVERY if not as_it_was(c).view.strip_rules.anything], ids=name_of)
def test_transparency_of_what_was_asked(cassette: Cassette):
    """A client that asked for all of it sees the very bytes; so does one whose call bears no asking."""
    assert cassette.response == b"".join(play(as_it_was(cassette), cassette)[:2])


# Ids in `sglext` are asked for in streams only; these were recorded unstreamed.
ASKED_OTHERWISE = {c.response for c in EVERY if b'"sglext"' in c.response and not c.is_stream}


@pytest.mark.parametrize(
    "cassette", [c for c in EVERY if c.status == 200 and c.response not in ASKED_OTHERWISE], ids=name_of
)
def test_transparency_of_what_was_not(cassette: Cassette):
    """A client that asked for no ids and no logprobs sees none; what it sees is all in the engine's answer."""
    plan = by_nobody(cassette)
    shown = b"".join(play(plan, cassette)[:2])
    lines = [line.removeprefix(b"data: ") for line in shown.split(b"\n") if line.startswith(b"data: {")]
    for text in lines if cassette.is_stream else [shown]:
        response = orjson.loads(text)
        assert not {"sglext", "__verbose"} & response.keys()
        for choice in response.get("choices") or ():
            for key in ("token_ids", "response_token_ids", "meta_info", "logprobs"):
                assert (
                    not plan.view.strip_rules.anything
                    or not choice.get(key)
                    or cassette.path == "/inference/v1/generate"
                )
    assert shown == cassette.response or plan.view.strip_rules.anything


SGLANG_TWINS = [
    ("chat_sglext", "chat_stream_sglext"),
    ("chat_sglext", "chat_stream_sglext_framed"),
    ("chat_emoji_sglext", "chat_stream_emoji_sglext"),
    ("chat_tools", "chat_stream_tools"),
    ("chat_reasoning", "chat_stream_reasoning"),
    ("chat_abort", "chat_stream_abort"),
    ("chat_plain", "chat_stream_plain"),
]


@pytest.mark.parametrize(("whole", "stream"), SGLANG_TWINS)
def test_fold_of_sglang(whole, stream):
    """Folding gives the message and the ids that the unstreamed call gives; what no stream has is named here."""
    folding = DIALECTS["/v1/chat/completions"].accumulator()
    for event in load_http("sglang", stream).response.split(b"\n\n"):
        payload = event.rpartition(b"data: ")[2].strip()
        if payload not in (b"", b"[DONE]"):
            folding.feed(orjson.loads(payload))
    folded, expected = folding.finish(), orjson.loads(load_http("sglang", whole).response)

    assert expected.get("sglext") == folded.get("sglext")
    for one, other in zip(expected["choices"], folded["choices"], strict=True):
        # Streams alone write text with a tool call's as null, and ids of calls are random.
        assert said(one["message"]) == said(other["message"])
        assert (one["finish_reason"], one["matched_stop"]) == (other["finish_reason"], other["matched_stop"])


LLAMACPP_TWINS = [
    (name, name.replace("_n_", "_s_"))
    for name in names("recorded/*_n_*", "llamacpp")
    if load(name, "llamacpp").path in DIALECTS and load(name.replace("_n_", "_s_"), "llamacpp").status == 200
]
# The engine itself has other entries in its two framings (seen on 2026.10).
OTHER_ENTRIES = {
    "chat_schema": "streamed, entries are missing in the middle",
    "chat_stop": "streamed, the tokens of a stop string have entries, in part",
    "cmpl_stop": "likewise",
    "chat_tool": "with tools, a stream has none: asked for, they are refused",
}


@pytest.mark.parametrize(("whole", "stream"), LLAMACPP_TWINS)
def test_fold_of_llamacpp(whole, stream):
    """Likewise: texts and reasons are those of the unstreamed call, and so are the entries, but for a chat's EOS."""
    folding = DIALECTS[load(stream, "llamacpp").path].accumulator()
    for event in load(stream, "llamacpp").response.split(b"\n\n"):
        payload = event.removeprefix(b"data: ").strip()
        if payload not in (b"", b"[DONE]", b"null"):
            folding.feed(orjson.loads(payload))
    folded, expected = folding.finish(), orjson.loads(load(whole, "llamacpp").response)

    for one, other in zip(expected["choices"], folded["choices"], strict=True):
        assert said(one.get("message") or {}) == said(other.get("message") or {})
        assert (one.get("text"), one["finish_reason"]) == (other.get("text"), other["finish_reason"])
        if not any(f"/{name}" in whole for name in OTHER_ENTRIES):
            assert ids_of(other) in (ids_of(one), ids_of(one)[:-1])


def ids_of(choice: dict) -> list[int]:
    return [entry["id"] for entry in (choice.get("logprobs") or {}).get("content") or ()]


def said(message: dict) -> dict:
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return {key: message.get(key) or None for key in ("role", "content", "reasoning_content")} | {"calls": calls}


def test_the_laws_are_tried_on_many_answers():
    """Of every engine, and not on a few."""
    counted = {kind: sum(cassette.kind == kind for cassette in EVERY) for kind in KINDS}

    assert 28 == counted["sglang"]
    assert 250 < counted["vllm"]
    assert 120 < counted["llamacpp"]
