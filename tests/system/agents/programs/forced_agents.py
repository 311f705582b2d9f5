"""OpenAI's Agents SDK with a random model; request fields that the SDK passes on constrain the output.

The first run ends with a tool call, the second continues it. The arguments are the fields of each run, as JSON.
"""

import asyncio
import json
import sys

from agents import Agent, ModelSettings, Runner, function_tool, set_tracing_disabled

set_tracing_disabled(True)
CALLED, ANSWERED = map(json.loads, sys.argv[1:])


@function_tool(strict_mode=False)  # vLLM constrains strict calls itself
def add(x: int) -> str:
    """Add one to a number."""
    return str(x + 1)


def agent(fields: dict, **more) -> Agent:
    """Return an agent that sends these fields with its calls."""
    settings = ModelSettings(max_tokens=60, extra_body=fields)
    return Agent(name="Calculator", model="gpt-5", tools=[add], model_settings=settings, **more)


async def main() -> None:
    """Run both, the second streamed."""
    first = await Runner.run(agent(CALLED, tool_use_behavior="stop_on_first_tool"), "What is 57 and 67?")
    second = Runner.run_streamed(agent(ANSWERED), first.to_input_list())
    async for _ in second.stream_events():
        pass
    sys.stdout.write(json.dumps([first.final_output, second.final_output]) + "\n")


asyncio.run(main())
