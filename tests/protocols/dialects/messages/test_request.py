"""Messages requests and their tools, translated to chat."""

import copy

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.anthropic_bodies import BODIES
from tests.support.json_bodies import JSON

from proxy.errors import UnprocessableRequest
from proxy.protocols.dialects.base import ResolvedReferences, TranslationOptions
from proxy.protocols.dialects.messages import MESSAGES
from proxy.protocols.dialects.messages.request import TRANSLATED, tools_from
from proxy.protocols.sampling import SAMPLING_FIELDS

HI = [{"role": "user", "content": "hi"}]
MINIMAL = {"model": "m", "max_tokens": 9, "messages": HI}
SWITCHES = TranslationOptions(
    thinking={"chat_template_kwargs": {"enable_thinking": True}, "include_reasoning": True},
    not_thinking={"chat_template_kwargs": {"enable_thinking": False}},
)


def read(body, options=TranslationOptions(), **resolved):  # noqa: B008 - frozen
    return MESSAGES.read(body, options, ResolvedReferences(**resolved))


def test_a_minimal_request_gets_no_further_fields():
    assert read(MINIMAL) == {"model": "m", "messages": HI, "max_tokens": 9}
    assert read({"messages": HI}) == {"messages": HI}


def test_sampling_parameters_get_chats_names():
    """Parameters that engines know beyond Anthropic's are passed through."""
    body = {"temperature": 1.0, "top_p": 0.9, "top_k": 5, "stop_sequences": ["\n\n"], "min_p": 0.1, "seed": 7}

    expected = {"temperature": 1.0, "top_p": 0.9, "top_k": 5, "stop": ["\n\n"], "min_p": 0.1, "seed": 7}
    assert read(MINIMAL | body) == MINIMAL | expected


def test_every_recorded_sampling_parameter_is_passed_through_or_translated():
    passed = {name: {"x": 1} for name in (*SAMPLING_FIELDS, "chat_template_kwargs") if name not in TRANSLATED}

    assert read(MINIMAL | passed) == MINIMAL | passed


def test_unknown_fields_are_not_sent():
    """They are recorded in the body; an engine could give them another meaning."""
    body = {
        "metadata": {"user_id": "u"},
        "context_management": {"edits": []},
        "output_config": {"task_budget": {"type": "tokens", "total": 1}},
        "service_tier": "auto",
        "return_token_ids": True,
        "logprobs": True,
        "stop": "x",
        "max_completion_tokens": 1,
        "container": None,
        "betas": ["x"],
        "stream": False,
        "stop_sequences": [],
    }

    assert read(MINIMAL) == read(MINIMAL | body)


def test_a_stream_requests_usage_in_each_chunk():
    """`message_start` has the input tokens."""
    chat = read(MINIMAL | {"stream": True})

    assert (chat["stream"], chat["stream_options"]) == (True, {"include_usage": True, "continuous_usage_stats": True})


@pytest.mark.parametrize(
    ("thinking", "expected", "by_default"),
    [
        (None, {}, {}),
        ({"type": "enabled", "budget_tokens": 1024}, {**SWITCHES.thinking}, {}),
        ({"type": "adaptive"}, {**SWITCHES.thinking}, {}),
        ({"type": "disabled"}, {"reasoning_effort": "none", **SWITCHES.not_thinking}, {"reasoning_effort": "none"}),
    ],
)
def test_thinking_sets_the_configured_fields(thinking, expected, by_default):
    """By default those that vLLM's endpoint sets."""
    assert read(MINIMAL) | expected == read(MINIMAL | {"thinking": thinking}, SWITCHES)
    assert read(MINIMAL) | by_default == read(MINIMAL | {"thinking": thinking})


def test_effort_is_passed_through():
    """If thinking is disabled, effort is none, or the configured value."""
    high = MINIMAL | {"output_config": {"effort": "high"}}
    forbidden = high | {"thinking": {"type": "disabled"}}
    low = TranslationOptions(thinking={"reasoning_effort": "low"}, not_thinking={"reasoning_effort": "low"})

    assert read(high)["reasoning_effort"] == "high"
    assert read(high | {"thinking": {"type": "adaptive"}}, low)["reasoning_effort"] == "high"
    assert [read(forbidden, options)["reasoning_effort"] for options in (TranslationOptions(), low)] == ["none", "low"]


def test_the_bodys_fields_override_the_fields_of_thinking():
    """chat_template_kwargs are merged by key; the configuration is not changed."""
    body = {"thinking": {"type": "enabled"}, "chat_template_kwargs": {"enable_thinking": False, "x": 1}}
    before = copy.deepcopy(SWITCHES)

    chat = read(MINIMAL | body, SWITCHES)

    assert chat["chat_template_kwargs"] == {"enable_thinking": False, "x": 1}
    assert (
        read(MINIMAL | {"thinking": {"type": "enabled"}, "seed": 0}, TranslationOptions(thinking={"seed": 7}))["seed"]
        == 0
    )
    assert before == SWITCHES


@pytest.mark.parametrize("field", ["output_config", "output_format"])
def test_an_output_schema_becomes_a_response_format(field):
    """`messages.parse` of the SDK sends it."""
    form = {"type": "json_schema", "schema": {"type": "object"}}

    chat = read(MINIMAL | {field: {"format": form} if field == "output_config" else form})

    assert chat["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "output", "schema": {"type": "object"}, "strict": True},
    }


def test_a_last_assistant_message_is_continued():
    """A prefill; an empty one is ignored."""
    begun = read(MINIMAL | {"messages": [*HI, {"role": "assistant", "content": "The answer is ("}]})
    empty = read(MINIMAL | {"messages": [*HI, {"role": "assistant", "content": []}]})

    assert (begun["continue_final_message"], begun["add_generation_prompt"]) == (True, False)
    assert begun["messages"][-1] == {"role": "assistant", "content": "The answer is ("}
    thought = {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm", "signature": "s"}]}
    assert read(MINIMAL | {"messages": [*HI, thought]})["continue_final_message"]
    assert read(MINIMAL) == empty


@pytest.mark.parametrize("turn", [{"role": "assistant", "content": []}, {"role": "system", "content": []}])
def test_a_conversation_without_content_is_rejected(turn):
    with pytest.raises(UnprocessableRequest, match="^messages: at least one message must have content"):
        read(MINIMAL | {"messages": [turn]})


def test_a_last_message_with_tool_calls_is_rejected():
    """Their results are missing."""
    call = {"type": "tool_use", "id": "c", "name": "f", "input": {}}

    with pytest.raises(UnprocessableRequest, match="^messages: the last message calls tools"):
        read(MINIMAL | {"messages": [*HI, {"role": "assistant", "content": [call]}]})


def test_sampled_arguments_are_restored_by_tool_call_id():
    turns = [
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c"}]},
    ]

    chat = read({"messages": [*HI, *turns]}, calls={"c": {"name": "f", "arguments": '{"a":1}'}})

    assert chat["messages"][1]["tool_calls"][0]["function"]["arguments"] == '{"a":1}'


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"model": 1}, "model"),
        ({"messages": None}, "messages"),
        ({"system": 1}, "system"),
        ({"system": [{"type": "image"}]}, "system.0.type"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"top_k": "1"}, "top_k"),
        ({"temperature": "1"}, "temperature"),
        ({"top_p": False}, "top_p"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"stop_sequences": ["x", 1]}, "stop_sequences.1"),
        ({"thinking": True}, "thinking"),
        ({"thinking": {"type": "hard"}}, "thinking.type"),
        ({"output_config": 1}, "output_config"),
        ({"output_config": {"effort": 1}}, "output_config.effort"),
        ({"output_config": {"format": 1}}, "output_config.format"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
        ({"output_format": {"type": "json_schema"}}, "output_format.schema"),
        ({"stream": "yes"}, "stream"),
        ({"n": 2}, "n"),
        ({"thread": {"type": "create"}}, "thread"),
        ({"thread": {"type": "continue", "previous_message_id": "msg_1"}}, "thread"),
        ({"tools": 1}, "tools"),
    ],
)
def test_an_invalid_field_is_rejected_with_its_name(wrong, field):
    """The error message begins with it."""
    with pytest.raises(UnprocessableRequest, match=f"^{field}: ") as raised:
        read(MINIMAL | wrong)
    assert raised.value.param == field


@given(BODIES, st.dictionaries(st.text(max_size=2), JSON, max_size=2))
def test_any_body_is_read_or_rejected(body, items):
    """Rejected with a field's name, never by another exception; a read body is serializable, and the input is unchanged."""
    before = copy.deepcopy(body)
    try:
        chat = read(body, SWITCHES, calls={name: item for name, item in items.items() if isinstance(item, dict)})
    except UnprocessableRequest as raised:
        assert raised.param
        assert raised.message.startswith(f"{raised.param}: ")
    else:
        assert orjson.loads(orjson.dumps(chat)) == chat
        assert all(turn["role"] in {"system", "user", "assistant", "tool"} for turn in chat["messages"])
    assert before == body


@pytest.mark.parametrize(
    "last",
    [
        {"role": "system", "content": "Now be brief."},
        {"role": "system", "content": []},
        {"role": "user", "content": [{"type": "text", "text": ""}]},
    ],
)
@pytest.mark.parametrize("merges_systems", [False, True])
def test_an_assistant_message_before_the_last_message_is_not_continued(last, merges_systems):
    """Also if the last message is empty or moved to the beginning."""
    body = MINIMAL | {"messages": [*HI, {"role": "assistant", "content": "Yes"}, last]}

    assert "continue_final_message" not in read(body, TranslationOptions(merges_systems=merges_systems))


SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"name": "weather", "description": "Tells it.", "input_schema": SCHEMA}
FUNCTION = {"type": "function", "function": {"name": "weather", "description": "Tells it.", "parameters": SCHEMA}}


@pytest.mark.parametrize("extra", [{}, {"type": "custom"}, {"type": None}, {"cache_control": {"type": "ephemeral"}}])
def test_a_custom_tool_becomes_a_function(extra):
    """Fields that the model does not see are dropped."""
    assert tools_from({"tools": [WEATHER | extra]}) == {"tools": [FUNCTION]}


def test_fields_that_chat_templates_show_are_kept():
    """The description is optional; a schema without a type gets `object`, as in vLLM."""
    extra_fields = {"strict": True, "defer_loading": True}
    tool = {"name": "f", "input_schema": {"properties": {}}, **extra_fields}

    assert [function["function"] for function in tools_from({"tools": [tool]})["tools"]] == [
        {"name": "f", "parameters": {"properties": {}, "type": "object"}, **extra_fields}
    ]


def change(kind, tool):
    return {"type": f"tool_{kind}", "tool": tool}


def named(name):
    return {"type": "tool_reference", "name": name}


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ([], ["weather", "late"]),
        ([change("removal", named("weather"))], ["late"]),
        ([change("removal", named("weather")), change("addition", named("weather"))], ["weather", "late"]),
        (
            [change("addition", {"type": "tool_definition", "definition": WEATHER | {"name": "new"}})],
            ["weather", "late", "new"],
        ),
    ],
)
def test_tools_are_those_at_the_end_of_the_conversation(changes, names):
    """System messages may add and remove tools."""
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "system", "content": [*changes, {"type": "text", "text": "a"}]},
    ]
    body = {"messages": messages, "tools": [WEATHER, WEATHER | {"name": "late", "defer_loading": True}]}

    assert [tool["function"]["name"] for tool in tools_from(body)["tools"]] == names


def test_a_tool_that_is_added_is_no_longer_deferred():
    messages = [{"role": "system", "content": [change("addition", named("weather"))]}]

    assert tools_from({"messages": messages, "tools": [WEATHER | {"defer_loading": True}]}) == {"tools": [FUNCTION]}


@pytest.mark.parametrize(
    ("tool", "path"),
    [
        (None, ""),
        ({"type": "odd"}, ".type"),
        (named("unknown"), ".name"),
        (named(1), ".name"),
        ({"type": "tool_definition", "definition": {"name": "f"}}, ".definition.input_schema"),
    ],
)
def test_an_invalid_tool_change_is_rejected_with_its_path(tool, path):
    with pytest.raises(UnprocessableRequest) as raised:
        tools_from({"messages": [{"role": "system", "content": [change("addition", tool)]}]})
    assert raised.value.param == f"messages.0.content.0.tool{path}"


@pytest.mark.parametrize(
    ("tool", "named"),
    [
        ({"type": "web_search_20250305", "name": "web_search"}, "web_search"),
        ({"type": "code_execution_20250825", "name": "code_execution"}, "code_execution"),
        ({"type": "bash_20250124", "name": "bash"}, "bash"),
        ({"type": "mcp_toolset", "mcp_server_name": "files"}, "files"),
        ({"type": "odd"}, "odd"),
    ],
)
def test_hosted_tools_are_rejected_by_name(tool, named):
    """Only Anthropic can run them."""
    with pytest.raises(UnprocessableRequest, match=rf"^tools\.1: tool '{named}' ") as raised:
        tools_from({"tools": [WEATHER, tool]})
    assert raised.value.param == "tools.1"


def test_hosted_tools_are_dropped_if_configured():
    """Other tools are kept, and invalid ones are still rejected."""
    hosted = {"type": "web_search_20250305", "name": "web_search"}

    assert tools_from({"tools": [hosted, WEATHER]}, ignore_hosted=True) == {"tools": [FUNCTION]}
    assert (
        tools_from({"tools": [hosted], "mcp_servers": [{}], "tool_choice": {"type": "auto"}}, ignore_hosted=True) == {}
    )
    with pytest.raises(UnprocessableRequest, match="^tools.0.name: "):
        tools_from({"tools": [{"type": "custom"}]}, ignore_hosted=True)


def test_mcp_servers_are_rejected():
    """Anthropic's servers would call them."""
    with pytest.raises(UnprocessableRequest, match="^mcp_servers: "):
        tools_from({"mcp_servers": [{"type": "url", "url": "https://x", "name": "x"}]})
    assert tools_from({"mcp_servers": []}) == {}


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, {"tool_choice": "auto"}),
        ({"type": "any"}, {"tool_choice": "required"}),
        ({"type": "none"}, {"tool_choice": "none"}),
        ({"type": "tool", "name": "f"}, {"tool_choice": {"type": "function", "function": {"name": "f"}}}),
        (
            {"type": "auto", "disable_parallel_tool_use": True},
            {"tool_choice": "auto", "parallel_tool_calls": False},
        ),
        ({"type": "auto", "disable_parallel_tool_use": False}, {"tool_choice": "auto"}),
    ],
)
def test_tool_choice_is_translated(choice, expected):
    assert tools_from({"tools": [WEATHER], "tool_choice": choice}) == {"tools": [FUNCTION], **expected}


def test_tool_choice_without_tools():
    """`auto` and `none` are dropped, as engines reject them; the engine rejects `required`."""
    assert tools_from({"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}) == {}
    assert tools_from({"tools": [], "tool_choice": {"type": "none"}}) == {}
    assert tools_from({"tool_choice": {"type": "any"}}) == {"tool_choice": "required"}


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": {"a": 1}}, "tools"),
        ({"tools": [1]}, "tools.0"),
        ({"tools": [{"name": 1, "input_schema": {}}]}, "tools.0.name"),
        ({"tools": [{"name": "f"}]}, "tools.0.input_schema"),
        ({"tools": [{"name": "f", "input_schema": {}, "description": 1}]}, "tools.0.description"),
        ({"tools": [{"name": "f", "input_schema": {}, "strict": 1}]}, "tools.0.strict"),
        ({"tools": [{"type": 1}]}, "tools.0.type"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": {}}, "tool_choice.type"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "any", "disable_parallel_tool_use": 1}}, "tool_choice.disable_parallel_tool_use"),
    ],
)
def test_a_value_of_a_wrong_type_is_rejected_with_its_path(body, path):
    with pytest.raises(UnprocessableRequest) as raised:
        tools_from(body)
    assert raised.value.param == path
