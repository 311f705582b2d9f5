"""What every program here is called with, its one tool, and how it tells what came of it.

A program is called with a task, a dialect and `whole` or `streamed`. Where the engine is stands in the environment, and
nowhere else.
"""

import json
import sys

TASK, DIALECT, STREAMED = sys.argv[1], sys.argv[2], sys.argv[3] == "streamed"
SYSTEM = "Use the tools."
MODEL = "policy"

_calls = []


def weather(city: str, days: float) -> str:
    """Tell the weather of a city.

    Args:
        city: The city.
        days: For how many days.
    """
    _calls.append([city, days])
    return f"{city}: dry for {days:g} days."


SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "number"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}


def tell(answer: str) -> None:
    """Print what the agent came to, and which calls its tool saw; those of one turn may run in any order."""
    sys.stdout.write("\n" + json.dumps({"answer": answer, "calls": sorted(_calls)}) + "\n")
