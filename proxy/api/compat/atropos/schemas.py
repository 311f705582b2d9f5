"""The pydantic models of the requests of Atropos' proxy (296a0bc), with errors in FastAPI's format.

Unknown keys are allowed: its proxy drops them, TokenTape forwards them.
"""

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from proxy.api.body import FIRST_FAULT, faults_of
from proxy.errors import UnprocessableRequest


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
