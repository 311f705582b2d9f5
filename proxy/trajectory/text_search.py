"""Search for a text in the prompts, replies and errors of steps."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from proxy.trajectory.blocks import count_equal
from proxy.trajectory.step import Step, answers_of, messages_of

Place = Literal["prompt", "reply", "error"]

_CONTEXT: Final = 80  # characters before and after a match
_NO_TEXT: Final = frozenset({"role", "type", "id", "tool_call_id", "object", "finish_reason", "logprobs"})


@dataclass(frozen=True, slots=True)
class Match:
    """A text in a step: where it is, and the characters around it. `role`: its message's role, if it has one."""

    step_id: str
    place: Place
    role: str | None
    before: str
    text: str
    after: str


class Needle:
    """A text to search for. Case does not matter."""

    __slots__ = ("_lower",)

    def __init__(self, text: str) -> None:
        self._lower = text.lower()

    def __repr__(self) -> str:
        return f"<Needle {self._lower!r}>"

    def find(self, text: str) -> tuple[str, str, str] | None:
        """Return the first match and what is around it; None if there is none."""
        lower = text.lower()
        at = lower.find(self._lower)
        if at < 0:
            return None
        shown = text if len(lower) == len(text) else lower  # the lower case of some characters is longer
        end = at + len(self._lower)
        return shown[max(0, at - _CONTEXT) : at], shown[at:end], shown[end : end + _CONTEXT]


def search(steps: Sequence[Step], needle: Needle, limit: int) -> list[Match]:
    """Return up to `limit` matches in the steps of a rollout, at most one for each message, reply or error.

    Messages that a step has in common with the step before it are searched once.
    """
    found: list[Match] = []
    earlier: list[Any] = []
    for step in steps:
        messages = messages_of(step)
        new = messages[count_equal(earlier, messages) :]
        earlier = messages
        for place, role, value in _values(step, new):
            match = next(filter(None, map(needle.find, _texts(value))), None)
            if match is not None:
                found.append(Match(step.step_id, place, role, *match))
                if len(found) == limit:
                    return found
    return found


def _values(step: Step, messages: Sequence[Any]) -> Iterator[tuple[Place, str | None, Any]]:
    """Yield the values to search in a step, with place and role. `messages` were not searched yet."""
    for message in messages:
        yield "prompt", _role(message), message
    yield "prompt", None, step.request.get("prompt")
    for answer in answers_of(step).values():
        message = answer.get("message", answer.get("text"))
        yield "reply", _role(message), message
    if step.status == "error":
        yield "error", None, step.response
        yield "error", None, step.reason


def _role(message: Any) -> str | None:
    role = message.get("role") if isinstance(message, dict) else None
    return role if isinstance(role, str) else None


def _texts(value: Any) -> Iterator[str]:
    """Return the texts of a JSON value, in order, without roles, types and ids."""
    waiting = [value]
    while waiting:
        match waiting.pop():
            case str() as text:
                yield text
            case dict() as fields:
                waiting += reversed([inner for name, inner in fields.items() if name not in _NO_TEXT])
            case list() as items if not (items and isinstance(items[0], int)):  # not a list of token ids
                waiting += reversed(items)
