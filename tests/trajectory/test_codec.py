"""Records: decoding returns the step that was encoded, with values of the declared types, or raises UnreadableRecord."""

from array import array
from base64 import b64encode
from dataclasses import asdict, replace
from hashlib import blake2b
from itertools import pairwise
from math import nan

import orjson
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.any_json import JSON
from tests.support.forests import make_choice, make_step
from tests.support.recorded import ROOTS

from proxy.trajectory.arrays import pack_experts, pack_ids, pack_logprobs, pack_mask
from proxy.trajectory.blocks import BlockReader
from proxy.trajectory.codec import SCHEMA, UnreadableRecord, decode, encode, encode_leniently
from proxy.trajectory.step import Choice, EngineFacts, Span, Step, Timing, answers_of, messages_of

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
    assert written.leans_on == ()


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

    assert (encoded.response is not None, encoded.exact) == (is_kept, is_kept)
    assert encoded.choices[0].ids == decode(record.record, BlockReader(record.blocks)).choices[0].ids


def read(step):
    record = encode(step)
    return decode(record.record, BlockReader(record.blocks))


def with_choice(**facts):
    return make_step("a", [1], make_choice(0, [10, 11], **facts))


@pytest.mark.parametrize("wrong", [{}, {"a": 1}, [], ["stop"], 5, 1.5, True])
@pytest.mark.parametrize("name", ["finish_reason", "stop_reason"])
def test_a_finish_or_stop_reason_of_another_type_is_dropped_and_flagged(name, wrong):
    """A stop reason may be a token id."""
    if (name, wrong) == ("stop_reason", 5):
        wrong = 2**64 - 1  # no token id, and no number of 64 bits
    step = read(with_choice(**{name: wrong}))

    assert None is getattr(step.choices[0], name)
    assert (step.exact, step.problems) == (False, ("unparsed_event",))


@pytest.mark.parametrize(("version", "expected"), [("v3", "v3"), (None, None), (3, "3"), (-1, "-1"), (0, "0")])
def test_a_policy_version_is_a_string_or_the_digits_of_an_integer(version, expected):
    """In spans and in the step."""
    step = read(replace(with_choice(spans=(Span(0, 2, version),)), policy_version=version, policy_version_end=version))

    assert [step.choices[0].spans[0].policy_version, step.policy_version, step.policy_version_end] == [expected] * 3
    assert step.exact


@pytest.mark.parametrize("version", [True, 1.5, {}, []])
def test_policy_versions_of_another_type_are_dropped_and_flagged(version):
    step = read(with_choice(spans=(Span(0, 2, version),)))

    assert (step.choices[0].spans[0].policy_version, step.problems) == (None, ("unparsed_event",))


@pytest.mark.parametrize("epoch", [0, 1, 2**63 - 1])
def test_the_epoch_of_a_span_is_stored(epoch):
    step = read(with_choice(spans=(Span(0, 2, "3", epoch),)))

    assert ((Span(0, 2, "3", epoch),), epoch, True) == (step.choices[0].spans, step.policy_epoch, step.exact)


@pytest.mark.parametrize("epoch", [-1, 2**63, 1.0, True, "1", None, [], {}])
def test_an_epoch_that_is_no_count_is_the_first_one_and_flagged(epoch, monkeypatch):
    monkeypatch.setattr(Span, "as_dict", asdict)
    step = read(with_choice(spans=(Span(0, 2, "3", epoch),)))

    assert ((Span(0, 2, "3", 0),), ("unparsed_event",)) == (step.choices[0].spans, step.problems)


@pytest.mark.parametrize("span", [(0, 3), (-1, 1), (1, 0), ("0", 2), (0, None), (0.0, 2), (False, True)])
def test_version_spans_outside_of_the_sampled_ids_are_dropped_and_flagged(span):
    """All spans of the choice are dropped."""
    step = read(with_choice(spans=(Span(0, 1, "1"), Span(*span, "2"))))

    assert (step.choices[0].spans, step.problems) == ((), ("version_spans",))


@pytest.mark.parametrize("prompt", [-1, -5])
def test_a_choice_with_a_negative_prompt_index_has_no_prompt(prompt):
    """A negative index is not read as counting from the end."""
    step = read(with_choice(prompt=prompt))

    assert step.choices[0].prompt == len(step.prompts)


@pytest.mark.parametrize(
    "wrong",
    [
        {"choices": (make_choice("0", [1]),)},
        {"choices": (make_choice(True, [1]),)},
        {"choices": (make_choice(0, [1], prompt=None),)},
        {"status": "wrong"},
        {"status": ["complete"]},
        {"dialect": "smoke signals"},
        {"delivered": None},
        {"policy": None},
        {"policy": 5},
        {"policy": ["planner"]},
        {"endpoint": 5},
        {"problems": (5,)},
        {"timing": Timing("noon")},
        {"timing": Timing(1e300)},
        {"choices": (make_choice(2**63, [1]),)},
        {"engine": EngineFacts(5, "vllm", None, "")},
        {"sent": {"unset": [1]}},
        {"sent": {"set": [1]}},
    ],
)
def test_a_record_without_a_required_field_raises_unreadable_record(wrong):
    record = encode(replace(make_step("a", [1], [2]), **wrong))

    with pytest.raises(UnreadableRecord):
        decode(record.record, BlockReader(record.blocks))


def test_other_fields_of_a_wrong_type_are_dropped():
    """Fields from the engine's response flag the step; others do not."""
    wrong = {
        "model_served": [1], "usage": 5, "reason": {}, "extra": {"attempt": "1", "retry_of": 5, "request_key": [], "x": 1},
        "timing": Timing(1.0, sent="noon", last_byte=float("nan")), "engine": EngineFacts("e", "vllm", 5, ""),
    }  # fmt: skip
    step = read(replace(make_step("a", [1], [2]), **wrong))

    assert (step.model_served, step.usage, step.reason, step.extra) == (None, None, None, {"x": 1})
    assert (Timing(1.0), None, ("unparsed_event",)) == (step.timing, step.engine.version, step.problems)


@settings(suppress_health_check=list(HealthCheck), max_examples=50)
@given(JSON)
def test_a_response_is_an_object_or_none(value):
    try:
        step = read(make_step("a", [1], [2], response=value))
    except TypeError:
        return  # nested too deeply to be encoded

    assert step.response is None or isinstance(step.response, dict)
    assert step.choices[0].ids == array("i", [2])


CHOICE = {"index": 1, "text": "b"}


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ({"choices": [CHOICE, {"text": "a"}]}, {1: CHOICE, 0: {"text": "a"}}),
        ({"choices": [CHOICE, {"index": 1, "text": "again"}]}, {1: CHOICE}),
        ({"choices": [5, None, {"index": [1]}, {"index": True}, {"index": "1"}, CHOICE]}, {1: CHOICE}),
        ({"choices": {"0": CHOICE}}, {}),
        ({"choices": 5}, {}),
        ({}, {}),
        (None, {}),
    ],
)
def test_malformed_choices_are_ignored(response, expected):
    """By index; of duplicates the first."""
    assert answers_of(make_step("a", [1], [2], response=response)) == expected


@pytest.mark.parametrize(
    ("messages", "expected"), [([1, "a"], [1, "a"]), ({"a": 1}, []), ("hi", []), (None, []), (5, [])]
)
def test_messages_of_another_type_are_an_empty_list(messages, expected):
    assert messages_of(make_step("a", [1], [2], request={"messages": messages})) == expected
