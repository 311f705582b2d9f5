"""What clients of Atropos' proxy send: defaults, and faults as FastAPI tells them."""

import pytest

from proxy.api.compat.atropos.schemas import CreateSession, SchemaFault, SessionCall, Setup, read_as


def test_what_is_not_said_has_its_schemas_defaults():
    """Of a setup nothing is needed at all."""
    session, call = read_as(CreateSession, {}), read_as(SessionCall, {"messages": []})

    assert ("hermes", False, None) == (session.tool_parser, session.track_tree, session.base_url)
    assert (1024, 1.0, 1) == (call.max_tokens, call.temperature, call.n)
    assert [] == read_as(Setup, {}).servers


def test_a_fault_is_told_by_where_and_what():
    """With `body` first, as FastAPI has it; and in a sentence for people."""
    with pytest.raises(SchemaFault) as refused:
        read_as(Setup, {"servers": [{"base_url": 7}]})

    assert [
        {"type": "string_type", "loc": ["body", "servers", 0, "base_url"], "msg": "Input should be a valid string", "input": 7}
    ] == refused.value.detail  # fmt: skip
    assert "body.servers.0.base_url: Input should be a valid string" == refused.value.message
