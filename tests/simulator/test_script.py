"""Scripted replies."""

import re
from pathlib import Path

import openai
import pytest
from openai import AsyncOpenAI

from proxy.server.listener import simulating
from proxy.simulator.options import Options
from proxy.simulator.script import ScriptedCall, Turn, read_script
from proxy.simulator.template import render

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]
WEATHER = """
- think: Where is it?
  say: I look that up.
  call: [{name: weather, arguments: {city: Oslo}}, {name: weather, arguments: '{"city":  "Rome"}'}]
- fail: {status: 503, times: 2}
  say: It rains.
"""


@pytest.fixture
def text():
    """The script; a test can parametrize it."""
    return WEATHER


@pytest.fixture(params=["vllm", "sglang"])
async def client(request, text, tmp_path):
    """OpenAI's client of an engine with the script of the test."""
    (tmp_path / "script.yaml").write_text(text)
    script = read_script(tmp_path / "script.yaml")
    async with (
        simulating("127.0.0.1:0", Options(shape=request.param, script=script)) as url,
        AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


async def reply(client, messages, **fields):
    completion = await client.chat.completions.create(model="simulated", messages=messages, logprobs=True, **fields)
    return completion.choices[0]


async def test_a_turn_has_reasoning_text_and_calls(client):
    """A turn is parsed like any reply, and sampled as ids with logprobs."""
    choice = await reply(client, [{"role": "user", "content": "Oslo?"}], tools=TOOLS)
    message = choice.message
    reasoning = getattr(message, "reasoning", None) or message.reasoning_content

    assert (reasoning, message.content) == ("Where is it?", "I look that up.\n")
    assert [(call.function.name, call.function.arguments) for call in message.tool_calls] == [
        ("weather", '{"city": "Oslo"}'),
        ("weather", '{"city": "Rome"}'),
    ]
    assert choice.finish_reason == "tool_calls"
    assert len(choice.logprobs.content) > 10


@pytest.mark.parametrize("think", ["", "Where is it?"])
@pytest.mark.parametrize("say", ["", "I look that up."])
@pytest.mark.parametrize("calls", [0, 2])
async def test_a_turn_is_written_as_the_template_repeats_it(think, say, calls):
    """A scripted reply has the text that the template renders, so that the next prompt extends the sampled ids."""
    turn = Turn(say=say, think=think, call=[ScriptedCall("weather", {"city": "Oslo"})] * calls)
    function = {"name": "weather", "arguments": '{"city": "Oslo"}'}
    message = {"role": "assistant", "content": say, "reasoning": think, "tool_calls": [{"function": function}] * calls}
    prompt = render([{"role": "user", "content": "Oslo?"}, message], add_generation_prompt=False)

    assert prompt.endswith(f"<|im_start|>assistant\n{turn.text()}<|im_end|>\n")


async def test_failures_precede_the_turn(client):
    """The first attempts at a turn fail as often as the script requests, then the turn is returned."""
    messages = [
        {"role": "user", "content": "Oslo?"},
        {"role": "assistant", "content": "…"},
        {"role": "user", "content": "?"},
    ]
    for _ in range(2):
        with pytest.raises(openai.InternalServerError, match="the script requests this error"):
            await reply(client, messages)

    assert (await reply(client, messages)).message.content == "It rains."


@pytest.mark.parametrize("text", ["[{say: One two three four five., cut: 3}]"])
async def test_a_cut_disconnects_the_first_attempt(client):
    """The first attempt at a streamed turn with `cut` disconnects; the next attempt is complete."""
    fields = {"model": "simulated", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    texts = []
    with pytest.raises(openai.APIError):
        async for chunk in await client.chat.completions.create(**fields):
            texts += [chunk.choices[0].delta.content or ""]
    complete = [chunk.choices[0].delta.content or "" async for chunk in await client.chat.completions.create(**fields)]

    assert "".join(complete) == "One two three four five."
    assert 0 < len("".join(texts)) < len("".join(complete))


@pytest.mark.parametrize("text", ["[{when: Rome, turns: [{say: Sun.}]}, {when: Oslo, turns: [{say: Rain.}]}]"])
async def test_the_first_user_message_that_matches_selects_the_conversation(client):
    """Later ones are searched if the first one has no match; no match at all, and a turn after the last, are errors."""
    asked = [{"role": "user", "content": text} for text in ("It is May.", "How is Oslo?", "And Rome?")]
    assert (await reply(client, asked)).message.content == "Rain."
    assert (await reply(client, asked[::-1])).message.content == "Sun."
    assert (await reply(client, [{"role": "user", "content": "How is Oslo?"}])).message.content == "Rain."
    assert (await reply(client, [{"role": "user", "content": "And Rome?"}])).message.content == "Sun."
    with pytest.raises(openai.BadRequestError, match="no conversation"):
        await reply(client, [{"role": "user", "content": "Paris?"}])
    with pytest.raises(openai.BadRequestError, match="1 turns, and this is turn 2"):
        await reply(client, [{"role": "user", "content": "Rome"}, {"role": "assistant", "content": "Sun."}])


@pytest.mark.parametrize("text", ["[{}]"])
async def test_a_turn_without_text_has_drawn_words(client):
    """It is no call, also if the request has tools."""
    message = (await reply(client, [{"role": "user", "content": "Oslo?"}], tools=TOOLS)).message

    assert message.content
    assert not message.tool_calls


@pytest.mark.parametrize("text", ["- sya: x", "a: [", "3", "- say: 3"])
def test_an_invalid_script_is_an_error(tmp_path, text):
    """The error for a file that is not a script names the file."""
    (tmp_path / "s.yaml").write_text(text)

    with pytest.raises(ValueError, match=r"s\.yaml"):
        read_script(tmp_path / "s.yaml")


async def test_the_script_of_the_page_on_the_command_line_does_what_its_comments_state(tmp_path):
    """It is the block of docs/cli.md: a tool call, then a reply; elsewhere an error, a disconnect and a reply."""
    page = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
    (text,) = re.findall(r"```yaml\n(- when: Oslo\n.*?)```", page, re.DOTALL)
    (tmp_path / "script.yaml").write_text(text)
    options = Options(script=read_script(tmp_path / "script.yaml"))
    oslo, other = ([{"role": "user", "content": content}] for content in ("Is it dry in Oslo?", "Is it dry?"))
    async with (
        simulating("127.0.0.1:0", options) as url,
        AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        first = (await reply(client, oslo, tools=TOOLS)).message
        second = (await reply(client, [*oslo, {"role": "assistant", "content": "I look that up."}])).message
        with pytest.raises(openai.InternalServerError):
            await reply(client, other)
        with pytest.raises(openai.APIError):
            async for _ in await client.chat.completions.create(model="simulated", messages=other, stream=True):
                pass
        third = (await reply(client, other)).message
        with pytest.raises(openai.BadRequestError, match="1 turns, and this is turn 2"):
            await reply(client, [*other, {"role": "assistant", "content": "Which city?"}, *other])

    assert [call.function.name for call in first.tool_calls] == ["weather"]
    assert [second.content, third.content] == ["It rains.", "Which city?"]
