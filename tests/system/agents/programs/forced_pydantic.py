"""pydantic-ai's Anthropic model with a random model; fields constrain the output as in forced_agents.py."""

import json
import sys

from pydantic_ai import Agent, RunContext
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.settings import ModelSettings

CALLED, ANSWERED = map(json.loads, sys.argv[1:])
results = []


def fields(ctx: RunContext) -> ModelSettings:
    """Return the fields of the run's next call."""
    return {"max_tokens": 60, "extra_body": CALLED if ctx.run_step == 1 else ANSWERED}


agent = Agent(AnthropicModel("claude-x"), model_settings=fields)


@agent.tool_plain
def add(x: int) -> str:
    """Add one to a number."""
    results.append(str(x + 1))
    return results[-1]


answer = agent.run_sync("What is 57 and 67?").output
sys.stdout.write(json.dumps([*results, answer]) + "\n")
