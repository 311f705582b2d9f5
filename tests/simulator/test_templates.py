"""Engines with a chat template in Jinja, over HTTP."""

import asyncio
import re
import sys

import aiohttp
import orjson
import pytest
from tests.support.simulated import HELLO

from proxy.simulator.model import load_model
from proxy.simulator.options import Faults, Options
from proxy.simulator.script import Conversation, Script, ScriptedCall, Turn
from proxy.simulator.server import make_engine
from proxy.simulator.tokenizer import load_tokenizer

LLAMA = """{{ bos_token }}{% for m in messages %}
<|start_header_id|>{{ m.role }}<|end_header_id|>

{{ m.content | trim }}{% for c in m.tool_calls %}[CALL]{{ c.function | tojson }}{% endfor %}<|eot_id|>
{%- endfor %}
{% if add_generation_prompt %}
<|start_header_id|>assistant<|end_header_id|>

{{ "<think>\n" if enable_thinking }}{% endif %}"""
EOS = "<|eot_id|>"
SHAPES = pytest.mark.parametrize("shape", ["vllm", "sglang"])


def options(**fields):
    """The options of an engine with the template."""
    return Options(template=LLAMA, eos=EOS, **fields)


def script(say, **fields):
    """A script of one turn."""
    return Script([Conversation([Turn(say=say, **fields)])])


def test_markers_are_single_tokens_after_the_vocabulary():
    """Each marker of the template has an id after the existing ones, which do not change."""
    base, tokenizer = load_tokenizer(), load_model(LLAMA, EOS).tokenizer
    names = ("<|start_header_id|>", "<|end_header_id|>", "[CALL]", EOS, "<s>")

    assert base.pieces == tokenizer.pieces[: len(base)]
    assert (
        [len(base) + i for i in range(5)] == tokenizer.encode("".join(names)) == [tokenizer.id(name) for name in names]
    )
    assert tokenizer.decode(tokenizer.encode(f"{EOS}[CALL]<s>"), skip_special=True) == "[CALL]"


@SHAPES
async def test_chat_and_tokenize_use_the_template(shape, start):
    """A chat's prompt is the rendered template, which `/tokenize` returns; `/detokenize` can keep special tokens."""
    client = await start(options(shape=shape))
    prefix, text_key = ("", "prompt") if shape == "vllm" else ("/v1", "text")
    ids = (await client(f"{prefix}/tokenize", messages=HELLO))["tokens"]
    chat = await client.chat(HELLO, return_token_ids=True)
    choice = chat["choices"][0]
    sampled = choice["token_ids" if shape == "vllm" else "response_token_ids"]
    expected = f"<s><|start_header_id|>user<|end_header_id|>\n\nSay hello to the world.{EOS}"
    expected += "<|start_header_id|>assistant<|end_header_id|>\n\n"

    keeps_special = {} if shape == "vllm" else {"skip_special_tokens": False}
    assert await client(f"{prefix}/detokenize", tokens=ids, **keeps_special) == {text_key: expected}
    assert ids == (chat if shape == "vllm" else choice)["prompt_token_ids"]
    assert await client(f"{prefix}/detokenize", tokens=sampled[-1:], **keeps_special) == {text_key: EOS}
    assert EOS not in choice["message"]["content"]
    assert choice["finish_reason"] == "stop"


async def test_texts_begin_with_bos_if_the_template_has_it(start):
    """`add_special_tokens` prepends BOS: by default to prompts that are texts, but not to rendered messages."""
    client = await start(options())
    plain = (await client("/tokenize", prompt="Hi", add_special_tokens=False))["tokens"]
    bos = load_model(LLAMA, EOS).tokenizer.id("<s>")
    completion = await client.completion("Hi", max_tokens=1, return_token_ids=True)
    messages = await client("/tokenize", messages=HELLO, add_special_tokens=True)

    assert (await client("/tokenize", prompt="Hi"))["tokens"] == [bos, *plain]
    assert completion["choices"][0]["prompt_token_ids"] == [bos, *plain]
    assert messages["tokens"][:2] == [bos, bos]
    assert plain == (await (await start(Options()))("/tokenize", prompt="Hi"))["tokens"]


async def test_a_request_has_variables_and_a_template(start):
    """`chat_template_kwargs`, `chat_template` and, of a chat only, `reasoning_effort` reach the template."""
    client = await start(Options(template="{{ x }}{{ reasoning_effort }}{{ enable_thinking }}"))

    async def prompt(path="/v1/chat/completions", **body):
        response = await client(path, messages=HELLO, return_token_ids=True, max_tokens=1, **body)
        ids = response["tokens"] if "tokens" in response else response["prompt_token_ids"]
        return (await client("/detokenize", tokens=ids))["prompt"]

    assert await prompt(chat_template_kwargs={"x": 7}, reasoning_effort="low") == "7lowTrue"
    assert await prompt(chat_template_kwargs={"enable_thinking": False}, reasoning_effort="low") == "lowFalse"
    assert await prompt(chat_template="own") == "own"
    assert await prompt("/tokenize", chat_template_kwargs={"x": 7}, reasoning_effort="low") == "7"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
async def test_an_error_of_the_template_is_a_400(path, start):
    """A template that raises an exception gives a 400 with its text."""
    client = await start(Options(template="{{ raise_exception('no system role') }}"))
    status, raw = await client.answer(path, {"messages": HELLO})

    assert (status, orjson.loads(raw)["error"]["message"]) == (400, "no system role")


@SHAPES
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("turn", [None, {"say": "\n\nHi.", "think": "Why?\n"}])
async def test_a_prompt_can_open_the_reasoning(shape, stream, turn, start):
    """After a prompt that ends with `<think>` the reply begins with reasoning, without the tag."""
    client = await start(options(shape=shape, script=turn and script(**turn)))
    body = {"chat_template_kwargs": {"enable_thinking": True}, "seed": 3}
    name = "reasoning" if shape == "vllm" else "reasoning_content"
    if stream:
        deltas = [chunk["choices"][0]["delta"] for chunk in await client.chat_stream(HELLO, **body)]
    else:
        deltas = [(await client.chat(HELLO, **body))["choices"][0]["message"]]
    reasoning = "".join(delta.get(name) or "" for delta in deltas)
    content = "".join(delta.get("content") or "" for delta in deltas)

    assert reasoning
    assert content
    assert "think>" not in reasoning + content
    assert turn is None or (reasoning, content) == ("Why?\n", "\n\nHi.")


async def test_a_script_can_have_the_calls_of_a_foreign_template(start):
    """Text with markers is sampled as their single tokens and stays in the content."""
    client = await start(options(script=script('Yes.[CALL]{"name": "f"}')))
    choice = (await client.chat(HELLO, return_token_ids=True))["choices"][0]

    assert choice["message"]["content"] == 'Yes.[CALL]{"name": "f"}'
    assert load_model(LLAMA, EOS).tokenizer.id("[CALL]") in choice["token_ids"]


@pytest.mark.parametrize("scripted", [None, script("Hm.", call=[ScriptedCall("f")])])
async def test_turns_with_calls_can_end_with_another_token(scripted, start, tools):
    """`call_eos` ends a turn with a tool call, drawn or scripted; other turns end with `eos`."""
    client = await start(Options(template="<call><end>", eos="<end>", call_eos="<call>", script=scripted))
    ids = {name: load_model("<call><end>", "<end>").tokenizer.id(name) for name in ("<call>", "<end>")}
    unscripted = await start(Options(template="<call><end>", eos="<end>", call_eos="<call>"))
    call, text = (
        (choice["finish_reason"], choice["token_ids"][-1], choice["stop_reason"])
        for chat in (
            await client.chat(tools=tools, return_token_ids=True),
            await unscripted.chat(return_token_ids=True),
        )
        for choice in chat["choices"]
    )

    assert ("tool_calls", ids["<call>"], ids["<call>"]) == call
    assert ("stop", ids["<end>"], None) == text


async def test_a_script_can_end_a_turn_with_any_eos(start):
    """Text after an EOS is not sampled; the engine names the EOS that is not its first one."""
    client = await start(Options(template="<call><end>", eos="<end>", call_eos="<call>", script=script("Hm.<call>x")))
    choice = (await client.chat(HELLO))["choices"][0]

    assert choice["message"]["content"] == "Hm."
    assert load_model("<call><end>", "<end>").tokenizer.id("<call>") == choice["stop_reason"]


@pytest.mark.parametrize(
    ("invalid", "message"),
    [
        (Options(call_eos="<call>"), "EOS '<call>' is not a single token; use one of <|endoftext|>, "),
        (Options(eos=EOS), "EOS '<|eot_id|>' is not a single token; use one of <|endoftext|>, "),
        (Options(template="{% if %}"), "the chat template is invalid: line 1"),
    ],
)
def test_invalid_options_are_refused(invalid, message):
    """An EOS that is no single token, or an invalid template, is refused at the start, with the reason."""
    with pytest.raises(ValueError, match=re.escape(message)):
        make_engine(invalid)


def test_a_template_requires_jinja2(monkeypatch):
    """Without jinja2 the error names the extra to install."""
    monkeypatch.delitem(sys.modules, "proxy.simulator.jinja_template", raising=False)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ValueError, match=r"^A chat template requires jinja2: pip install jinja2\.$"):
        load_model("without jinja2")


@SHAPES
async def test_faults_of_tokenize(shape, start):
    """The tokenizer endpoint responds with a status, or never; tests switch it at any time."""
    faults = Faults()
    client = await start(Options(shape=shape, faults=faults))
    faults.tokenize = 404
    assert (await client.answer("/tokenize", {"prompt": "a"}))[0] == 404
    faults.tokenize = "hangs"
    with pytest.raises(asyncio.TimeoutError):
        await client.answer("/tokenize", {"prompt": "a"}, timeout=aiohttp.ClientTimeout(0.2))
    faults.tokenize = None

    assert (await client("/tokenize", prompt="a"))["count"] == 1


async def test_requests_are_counted_by_path(start):
    """The options count all requests that the engine receives."""
    given = Options()
    client = await start(given)
    await client.chat(HELLO)
    await client("/tokenize", prompt="a")
    await client("/tokenize", prompt="b")
    assert (await client.get("/unknown"))[0] == 404

    assert given.requests == {"/v1/chat/completions": 1, "/tokenize": 2, "/unknown": 1}
