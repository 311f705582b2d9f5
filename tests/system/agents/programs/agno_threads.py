"""Agno: a team with a member, and with a summary of the session."""

from agno.agent import Agent
from agno.db.in_memory import InMemoryDb
from agno.models.openai import OpenAIChat
from agno.team import Team
from weather import MODEL, SYSTEM, TASK, weather

model = OpenAIChat(id=MODEL)
expert = Agent(name="Expert", model=model, tools=[weather], instructions="You know the weather.", telemetry=False)
shared = {"db": InMemoryDb(), "enable_session_summaries": True, "telemetry": False}
Team(name="Team", members=[expert], model=model, instructions=SYSTEM, **shared).run(TASK, session_id="s")
