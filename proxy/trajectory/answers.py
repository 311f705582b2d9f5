"""The choices of a recorded response, which may be any JSON.

Contains the one reading of them that all readers of steps share. A response of another shape has no choices.
"""

from typing import Any

from proxy.trajectory.step import Step


def answers_of(step: Step) -> dict[int, dict[str, Any]]:
    """Return the choices of a step's response by index; the first of each index, and one without an index is choice 0."""
    given = (step.response or {}).get("choices")
    found: dict[int, dict[str, Any]] = {}
    for answer in given if isinstance(given, list) else ():
        if isinstance(answer, dict) and type(index := answer.get("index", 0)) is int:
            found.setdefault(index, answer)
    return found


def messages_of(step: Step) -> list[Any]:
    """Return the messages that were sent; none if they are not a list."""
    messages = step.body.get("messages")
    return messages if isinstance(messages, list) else []
