"""Strands Agents: an agent in a tool of another one; the conversation is summarized."""

from strands import Agent, tool
from strands.agent.conversation_manager import SummarizingConversationManager
from strands.models.openai import OpenAIModel
from weather import MODEL, SYSTEM, TASK, weather

shared = {"model": OpenAIModel(model_id=MODEL), "callback_handler": None}


@tool
def ask(question: str) -> str:
    """Ask the expert."""
    return str(Agent(tools=[tool(weather)], system_prompt="You know the weather.", **shared)(question))


manager = SummarizingConversationManager(summary_ratio=0.8, preserve_recent_messages=1)
agent = Agent(tools=[ask], system_prompt=SYSTEM, conversation_manager=manager, **shared)
agent(TASK)
manager.reduce_context(agent)  # as when the context is too long
agent("And now?")
