"""Tool calls of earlier turns: the simulator prepares them for the template as vLLM does."""

import orjson
import pytest

from proxy.simulator.errors import RequestError
from proxy.simulator.prompts import text_to_tokenize

USER = {"role": "user", "content": "Count to three."}
ARGUMENTS = (
    '{"a":1}', '{ "a": "\\u00f8 <b>", "a": 2.50 }', '{"a":1e22,"b":0.00001,"c":12345678901234567890123}', '{"a": NaN}',
    '{"a":1e400}', "", '{"a": "cu', "nothing", "[]", "4", "null", '{"a": "\\ud800"}', '{"a": ' + "1" * 5_000 + "}",
    {"a": 1}, None, 4,
)  # fmt: skip


def conversation(arguments, **call):
    """Return a conversation with one tool call."""
    made = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}, **call}
    return [USER, {"role": "assistant", "content": None, "tool_calls": [made]}]


ODD = (
    conversation("{}", id=None), conversation("{}", type=None),
    conversation("{}", type="custom", custom={"name": "f", "input": "x"}),
    conversation("{}", function="f"), conversation("{}", function={"arguments": "{}"}),
    [USER, {"role": "assistant", "content": "Hi", "tool_calls": []}],
    [USER, {"role": "assistant", "content": "Hi", "tool_calls": None}],
    [USER, {"role": "assistant", "content": "Hi", "tool_calls": "f"}],
)  # fmt: skip


def simulated(messages) -> str | None:
    """Return the call in the simulator's prompt; None if it rejects the request."""
    try:
        return call_in(text_to_tokenize({"messages": messages}))
    except RequestError:
        return None


def call_in(prompt: str) -> str:
    """Return the tool call in a prompt; empty if there is none."""
    return prompt.partition("<tool_call>")[2].partition("</tool_call>")[0]


@pytest.mark.parametrize(
    "messages", [*map(conversation, ARGUMENTS), *ODD], ids=lambda case: repr(case[1]["tool_calls"])[:90]
)
async def test_the_simulator_renders_a_call_as_vllm_does(vllm, http, messages):
    """In the prompt of the next turn, or both reject it."""
    async with http.post(f"{vllm.url}/tokenize", json={"model": "tiny", "messages": messages}) as response:
        rendered = orjson.loads(await response.read())
    if response.status != 200:
        assert response.status == 400
        assert simulated(messages) is None
        return
    async with http.post(f"{vllm.url}/detokenize", json={"model": "tiny", "tokens": rendered["tokens"]}) as response:
        prompt = orjson.loads(await response.read())["prompt"]

    assert call_in(prompt) == simulated(messages)
