"""AutoGen: a chat of two agents; a model selects the next speaker."""

import asyncio

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.conditions import MaxMessageTermination
from autogen_agentchat.teams import SelectorGroupChat
from autogen_ext.models.openai import OpenAIChatCompletionClient
from weather import MODEL, SYSTEM, TASK, weather

ABLE = {
    "vision": False,
    "function_calling": True,
    "json_output": False,
    "structured_output": False,
    "family": "unknown",
}
client = OpenAIChatCompletionClient(model=MODEL, model_info=ABLE)
planner = AssistantAgent("planner", client, system_message=SYSTEM)
expert = AssistantAgent("expert", client, tools=[weather], system_message="You know the weather.")
chat = SelectorGroupChat([planner, expert], client, termination_condition=MaxMessageTermination(5))
asyncio.run(chat.run(task=TASK))
