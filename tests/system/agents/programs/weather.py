"""The arguments, the tool and the output format of every program here.

A program is called with a task, a dialect, and `whole` or `streamed`. The engine's address comes from the environment
only.
"""

import json
import sys

TASK, DIALECT, STREAMED = sys.argv[1], sys.argv[2], sys.argv[3] == "streamed"
SYSTEM = "Use the tools."
MODEL = "policy"

_calls = []


def weather(city: str, days: float) -> str:
    """Return the weather forecast of a city.

    Args:
        city: The city.
        days: The number of days.
    """
    _calls.append([city, days])
    return f"{city}: dry for {days:g} days."


SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "number"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}


def report(answer: str) -> None:
    """Print the agent's answer and the arguments of its tool calls, sorted: calls of one turn may run in any order."""
    sys.stdout.write("\n" + json.dumps({"answer": answer, "calls": sorted(_calls)}) + "\n")
