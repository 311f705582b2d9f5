"""The tool calls of replies: in the syntax of the chat template, if it writes them in one of its own.

A real model samples calls as its template repeats them, and a parser for this syntax reads them. The simulated model takes
the syntax from the template itself: it renders the chat with and without the calls. Calls in the syntax of
`proxy.simulator.template` are parsed as text; other ones are recognized as a whole, hence only if they are complete.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import orjson

from proxy.simulator.errors import RequestError
from proxy.simulator.parser import ToolCall
from proxy.simulator.template import COMPACT, SPACED, call_text, json_text, to_json

if TYPE_CHECKING:
    from proxy.simulator.model import Model
    from proxy.simulator.sampler import RandomStream

_EMPTY_REASONING: Final = re.compile(r"^\s*<think>\s*</think>\s*")

Render = Callable[[Sequence[dict[str, Any]]], str]
"""Returns the text of the chat with more messages; without any, it ends with the generation prompt."""

Call = tuple[str, object]
"""A function's name and its arguments: an object, or JSON text that is written unchanged."""


@dataclass(slots=True)
class CallSyntax:
    """Writes the calls of the replies to one chat. `blocks`: the texts in the template's own syntax, with their calls."""

    render: Render
    model: "Model"
    blocks: dict[str, Sequence[ToolCall]] = field(default_factory=dict)

    def write(self, calls: Sequence[Call], stream: "RandomStream") -> str:
        """Return the text of the calls, each at the model's rate in other white space than the template's."""
        separators = [self._separators(stream) for _ in calls]
        arguments = [_object(value) for _, value in calls]
        objects = [value for value in arguments if value is not None]
        if calls and self.model.template is not None and len(objects) == len(calls):
            names = [name for name, _ in calls]
            block = self._block(names, objects)
            if block is not None and block != "\n".join(map(call_text, names, objects)):
                for value, pair in zip(objects, separators, strict=True):
                    if value:
                        block = block.replace(to_json(value), json_text(value, pair), 1)
                self.blocks[block] = [ToolCall(name, to_json(v)) for name, v in zip(names, objects, strict=True)]
                return block
        return "\n".join(call_text(name, value, pair) for (name, value), pair in zip(calls, separators, strict=True))

    def _separators(self, stream: "RandomStream") -> tuple[str, str]:
        rate = self.model.noncanonical_rate
        return (", ", ": ") if not rate or stream.unit() >= rate else (COMPACT, SPACED)[stream.below(2)]

    def _block(self, names: Sequence[str], arguments: Sequence[dict[str, Any]]) -> str | None:
        """Return the calls as the template writes them; None if they are not at the end of its text."""
        message = {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": f"call{index:05}", "type": "function", "function": {"name": name, "arguments": value}}
                for index, (name, value) in enumerate(zip(names, arguments, strict=True))
            ],
        }
        try:
            before = self.render([])
            text = self.render([message])
        except RequestError:
            return None
        if not text.startswith(before):
            return None
        stops = [self.model.tokenizer.decode([token]) for token in self.model.eos_ids]
        block = re.split("|".join(map(re.escape, stops)), text[len(before) :], maxsplit=1)[0]
        block = _EMPTY_REASONING.sub("", block).rstrip()
        return block if all(name in block for name in names) else None


def _object(arguments: object) -> dict[str, Any] | None:
    """Return arguments as an object; None for text that is not the JSON of one."""
    if isinstance(arguments, str):
        try:
            arguments = orjson.loads(arguments)
        except orjson.JSONDecodeError:
            return None
    return arguments if isinstance(arguments, dict) else None
