"""Google's Agent Development Kit: an agent that is a tool of another one."""

import asyncio
import warnings

from google.adk.agents import Agent
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import InMemoryRunner
from google.adk.tools.agent_tool import AgentTool
from google.genai.types import Content, Part
from weather import MODEL, SYSTEM, TASK, weather

warnings.filterwarnings("ignore", category=DeprecationWarning)  # AgentTool uses what its own package deprecates


async def main() -> None:
    """Run the agent once."""
    model = LiteLlm(model=f"openai/{MODEL}")
    expert = Agent(name="ask", model=model, instruction="You know the weather.", tools=[weather])
    runner = InMemoryRunner(Agent(name="boss", model=model, instruction=SYSTEM, tools=[AgentTool(expert)]))
    session = await runner.session_service.create_session(app_name=runner.app_name, user_id="user")
    message = Content(role="user", parts=[Part(text=TASK)])
    async for _ in runner.run_async(user_id="user", session_id=session.id, new_message=message):
        pass


asyncio.run(main())
