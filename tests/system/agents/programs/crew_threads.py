"""CrewAI: an agent that delegates work to a coworker."""

from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool
from weather import MODEL, SYSTEM, TASK, weather

llm = LLM(model=MODEL, provider="openai")
boss = Agent(role="Boss", goal=SYSTEM, backstory=SYSTEM, llm=llm, allow_delegation=True)
expert = Agent(role="Expert", goal=SYSTEM, backstory="You know the weather.", llm=llm, tools=[tool(weather)])
Crew(agents=[boss, expert], tasks=[Task(description=TASK, expected_output="A city.", agent=boss)]).kickoff()
