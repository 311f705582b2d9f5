"""smolagents: a plan, and an agent that is managed by another one."""

from smolagents import LogLevel, OpenAIModel, ToolCallingAgent, tool
from weather import MODEL, TASK, weather

shared = {"tools": [tool(weather)], "model": OpenAIModel(model_id=MODEL), "verbosity_level": LogLevel.OFF}
expert = ToolCallingAgent(name="ask", description="Knows the weather.", **shared)
ToolCallingAgent(managed_agents=[expert], planning_interval=9, **shared).run(TASK)
