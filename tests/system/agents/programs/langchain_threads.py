"""LangChain: an agent in a tool of another one; middleware summarizes the conversation."""

from langchain.agents import create_agent
from langchain.agents.middleware import SummarizationMiddleware
from langchain_openai import ChatOpenAI
from weather import MODEL, SYSTEM, TASK, weather

model = ChatOpenAI(model=MODEL)
expert = create_agent(model, tools=[weather], system_prompt="You know the weather.")


def ask(question: str) -> str:
    """Ask the expert."""
    return expert.invoke({"messages": [{"role": "user", "content": question}]})["messages"][-1].content


summarizing = SummarizationMiddleware(model=model, trigger=("messages", 5), keep=("messages", 2))
agent = create_agent(model, tools=[weather, ask], system_prompt=SYSTEM, middleware=[summarizing])
agent.invoke({"messages": [{"role": "user", "content": TASK}]})
