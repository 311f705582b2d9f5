"""AutoGen's AssistantAgent, with its client for OpenAI's API."""

import asyncio

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.base import TaskResult
from autogen_ext.models.openai import OpenAIChatCompletionClient
from weather import MODEL, STREAMED, SYSTEM, TASK, report, weather

ABLE = {
    "vision": False,
    "function_calling": True,
    "json_output": False,
    "structured_output": False,
    "family": "unknown",
}


async def main() -> None:
    """Run the agent once."""
    agent = AssistantAgent(
        "forecaster",
        OpenAIChatCompletionClient(model=MODEL, model_info=ABLE),
        tools=[weather],
        system_message=SYSTEM,
        max_tool_iterations=4,
        model_client_stream=STREAMED,
    )
    results = [event async for event in agent.run_stream(task=TASK) if isinstance(event, TaskResult)]
    report(results[0].messages[-1].content)


asyncio.run(main())
