"""The head of a record is read in one pass if all values have their types, with the same result as value by value."""

from copy import deepcopy
from dataclasses import replace

import orjson
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from tests.support.any_json import JSON
from tests.support.forests import make_choice, make_step

from proxy.trajectory.arrays import pack_experts, pack_mask
from proxy.trajectory.codec import encode
from proxy.trajectory.record_head import read_head
from proxy.trajectory.record_values import Typed
from proxy.trajectory.step import Span


def head_json(step):
    payload = zstandard.decompress(encode(step).record[11:])
    return orjson.loads(payload[16 : 16 + int.from_bytes(payload[:4], "little")])


CHOICE = make_choice(0, [10, 11], stop_reason=7, spans=(Span(0, 2, "v1"),))
ROUTED = replace(CHOICE, index=1, routed_experts=pack_experts([[1]]), sampling_mask=pack_mask([[7], [8, 9]]))
STEP = make_step(
    "a",
    [1] * 300,
    CHOICE,
    ROUTED,
    usage={"prompt_tokens": 300},
    extra={"attempt": 1, "x": [0.5, 2**64 - 1]},
    policy="planner",
)
HEAD = head_json(STEP)


def paths(value, path=()):
    """Return the positions of all values in a JSON value."""
    found = [path] if path else []
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return found + [inner for key, child in children for inner in paths(child, (*path, key))]


def with_value(path, value):
    changed = holder = deepcopy(HEAD)
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = value
    return changed


def value_by_value(head):
    typed = Typed()
    return typed, typed.head(head)


def test_the_policy_default_is_not_written():
    """So the record of a step without named policies has no more bytes than before, and an old record has that policy."""
    head = head_json(replace(STEP, policy="default"))

    assert ("planner", False) == (HEAD["policy"], "policy" in head)
    assert ["default"] * 2 == [read_head(orjson.dumps(head)).policy, value_by_value(head)[1].policy]
    assert ["planner"] * 2 == [read_head(orjson.dumps(HEAD)).policy, value_by_value(HEAD)[1].policy]


def test_the_first_epoch_is_not_written():
    """So the record of a step of the first epoch has no more bytes than before, and an old record is of that epoch."""
    later = head_json(replace(STEP, choices=(replace(CHOICE, spans=(Span(0, 2, "v1", 3),)),)))

    assert {"start", "end", "policy_version"} == HEAD["choices"][0]["spans"][0].keys()
    assert (0, 3) == tuple(read_head(orjson.dumps(head)).choices[0].spans[0].epoch for head in (HEAD, later))


def test_a_head_of_this_version_is_read_in_one_pass():
    head = read_head(orjson.dumps(HEAD))

    assert repr(value_by_value(HEAD)[1]) == repr(head)
    assert ((Span(0, 2, "v1"),), 2, ["json", 5]) == (
        head.choices[1].spans,
        head.choices[1].ids,
        head.choices[1].experts,
    )


@given(st.sampled_from(paths(HEAD)), JSON | st.integers(-3, 3) | st.sampled_from([None, 1.5, True, 2**63, "f", [], {}]))
def test_a_head_with_any_changed_value_is_read_equally_or_only_value_by_value(path, value):
    """A head that is read in one pass needs no correction."""
    try:
        text = orjson.dumps(with_value(path, value))
    except TypeError:
        return  # nested too deeply to be encoded
    head = read_head(text)
    if head is None:
        return
    typed, expected = value_by_value(orjson.loads(text))

    assert {} == typed.problems
    assert comparable(expected) == comparable(head)


def comparable(head):
    """Return the head as text; absent mappings are read as empty ones, and seconds as floats."""
    timing = replace(head.timing, **{name: float(value) for name, value in seconds(head.timing)})
    facts = {"sampling": head.sampling or {}, "extra": head.extra or {}, "timing": timing}
    return repr([facts.get(name, getattr(head, name)) for name in head.__struct_fields__])


def seconds(timing):
    return [(name, getattr(timing, name)) for name in timing.__slots__ if getattr(timing, name) is not None]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("finish",), None),
        (("choices", 0, "spans", 0, "end"), 3),
        (("choices", 0, "spans", 0, "start"), -1),
        (("choices", 0, "spans", 0, "epoch"), -1),
        (("choices", 0, "spans", 0, "epoch"), 2**63),
        (("choices", 0, "spans", 0, "epoch"), None),
        (("choices", 0, "stop_reason"), 2**63),
        (("choices", 0, "ids"), -1),
        (("choices", 0, "index"), 2**63),
        (("timing", "received"), 1e300),
        (("timing", "sent"), -(2.0**38)),
        (("choices", 0, "code"), "q"),
        (("policy_version",), 5),
        (("extra", "attempt"), "1"),
        (("extra", "retry_of"), 1),
        (("dialect",), "smoke signals"),
    ],
)
def test_only_a_value_of_another_type_or_out_of_range_is_refused(path, value):
    """Unknown fields are ignored."""
    assert (path == ("finish",)) is (read_head(orjson.dumps(with_value(path, value))) is not None)


@pytest.mark.parametrize("digits", [b"18446744073709551616", b"-9223372036854775809", b"9" * 5000])
def test_integers_that_json_writers_refuse_are_read_value_by_value(digits):
    """As the floats that orjson reads; a hostile depth is refused."""
    text = orjson.dumps(HEAD).replace(b"18446744073709551615", digits)

    assert read_head(text) is None
    assert read_head(text.replace(digits, b"[" * 5000 + b"]" * 5000)) is None


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"null", b'{"step_id":"a"}', b"\xff"])
def test_other_bytes_are_no_head(text):
    assert read_head(text) is None
