"""smolagents: its agents finish with a tool call."""

from smolagents import LogLevel, OpenAIModel, ToolCallingAgent, tool
from weather import MODEL, STREAMED, TASK, report, weather

agent = ToolCallingAgent(
    tools=[tool(weather)], model=OpenAIModel(model_id=MODEL), stream_outputs=STREAMED, verbosity_level=LogLevel.OFF
)
report(agent.run(TASK))
