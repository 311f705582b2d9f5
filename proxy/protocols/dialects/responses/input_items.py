"""Input items, as chat messages.

The items of one response (reasoning, a message, calls) are one chat message. Items with an id of TokenTape are assigned by
that id, others by their order.

Invariant: the items of a response, sent back in any order that agents use, are the message that was sampled.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import orjson

from proxy.errors import UnprocessableRequest
from proxy.protocols.dialects.responses.content_parts import read_content, read_said
from proxy.protocols.dialects.responses.item_ids import step_of
from proxy.protocols.dialects.responses.response_object import thoughts_of
from proxy.protocols.dialects.responses.tools import ADDITIONAL, arguments_for, chat_name, hosted, input_of
from proxy.protocols.dialects.responses.validation import optional, required, unknown, wrong
from proxy.protocols.dialects.translation import Json, ResolvedReferences, TranslationOptions

_SAYING_NOTHING: Final = (
    ADDITIONAL,
    "configuration_update",
)  # of the agent's own settings; the tools are read elsewhere
_ROLES: Final = ("user", "system", "developer", "assistant")

# Of tools that OpenAI runs, or that have items of their own.
_HOSTED: Final = frozenset({
    "file_search_call", "web_search_call", "computer_call", "computer_call_output", "image_generation_call",
    "code_interpreter_call", "local_shell_call", "local_shell_call_output", "shell_call", "shell_call_output",
    "apply_patch_call", "apply_patch_call_output", "mcp_list_tools", "mcp_approval_request", "mcp_approval_response",
    "mcp_call", "tool_search_call", "tool_search_output", "additional_tools", "program", "program_output",
})  # fmt: skip


def read_items(value: object, options: TranslationOptions, resolved: ResolvedReferences) -> list[Json]:
    """Return the chat messages of `input`. Raises UnprocessableRequest or BadRequest, naming the item."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise wrong("input", "a string or a list of items", value)
    reading = _Reading(options, resolved)
    for number, item in enumerate(value):
        at = f"input[{number}]"
        if type(item) is not dict:
            raise wrong(at, "an object", item)
        reading.take(item, at)
    return reading.messages


def is_unfinished(value: object, messages: Sequence[Json], thought: str) -> bool:
    """Whether the model continues the last of these messages, which were made of `input`, as with vLLM 0.32.

    The status of the last item says so (entrypoints/openai/responses/utils.py:201): of a reply, or of thoughts. There must be
    something of it to continue: an item that says nothing, or whose thoughts cannot be read, is none.
    """
    last = value[-1] if isinstance(value, list) and value else None
    if not isinstance(last, dict) or last.get("status") not in ("in_progress", "incomplete"):
        return False
    said = messages[-1]
    if said["role"] != "assistant" or said.get("tool_calls"):
        return False
    if last.get("type") == "reasoning":
        return bool(said.get(thought)) and not said["content"]
    return last.get("type") in (None, "message") and bool(said["content"])


def calls_of(value: object) -> list[str]:
    """The ids of calls in `input`: agents may send their argument text spelt anew, and of custom tools only what it says."""
    ids = [item.get("call_id") for item in _entries(value) if item.get("type") in ("function_call", "custom_tool_call")]
    return [call_id for call_id in ids if isinstance(call_id, str)]


def references_of(value: object) -> list[str]:
    """The ids of items in `input` that stand for what we told before: references, and thoughts without a text."""
    ids = [item.get("id") for item in _entries(value) if _is_reference(item) or _is_empty(item)]
    return [name for name in ids if isinstance(name, str)]


def _is_empty(item: Json) -> bool:
    """Whether these are thoughts of which only the name came back."""
    return item.get("type") == "reasoning" and not item.get("content") and not item.get("encrypted_content")


def _entries(value: object) -> list[Json]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _is_reference(item: Json) -> bool:
    kind = item.get("type")
    return kind == "item_reference" or (kind is None and "role" not in item and "id" in item)


def _spelt_as(sampled: str | None, said: str) -> str:
    """Argument text as it was sampled, if what an agent sends back is the same JSON value; else as it was sent.

    Key order and spaces make no difference: pydantic-ai 2.68 and LangChain 1.7 write both anew.
    """
    if sampled is None or sampled == said:
        return said
    try:
        before, after = (orjson.dumps(orjson.loads(text), option=orjson.OPT_SORT_KEYS) for text in (sampled, said))
    except (orjson.JSONDecodeError, orjson.JSONEncodeError):  # no JSON, or nested deeper than orjson writes
        return said
    return sampled if before == after else said


class _Reading:
    """Messages as they grow, item by item."""

    def __init__(self, options: TranslationOptions, resolved: ResolvedReferences) -> None:
        self.messages: list[Json] = []
        self._ways = options
        self._earlier = resolved
        self._open: Json | None = None  # the assistant's message that more may be said in
        self._open_step: str | None = None
        self._by_step: dict[str, Json] = {}
        self._takes: Mapping[str, Callable[[Json, str], None]] = {
            "message": self._message,
            "reasoning": self._reasoning,
            "function_call": self._call,
            "custom_tool_call": self._call,
            "function_call_output": self._output,
            "custom_tool_call_output": self._output,
        }

    def take(self, item: Json, at: str) -> None:
        """Take one item."""
        kind = optional(item, "type", str, at)
        if _is_reference(item):
            item = self._referred(item, at)
            kind = optional(item, "type", str, at)
        kind = kind or "message"
        if kind in _SAYING_NOTHING:
            return
        if kind in self._takes:
            self._takes[kind](item, at)
        elif kind not in _HOSTED:
            raise unknown(f"{at}.type", kind, f"an item is {', '.join(self._takes)} or item_reference")
        elif not self._ways.ignore_hosted_tools:
            raise hosted(kind, f"{at}.type")

    def _referred(self, item: Json, at: str) -> Json:
        name = required(item, "id", str, at)
        found = self._earlier.items.get(name)
        if found is None:
            raise UnprocessableRequest(
                f"{at}.id names {name[:100]!r}, which is not in any recorded response", param=f"{at}.id"
            )
        return found

    def _message(self, item: Json, at: str) -> None:
        role = required(item, "role", str, at)
        if role not in _ROLES:
            raise unknown(f"{at}.role", role, f"it is one of {', '.join(_ROLES)}")
        content = item.get("content")
        if role != "assistant":
            self._say({"role": role, "content": read_content(content, f"{at}.content")})
            return
        text, refusal = read_said(content, f"{at}.content")
        message = self._assistant("content", optional(item, "id", str, at))
        if text is not None:
            message["content"] = (message["content"] or "") + text
        if refusal is not None:
            message["refusal"] = message.get("refusal", "") + refusal

    def _reasoning(self, item: Json, at: str) -> None:
        name = optional(item, "id", str, at)
        thoughts = thoughts_of(item, at)
        if (
            thoughts is None and name is not None and name in self._earlier.items
        ):  # OpenAI keeps them, so LangChain 1.7 leaves them out
            thoughts = thoughts_of(self._earlier.items[name], at)
        if thoughts is None:
            return
        message = self._assistant(self._ways.thought, name)
        message[self._ways.thought] = message.get(self._ways.thought, "") + thoughts

    def _call(self, item: Json, at: str) -> None:
        call_id = required(item, "call_id", str, at)
        name = chat_name(required(item, "name", str, at), optional(item, "namespace", str, at))
        sampled = self._earlier.calls.get(call_id)
        if item.get("type") == "function_call":
            arguments = _spelt_as(sampled, required(item, "arguments", str, at))
        else:
            said = required(item, "input", str, at)
            arguments = sampled if sampled is not None and input_of(sampled) == said else arguments_for(said)
        message = self._assistant("tool_calls", optional(item, "id", str, at))
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        message.setdefault("tool_calls", []).append(call)

    def _output(self, item: Json, at: str) -> None:
        call_id = required(item, "call_id", str, at)
        output = read_content(item.get("output"), f"{at}.output")
        self._say({"role": "tool", "tool_call_id": call_id, "content": output})

    def _say(self, message: Json) -> None:
        """A message that is nobody's but its own item's."""
        self._open = self._open_step = None
        self.messages.append(message)

    def _assistant(self, field: str, item_id: str | None) -> Json:
        """The assistant's message that an item belongs to, whose `field` it tells."""
        step = step_of(item_id)
        if step is not None and step in self._by_step:
            return self._by_step[step]
        if self._open is None or self._is_another(field, step):
            self._open, self._open_step = {"role": "assistant", "content": None}, None
            self.messages.append(self._open)
        if step is not None:
            self._by_step[step] = self._open
            self._open_step = step
        return self._open

    def _is_another(self, field: str, step: str | None) -> bool:
        """Whether an item after the open message begins the next one: it is of another step, or of something said already.

        Thoughts come first in an answer, and a text once; but after a call, and before its output, nothing else is sampled.
        """
        assert self._open is not None
        if None not in (step, self._open_step):
            return step != self._open_step
        return field != "tool_calls" and self._open["content"] is not None and "tool_calls" not in self._open
