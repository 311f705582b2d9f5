"""The pydantic models of Osmosis' protocols (71b6d83, and f47b00f~1 for the asynchronous one).

Unknown keys are allowed, as in its own schemas.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, TypeVar

import orjson
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, FiniteFloat, ValidationError

from proxy.api.body import FIRST_FAULT, faults_of
from proxy.api.reward_values import Signal, read_object
from proxy.errors import RequestTooLarge, UnprocessableRequest

MAX_RESULT_BYTES: Final = 64_000  # of a result in a rollout's metadata
_MAX_NAMED_FAULTS = 5  # of a body: a long list may have one per item


def _bits(mask: Any) -> Any:
    """Validate a mask as a whole, with one error for all of its items."""
    if mask is not None and not (isinstance(mask, list) and all(type(bit) is int and bit in (0, 1) for bit in mask)):
        raise ValueError(
            "response_mask must be null or a list of 0 and 1, one for each token added since the previous call"
        )
    return mask


Name = Annotated[str, Field(min_length=1, max_length=256)]


class _Message(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    role: Literal["system", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[dict[str, Any]], FIRST_FAULT] | None = None
    tool_calls: Annotated[list[dict[str, Any]], FIRST_FAULT] | None = None
    tool_call_id: Annotated[str, Field(max_length=256)] | None = None


class FlatCallBody(BaseModel):
    """`POST /v1/completions` with messages. The flat response cannot represent several choices or a stream."""

    model_config = ConfigDict(extra="allow", strict=True)

    messages: Annotated[list[_Message], Field(min_length=1), FIRST_FAULT]
    model: str = "default"
    temperature: Annotated[FiniteFloat, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[FiniteFloat, Field(ge=0, le=1)] = 1.0
    max_tokens: Annotated[int, Field(ge=1, le=32768)] = 512
    stop: Annotated[list[str], FIRST_FAULT] | None = None
    logprobs: bool = True
    response_mask: Annotated[Annotated[list[int], FIRST_FAULT] | None, BeforeValidator(_bits)] = None
    n: Literal[1] | None = None
    stream: Literal[False] | None = None


class RolloutResult(BaseModel):
    """The result of a rollout as its server reports it: the response to `POST /rollout`, or the body of a callback."""

    model_config = ConfigDict(strict=True)

    rollout_id: Name
    status: Literal["COMPLETED", "ERROR"]
    final_messages: Annotated[list[dict[str, Any]], FIRST_FAULT] | None = None
    finish_reason: str | None = None
    error_message: str | None = None
    metrics: dict[str, Any] | None = None
    extra_fields: dict[str, Any] | None = None
    reward: Signal | None = None


def read_result(text: bytes) -> RolloutResult:
    """Return the result in the body of a completed callback. Raises BadRequest, UnprocessableRequest or RequestTooLarge."""
    result = validated(RolloutResult, read_object(text))
    kept_result(result)
    return result


def kept_result(result: RolloutResult) -> dict[str, Any]:
    """Return the fields of a result that are stored with the rollout: at most 64 kB of JSON.

    If they are larger, the messages are removed, which are in the steps as well, and `left_out` names them. Raises
    RequestTooLarge if the other fields are too large.
    """
    fields = result.model_dump(exclude_none=True, exclude={"rollout_id"})
    if len(orjson.dumps(fields)) > MAX_RESULT_BYTES and fields.pop("final_messages", None) is not None:
        fields["left_out"] = ["final_messages"]
    if len(orjson.dumps(fields)) > MAX_RESULT_BYTES:
        raise RequestTooLarge(
            f"The result without its messages is too large; the maximum is {MAX_RESULT_BYTES} bytes of JSON."
        )
    return fields


class InitAnswer(BaseModel):
    """The response to `POST /v1/rollout/init`: the tools of the policy."""

    rollout_id: Name
    tools: list[dict[str, Any]] = []


Read = TypeVar("Read", bound=BaseModel)


def validated(model: type[Read], body: Mapping[str, Any]) -> Read:
    """Return the body as this model. Raises UnprocessableRequest, which names the fields."""
    try:
        return model.model_validate(body)
    except ValidationError as error:
        faults = faults_of(error)
        named = [
            f"{'.'.join(map(str, fault['loc'])) or 'body'}: {fault['msg']}" for fault in faults[:_MAX_NAMED_FAULTS]
        ]
        more = [f"and {len(faults) - _MAX_NAMED_FAULTS} more"] if len(faults) > _MAX_NAMED_FAULTS else []
        first = faults[0]["loc"]
        raise UnprocessableRequest("; ".join([*named, *more]), param=str(first[0]) if first else None) from None
