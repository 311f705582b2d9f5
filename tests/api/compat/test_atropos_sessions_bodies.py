"""A session: its ID, its calls, their responses, and its nodes."""

import orjson
import pytest
from tests.support.forests import make_choice, make_step
from tests.support.playbacks import branched

from proxy.api.compat.atropos_sessions import (
    CreateSession,
    SchemaFault,
    SessionCall,
    Setup,
    is_session_id,
    nodes_from,
    read_as,
    read_session_chat,
    session_id,
)
from proxy.errors import BadRequest
from proxy.protocols.dialects.base import TranslationOptions
from proxy.trajectory.facts import RolloutFacts

HELLO = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("entropy", [bytes(16), b"\xff" * 16, bytes(range(16))])
def test_a_session_id_is_a_uuid_of_version_8(entropy):
    """Version 8 distinguishes sessions from other rollouts."""
    name = session_id(entropy)

    assert (len(name), name[14]) == (36, "8")
    assert is_session_id(name)


def read_chat(body):
    return read_session_chat("", body, TranslationOptions())


@pytest.mark.parametrize("name", ["r1", "", "12345678-1234-4123-8123-123456789012", session_id(bytes(16)) + "0"])
def test_other_names_are_not_session_ids(name):
    assert not is_session_id(name)


def test_missing_and_null_fields_of_a_call_have_the_schemas_defaults():
    """`max_completion_tokens` replaces the default of `max_tokens`."""
    body = {"messages": [{"role": "user", "content": "hi", "name": None}], "stop": None, "top_p": 0.5}

    assert read_chat(body).body == {"messages": HELLO, "max_tokens": 1024, "temperature": 1.0, "n": 1, "top_p": 0.5}
    assert read_chat({"messages": HELLO, "max_completion_tokens": 7}).body["max_tokens"] == 7


def test_tool_choice_is_not_sent_without_tools():
    """Engines reject it; Atropos' proxy ignores it."""
    assert "tool_choice" not in read_chat({"messages": HELLO, "tools": [], "tool_choice": "auto"}).body


@pytest.mark.parametrize(
    ("body", "fault"),
    [({"messages": []}, BadRequest), ({}, SchemaFault), ({"messages": [{"content": "x"}]}, SchemaFault)],
)
def test_a_call_without_messages_is_rejected(body, fault):
    with pytest.raises(fault):
        read_chat(body)


def test_reasoning_is_in_a_message_only_if_present():
    """Role and content are always present."""
    for message, expected in (
        ({"content": "x", "reasoning": None, "tool_calls": []}, {"role": "assistant", "content": "x"}),
        ({"content": None, "reasoning": "hm"}, {"role": "assistant", "content": None, "reasoning": "hm"}),
    ):
        response = {"created": 7, "model": "m", "choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}
        step = make_step("a", [1], make_choice(0, [5]), response=response)
        payload = orjson.loads(read_chat({"messages": HELLO}).answer(step))
        assert payload["choices"][0]["message"] == expected


def test_an_incomplete_response_is_not_rendered():
    form = read_chat({"messages": HELLO})

    assert form.answer(make_step("a", [1], make_choice(0, [5]), response={"choices": []})) is None
    assert form.answer(make_step("a", [1], make_choice(0, [5]), status="partial")) is None


def test_identical_samples_are_separate_nodes():
    step = make_step("a", [1, 2], make_choice(0, [5]), make_choice(1, [5]))
    nodes = nodes_from(RolloutFacts("r1"), [step], as_tree=True)

    assert [node["tokens"] for node in nodes] == [[1, 2, 5], [1, 2, 5]]
    assert [node["masked_tokens"] for node in nodes] == [[-100, -100, 5]] * 2


def test_a_flagged_step_has_no_node():
    step = make_step("a", [1], make_choice(0, [5]), problems=("logprobs_count",))

    assert nodes_from(RolloutFacts("r1"), [step], as_tree=True) == []
    assert nodes_from(RolloutFacts("r1"), [step], as_tree=False) == []


@pytest.mark.parametrize("as_tree", [True, False])
def test_what_a_playback_inherited_has_no_node(as_tree):
    (node,) = nodes_from(RolloutFacts("r1"), branched(), as_tree=as_tree)

    assert node["masked_tokens"] == [-100] * 7 + [12, 9]
    assert nodes_from(RolloutFacts("r1"), branched()[:2], as_tree=as_tree) == []


def test_missing_fields_have_the_defaults_of_atropos_schemas():
    session, call = read_as(CreateSession, {}), read_as(SessionCall, {"messages": []})

    assert (session.tool_parser, session.track_tree, session.base_url) == ("hermes", False, None)
    assert (call.max_tokens, call.temperature, call.n) == (1024, 1.0, 1)
    assert read_as(Setup, {}).servers == []


def test_an_invalid_field_has_fastapis_detail_and_a_message():
    with pytest.raises(SchemaFault) as refused:
        read_as(Setup, {"servers": [{"base_url": 7}]})

    assert refused.value.detail == [
        {"type": "string_type", "loc": ["body", "servers", 0, "base_url"], "msg": "Input should be a valid string", "input": 7}
    ]  # fmt: skip
    assert refused.value.message == "body.servers.0.base_url: Input should be a valid string"
