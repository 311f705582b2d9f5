"""A CrewAI crew of one agent."""

from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool
from weather import MODEL, STREAMED, SYSTEM, TASK, report, weather

agent = Agent(
    role="Forecaster",
    goal=SYSTEM,
    backstory=SYSTEM,
    llm=LLM(model=MODEL, provider="openai", stream=STREAMED),
    tools=[tool(weather)],
)
crew = Crew(agents=[agent], tasks=[Task(description=TASK, expected_output="A city.", agent=agent)])
report(crew.kickoff().raw)
