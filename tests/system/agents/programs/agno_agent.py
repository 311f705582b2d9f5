"""Agno's agent, with its model class for OpenAI's API."""

from agno.agent import Agent
from agno.models.openai import OpenAIChat
from weather import MODEL, STREAMED, SYSTEM, TASK, report, weather

agent = Agent(model=OpenAIChat(id=MODEL), tools=[weather], instructions=SYSTEM, telemetry=False)
if STREAMED:
    events = list(agent.run(TASK, stream=True, yield_run_output=True))
    report(events[-1].messages[-1].content)
else:
    report(agent.run(TASK).messages[-1].content)
