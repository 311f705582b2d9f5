"""The head of a record has the types that a step declares, whichever version wrote it."""

from copy import deepcopy
from dataclasses import replace

import orjson
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import asdict
from tests.support.any_json import JSON
from tests.support.forests import make_choice, make_step

from proxy.trajectory.arrays import pack_experts, pack_mask
from proxy.trajectory.codec import encode, read_head
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


def read(head):
    """Return the head as a dictionary, with seconds as floats and absent mappings as empty ones; an error as its base."""
    try:
        found = asdict(read_head(orjson.dumps(head)))
    except (ValueError, TypeError, LookupError, AttributeError):
        return "unreadable"
    times = {name: value if value is None else float(value) for name, value in attrs(found["timing"]).items()}
    return {**found, "timing": times, "sampling": found["sampling"] or {}, "extra": found["extra"] or {}}


def attrs(value):
    return {name: getattr(value, name) for name in value.__slots__}


def test_the_policy_default_is_not_written():
    """So the record of a step without named policies has no more bytes than before, and an old record has that policy."""
    head = head_json(replace(STEP, policy="default"))

    assert (HEAD["policy"], "policy" in head) == ("planner", False)
    assert [read(each)["policy"] for each in (head, {**head, "reason": 5}, HEAD)] == ["default", "default", "planner"]


def test_the_first_epoch_is_not_written():
    """So the record of a step of the first epoch has no more bytes than before, and an old record is of that epoch."""
    later = head_json(replace(STEP, choices=(replace(CHOICE, spans=(Span(0, 2, "v1", 3),)),)))

    assert HEAD["choices"][0]["spans"][0].keys() == {"start", "end", "policy_version"}
    assert tuple(read_head(orjson.dumps(head)).choices[0].spans[0].epoch for head in (HEAD, later)) == (0, 3)


def test_a_head_of_this_version_is_read():
    """Unknown fields are ignored."""
    head = read_head(orjson.dumps({**HEAD, "finish": None}))

    assert read(HEAD) == read({**HEAD, "finish": None})
    assert ((Span(0, 2, "v1"),), 2, ["json", 5]) == (
        head.choices[1].spans,
        head.choices[1].ids,
        head.choices[1].experts,
    )


@given(st.sampled_from(paths(HEAD)), JSON | st.integers(-3, 3) | st.sampled_from([None, 1.5, True, 2**63, "f", [], {}]))
def test_another_value_that_is_dropped_changes_nothing_else(path, value):
    """A head with only values of the right types is read in one pass, any other value by value; with one result."""
    head = with_value(path, value)
    try:
        found = read(head)
    except TypeError:
        return  # nested too deeply to be encoded
    if path == ("reason",):
        return
    odd = read({**head, "reason": [5]})

    if found == "unreadable":
        assert odd == found
    else:
        problems = tuple(dict.fromkeys((*found["problems"], "unparsed_event")))
        assert {**found, "reason": None, "problems": frozenset(problems)} == {
            **odd,
            "problems": frozenset(odd["problems"]),
        }


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("choices", 0, "ids"), -1),
        (("choices", 0, "index"), 2**63),
        (("choices", 0, "code"), "q"),
        (("timing", "received"), 1e300),
        (("dialect",), "smoke signals"),
    ],
)
def test_a_required_value_of_another_type_or_out_of_range_is_refused(path, value):
    assert read(with_value(path, value)) == "unreadable"


@pytest.mark.parametrize(
    ("path", "value", "problems"),
    [
        (("choices", 0, "spans", 0, "end"), 3, ("version_spans",)),
        (("choices", 0, "spans", 0, "start"), -1, ("version_spans",)),
        (("choices", 0, "spans"), {"a": 1}, ("version_spans",)),
        (("choices", 0, "spans", 0, "epoch"), None, ("unparsed_event",)),
        (("choices", 0, "stop_reason"), 2**63, ("unparsed_event",)),
        (("timing", "sent"), -(2.0**38), ()),
        (("policy_version",), 5, ()),
        (("extra", "attempt"), "1", ()),
        (("extra", "retry_of"), 1, ()),
    ],
)
def test_a_value_that_a_step_can_do_without_is_dropped(path, value, problems):
    assert read(with_value(path, value))["problems"] == problems


@pytest.mark.parametrize("space", [b"", b" ", b"\n"])
@pytest.mark.parametrize("digits", [b"18446744073709551616", b"-9223372036854775809", b"9" * 5000])
def test_integers_that_json_writers_refuse_are_read_as_floats(digits, space):
    """As orjson reads them, also after white space in an imported record; a hostile depth is refused."""
    text = orjson.dumps(HEAD).replace(b"18446744073709551615", space + digits)

    if len(digits) < 100:
        assert isinstance(read_head(text).extra["x"][1], float)
    with pytest.raises(orjson.JSONDecodeError):
        read_head(text.replace(digits, b"[" * 5000 + b"]" * 5000))


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"null", b'{"step_id":"a"}', b"\xff"])
def test_other_bytes_are_no_head(text):
    with pytest.raises((ValueError, TypeError, LookupError)):
        read_head(text)
