"""Bodies of Atropos' proxy: defaults, and errors in FastAPI's shape."""

import pytest

from proxy.api.compat.atropos.schemas import CreateSession, SchemaFault, SessionCall, Setup, read_as


def test_missing_fields_have_the_defaults_of_atropos_schemas():
    session, call = read_as(CreateSession, {}), read_as(SessionCall, {"messages": []})

    assert ("hermes", False, None) == (session.tool_parser, session.track_tree, session.base_url)
    assert (1024, 1.0, 1) == (call.max_tokens, call.temperature, call.n)
    assert [] == read_as(Setup, {}).servers


def test_an_invalid_field_has_fastapis_detail_and_a_message():
    with pytest.raises(SchemaFault) as refused:
        read_as(Setup, {"servers": [{"base_url": 7}]})

    assert [
        {"type": "string_type", "loc": ["body", "servers", 0, "base_url"], "msg": "Input should be a valid string", "input": 7}
    ] == refused.value.detail  # fmt: skip
    assert "body.servers.0.base_url: Input should be a valid string" == refused.value.message
