"""examples/tool_agent.py: an agent that uses only OpenAI's client."""

import asyncio
from pathlib import Path

import pytest
import tool_agent
from openai import OpenAI


@pytest.mark.parametrize(
    ("call", "result"),
    [
        (("look_up", '{"line": 2}'), "1 x kettle, 34.00 each"),
        (("calculate", '{"left": 19.5, "sign": "*", "right": 2}'), "39"),
        (("calculate", '{"left": 1, "sign": "^", "right": 2}'), "error: KeyError('^')"),
        (("calculate", '{"left": 1}'), "error: TypeError"),
        (("look_up", '{"line": 9}'), "error: IndexError"),
        (("look_up", '{"line": '), "error: JSONDecodeError"),
        (("delete", "{}"), "error: KeyError('delete')"),
    ],
)
def test_tools_work_and_report_their_errors_to_the_model(call, result):
    """They return a result or an error message, and raise no exception."""
    assert tool_agent.run_tool(*call).startswith(result)


async def test_the_agent_works_with_an_engine_directly(simulated):
    """Without a proxy it calls a tool, then another, and answers in text both times."""
    _, engine = simulated
    with OpenAI(base_url=f"{engine}/v1", api_key="none") as client:
        replies = await asyncio.to_thread(tool_agent.run_agent, client)

    assert [message["role"] for message in replies] == ["user", "assistant", "tool", "assistant"] * 2
    calls = [message["tool_calls"][0]["function"]["name"] for message in (replies[1], replies[5])]
    assert calls == ["look_up", "calculate"]
    assert replies[2]["content"] in tool_agent.ORDERS.read_text().splitlines()
    assert all(message["content"] for message in replies[3::4])


def test_the_agent_does_not_mention_the_proxy():
    """The example shows that an agent needs no change."""
    code = Path(tool_agent.__file__).read_text().partition('"""\n\n')[2]

    assert not {"proxy", "rollout", "tokentape"} & set(code.lower().replace(".", " ").split())
