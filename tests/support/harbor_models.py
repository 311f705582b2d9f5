"""Harbor's published model of a trajectory, and calls of a conversation."""

from dataclasses import replace
from functools import cache
from types import ModuleType

from tests.support.forests import make_step
from tests.support.trainers import import_published

from proxy.trajectory.step import Step

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "What time is it?"}
MORE = {"role": "user", "content": "And tomorrow?"}
NOW = {
    "role": "assistant",
    "content": None,
    "reasoning_content": "A clock has it.",
    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "now", "arguments": '{"zone": "UTC"}'}}],
}
TEN = {"role": "tool", "tool_call_id": "c1", "content": "10:00"}
REPLY = {"role": "assistant", "content": "It is ten."}


def call(name: str, messages: list, reply: dict, prompt: tuple = (1, 2), ids: tuple = (3, 4)) -> Step:
    """Return a step of these messages and this reply."""
    response = {"choices": [{"index": 0, "message": reply}]}
    return replace(make_step(name, list(prompt), list(ids)), request={"messages": messages}, response=response)


@cache
def harbor() -> ModuleType:
    """Harbor's model of a trajectory."""
    (module,) = import_published("harbor", "models.trajectories.trajectory", without=())
    return module
