"""pydantic-ai with each of its models; it streams if there is an event handler."""

import asyncio

from pydantic_ai import Agent
from weather import DIALECT, MODEL, STREAMED, SYSTEM, TASK, report, weather


def model():
    """Return the model class of the dialect."""
    if DIALECT == "messages":
        from pydantic_ai.models.anthropic import AnthropicModel

        return AnthropicModel(MODEL)
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel

    return OpenAIChatModel(MODEL) if DIALECT == "chat" else OpenAIResponsesModel(MODEL)


async def listen(_, events) -> None:
    """Consume all events."""
    async for _ in events:
        pass


async def main() -> None:
    """Run the agent once."""
    agent = Agent(model(), instructions=SYSTEM, tools=[weather])
    report((await agent.run(TASK, event_stream_handler=listen if STREAMED else None)).output)


asyncio.run(main())
