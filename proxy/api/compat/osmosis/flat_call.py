"""The adapter of Osmosis' flat calls: chat messages sent to `/v1/completions`.

A client claims with `response_mask` how many tokens were added since its last call. The exact number follows from the ids: this
prompt, minus the prompt and the sampled ids of the step that it continues.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Annotated, Any, Final, Literal, Self

import orjson
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, FiniteFloat

from proxy.api.body import FIRST_FAULT
from proxy.api.requests import validated
from proxy.protocols.dialects.base import TranslationOptions
from proxy.protocols.exchange import Outcome
from proxy.protocols.plan import Plan
from proxy.protocols.sampling import served_as
from proxy.protocols.translated_call import CallAdapter
from proxy.trajectory.step import Ids, Prompt, Step

_FLAT: Final = "/v1/completions"
_ANY_MODEL: Final = "default"  # the model name of its clients, which names none
_NO_LOGPROB: Final = -9999.0  # its schema allows no null; vLLM clamps logprobs to this value; the step is flagged


def _bits(mask: Any) -> Any:
    """Validate a mask as a whole, with one error for all of its items."""
    if mask is not None and not (isinstance(mask, list) and all(type(bit) is int and bit in (0, 1) for bit in mask)):
        raise ValueError(
            "response_mask must be null or a list of 0 and 1, one for each token added since the previous call"
        )
    return mask


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


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatCall(CallAdapter):
    """One flat call. `needs_steps`: the body has a mask, which may be null, and earlier steps verify it."""

    mask: Sequence[int] | None
    before: Sequence[Step] = ()
    # Its clients retry without a key (SDK 120bf30); their history only grows, so two different calls never have the same body.
    retries_by_body: bool = True

    def with_steps(self, steps: Sequence[Step]) -> Self:
        return replace(self, before=steps)

    def native(self, models: Mapping[str, str], kind: str | None = None) -> dict[str, Any]:
        """Return the body of the chat call. The model name `default` is removed, so that engines use the one they serve."""
        if self.body.get("model") == _ANY_MODEL and served_as(_ANY_MODEL, models) is None:
            return {name: value for name, value in self.body.items() if name != "model"}
        return self.body

    def recorded(self, plan: Plan) -> Plan:
        """Return the plan to record, with the length of the claimed mask."""
        plan, model = CallAdapter.recorded(self, plan), self.request.get("model")
        extra = {**plan.extra, "form": "osmosis", **({} if self.mask is None else {"mask_claim": len(self.mask)})}
        return replace(plan, model_asked=model if isinstance(model, str) else None, extra=extra)

    def reshape(self, outcome: Outcome) -> Outcome:
        """Return the end in the client's format, and the step with a mismatch of its mask. Engines' errors are unchanged."""
        step = outcome.step
        mismatch = self._mismatch(step)
        if mismatch is not None:
            step = replace(step, extra={**step.extra, "mask_mismatch": mismatch})
        flat = flat_answer(step)
        return replace(outcome, step=step, end=outcome.end if flat is None else flat)

    def answer(self, step: Step) -> bytes | None:
        return flat_answer(step)

    def _mismatch(self, step: Step) -> dict[str, int | None] | None:
        """Return both lengths if the claim differs from the ids; None if it is correct or cannot be verified."""
        if not self.needs_steps or not step.prompts:
            return None
        exact = added_since(step.prompts[0], self.before, longer=_longer_rendering(step))
        claimed, sampled = len(self.mask or ()), sum(self.mask or ())
        if self.mask is None and not exact:
            return None
        return {"claimed": claimed, "exact": exact, "claimed_sampled": sampled} if claimed != exact or sampled else None


def read_flat(endpoint: str, body: Mapping[str, Any], _options: TranslationOptions) -> FlatCall | None:
    """Parse a flat call; None if the body is another call. Raises UnprocessableRequest."""
    if endpoint != _FLAT or "messages" not in body or "prompt" in body:
        return None
    call = validated(FlatCallBody, body)
    chat = {name: value for name, value in body.items() if value is not None and name != "response_mask"}
    chat["messages"] = [_for_chat(message) for message in body["messages"]]
    claims = "response_mask" in body
    return FlatCall(
        request=body, body=chat, mask=call.response_mask, needs_steps=claims, returns_logprobs=call.logprobs
    )


def added_since(prompt: Prompt, before: Iterable[Step], *, longer: int = 0) -> int | None:
    """Return the number of ids that a prompt adds to the latest step that it continues; None if it continues none.

    `longer`: by how many ids the template's rendering of the messages is longer than the prompt. None as well if the rendering
    is shorter than that step, because the template dropped some of it.
    """
    latest = None
    for step in before:
        for choice in step.choices:
            if choice.prompt < len(step.prompts) and _begins_with(prompt, step.prompts[choice.prompt], choice.ids):
                latest = len(prompt) + longer - len(step.prompts[choice.prompt]) - len(choice.ids)
    return None if latest is None or latest < 0 else latest


def _longer_rendering(step: Step) -> int:
    """Return by how many ids the template's rendering is longer than the prompt of a step that was continued by ids.

    Clients count the tokens of a rendering.
    """
    rendered = step.extra.get("continuation", {}).get("rendered")
    return 0 if rendered is None else rendered - len(step.prompts[0])


def flat_answer(step: Step) -> bytes | None:
    """Return the response of a step in the flat format; None if it is incomplete."""
    choices = (step.response or {}).get("choices")
    if step.status != "complete" or step.response is None or not isinstance(choices, list) or not choices:
        return None
    first = choices[0] if isinstance(choices[0], dict) else {}
    sampled = step.choices[0] if step.choices else None
    ids = sampled.ids.tolist() if sampled else []
    prompt = step.prompts[0].tolist() if step.prompts else []
    usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids), "total_tokens": len(prompt) + len(ids)}
    payload = {
        "id": step.response.get("id") or step.step_id,
        "created": int(step.response.get("created") or step.timing.received),
        "object": "chat.completion",
        "model": step.model_asked or step.response.get("model") or _ANY_MODEL,
        # Its clients refuse a null finish reason; "stop" is the default of their schema.
        "choices": [
            {"index": 0, "message": first.get("message"), "finish_reason": first.get("finish_reason") or "stop"}
        ],
        "token_ids": ids,
        "logprobs": [it if isfinite(it) else _NO_LOGPROB for it in sampled.logprobs] if sampled else [],
        "prompt_token_ids": prompt,
        "usage": step.usage or usage,
    }
    return orjson.dumps(payload)


def _begins_with(prompt: Prompt, earlier: Prompt, sampled: Ids) -> bool:
    end = len(earlier) + len(sampled)
    return len(sampled) > 0 and prompt[: len(earlier)] == earlier and prompt[len(earlier) : end] == sampled


def _for_chat(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the message in chat's format: without nulls on its top level, and with arguments of calls as text.

    The protocol allows objects as arguments, which vLLM (0.32.0) and OpenAI refuse.
    """
    fields = {name: value for name, value in message.items() if value is not None}
    calls = []
    for call in fields.get("tool_calls") or ():
        function = call.get("function")
        is_object = isinstance(function, Mapping) and isinstance(function.get("arguments"), Mapping)
        text = orjson.dumps(function["arguments"]).decode() if is_object else None
        calls.append({**call, "function": {**function, "arguments": text}} if is_object else call)
    return {**fields, "tool_calls": calls} if calls else fields
