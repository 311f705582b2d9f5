"""pydantic-ai: an agent in a tool of another one."""

from pydantic_ai import Agent
from weather import MODEL, SYSTEM, TASK, weather

expert = Agent(f"openai-chat:{MODEL}", instructions="You know the weather.", tools=[weather])


async def ask(question: str) -> str:
    """Ask the expert."""
    return (await expert.run(question)).output


Agent(f"openai-chat:{MODEL}", instructions=SYSTEM, tools=[ask]).run_sync(TASK)
