"""Sessions of Atropos' proxy (296a0bc): their IDs, their requests with errors in FastAPI's format, chat calls, and nodes.

A session is a rollout whose id is a UUID and whose metadata have its terms under `atropos`, so every replica serves it.
Unknown keys of requests are allowed: its proxy drops them, TokenTape forwards them.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Annotated, Any, Final, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from proxy.api.body import FIRST_FAULT, faults_of
from proxy.api.compat.atropos.generate import with_any_model
from proxy.errors import BadRequest, UnprocessableRequest
from proxy.export import FORMATS, Inexpressible
from proxy.export.atropos import IGNORED, NOT_SAMPLED
from proxy.protocols.dialects.base import is_on
from proxy.protocols.dialects.translation import TranslationOptions
from proxy.protocols.exchange import Outcome
from proxy.protocols.plan import Plan
from proxy.protocols.translated_call import CallAdapter
from proxy.rollouts.rollout import Rollout
from proxy.trajectory.facts import RolloutFacts
from proxy.trajectory.fidelity import is_unlogged
from proxy.trajectory.sequence import Options
from proxy.trajectory.step import Step


class SchemaFault(UnprocessableRequest):
    """A body that does not match its schema; `detail` is FastAPI's description of the errors."""

    def __init__(self, detail: list[dict[str, Any]]) -> None:
        super().__init__("; ".join(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in detail))
        self.detail = detail


class ServerNamed(BaseModel):
    """A server of `POST /setup`. Only its URL is used; the rest is configured."""

    base_url: str | None = None


class Setup(BaseModel):
    """`POST /setup`."""

    model_config = ConfigDict(protected_namespaces=())

    model_name: str | None = None
    tokenizer_name: str | None = None
    servers: Annotated[list[ServerNamed], FIRST_FAULT] = []


class CreateSession(BaseModel):
    """`POST /sessions/create`."""

    tool_parser: Annotated[str, Field(max_length=256)] = "hermes"  # kept in the metadata of its rollout
    track_tree: bool = False
    base_url: str | None = None


class Message(BaseModel):
    """One message of a conversation."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | list[Any] | None = None
    tool_calls: list[Any] | None = None
    tool_call_id: str | None = None
    name: str | None = None


class SessionCall(BaseModel):
    """`POST /{uuid}/v1/chat/completions`, and its `/render`."""

    model_config = ConfigDict(extra="allow")

    messages: Annotated[list[Message], FIRST_FAULT]
    max_tokens: int | None = 1024
    temperature: float | None = 1.0
    n: int | None = 1
    stop: Annotated[list[str], FIRST_FAULT] | str | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None


Read = TypeVar("Read", bound=BaseModel)


def read_as(model: type[Read], body: Mapping[str, Any]) -> Read:
    """Return the body as this model. Raises SchemaFault."""
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise SchemaFault([{**fault, "loc": ["body", *fault["loc"]]} for fault in faults_of(error)]) from None


TERMS: Final = "atropos"  # in the metadata of its rollout
_DEFAULTS: Final = {"max_tokens": 1024, "temperature": 1.0, "n": 1}  # of its schema
# UUIDs of version 8 are application-specific (RFC 9562): sessions are distinguished from other rollouts by their ids alone.
_SESSION_ID: Final = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-8[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")


def session_id(entropy: bytes) -> str:
    """Return the session id made of 16 random bytes."""
    digits = entropy.hex()
    variant = "89ab"[int(digits[16], 16) & 3]
    return f"{digits[:8]}-{digits[8:12]}-8{digits[13:16]}-{variant}{digits[17:20]}-{digits[20:]}"


def is_session_id(name: str) -> bool:
    """Return whether a rollout with this id may be a session."""
    return _SESSION_ID.fullmatch(name) is not None


def terms_from(rollout: Rollout) -> Mapping[str, Any] | None:
    """Return the terms that a session was created with; None if the rollout is not a session, or a deleted one."""
    terms = rollout.metadata.get(TERMS) if is_session_id(rollout.rollout_id) else None
    return terms if isinstance(terms, Mapping) and not terms.get("deleted") else None


def deleted_metadata(rollout: Rollout) -> dict[str, Any]:
    """Return the metadata of a kept rollout whose session was deleted: its terms are marked as deleted."""
    terms = rollout.metadata.get(TERMS)
    return {**rollout.metadata, TERMS: {**(terms if isinstance(terms, Mapping) else {}), "deleted": True}}


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionChat(CallAdapter):
    """One chat call of a session."""

    returns_logprobs: bool = True  # its nodes do

    def native(self, models: Mapping[str, str], kind: str | None = None) -> dict[str, Any]:
        """Return the chat call. Most of its clients send no model."""
        return with_any_model(self.body, models)

    def recorded(self, plan: Plan) -> Plan:
        """Return the plan with the client's body."""
        plan = CallAdapter.recorded(self, plan)
        return replace(plan, extra={**plan.extra, "form": "atropos_session"})

    def reshape(self, outcome: Outcome) -> Outcome:
        """Return the end in the client's format. A stream, which its proxy lacks, is the engine's own."""
        if is_on(self.body.get("stream")):
            return outcome
        response = self.answer(outcome.step)
        if response is not None:
            return replace(outcome, end=response)
        message = f"Completion failed: {_reason(outcome.step)}"
        return replace(outcome, end=error_body(500, message), status=500)

    def answer(self, step: Step) -> bytes | None:
        """Return the response of a step; None if it is incomplete or was streamed."""
        response = step.response or {}
        choices = response.get("choices")
        if is_on(self.body.get("stream")) or step.status != "complete" or not isinstance(choices, list) or not choices:
            return None
        payload = {
            "id": f"chatcmpl-{blake2b(step.step_id.encode(), digest_size=6).hexdigest()}",
            "object": "chat.completion",
            "created": int(response.get("created") or step.timing.received),
            "model": response.get("model"),
            "choices": [
                {"index": choice["index"], "message": _message(choice), "finish_reason": choice.get("finish_reason")}
                for choice in choices
            ],
        }
        return orjson.dumps(payload)


def read_session_chat(_endpoint: str, body: Mapping[str, Any], _options: TranslationOptions) -> SessionChat:
    """Parse the body of a chat call. Raises SchemaFault, or BadRequest if it has no messages."""
    call = read_as(SessionCall, body)
    if not call.messages:
        raise BadRequest("messages must not be empty.", param="messages")
    fields = {name: value for name, value in body.items() if value is not None}
    if not fields.get("tools"):
        fields = {name: value for name, value in fields.items() if name not in {"tools", "tool_choice"}}
    messages = [{key: value for key, value in message.items() if value is not None} for message in body["messages"]]
    if "max_completion_tokens" in fields:
        fields = {"max_tokens": fields["max_completion_tokens"], **fields}  # instead of the default of max_tokens
    return SessionChat(request=body, body={**_DEFAULTS, **fields, "messages": messages})


def nodes_from(facts: RolloutFacts, steps: Sequence[Step], *, as_tree: bool) -> list[dict[str, Any]]:
    """Return the nodes of a session without their texts.

    A tree has one node per completion, and masks all of its prompt; otherwise the nodes are those of the `nodes` export.
    """
    if not as_tree:
        return FORMATS["nodes"].rows(facts, steps, Options()).rows
    trained = [step for step in steps if step.trainable]
    if any(map(is_unlogged, trained)):
        raise Inexpressible(
            "Nodes require the logprob of each sampled token, and none were requested (record.logprobs: off)."
        )
    return [
        {
            "full_text": None,
            "tokens": [*step.prompts[choice.prompt], *choice.ids],
            "masked_tokens": [*[IGNORED] * len(step.prompts[choice.prompt]), *choice.ids],
            "logprobs": [*[NOT_SAMPLED] * len(step.prompts[choice.prompt]), *choice.logprobs],
            "metadata": {"finish_reason": choice.finish_reason},
        }
        for step in trained
        for choice in step.choices
    ]


def error_body(status: int, message: str) -> bytes:
    """Return an error in its format."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return orjson.dumps({"error": {"message": message, "type": kind, "code": status}})


def _message(choice: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with its role and content, and its other fields unless they are empty."""
    message = choice.get("message") or {}
    more = {name: value for name, value in message.items() if name not in {"role", "content"} and value}
    return {"role": message.get("role") or "assistant", "content": message.get("content"), **more}


def _reason(step: Step) -> str:
    """Return why there is no response: the engine's message if it sent one."""
    text = (step.response or {}).get("body")
    if not isinstance(text, str):
        return step.reason or "the engine returned no response"
    try:
        body = orjson.loads(text)
    except orjson.JSONDecodeError:
        return text
    error = body.get("error", body) if isinstance(body, dict) else body
    message = error.get("message") if isinstance(error, dict) else None
    return str(message or text)
