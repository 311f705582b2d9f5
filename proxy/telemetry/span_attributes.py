"""The attributes of a call's span, from its plan and its step.

Names that begin with `gen_ai.` are those of OpenTelemetry's GenAI conventions (0.1.0, in development; as listed in
opentelemetry-semantic-conventions 0.66b2). Values come from clients and engines: those of another type are omitted.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, TypeAlias

from proxy.protocols.dialects.base import GENERATES
from proxy.protocols.plan import Plan
from proxy.telemetry.message_parts import clean, input_messages, output_messages, tool_definitions
from proxy.trajectory.step import Step, answers_of

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
    """Return the sampling parameters as they were sent, and the engine. `plan` is that of the last engine."""
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
    return kind if kind in {"vllm", "sglang", "llamacpp"} else "openai"


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
    """Return the type and the description of the error in which a call ended, without a failure of the engine's connection.

    `status` is that of the response to the client.
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
