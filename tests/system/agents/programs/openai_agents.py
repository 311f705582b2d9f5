"""OpenAI's Agents SDK; with `responses, chained` it sends the previous response's ID instead of the whole conversation."""

import asyncio

from agents import Agent, Runner, function_tool, set_default_openai_api, set_tracing_disabled
from weather import DIALECT, MODEL, STREAMED, SYSTEM, TASK, report, weather

set_tracing_disabled(True)
set_default_openai_api("chat_completions" if DIALECT == "chat" else "responses")
agent = Agent(name="Forecaster", instructions=SYSTEM, model=MODEL, tools=[function_tool(weather)])


async def main() -> None:
    """Run the agent once."""
    chained = {"auto_previous_response_id": DIALECT == "responses, chained"}
    if STREAMED:
        result = Runner.run_streamed(agent, TASK, **chained)
        async for _ in result.stream_events():
            pass
    else:
        result = await Runner.run(agent, TASK, **chained)
    report(result.final_output)


asyncio.run(main())
