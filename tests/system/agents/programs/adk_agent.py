"""Google's Agent Development Kit, with its model class for LiteLLM."""

import asyncio

from google.adk.agents import Agent
from google.adk.agents.run_config import RunConfig, StreamingMode
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import InMemoryRunner
from google.genai.types import Content, Part
from weather import MODEL, STREAMED, SYSTEM, TASK, report, weather


async def main() -> None:
    """Run the agent once."""
    agent = Agent(name="forecaster", model=LiteLlm(model=f"openai/{MODEL}"), instruction=SYSTEM, tools=[weather])
    runner = InMemoryRunner(agent)
    session = await runner.session_service.create_session(app_name=runner.app_name, user_id="user")
    events = runner.run_async(
        user_id="user",
        session_id=session.id,
        new_message=Content(role="user", parts=[Part(text=TASK)]),
        run_config=RunConfig(streaming_mode=StreamingMode.SSE if STREAMED else StreamingMode.NONE),
    )
    replies = [event async for event in events if event.is_final_response()]
    report(replies[-1].content.parts[-1].text)


asyncio.run(main())
