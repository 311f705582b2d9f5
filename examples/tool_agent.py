"""An ordinary agent with tools.

Shows that an agent needs no change to be recorded. OpenAI's client reads OPENAI_BASE_URL and OPENAI_API_KEY; the loop runs
tools until the model calls none. The tools look up a line of a file, and calculate. `record_agent.py` runs this file and
prints the rows for a trainer.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from openai import OpenAI

ORDERS = Path(__file__).with_name("orders.txt")
QUESTIONS = ("What was the first order?", "And what do two of them cost?")


def look_up(line: int) -> str:
    """A line of the list of orders, counted from 1."""
    return ORDERS.read_text().splitlines()[line - 1]


def calculate(left: float, sign: str, right: float) -> str:
    """A sum of two numbers."""
    sums = {"+": left + right, "-": left - right, "*": left * right}
    return f"{sums[sign]:g}"


def schema_of(tool: Callable[..., str], **properties: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a tool for the model."""
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    function = {"name": tool.__name__, "description": tool.__doc__, "parameters": parameters}
    return {"type": "function", "function": function}


TOOLS: dict[str, Callable[..., str]] = {"calculate": calculate, "look_up": look_up}
SCHEMAS: list[Any] = [
    schema_of(calculate, left={"type": "number"}, sign={"enum": ["+", "-", "*"]}, right={"type": "number"}),
    schema_of(look_up, line={"type": "integer", "minimum": 1, "maximum": 3}),
]


def run_tool(name: str, arguments: str) -> str:
    """Return the result of a tool, or its error for the model to correct."""
    try:
        return TOOLS[name](**json.loads(arguments))
    except (KeyError, TypeError, ValueError, IndexError) as fault:
        return f"error: {fault!r}"


def complete(client: OpenAI, messages: list[Any], *, stream: bool, **options: Any) -> Any:
    """Return the message of the model's next turn, streamed or not."""
    body = {"model": "policy", "messages": messages, "tools": SCHEMAS, "temperature": 1.0, **options}
    if not stream:
        return client.chat.completions.create(**body).choices[0].message
    with client.chat.completions.stream(**body) as events:
        return events.get_final_completion().choices[0].message


def run_agent(client: OpenAI, questions: Sequence[str] = QUESTIONS, max_turns: int = 4) -> list[Any]:
    """Send each question and run tools until the model replies without a call; return the whole conversation.

    `tool_choice` forces a look-up in the first turn. Every second question is streamed.
    """
    messages: list[Any] = []
    forced: dict[str, Any] = {"tool_choice": {"type": "function", "function": {"name": "look_up"}}}
    for number, question in enumerate(questions):
        messages.append({"role": "user", "content": question})
        for turn in range(max_turns):
            reply = complete(client, messages, stream=number % 2 == 1, **(forced if number == turn == 0 else {}))
            messages.append(reply.model_dump(exclude_none=True, include={"role", "content", "tool_calls"}))
            if not reply.tool_calls:
                break
            for call in reply.tool_calls:
                result = run_tool(call.function.name, call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return messages


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the agent and print the conversation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", nargs="*", default=QUESTIONS, help="questions of the user")
    options = parser.parse_args(arguments)
    with OpenAI() as client:
        for message in run_agent(client, options.questions):
            calls = [call["function"] for call in message.get("tool_calls", ())]
            texts = [f"{call['name']}({call['arguments']})" for call in calls] or [message["content"]]
            print(f"{message['role']:>9}: {'; '.join(texts)}")


if __name__ == "__main__":
    main()
