"""Sampling rules: override, default, cap, and the engine's context window."""

import pytest
from tests.support.recorded import plan_of

from proxy.protocols.engines import sglang, vllm
from proxy.protocols.engines.base import ALL, CallOptions
from proxy.protocols.sampling import SAMPLING_FIELDS, Sampling

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BODY = {"model": "gpt-4o", "messages": [{"role": "user", "content": "hi"}]}


def sent(body: dict, **terms) -> dict:
    return plan_of(CHAT, BODY | body, CallOptions(**terms)).body


@pytest.mark.parametrize(
    ("rules", "body", "expected"),
    [
        ({"default": {"temperature": 1.0}}, {}, {"temperature": 1.0}),
        ({"default": {"temperature": 1.0}}, {"temperature": 0}, {"temperature": 0}),
        ({"default": {"temperature": 1.0}}, {"temperature": None}, {"temperature": 1.0}),
        (
            {"default": {"max_tokens": 9}},
            {"max_completion_tokens": 5},
            {"max_completion_tokens": 5, "max_tokens": None},
        ),
        ({"override": {"temperature": 1.0}}, {"temperature": 0}, {"temperature": 1.0}),
        (
            {"override": {"max_tokens": 9}},
            {"max_completion_tokens": 5},
            {"max_tokens": 9, "max_completion_tokens": None},
        ),
        ({"cap": {"max_tokens": 9}}, {"max_tokens": 5}, {"max_tokens": 5}),
        ({"cap": {"max_tokens": 9}}, {"max_tokens": 50}, {"max_tokens": 9}),
        ({"cap": {"max_tokens": 9}}, {"max_completion_tokens": 50}, {"max_completion_tokens": 9, "max_tokens": None}),
        ({"cap": {"max_tokens": 9}}, {}, {"max_tokens": 9}),
        ({"cap": {"max_tokens": 9}}, {"max_tokens": "many"}, {"max_tokens": "many"}),
        ({"cap": {"n": 2}, "override": {"n": 5}}, {}, {"n": 2}),
        ({"cap": {"max_completion_tokens": 9}}, {"max_tokens": 5}, {"max_tokens": 5, "max_completion_tokens": None}),
        (
            {"default": {"max_completion_tokens": 9}, "override": {"max_tokens": 5}},
            {},
            {"max_tokens": 5, "max_completion_tokens": None},
        ),
        ({"default": {"max_completion_tokens": 9}}, {"max_tokens": 5}, {"max_completion_tokens": None}),
        ({"override": {"max_completion_tokens": 9}}, {"max_tokens": 5}, {"max_completion_tokens": 9, "max_tokens": 5}),
    ],
)
def test_override_replaces_default_fills_in_and_cap_limits(rules, body, expected):
    """Both names of the limit on tokens are understood."""
    actual = sent(body, sampling=Sampling(**rules))

    assert {name: actual.get(name) for name in expected} == expected


@pytest.mark.parametrize(
    ("fields", "room", "expected"),
    [
        ({"max_tokens": 32_000}, 700, {"max_tokens": 700}),
        ({"max_completion_tokens": 32_000}, 700, {"max_completion_tokens": 700, "max_tokens": None}),
        ({"max_tokens": 5}, 700, {"max_tokens": 5}),
        ({"max_tokens": 32_000}, None, {"max_tokens": 32_000}),
        ({}, 700, {"max_tokens": None, "max_completion_tokens": None}),
        ({"max_tokens": "many"}, 700, {"max_tokens": "many"}),
    ],
)
def test_an_auto_cap_limits_max_tokens_to_the_context_window(fields, room, expected):
    """A request without a limit gets none: engines then generate up to the end of the window."""
    actual = sent(fields, sampling=Sampling(cap={"max_tokens": "auto"}), room_left=room)

    assert {name: actual.get(name) for name in expected} == expected


def test_a_rollouts_rules_override_the_configurations_field_by_field():
    general = Sampling({"a": 1, "b": 1}, {"c": 1}, {"d": 1})
    own = Sampling({"b": 2}, {"c": 2}, {})

    assert Sampling({"a": 1, "b": 2}, {"c": 2}, {"d": 1}) == own.over(general)


def test_fields_that_change_logprobs_are_recorded():
    """An engine's grammars, too."""
    assert {*ALL, *vllm._GRAMMARS, *sglang._GRAMMARS} <= set(SAMPLING_FIELDS)
