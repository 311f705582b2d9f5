"""Records: decoding returns the step that was encoded, or raises UnreadableRecord."""

from array import array
from base64 import b64encode
from dataclasses import replace
from hashlib import blake2b
from itertools import pairwise
from math import nan

import orjson
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from tests.support.recorded import ROOTS

from proxy.trajectory.arrays import pack_experts, pack_ids, pack_logprobs, pack_mask
from proxy.trajectory.blocks import BlockReader
from proxy.trajectory.codec import SCHEMA, UnreadableRecord, decode, encode, encode_leniently
from proxy.trajectory.step import Choice, EngineFacts, Span, Step, Timing

TEXT = st.text(max_size=12)
NUMBER = st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
LONG = st.builds(lambda text, times: text * times, st.text(min_size=1, max_size=8), st.integers(0, 900))
VALUE = st.recursive(
    st.none() | st.booleans() | NUMBER | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
FIELDS = st.dictionaries(TEXT, VALUE, max_size=3)
UNCHANGED = FIELDS.filter({"set", "unset"}.isdisjoint)  # their types are checked
IDS = st.builds(
    lambda ids, times: pack_ids(ids * times),
    st.lists(st.integers(-(2**31), 2**31 - 1), max_size=5),
    st.sampled_from([0, 1, 60, 300]),
)
LOGPROBS = st.builds(pack_logprobs, st.lists(st.none() | st.floats(width=32) | st.floats(), max_size=5))
MAYBE = st.none() | TEXT
EXPERTS = st.builds(pack_experts, st.binary(max_size=40).map(lambda raw: b64encode(raw).decode()) | VALUE)
MASKS = st.builds(pack_mask, st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=4), max_size=4))


@st.composite
def choices_drawn(draw):
    ids = draw(IDS)
    ends = sorted(draw(st.lists(st.integers(0, len(ids)), max_size=3)))
    return Choice(
        index=draw(st.integers(0, 9)),
        ids=ids,
        logprobs=draw(LOGPROBS),
        finish_reason=draw(MAYBE),
        stop_reason=draw(MAYBE | st.integers(0, 9)),
        prompt=draw(st.integers(0, 3)),
        spans=tuple(Span(start, end, draw(MAYBE), start % 3) for start, end in pairwise(ends)),
        routed_experts=draw(st.none() | EXPERTS),
        sampling_mask=draw(st.none() | MASKS),
    )


CHOICES = choices_drawn()
SECONDS = st.floats(0, 2e9)


@st.composite
def requests(draw, prompts):
    request = draw(FIELDS)
    if draw(st.booleans()):
        request["messages"] = draw(st.lists(VALUE | LONG, max_size=5) | TEXT)
    if draw(st.booleans()):
        ids = [prompt.tolist() for prompt in prompts]
        request["prompt"] = draw(VALUE | LONG | st.sampled_from([ids, *ids, [1.0], [True]]))
    if draw(st.booleans()):
        request["tools"] = draw(LONG | st.lists(LONG, max_size=3) | st.dictionaries(TEXT, LONG, max_size=2))
    return request


@st.composite
def steps(draw):
    prompts = draw(st.lists(IDS, max_size=3).map(tuple))
    return draw(
        st.builds(
            Step,
            step_id=TEXT,
            rollout_id=TEXT,
            dialect=st.sampled_from(["chat", "completions", "generate"]),
            endpoint=TEXT,
            engine=st.builds(EngineFacts, TEXT, TEXT, MAYBE, TEXT),
            model_asked=MAYBE,
            model_served=MAYBE,
            request=requests(prompts),
            sent=FIELDS.filter({"set", "unset"}.isdisjoint)
            | st.fixed_dictionaries({"set": requests(prompts), "unset": st.lists(TEXT, max_size=2)}),
            response=st.none() | FIELDS,
            prompts=st.just(prompts),
            choices=st.lists(CHOICES, max_size=3).map(tuple),
            usage=st.none() | FIELDS,
            sampling=FIELDS,
            timing=st.builds(Timing, SECONDS, st.none() | SECONDS, st.none() | SECONDS),
            status=st.sampled_from(["complete", "partial", "error"]),
            reason=MAYBE,
            delivered=st.booleans(),
            policy=st.just("default") | TEXT,
            policy_version=MAYBE,
            policy_version_end=MAYBE,
            problems=st.lists(TEXT, max_size=2).map(tuple),
            index=st.none() | st.integers(0, 9),
            extra=FIELDS,
        )
    )


def bits(numbers):
    return numbers.typecode, numbers.tobytes()


def comparable(step):
    """Return a form of a step in which 1, 1.0 and true differ, order counts, and NaN equals itself."""
    arrays = [bits(ids[:]) for ids in step.prompts]
    arrays += [bits(numbers) for choice in step.choices for numbers in (choice.ids, choice.logprobs)]
    bare = tuple(replace(choice, ids=array("i"), logprobs=array("f")) for choice in step.choices)
    return arrays, repr(replace(step, prompts=(), choices=bare))


def a_step(**changed):
    facts = {
        "step_id": "01J",
        "rollout_id": "r",
        "dialect": "chat",
        "endpoint": "/v1/chat/completions",
        "engine": EngineFacts("local", "vllm", "0.32.0", "http://engine:8000"),
        "model_asked": "gpt",
        "model_served": "policy",
        "request": {"messages": [{"role": "user", "content": "grüß dich"}], "tools": ["t" * 3000]},
        "sent": {"set": {"logprobs": True, "system": "s" * 2000}, "unset": ["rollout_id"]},
        "response": {"choices": []},
        "prompts": (array("i", [5] * 600),),
        "choices": (Choice(0, array("i", [7, 8]), array("f", [-0.5, nan]), "stop", 8, 0, (Span(0, 2, "v1"),)),),
        "usage": {"prompt_tokens": 600, "completion_tokens": 2},
        "sampling": {"temperature": 1.0},
        "timing": Timing(1795229447.25, stored=1795229448.5),
        "status": "complete",
        "problems": ("bad_logprob",),
        "extra": {"request_key": "abc"},
    }
    return Step(**facts | changed)


@given(steps())
def test_a_step_round_trips_bit_for_bit(step):
    """The index is the store's."""
    written = encode(step)
    read = decode(written.record, BlockReader(written.blocks), step.index)

    assert comparable(step) == comparable(read)
    assert () == written.leans_on


@given(st.lists(steps(), max_size=4))
def test_steps_reuse_the_blocks_of_earlier_steps(many):
    stored, records = {}, []
    for step in many:
        written = encode(step, known=stored)

        assert not written.blocks.keys() & stored.keys()
        assert set(written.leans_on) <= stored.keys()
        stored |= written.blocks
        records.append(written.record)
        assert set(written.names) <= stored.keys()
    reader = BlockReader(stored)

    assert [comparable(s) for s in many] == [
        comparable(decode(r, reader, s.index)) for s, r in zip(many, records, strict=True)
    ]


def test_a_step_decoded_with_whole_false_has_no_request_sent_and_response():
    step = a_step()
    written = encode(step)
    read = decode(written.record, BlockReader(written.blocks), whole=False)

    assert comparable(replace(step, request={}, sent={}, response=None)) == comparable(read)


def test_the_order_of_request_fields_is_preserved():
    step = a_step()
    request = {"a": 1, "messages": [], "tools": "x" * 5000, "prompt": [1, 2], "z": None}
    written = encode(replace(step, request=request))
    read = decode(written.record, BlockReader(written.blocks))

    assert list(request.items()) == list(read.request.items())


@pytest.mark.parametrize("prompt", [[1, 2, 3], [[1, 2, 3], [4]], [1.0, 2, 3], [True, 2, 3], [[1, 2, 3], [4.0]]])
def test_prompts_of_token_ids_are_preserved(prompt):
    """Lists with numbers that only compare equal to the recorded ids (1.0, true) are preserved, too."""
    step = a_step(request={"prompt": prompt}, prompts=(array("i", [1, 2, 3]), array("i", [4])))
    written = encode(step)
    read = decode(written.record, BlockReader(written.blocks))

    assert repr(prompt) == repr(read.request["prompt"])


@given(steps(), st.data())
def test_any_changed_byte_and_any_truncation_raise_unreadable_record(step, draw):
    written = encode(step)
    reader = BlockReader(written.blocks)
    damaged = bytearray(written.record)
    damaged[draw.draw(st.integers(0, len(damaged) - 1))] ^= draw.draw(st.integers(1, 255))
    short = written.record[: draw.draw(st.integers(0, len(written.record) - 1))]

    for wrong in (bytes(damaged), short):
        with pytest.raises(UnreadableRecord):
            decode(wrong, reader)


@given(st.binary(max_size=40))
def test_other_bytes_raise_unreadable_record(garbage):
    with pytest.raises(UnreadableRecord):
        decode(garbage, BlockReader({}))
    with pytest.raises(UnreadableRecord):
        decode(b"TT\1" + garbage, BlockReader({}))


def sealed(payload, schema=SCHEMA):
    """Return a record of this payload with a valid checksum."""
    packed = zstandard.compress(payload)
    checksum = blake2b(packed, digest_size=8, person=b"record", salt=bytes([schema])).digest()
    return b"TT" + bytes([schema]) + checksum + packed


def payload_from(record):
    return zstandard.decompress(record[11:])


@given(st.data())
def test_a_payload_that_does_not_match_its_schema_raises_or_decodes(draw):
    """No other exception is raised."""
    written = encode(a_step())
    payload = bytearray(payload_from(written.record))
    head_end = 16 + int.from_bytes(payload[:4], "little")
    position = draw.draw(st.integers(0, head_end))
    payload[position : position + draw.draw(st.integers(0, 3))] = draw.draw(st.binary(max_size=3))
    try:
        step = decode(sealed(bytes(payload)), BlockReader(written.blocks))
    except UnreadableRecord:
        return

    assert isinstance(step, Step)


@pytest.mark.parametrize(
    "change", [lambda payload: payload + b"\0", lambda payload: payload[:-1], lambda payload: payload[:15]]
)
def test_arrays_that_do_not_end_with_the_payload_raise(change):
    """No id is read from outside its array."""
    written = encode(a_step())

    with pytest.raises(UnreadableRecord, match="does not match schema 4"):
        decode(sealed(change(payload_from(written.record))), BlockReader(written.blocks))


def test_each_error_names_its_cause():
    """Not a record, another schema, damage, a missing block, a damaged block."""
    written = encode(a_step())
    name = written.names[0]
    newer, older = [sealed(payload_from(written.record), schema) for schema in (9, 3)]
    others = {other: block for other, block in written.blocks.items() if other != name}
    swapped = others | {name: next(iter(others.values()))}

    with pytest.raises(UnreadableRecord, match="^5 bytes are not a record"):
        decode(b"hello", BlockReader({}))
    with pytest.raises(UnreadableRecord, match="schema 9 is not supported: this version reads schema 4; use a newer"):
        decode(newer, BlockReader(written.blocks))
    with pytest.raises(UnreadableRecord, match="schema 3 is not supported: .*; a version before 0.1.0 wrote it"):
        decode(older, BlockReader(written.blocks))
    with pytest.raises(UnreadableRecord, match="checksum mismatch"):
        decode(written.record + b"\0", BlockReader(written.blocks))
    with pytest.raises(UnreadableRecord, match=f"block {name.hex()} is missing"):
        decode(written.record, BlockReader(others))
    with pytest.raises(UnreadableRecord, match=f"block {name.hex()} is damaged"):
        decode(written.record, BlockReader(swapped))


def test_recorded_requests_and_responses_of_vllm_round_trip():
    paths = sorted(ROOTS["vllm"].rglob("*.request.json"))

    assert len(paths) > 200
    for path in paths:
        answer = path.with_name(path.name.replace(".request.", ".response."))
        response = orjson.loads(answer.read_bytes()) if answer.exists() else None
        response = (
            response if isinstance(response, dict) else None
        )  # a list is the response of a call that samples nothing
        step = a_step(request=orjson.loads(path.read_bytes()).get("body") or {}, response=response)
        written = encode(step)

        assert comparable(step) == comparable(decode(written.record, BlockReader(written.blocks)))


@pytest.mark.parametrize(("depth", "is_kept"), [(200, True), (225, True), (240, False), (900, False)])
def test_a_response_that_is_nested_too_deeply_for_json_is_dropped_and_flagged(depth, is_kept):
    """orjson's limit is 254 levels; a page of the UI adds a few."""
    deep: list = []
    for _ in range(depth):
        deep = [deep]
    step = replace(a_step(), response={"choices": deep}, problems=())
    encoded, record = encode_leniently(step)

    assert (is_kept, is_kept) == (encoded.response is not None, encoded.exact)
    assert encoded.choices[0].ids == decode(record.record, BlockReader(record.blocks)).choices[0].ids
