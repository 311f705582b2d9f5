"""Tool calls in the syntax of the chat template."""

import orjson
import pytest

from proxy.simulator.model import load_model
from proxy.simulator.options import Options
from proxy.simulator.sampler import RandomStream
from proxy.simulator.script import Conversation, Script, ScriptedCall, Turn
from proxy.simulator.tool_calls import CallSyntax

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

    assert "I look.\n" == choice["message"]["content"] == "".join(delta.get("content") or "" for delta in deltas)
    assert [("get_weather", {"city": "Oslo"}), ("get_weather", {"city": "Rome", "days": 2})] == functions(
        choice["message"]["tool_calls"]
    )
    assert '{"city": "Oslo"}{"city": "Rome", "days": 2}' == arguments
    assert {0, 1} == {call["index"] for call in streamed}
    assert "tool_calls" == choice["finish_reason"]
    assert f"<u>Hi<e><a>{tokenizer.decode(sampled)}<a>" == tokenizer.decode(again["tokens"])


async def test_drawn_calls_are_parsed_for_each_choice(start, tools):
    """Each of several choices has its own arguments."""
    client = await start(Options(template=GLM, eos="<e>", seed=1))
    chat = await client.chat(HELLO, tools=tools, n=3)
    calls = [functions(choice["message"]["tool_calls"]) for choice in chat["choices"]]

    assert [1, 1, 1] == list(map(len, calls))
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

    def render(messages):
        return model.template.render(
            [*HELLO, *messages],
            tools=None,
            add_generation_prompt=not messages,
            continue_final_message=False,
            variables={},
        )

    return CallSyntax(render, model)


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

    assert '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>' == written.write(
        [("f", {"a": 1})], RandomStream(1)
    )
    assert {} == written.blocks


@pytest.mark.parametrize("arguments", ["{", "[1]"])
def test_arguments_that_are_no_object_have_the_simulators_syntax(arguments):
    """Templates take objects, so that invalid JSON is written unchanged."""
    assert f'"arguments": {arguments}}}' in syntax(GLM).write([("f", arguments)], RandomStream(1))


def test_arguments_in_json_have_other_white_space_at_the_rate():
    """JSON within the template's syntax is compact or spaced."""
    written = syntax(JSON, 1.0)
    texts = {written.write([("f", {"a": 1, "b": 2})], RandomStream(seed)) for seed in range(9)}

    assert {'<call>f|{"a":1,"b":2}</call>', '<call>f|{"a":  1,  "b":  2}</call>'} == texts == set(written.blocks)


def test_an_empty_reasoning_block_is_no_part_of_calls():
    """Templates like Qwen3's write one before the calls."""
    template = GLM.replace("{{ calls(m) }}", "{{ '<think>\n\n</think>\n\n' if m.tool_calls }}{{ calls(m) }}")

    assert "<call>f</call>" == syntax(template).write([("f", {})], RandomStream(1))
