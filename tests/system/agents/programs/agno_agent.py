"""Agno's agent, with its model classes for OpenAI's APIs."""

from agno.agent import Agent
from agno.models.openai import OpenAIChat, OpenAIResponses
from weather import DIALECT, MODEL, STREAMED, SYSTEM, TASK, report, weather

model = (OpenAIResponses if DIALECT == "responses" else OpenAIChat)(id=MODEL)
agent = Agent(model=model, tools=[weather], instructions=SYSTEM, telemetry=False)
if STREAMED:
    events = list(agent.run(TASK, stream=True, yield_run_output=True))
    report(events[-1].messages[-1].content)
else:
    report(agent.run(TASK).messages[-1].content)
