"""The attributes of a call's span, from its plan and its step.

OpenTelemetry's GenAI conventions define the names that begin with `gen_ai.` (0.1.0, in development; as listed in
opentelemetry-semantic-conventions 0.66b2). Clients and engines send the values: values of another type are omitted. Messages
are JSON strings: roles, and parts with a type. The newest messages are kept up to a size, and long texts are cut.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, Final, TypeAlias

import orjson

from proxy.protocols.dialects.base import GENERATES
from proxy.protocols.engines import ENGINES
from proxy.protocols.plan import Plan
from proxy.trajectory.json_bytes import size_of, to_json_bytes
from proxy.trajectory.step import Step, answers_of, messages_of

MAX_TEXT: Final = 16_384  # characters of one text
MAX_BYTES: Final = 65_536  # of the messages of one attribute
_MAX_PARTS: Final = 256
_MAX_TOOLS: Final = 16 * MAX_BYTES  # with the weight of their values: more are certainly too large
_MAX_URI: Final = 256  # an image as a data URL is longer
_CUT: Final = "…"


def clean(text: str, limit: int = MAX_TEXT) -> str:
    """Return a text that protobuf can encode, of at most `limit` characters."""
    whole = text if len(text) <= limit else text[: limit - 1] + _CUT
    return whole if whole.isascii() else whole.encode("utf-8", "replace").decode()


def input_messages(step: Step) -> tuple[str | None, int]:
    """Return the messages or the prompt as they were sent, and the number of older messages that are omitted."""
    if step.is_chat:
        return _newest([message for message in messages_of(step) if isinstance(message, dict)])
    prompts = step.body.get("prompt")
    texts = prompts if isinstance(prompts, list) else [prompts]
    return _newest([{"role": "user", "content": text} for text in texts if isinstance(text, str)])


def output_messages(step: Step) -> str | None:
    """Return a message for each choice of the response."""
    if not isinstance(step.response, dict):
        return None
    choices = islice(answers_of(step).values(), _MAX_PARTS)
    messages = [_message(_answer(choice), "assistant") for choice in choices]
    return _json(messages) if messages else None


def tool_definitions(step: Step) -> str | None:
    """Return the definitions of the tools; None if there are none, or if they are too large."""
    tools = step.body.get("tools")
    if size_of([tools], _MAX_TOOLS) > _MAX_TOOLS:
        return None
    found = [_tool(tool) for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []
    text = _json(found) if found else None
    return text if text is not None and len(text) <= MAX_BYTES else None


def _newest(messages: list[dict[str, Any]]) -> tuple[str | None, int]:
    """Return the newest messages that fit, at least one, in their order."""
    kept: list[bytes] = []
    size = 0
    for message in reversed(messages):
        encoded = _encoded(_message(message, "user"))
        size += len(encoded)
        if kept and size > MAX_BYTES:
            break
        kept.append(encoded)
    if not kept:
        return None, 0
    return (b"[" + b",".join(reversed(kept)) + b"]").decode(), len(messages) - len(kept)


def _answer(choice: Mapping[str, Any]) -> dict[str, Any]:
    message = choice.get("message")
    return message if isinstance(message, dict) else {"content": choice.get("text")}


def _message(message: Mapping[str, Any], role: str) -> dict[str, Any]:
    given = message.get("role")
    return {
        "role": clean(given, 64) if isinstance(given, str) else role,
        "parts": list(_limited(_parts(message))),
    }


def _limited(parts: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield parts until their texts have the maximum size."""
    left = MAX_BYTES
    for part in islice(parts, _MAX_PARTS):
        left -= len(_encoded(part))
        if left < 0:
            return
        yield part


def _parts(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the reasoning, the content and the tool calls of a message."""
    for name in ("reasoning_content", "reasoning"):
        if isinstance(message.get(name), str) and message[name]:
            yield {"type": "reasoning", "content": clean(message[name])}
            break
    content = message.get("content")
    if message.get("role") == "tool":
        response = clean(content) if isinstance(content, str) else list(_content_parts(content))
        yield {"type": "tool_call_response", "id": _name(message.get("tool_call_id")), "response": response}
    else:
        yield from _content_parts(content)
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        if isinstance(call, dict) and isinstance(function := call.get("function"), dict):
            yield {
                "type": "tool_call",
                "id": _name(call.get("id")),
                "name": _name(function.get("name")) or "",
                "arguments": _arguments(function.get("arguments")),
            }


def _content_parts(content: Any) -> Iterator[dict[str, Any]]:
    """Yield the parts of a content: a text, or a list of texts and images."""
    if isinstance(content, str) and content:
        yield {"type": "text", "content": clean(content)}
    for item in content if isinstance(content, list) else ():
        if not isinstance(item, dict):
            continue
        if isinstance(item.get("text"), str):
            yield {"type": "text", "content": clean(item["text"])}
        elif isinstance(image := item.get("image_url"), dict) and isinstance(image.get("url"), str):
            yield {"type": "uri", "modality": "image", "uri": clean(image["url"], _MAX_URI)}


def _arguments(arguments: Any) -> Any:
    """Return the arguments of a tool call as JSON, or as text if they are none or long."""
    if not isinstance(arguments, str):
        return arguments if isinstance(arguments, dict) else None
    if len(arguments) <= MAX_TEXT:
        try:
            return orjson.loads(arguments)
        except (orjson.JSONDecodeError, UnicodeEncodeError):
            pass
    return clean(arguments)


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    definition = function if isinstance(function, dict) else tool
    fields = {name: definition[name] for name in ("description", "parameters") if definition.get(name) is not None}
    return {"type": _name(tool.get("type")) or "function", "name": _name(definition.get("name")) or "", **fields}


def _name(value: Any) -> str | None:
    return clean(value, 1024) if isinstance(value, str) else None


def _json(value: Any) -> str:
    return _encoded(value).decode()


def _encoded(value: Any) -> bytes:
    """Return JSON; a placeholder for values that JSON cannot represent."""
    try:
        return to_json_bytes(value)
    except (TypeError, RecursionError):
        return b'{"type":"text","content":"(not valid JSON)"}'


Attributes: TypeAlias = dict[str, str | bool | int | float | Sequence[str]]

CONVERSATION: Final = "gen_ai.conversation.id"
_MAX_NAME: Final = 1024  # characters of a name or an id
_MAX_CHOICES: Final = 128
_INT64: Final = range(-(2**63), 2**63)
_OPERATIONS: Final[Mapping[str, str]] = dict.fromkeys(("completions", *GENERATES), "text_completion")
_INTEGERS: Final = {"seed": "gen_ai.request.seed", "top_k": "gen_ai.request.top_k", "n": "gen_ai.request.choice.count"}
_FLOATS: Final = {
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    "presence_penalty": "gen_ai.request.presence_penalty",
}
_BOUNDS: Final = ("max_completion_tokens", "max_tokens")


def operation(plan: Plan) -> str:
    """Return the operation of a call: `chat`, also for dialects that are translated to chat, or `text_completion`."""
    return _OPERATIONS.get(plan.dialect.name, "chat")


def span_name(plan: Plan) -> str:
    """Return the operation and the requested model."""
    return f"{operation(plan)} {clean(plan.model_asked, _MAX_NAME)}" if plan.model_asked else operation(plan)


def first_attributes(plan: Plan) -> Attributes:
    """Return the attributes that are known before the call is sent, on which samplers can decide."""
    found: Attributes = {
        "gen_ai.operation.name": operation(plan),
        CONVERSATION: clean(plan.rollout_id, _MAX_NAME),
        "tokentape.step.id": plan.step_id,
        "tokentape.dialect": plan.error_dialect.name,
        "tokentape.policy": plan.policy,
    }
    if plan.model_asked:
        found["gen_ai.request.model"] = clean(plan.model_asked, _MAX_NAME)
    if plan.request.get("stream") is True:
        found["gen_ai.request.stream"] = True
    return found


def request_attributes(plan: Plan) -> Attributes:
    """Return the sampling parameters as they were sent, and the engine. `plan` is the plan for the last engine."""
    sent = plan.dialect.sampling(plan.body)
    found: Attributes = {
        "gen_ai.provider.name": provider(plan.engine_facts.kind),
        "tokentape.engine": clean(plan.engine_facts.name, _MAX_NAME),
    }
    for field, name in _FLOATS.items():
        if (number := _number(sent.get(field))) is not None:
            found[name] = number
    for field, name in _INTEGERS.items():
        if (value := _integer(sent.get(field))) is not None and not (field == "n" and value == 1):
            found[name] = value
    bounds = [bound for name in _BOUNDS if (bound := _integer(sent.get(name))) is not None]
    if bounds:
        found["gen_ai.request.max_tokens"] = bounds[0]
    return found


def provider(kind: str) -> str:
    """Return the name of the provider: the engine type, or `openai` for an engine that is only known to be compatible."""
    return kind if kind in ENGINES and ENGINES[kind].returns_ids else "openai"


def step_attributes(step: Step, *, content: bool) -> Attributes:
    """Return what the response contains; messages and tools only with `content`."""
    if not isinstance(step.response, dict):
        step = replace(step, response=None)
    response = step.response or {}
    found: Attributes = {
        "tokentape.step.status": step.status,
        "tokentape.step.exact": step.exact and step.status != "error",
        "tokentape.step.problems": list(step.problems),
        **dict(_tokens(step)),
    }
    names = {
        "tokentape.policy_version": step.policy_version,
        "tokentape.policy_version_end": step.policy_version_end,
        "gen_ai.response.id": response.get("id"),
        "gen_ai.response.model": response.get("model"),
    }
    found |= {name: clean(value, _MAX_NAME) for name, value in names.items() if isinstance(value, str)}
    if reasons := _finish_reasons(step):
        found["gen_ai.response.finish_reasons"] = reasons
    if content:
        found |= _content(step)
    return found


def error_of_step(step: Step | None, status: int) -> tuple[str, str | None] | None:
    """Return the type and the description of the error that ended a call, unless the connection to the engine failed.

    `status` is the HTTP status of the response to the client.
    """
    if step is None:
        return str(status), None
    if step.status == "complete":
        return None
    if step.status == "error":
        own = _integer(step.response.get("status")) if isinstance(step.response, dict) else None
        return str(status if own is None else own), None
    return "aborted", step.reason


def _tokens(step: Step) -> Iterator[tuple[str, int]]:
    """Yield the numbers of tokens, as the engine counts them, or else as they are recorded."""
    usage = step.usage if isinstance(step.usage, dict) else {}
    counts = {
        "gen_ai.usage.input_tokens": (usage.get("prompt_tokens"), sum(map(len, step.prompts))),
        "gen_ai.usage.output_tokens": (usage.get("completion_tokens"), step.sampled),
    }
    for name, (counted, recorded) in counts.items():
        if tokens := _integer(counted) or recorded:
            yield name, tokens
    if step.cached_tokens is not None:
        yield "gen_ai.usage.cache_read.input_tokens", step.cached_tokens
    details = usage.get("completion_tokens_details")
    if isinstance(details, dict) and (count := _integer(details.get("reasoning_tokens"))) is not None:
        yield "gen_ai.usage.reasoning.output_tokens", count


def _finish_reasons(step: Step) -> list[str]:
    """Return a reason for each choice; `error` for one that did not end."""
    given = [answer.get("finish_reason") for answer in list(answers_of(step).values())[:_MAX_CHOICES]]
    return [clean(reason, _MAX_NAME) if isinstance(reason, str) else "error" for reason in given]


def _content(step: Step) -> Attributes:
    messages, omitted = input_messages(step)
    found = {
        "gen_ai.input.messages": messages,
        "gen_ai.output.messages": output_messages(step),
        "gen_ai.tool.definitions": tool_definitions(step),
    }
    attributes: Attributes = {name: text for name, text in found.items() if text is not None}
    if omitted:
        attributes["tokentape.input.omitted_messages"] = omitted
    return attributes


def _integer(value: Any) -> int | None:
    return value if type(value) is int and value in _INT64 else None


def _number(value: Any) -> float | None:
    number = value if type(value) is float else _integer(value)
    return None if number is None else float(number)
