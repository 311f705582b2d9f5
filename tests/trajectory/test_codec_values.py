"""Values of a decoded record have the types that a step declares, whichever version wrote it."""

from array import array
from dataclasses import asdict, replace

import pytest
from hypothesis import HealthCheck, given, settings
from tests.support.any_json import JSON
from tests.support.forests import make_choice, make_step

from proxy.trajectory.blocks import BlockReader
from proxy.trajectory.codec import UnreadableRecord, decode, encode
from proxy.trajectory.step import EngineFacts, Span, Timing


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
    assert (False, ("unparsed_event",)) == (step.exact, step.problems)


@pytest.mark.parametrize(("version", "expected"), [("v3", "v3"), (None, None), (3, "3"), (-1, "-1"), (0, "0")])
def test_a_policy_version_is_a_string_or_the_digits_of_an_integer(version, expected):
    """In spans and in the step."""
    step = read(replace(with_choice(spans=(Span(0, 2, version),)), policy_version=version, policy_version_end=version))

    assert [expected] * 3 == [step.choices[0].spans[0].policy_version, step.policy_version, step.policy_version_end]
    assert step.exact


@pytest.mark.parametrize("version", [True, 1.5, {}, []])
def test_policy_versions_of_another_type_are_dropped_and_flagged(version):
    step = read(with_choice(spans=(Span(0, 2, version),)))

    assert (None, ("unparsed_event",)) == (step.choices[0].spans[0].policy_version, step.problems)


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

    assert ((), ("version_spans",)) == (step.choices[0].spans, step.problems)


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

    assert (None, None, None, {"x": 1}) == (step.model_served, step.usage, step.reason, step.extra)
    assert (Timing(1.0), None, ("unparsed_event",)) == (step.timing, step.engine.version, step.problems)


@settings(suppress_health_check=list(HealthCheck), max_examples=50)
@given(JSON)
def test_a_response_is_an_object_or_none(value):
    try:
        step = read(make_step("a", [1], [2], response=value))
    except TypeError:
        return  # nested too deeply to be encoded

    assert step.response is None or isinstance(step.response, dict)
    assert array("i", [2]) == step.choices[0].ids
