"""Strands Agents with its model class for OpenAI's API, which always streams."""

from strands import Agent, tool
from strands.models.openai import OpenAIModel
from weather import MODEL, SYSTEM, TASK, report, weather

agent = Agent(model=OpenAIModel(model_id=MODEL), tools=[tool(weather)], system_prompt=SYSTEM, callback_handler=None)
report(str(agent(TASK)).strip())
