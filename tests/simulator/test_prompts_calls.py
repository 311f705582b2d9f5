"""The tool calls of replies: their arguments and their syntax."""

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.simulator.model import load_model
from proxy.simulator.options import Options
from proxy.simulator.prompts import Replies, make_arguments
from proxy.simulator.requests import ChatRequest
from proxy.simulator.sampler import RandomStream
from proxy.simulator.script import Conversation, Script, ScriptedCall, Turn

TURN = "{% for m in messages %}<u>{{ m.content }}{{ calls(m) }}<e>{% endfor %}{{ '<a>' if add_generation_prompt }}"
GLM = (
    "{% macro calls(m) %}{% for c in m.tool_calls %}<call>{{ c.function.name }}{% for k, v in c.function.arguments.items() %}"
    "<k>{{ k }}</k>{{ v }}{% endfor %}</call>{% endfor %}{% endmacro %}"
    + TURN.replace("<u>", "{{ '<a>' if m.role == 'assistant' else '<u>' }}")
)
JSON = GLM.replace(
    "{% for k, v in c.function.arguments.items() %}<k>{{ k }}</k>{{ v }}{% endfor %}",
    "|{{ c.function.arguments | tojson }}",
)
CALLS = [ScriptedCall("get_weather", {"city": "Oslo"}), ScriptedCall("get_weather", '{"city": "Rome",  "days": 2}')]
SCRIPT = Script([Conversation([Turn("I look.", call=CALLS)])])
HELLO = [{"role": "user", "content": "Hi"}]


def functions(calls):
    """Names and arguments of calls."""
    return [(call["function"]["name"], orjson.loads(call["function"]["arguments"])) for call in calls]


@pytest.mark.parametrize("shape", ["vllm", "sglang"])
@pytest.mark.parametrize("template", [GLM, JSON])
async def test_calls_are_sampled_as_the_template_writes_them(shape, template, start, tools):
    """The next prompt has the text of the sampled turn, and the message has the calls; streamed and not."""
    client = await start(Options(shape=shape, template=template, eos="<e>", script=SCRIPT))
    choice = (await client.chat(HELLO, tools=tools, return_token_ids=True))["choices"][0]
    sampled = choice["token_ids" if shape == "vllm" else "response_token_ids"]
    tokenizer = load_model(template, "<e>").tokenizer
    again = await client("/tokenize", messages=[*HELLO, {"role": "assistant", **choice["message"]}], tools=tools)
    chunks = await client.chat_stream(HELLO, tools=tools)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    streamed = [call for delta in deltas for call in delta.get("tool_calls") or ()]
    arguments = "".join(call["function"].get("arguments") or "" for call in streamed)

    assert choice["message"]["content"] == "".join(delta.get("content") or "" for delta in deltas) == "I look.\n"
    assert functions(choice["message"]["tool_calls"]) == [
        ("get_weather", {"city": "Oslo"}),
        ("get_weather", {"city": "Rome", "days": 2}),
    ]
    assert arguments == '{"city": "Oslo"}{"city": "Rome", "days": 2}'
    assert {call["index"] for call in streamed} == {0, 1}
    assert choice["finish_reason"] == "tool_calls"
    assert f"<u>Hi<e><a>{tokenizer.decode(sampled)}<a>" == tokenizer.decode(again["tokens"])


async def test_drawn_calls_are_parsed_for_each_choice(start, tools):
    """Each of several choices has its own arguments."""
    client = await start(Options(template=GLM, eos="<e>", seed=1))
    chat = await client.chat(HELLO, tools=tools, n=3)
    calls = [functions(choice["message"]["tool_calls"]) for choice in chat["choices"]]

    assert list(map(len, calls)) == [1, 1, 1]
    assert calls[0] != calls[1]


async def test_a_truncated_call_is_content(start, tools):
    """A call that is cut by the limit stays in the content, streamed and not."""
    client = await start(Options(template=GLM, eos="<e>", script=SCRIPT))
    message = (await client.chat(HELLO, tools=tools, max_tokens=9))["choices"][0]["message"]
    chunks = await client.chat_stream(HELLO, tools=tools, max_tokens=9)

    assert message["content"].startswith("I look.\n<call>get")
    assert "tool_calls" not in message
    assert message["content"] == "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)


def syntax(template, rate=0.0):
    """How the replies of a model write calls."""
    model = load_model(template, "<e>", None, rate)
    return Replies(ChatRequest(HELLO), model)


@pytest.mark.parametrize(
    "template",
    [
        TURN.replace("{{ calls(m) }}", ""),  # no calls
        GLM.replace("'<a>' if m.role", "'<b>' if m.role"),  # the generation prompt is not the beginning of a turn
        GLM.replace("{% macro", "{{ raise_exception('x') if messages[1:] }}{% macro"),
    ],
)
def test_other_templates_have_the_simulators_syntax(template):
    """A template that does not write calls after its generation prompt gets the simulator's own syntax."""
    written = syntax(template)

    assert (
        written.write([ScriptedCall("f", {"a": 1})], RandomStream(1))
        == '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    )
    assert written.blocks == {}


@pytest.mark.parametrize("arguments", ["{", "[1]"])
def test_arguments_that_are_no_object_have_the_simulators_syntax(arguments):
    """Templates take objects, so that invalid JSON is written unchanged."""
    assert f'"arguments": {arguments}}}' in syntax(GLM).write([ScriptedCall("f", arguments)], RandomStream(1))


def test_arguments_in_json_have_other_white_space_at_the_rate():
    """JSON within the template's syntax is compact or spaced."""
    written = syntax(JSON, 1.0)
    texts = {written.write([ScriptedCall("f", {"a": 1, "b": 2})], RandomStream(seed)) for seed in range(9)}

    assert texts == set(written.blocks) == {'<call>f|{"a":1,"b":2}</call>', '<call>f|{"a":  1,  "b":  2}</call>'}


def test_an_empty_reasoning_block_is_no_part_of_calls():
    """Templates like Qwen3's write one before the calls."""
    template = GLM.replace("{{ calls(m) }}", "{{ '<think>\n\n</think>\n\n' if m.tool_calls }}{{ calls(m) }}")

    assert syntax(template).write([ScriptedCall("f", {})], RandomStream(1)) == "<call>f</call>"


WORDS = ["object", "file", "value"]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "properties", "items", "enum", "$ref", "anyOf", "minimum", "minLength", "a"]),
            inner,
            max_size=4,
        )
    ),
)


def value_from(schema, seed=1):
    """The value that is made for a property with this schema."""
    return make_arguments({"properties": {"x": schema}}, RandomStream(seed), WORDS)["x"]


@pytest.mark.parametrize(
    ("schema", "fits"),
    [
        ({"type": "string"}, lambda x: x in WORDS),
        ({}, lambda x: x in WORDS),
        ({"type": "string", "maxLength": 3}, lambda x: isinstance(x, str) and len(x) == 3),
        ({"type": "string", "minLength": 20}, lambda x: isinstance(x, str) and len(x) >= 20),
        ({"type": "integer"}, lambda x: isinstance(x, int)),
        ({"type": "integer", "minimum": 5, "maximum": 6}, lambda x: x in {5, 6}),
        ({"type": "integer", "exclusiveMinimum": 5, "exclusiveMaximum": 7}, lambda x: x == 6),
        ({"type": "number", "maximum": 2, "minimum": 2}, lambda x: x == 2),
        ({"type": "boolean"}, lambda x: isinstance(x, bool)),
        ({"type": "null"}, lambda x: x is None),
        ({"type": ["string", "null"]}, lambda x: x in WORDS),
        ({"type": "array", "items": {"type": "integer"}}, lambda x: x and all(isinstance(i, int) for i in x)),
        ({"type": "array", "minItems": 4}, lambda x: len(x) == 4),
        ({"type": "array", "maxItems": 0}, lambda x: x == []),
        ({"type": "object", "properties": {"y": {"const": 3}}}, lambda x: x == {"y": 3}),
        ({"enum": ["a", "b"]}, lambda x: x in {"a", "b"}),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, lambda x: isinstance(x, int)),
    ],
)
def test_values_fit_the_schema(schema, fits):
    """A value fits the type, bounds and enum of its schema, with any seed."""
    assert all(fits(value_from(schema, seed)) for seed in range(20))


def test_references_are_followed():
    """A reference gives a value of the definition that it names; a reference to nothing gives a string."""
    schema = {"properties": {"x": {"$ref": "#/$defs/day"}}, "$defs": {"day": {"const": "Monday"}}}

    assert make_arguments(schema, RandomStream(1), WORDS) == {"x": "Monday"}
    assert value_from({"$ref": "#/$defs/none"}) in WORDS


def test_a_schema_may_refer_to_itself():
    """Values of a schema that refers to itself are limited in depth and number."""
    node = {"type": "object", "properties": {str(i): {"$ref": "#/$defs/node"} for i in range(20)}}
    arguments = make_arguments({**node, "$defs": {"node": node}}, RandomStream(1), WORDS)

    assert str(arguments).count("None") < 5_000


@given(VALUES, st.integers())
def test_any_schema_gives_an_object(schema, seed):
    """Any JSON in place of a schema gives an object."""
    assert isinstance(make_arguments(schema, RandomStream(seed), WORDS), dict)
