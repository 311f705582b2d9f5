"""A Responses request, read as a chat call: its input items, and its options.

Fields without an equivalent in chat are not sent; they are recorded with the client's body. The items of one response
(reasoning, a message, calls) are one chat message. Items with an id of TokenTape are assigned by that id, others by their
order. Files and images that are referenced by an id are refused: TokenTape stores none.

Invariant: the items of a response, sent back in any order that agents use, are translated to the message that was sampled.
"""

import re
from base64 import b64encode, urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Any, Final, TypeAlias

from proxy.errors import BadRequest, InvalidValue
from proxy.protocols.dialects.base import NO_REFERENCES, Json, ResolvedReferences, TranslationOptions, text_or_none
from proxy.protocols.dialects.responses.tools import (
    ADDITIONAL,
    arguments_for,
    chat_name,
    choose,
    hosted,
    input_from,
    read_tools,
)
from proxy.protocols.dialects.translation import (
    CONTINUES,
    a_count,
    a_flag,
    a_number,
    a_text,
    add_configured,
    an_object,
    chat_call,
    chat_content,
    decoded,
    objects,
    optional,
    passed_fields,
    required,
    schema_format,
    text_part,
    texts,
    unknown,
    wrong,
)
from proxy.trajectory.conversations import canonical_json

_WITHOUT_MESSAGE: Final = (ADDITIONAL, "configuration_update")  # settings of the agent; `tools` reads additional tools
_ROLES: Final = ("user", "system", "developer", "assistant")

# Items of tools that OpenAI runs, or that have item types of their own.
_HOSTED: Final = frozenset({
    "file_search_call", "web_search_call", "computer_call", "computer_call_output", "image_generation_call",
    "code_interpreter_call", "local_shell_call", "local_shell_call_output", "shell_call", "shell_call_output",
    "apply_patch_call", "apply_patch_call_output", "mcp_list_tools", "mcp_approval_request", "mcp_approval_response",
    "mcp_call", "tool_search_call", "tool_search_output", "additional_tools", "program", "program_output",
})  # fmt: skip


def read_items(value: object, options: TranslationOptions, resolved: ResolvedReferences) -> list[Json]:
    """Return the chat messages of `input`. Raises InvalidValue or BadRequest, naming the item."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    builder = _MessageBuilder(options, resolved)
    for item, path in _objects(value, "input", "items"):
        builder.take(item, path)
    return builder.finish()


def is_unfinished(value: object, messages: Sequence[Json], reasoning_field: str) -> bool:
    """Return whether the model continues the last of these messages, the translation of `input`, as with vLLM 0.32.

    It does if the last item is an assistant message or reasoning with an unfinished status
    (entrypoints/openai/responses/utils.py:201), and is not empty or unreadable.
    """
    last = value[-1] if isinstance(value, list) and value else None
    if not isinstance(last, dict) or last.get("status") not in ("in_progress", "incomplete"):
        return False
    message = messages[-1]
    if message["role"] != "assistant" or message.get("tool_calls"):
        return False
    if last.get("type") == "reasoning":
        return bool(message.get(reasoning_field)) and not message["content"]
    return last.get("type") in (None, "message") and bool(message["content"])


def call_ids_from(value: object) -> list[str]:
    """Return the ids of calls in `input`. Agents may reserialize their arguments (or reduce them to a custom tool's input)."""
    ids = [item.get("call_id") for item in _entries(value) if item.get("type") in ("function_call", "custom_tool_call")]
    return [call_id for call_id in ids if isinstance(call_id, str)]


def item_ids_from(value: object) -> list[str]:
    """Return the ids of items in `input` that refer to items of earlier responses: references, and reasoning without text."""
    ids = [
        item.get("id")
        for item in _entries(value)
        if _is_reference(item)
        or (item.get("type") == "reasoning" and not item.get("content") and not item.get("encrypted_content"))
    ]
    return [name for name in ids if isinstance(name, str)]


def _entries(value: object) -> list[Json]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _is_reference(item: Json) -> bool:
    kind = item.get("type")
    return kind == "item_reference" or (kind is None and "role" not in item and "id" in item)


class _MessageBuilder:
    """Builds chat messages, item by item."""

    def __init__(self, options: TranslationOptions, resolved: ResolvedReferences) -> None:
        self.messages: list[Json] = []
        self._options = options
        self._resolved = resolved
        self._open: Json | None = None  # the assistant message that further items may belong to
        self._open_step: str | None = None
        self._by_step: dict[str, Json] = {}
        self._pieces: dict[tuple[int, str], list[str]] = {}  # of texts, by the id() of their message and the field
        self._referred_to: set[str] = set()
        self._canonical: dict[str, str] = {}  # the sampled arguments of calls, by their id
        self._inputs: dict[str, str] = {}  # the sampled inputs of custom tools
        self._takes: Mapping[str, Callable[[Json, str], None]] = {
            "message": self._message,
            "agent_message": self._agent_message,
            "reasoning": self._reasoning,
            "function_call": self._call,
            "custom_tool_call": self._call,
            "function_call_output": self._output,
            "custom_tool_call_output": self._output,
        }

    def take(self, item: Json, path: str) -> None:
        """Translate one item."""
        kind = optional(a_text, item, "type", path)
        if _is_reference(item):
            item = self._referred(item, path)
            kind = optional(a_text, item, "type", path)
        kind = kind or "message"
        if kind in _WITHOUT_MESSAGE:
            return
        if kind in self._takes:
            self._takes[kind](item, path)
        elif kind not in _HOSTED:
            raise unknown(f"{path}.type", kind, f"use {', '.join(self._takes)} or item_reference")
        elif not self._options.ignore_hosted_tools:
            raise hosted(kind, f"{path}.type")

    def _referred(self, item: Json, path: str) -> Json:
        name = required(a_text, item, "id", path)
        self._refer(name, path)
        found = self._resolved.items.get(name)
        if found is None:
            raise InvalidValue(
                f"{path}.id names {name[:100]!r}, which is not in any recorded response", param=f"{path}.id"
            )
        return found

    def _refer(self, name: str, path: str) -> None:
        """Note that an item refers to a recorded one. As at OpenAI, only one may: a short call would become a long prompt."""
        if name in self._referred_to:
            raise InvalidValue(f"{path}.id names {name[:100]!r} twice", param=f"{path}.id")
        self._referred_to.add(name)

    def _message(self, item: Json, path: str) -> None:
        role = required(a_text, item, "role", path)
        if role not in _ROLES:
            raise unknown(f"{path}.role", role, f"use one of {', '.join(_ROLES)}")
        content = item.get("content")
        if role != "assistant":
            self._add({"role": role, "content": read_content(content, f"{path}.content")})
            return
        text, refusal = read_assistant_content(content, f"{path}.content")
        message = self._assistant("content", optional(a_text, item, "id", path))
        if text is not None:
            self._add_text(message, "content", text)
        if refusal is not None:
            self._add_text(message, "refusal", refusal)

    def _add_text(self, message: Json, field: str, text: str) -> None:
        """Add a piece to a text of a message; `finish` joins the pieces, as there may be many of one message."""
        self._pieces.setdefault((id(message), field), []).append(text)
        message[field] = text

    def finish(self) -> list[Json]:
        """Return the messages."""
        for message in self.messages:
            for field in ("content", "refusal", self._options.thought):
                if pieces := self._pieces.get((id(message), field)):
                    message[field] = "".join(pieces)
        return self.messages

    def _agent_message(self, item: Json, path: str) -> None:
        """Add a message between agents of Codex 0.169. Its payload is an argument as it was sampled, not encrypted."""
        texts = [
            text_part(required(a_text, part, "encrypted_content", part_path))
            if part.get("type") == "encrypted_content"
            else part
            for part, part_path in required(objects, item, "content", path)
        ]
        self._add({"role": "user", "content": read_content(texts, f"{path}.content")})

    def _reasoning(self, item: Json, path: str) -> None:
        name = optional(a_text, item, "id", path)
        reasoning = reasoning_from(item, path)
        # OpenAI stores the text, so LangChain 1.7 sends the id only.
        if reasoning is None and name is not None and name in self._resolved.items:
            self._refer(name, path)
            reasoning = reasoning_from(self._resolved.items[name], path)
        if reasoning is None:
            return
        self._add_text(self._assistant(self._options.thought, name), self._options.thought, reasoning)

    def _call(self, item: Json, path: str) -> None:
        call_id = required(a_text, item, "call_id", path)
        name = chat_name(required(a_text, item, "name", path), optional(a_text, item, "namespace", path))
        function = self._resolved.calls.get(call_id, {})
        sampled = text_or_none(function.get("arguments"))
        if item.get("type") == "function_call":
            arguments = self._restored(call_id, sampled, required(a_text, item, "arguments", path))
        else:
            text = required(a_text, item, "input", path)
            if sampled is not None and call_id not in self._inputs:
                self._inputs[call_id] = input_from(sampled)
            arguments = sampled if sampled is not None and self._inputs[call_id] == text else arguments_for(text)
        message = self._assistant("tool_calls", optional(a_text, item, "id", path))
        message.setdefault("tool_calls", []).append(chat_call(call_id, name, arguments))

    def _restored(self, call_id: str, sampled: str | None, received: str) -> str:
        """Return the sampled argument text if the agent's is the same JSON value, else the agent's.

        Key order and spaces make no difference: pydantic-ai 2.68 and LangChain 1.7 reserialize arguments.
        """
        if sampled is None or sampled == received:
            return received
        if call_id not in self._canonical:
            self._canonical[call_id] = canonical_json(sampled)
        return sampled if self._canonical[call_id] == canonical_json(received) else received

    def _output(self, item: Json, path: str) -> None:
        call_id = required(a_text, item, "call_id", path)
        output = read_content(item.get("output"), f"{path}.output")
        self._add({"role": "tool", "tool_call_id": call_id, "content": output})

    def _add(self, message: Json) -> None:
        """Add a message that no other item belongs to."""
        self._open = self._open_step = None
        self.messages.append(message)

    def _assistant(self, field: str, item_id: str | None) -> Json:
        """Return the assistant message that an item belongs to; `field` is the field that the item sets."""
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
        """Return whether an item after the open message begins a new one: its step differs, or the message has text already.

        In a response, reasoning comes first, and there is one text; between a call and its output nothing else is sampled.
        """
        assert self._open is not None
        if None not in (step, self._open_step):
            return step != self._open_step
        return field != "tool_calls" and self._open["content"] is not None and "tool_calls" not in self._open


Content: TypeAlias = str | list[Json]

_TEXTS: Final = ("input_text", "output_text", "text")
_DETAILS: Final = ("auto", "low", "high")  # those that chat also has
_KNOWN: Final = "use input_text, input_image, input_file, input_audio, output_text or refusal"


def _objects(value: object, path: str, entries: str) -> list[tuple[Json, str]]:
    if not isinstance(value, list):
        raise wrong(path, f"a string or a list of {entries}", value)
    return objects(value, path)


def read_content(value: object, path: str) -> Content:
    """Return the chat content of a user, system or tool message. A single text is a string, as chat's clients send it."""
    if isinstance(value, str):
        return value
    return chat_content([_part(part, part_path) for part, part_path in _objects(value, path, "parts")])


def read_assistant_content(value: object, path: str) -> tuple[str | None, str | None]:
    """Return the text and the refusal of an assistant message; None if it has no part of the kind."""
    if isinstance(value, str):
        return value, None
    texts: dict[str, list[str]] = {"text": [], "refusal": []}
    for part, part_path in _objects(value, path, "parts"):
        kind = required(a_text, part, "type", part_path)
        if kind not in {*_TEXTS, "refusal"}:
            raise unknown(f"{part_path}.type", kind, "use output_text or refusal")
        field = "refusal" if kind == "refusal" else "text"
        texts[field].append(required(a_text, part, field, part_path))
    text, refusal = ("".join(pieces) if pieces else None for pieces in texts.values())
    return text, refusal


def _part(part: Json, path: str) -> Json:
    kind = required(a_text, part, "type", path)
    if kind in _TEXTS:
        return text_part(required(a_text, part, "text", path))
    if kind == "input_image":
        return _image(part, path)
    if kind == "input_file":
        return _file(part, path)
    if kind == "input_audio":
        audio = required(an_object, part, "input_audio", path)
        part_path = f"{path}.input_audio"
        fields = {name: required(a_text, audio, name, part_path) for name in ("data", "format")}
        return {"type": "input_audio", "input_audio": fields}
    raise unknown(f"{path}.type", kind, _KNOWN)


def _image(part: Json, path: str) -> Json:
    url = optional(a_text, part, "image_url", path)
    if url is None:
        raise _not_stored(path, "image_url")
    detail = optional(a_text, part, "detail", path)
    return {"type": "image_url", "image_url": {"url": url} | ({"detail": detail} if detail in _DETAILS else {})}


def _file(part: Json, path: str) -> Json:
    """Return a text file as text, since engines read no files; another file in chat's format, for the engine to validate."""
    content = optional(a_text, part, "file_data", path)
    if content is None:
        raise _not_stored(path, "file_data")
    name = optional(a_text, part, "filename", path)
    head, found, coded = content.partition(";base64,")
    if found and head.startswith("data:text/") and (text := decoded(coded)) is not None:
        return text_part(text)
    fields: dict[str, Any] = {"file_data": content}
    return {"type": "file", "file": fields if name is None else {**fields, "filename": name}}


def _not_stored(path: str, field: str) -> BadRequest:
    return BadRequest(f"{path} must have {field}; files by id or URL are not supported.", param=path)


_SEAL: Final = "tokentape-1."


def seal(reasoning: str) -> str:
    """Return reasoning as opaque text for the client."""
    return _SEAL + b64encode(reasoning.encode()).decode()


def unseal(sealed: str) -> str | None:
    """Return the reasoning in a sealed text; None if TokenTape did not seal it."""
    return decoded(sealed[len(_SEAL) :]) if sealed.startswith(_SEAL) else None


def reasoning_from(item: Json, path: str) -> str | None:
    """Return an item's reasoning: its text, else its sealed text, else its summary; None if it has none of these."""
    texts = _texts(item, "content", {"reasoning_text", "text"}, path)
    summary = _texts(item, "summary", {"summary_text"}, path)
    sealed = optional(a_text, item, "encrypted_content", path)
    if texts:
        return "".join(texts)
    opened = None if sealed is None else unseal(sealed)
    return opened if opened is not None else "\n\n".join(summary) or None


def _texts(item: Json, name: str, kinds: set[str], path: str) -> list[str]:
    texts = []
    for part, part_path in optional(objects, item, name, path) or ():
        kind = required(a_text, part, "type", part_path)
        if kind not in kinds:
            raise unknown(f"{part_path}.type", kind, f"use {' or '.join(sorted(kinds))}")
        texts.append(required(a_text, part, "text", part_path))
    return texts


# Values of `include` that request them.
LOGPROBS: Final = "message.output_text.logprobs"
ENCRYPTED: Final = "reasoning.encrypted_content"

# Sampling fields with another name or another form here.
TRANSLATED: Final = frozenset({"n", "max_tokens", "max_completion_tokens", "response_format", "tool_choice"})
_TEMPLATE: Final = "chat_template_kwargs"


def read(body: Mapping[str, Any], options: TranslationOptions, resolved: ResolvedReferences = NO_REFERENCES) -> Json:
    """Return the chat body.

    Raises:
        InvalidValue: A value has a wrong type.
        BadRequest: A feature is not supported.
    """
    _refuse(body)
    tools = read_tools(body, ignore_hosted=options.ignore_hosted_tools)
    chat: Json = {"messages": _messages(body, options, resolved)}
    if (model := optional(a_text, body, "model")) is not None:
        chat["model"] = model
    for name in ("temperature", "top_p"):
        optional(a_number, body, name)
    chat |= passed_fields(body, TRANSLATED)
    if (bound := optional(a_count, body, "max_output_tokens")) is not None:
        chat["max_tokens"] = bound
    if optional(a_flag, body, "stream"):
        chat |= {"stream": True, "stream_options": {"include_usage": True}}
    if is_unfinished(body.get("input"), chat["messages"], options.thought):
        chat |= CONTINUES
    chat |= choose(body, tools, ignore_hosted=options.ignore_hosted_tools)
    count = optional(a_count, body, "top_logprobs")  # of alternatives; `include` requests logprobs
    if LOGPROBS in included(body):
        chat |= {"logprobs": True, "top_logprobs": count or 0}
    chat |= _format(body)
    _set_reasoning(chat, body, options)
    return chat


def included(body: Mapping[str, Any]) -> frozenset[str]:
    """Return the values of `include`."""
    return frozenset(optional(texts, body, "include") or ())


def _refuse(body: Mapping[str, Any]) -> None:
    """Refuse unsupported features, and wrong types of fields that are not sent."""
    if optional(a_flag, body, "background"):
        raise BadRequest(
            "`background` is not supported: the response is returned by the call; remove it", param="background"
        )
    if body.get("conversation") is not None:
        raise BadRequest(
            "`conversation` is not supported: set `previous_response_id`, or send the items of the previous response",
            param="conversation",
        )
    if body.get("prompt") is not None:
        raise BadRequest(
            "`prompt` is not supported: OpenAI stores these templates; send `instructions` and `input` instead",
            param="prompt",
        )
    texts(list((optional(an_object, body, "metadata") or {}).values()), "metadata")
    for name in ("previous_response_id", "prompt_cache_key", "safety_identifier", "user"):
        optional(a_text, body, name)
    optional(a_flag, body, "store")
    optional(a_count, body, "max_tool_calls")
    truncation = optional(a_text, body, "truncation")
    if truncation not in {None, "auto", "disabled"}:
        raise unknown("truncation", str(truncation), "use auto or disabled")


def _messages(body: Mapping[str, Any], options: TranslationOptions, resolved: ResolvedReferences) -> list[Json]:
    """Return the instructions, the messages of earlier turns, and the messages from `input`.

    Engines that accept developer messages in chat receive them unchanged: if the template does not know them, vLLM 0.32 merges
    all developer and system messages into one (renderers/hf.py:531). For other engines, developer messages become system
    messages, and all at the beginning are merged: many templates accept only one, and only there.
    """
    instructions = optional(a_text, body, "instructions")
    first = [{"role": "system", "content": instructions}] if instructions else []
    messages = [*first, *resolved.messages, *read_items(body.get("input"), options, resolved)]
    if options.has_developers:
        return messages
    messages = [{**message, "role": "system"} if message["role"] == "developer" else message for message in messages]
    leading = list(takewhile(lambda it: it["role"] == "system" and _plain_texts(it["content"]) is not None, messages))
    if len(leading) < 2:
        return messages
    joined = "\n\n".join(text for message in leading for text in _plain_texts(message["content"]) or ())
    return [{"role": "system", "content": joined}, *messages[len(leading) :]]


def _plain_texts(content: str | list[Json]) -> list[str] | None:
    parts = [text_part(content)] if isinstance(content, str) else content
    return [part["text"] for part in parts] if all(part["type"] == "text" for part in parts) else None


def _format(body: Mapping[str, Any]) -> Json:
    """Return `response_format` of `text.format`; chat nests the schema one level deeper."""
    text_format = optional(an_object, optional(an_object, body, "text") or {}, "format", "text")
    if text_format is None:
        return {}
    path = "text.format"
    kind = required(a_text, text_format, "type", path)
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"response_format": {"type": kind}}
    if kind != "json_schema":
        raise unknown(f"{path}.type", kind, "use text, json_object or json_schema")
    fields = {
        "name": required(a_text, text_format, "name", path),
        "description": optional(a_text, text_format, "description", path),
        "schema": required(an_object, text_format, "schema", path),
        "strict": optional(a_flag, text_format, "strict", path),
    }
    return schema_format({name: value for name, value in fields.items() if value is not None})


def _set_reasoning(chat: Json, body: Mapping[str, Any], options: TranslationOptions) -> None:
    """Set the fields of reasoning: the client's effort, and the configured fields; the client's template fields win."""
    if (template := optional(an_object, body, _TEMPLATE)) is not None:
        chat[_TEMPLATE] = template
    reasoning = optional(an_object, body, "reasoning") or {}
    optional(a_text, reasoning, "summary", "reasoning")
    effort = optional(a_text, reasoning, "effort", "reasoning")
    if effort is not None:
        # Engines accept the same values (vLLM 0.32.0: chat_completion/protocol.py:252; SGLang: openai/protocol.py).
        configured = options.not_thinking if effort == "none" else options.thinking
        add_configured(chat, {"reasoning_effort": effort, **configured})


# The ids of responses and items contain the step id, so that an id identifies its step. It is a ULID (proxy/clock.py). Ids of
# items have a number after it.
_STEP: Final = "([0-9A-HJKMNP-TV-Z]{26})"
_NAME: Final = re.compile(rf"resp_{_STEP}(?:\.([A-Za-z0-9_-]+))?|(?:msg|rs|fc|ctc|in)_{_STEP}_\d{{1,9}}")


def response_name(step_id: str, rollout_id: str = "") -> str:
    """Return the id of a step's response. It contains the rollout id, since clients send the response id without it."""
    token = rollout_id_to_token(rollout_id)
    return f"resp_{step_id}.{token}" if token else f"resp_{step_id}"


def item_name(kind: str, step_id: str, number: int) -> str:
    """Return the id of a step's item; `number` counts items of the same kind from 0.

    Kinds: "msg", "rs" (reasoning), "fc" and "ctc" (calls of functions and custom tools), "in" (of the input), and "call", for
    calls to which the engine assigned no id.
    """
    return f"{kind}_{step_id}_{number}"


def step_of(name: object) -> str | None:
    """Return the step id in the id of a response or an item; None for a foreign id."""
    found = _NAME.fullmatch(name) if isinstance(name, str) else None
    return found and (found[1] or found[3])


def repeated_steps(body: Mapping[str, Any]) -> frozenset[str]:
    """Return the steps that a body of this dialect refers to, by the id of a response or of an item."""
    entries = body.get("input")
    items = [item.get("id") for item in entries if isinstance(item, Mapping)] if isinstance(entries, list) else []
    found = {name: step_of(name) for name in (body.get("previous_response_id"), *items) if isinstance(name, str)}
    return frozenset(step for name, step in found.items() if step and not name.startswith("in_"))


def rollout_of(name: object) -> str | None:
    """Return the rollout id in the id of a response; None if it contains none."""
    found = _NAME.fullmatch(name) if isinstance(name, str) else None
    return None if found is None or found[2] is None else rollout_id_from_token(found[2])


def rollout_id_to_token(rollout_id: str) -> str:
    """Return a rollout id as a token of a URL or of a key: base64url without padding."""
    return urlsafe_b64encode(rollout_id.encode()).rstrip(b"=").decode()


def rollout_id_from_token(token: str) -> str | None:
    """Return the rollout id of a token; None for a token that is not base64url of UTF-8."""
    try:
        return urlsafe_b64decode(token + "=" * (-len(token) % 4)).decode()
    except ValueError:
        return None
