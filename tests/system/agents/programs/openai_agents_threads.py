"""OpenAI's Agents SDK: an agent that is a tool of another one, and a handoff."""

from agents import Agent, Runner, function_tool, set_default_openai_api, set_tracing_disabled
from weather import MODEL, SYSTEM, TASK, weather

set_tracing_disabled(True)
set_default_openai_api("chat_completions")
expert = Agent(name="Expert", instructions="You know the weather.", model=MODEL, tools=[function_tool(weather)])
ask = expert.as_tool("ask", "Ask the expert.")
Runner.run_sync(Agent(name="Boss", instructions=SYSTEM, model=MODEL, tools=[ask], handoffs=[expert]), TASK)
