"""The adapter of Osmosis' flat calls: chat messages sent to `/v1/completions`.

A client claims with `response_mask` how many tokens were added since its last call. The exact number follows from the ids: this
prompt, minus the prompt and the sampled ids of the step that it continues.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Any, Final, Self

import orjson

from proxy.api.compat.osmosis.schemas import FlatCallBody, validated
from proxy.protocols.dialects.translation import TranslationOptions
from proxy.protocols.exchange import Outcome
from proxy.protocols.plan import Plan
from proxy.protocols.sampling import served_as
from proxy.trajectory.step import Choice, Ids, Prompt, Step

CHAT: Final = "/v1/chat/completions"
_FLAT: Final = "/v1/completions"
_ANY_MODEL: Final = "default"  # what its clients say of the model: nothing
_NO_LOGPROB: Final = -9999.0  # its schema takes no null; vLLM's own clamp, and such a step is flagged


@dataclass(frozen=True, slots=True)
class FlatCall:
    """One flat call: as it came, and as a chat call. `claims` says whether it has a mask at all, which may be null."""

    request: Mapping[str, Any]
    body: dict[str, Any]
    mask: Sequence[int] | None
    claims: bool
    returns_logprobs: bool = True
    before: Sequence[Step] = field(default=())
    endpoint: str = CHAT
    # Its clients retry without a key (SDK 120bf30), and a history that only grows never repeats a body.
    retries_by_body: bool = True

    @property
    def needs_steps(self) -> bool:
        """The claimed mask is compared with the steps before."""
        return self.claims

    def with_steps(self, steps: Sequence[Step]) -> Self:
        """Return the call with the steps that its claimed mask is compared with."""
        return replace(self, before=steps)

    def native(self, models: Mapping[str, str], kind: str | None = None) -> dict[str, Any]:
        """The body of the chat call. A model of no name is left out: engines then take the one they serve."""
        if self.body.get("model") == _ANY_MODEL and served_as(_ANY_MODEL, models) is None:
            return {name: value for name, value in self.body.items() if name != "model"}
        return self.body

    def recorded(self, plan: Plan) -> Plan:
        """The plan of the chat call, saying what was changed of the body that came."""
        said = {"messages": self.body["messages"]} if self.body["messages"] != self.request["messages"] else {}
        model = self.request.get("model")
        return replace(
            plan,
            request=dict(self.request),
            sent={"set": {**said, **plan.sent["set"]}, "unset": sorted(self.request.keys() - plan.body.keys())},
            model_asked=model if isinstance(model, str) else None,
            extra={**plan.extra, "form": "osmosis", **({} if self.mask is None else {"mask_claim": len(self.mask)})},
        )

    def reshape(self, outcome: Outcome) -> Outcome:
        """The end as this client reads it, and the step with what its claim was worth. Errors stay the engine's own."""
        step = outcome.step
        wrong = self._mismatch(step)
        if wrong is not None:
            step = replace(step, extra={**step.extra, "mask_mismatch": wrong})
        flat = flat_answer(step)
        return replace(outcome, step=step, end=outcome.end if flat is None else flat)

    def answer(self, step: Step) -> bytes | None:
        """See `flat_answer`."""
        return flat_answer(step)

    def _mismatch(self, step: Step) -> dict[str, int | None] | None:
        """Both lengths, if the claim is not what the ids show; None if it is, or if there is nothing to compare."""
        if not self.claims or not step.prompts:
            return None
        exact = added_since(step.prompts[0], self.before)
        claimed, sampled = len(self.mask or ()), sum(self.mask or ())
        if self.mask is None and not exact:
            return None
        return {"claimed": claimed, "exact": exact, "claimed_sampled": sampled} if claimed != exact or sampled else None


def read_flat(endpoint: str, body: Mapping[str, Any], _ways: TranslationOptions) -> FlatCall | None:
    """The flat call that a body is; None if it is none. Raises UnprocessableRequest."""
    if endpoint != _FLAT or "messages" not in body or "prompt" in body:
        return None
    call = validated(FlatCallBody, body)
    chat = {name: value for name, value in body.items() if value is not None and name != "response_mask"}
    chat["messages"] = [_for_chat(message) for message in body["messages"]]
    return FlatCall(body, chat, call.response_mask, "response_mask" in body, call.logprobs)


def added_since(prompt: Prompt, before: Iterable[Step]) -> int | None:
    """How many ids a prompt has more than the latest step that it goes on from; None if it goes on from none."""
    latest = None
    for step in before:
        for choice in step.choices:
            if choice.prompt < len(step.prompts) and _begins_with(prompt, step.prompts[choice.prompt], choice.ids):
                latest = len(prompt) - len(step.prompts[choice.prompt]) - len(choice.ids)
    return latest


def flat_answer(step: Step) -> bytes | None:
    """The answer of a step in the flat shape; None if it has none that is whole."""
    shown = (step.response or {}).get("choices")
    if step.status != "complete" or step.response is None or not isinstance(shown, list) or not shown:
        return None
    first = shown[0] if isinstance(shown[0], dict) else {}
    sampled = step.choices[0] if step.choices else None
    ids = sampled.ids.tolist() if sampled else []
    prompt = step.prompts[0].tolist() if step.prompts else []
    usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids), "total_tokens": len(prompt) + len(ids)}
    answer = {
        "id": step.response.get("id") or step.step_id,
        "created": int(step.response.get("created") or step.timing.received),
        "object": "chat.completion",
        "model": step.model_asked or step.response.get("model") or _ANY_MODEL,
        # A null finish reason is refused by its clients; "stop" is what their schema takes it for.
        "choices": [
            {"index": 0, "message": first.get("message"), "finish_reason": first.get("finish_reason") or "stop"}
        ],
        "token_ids": ids,
        "logprobs": _numbers(sampled),
        "prompt_token_ids": prompt,
        "usage": step.usage or usage,
    }
    return orjson.dumps(answer)


def _numbers(sampled: Choice | None) -> list[float]:
    return [value if isfinite(value) else _NO_LOGPROB for value in sampled.logprobs] if sampled else []


def _begins_with(prompt: Prompt, earlier: Prompt, sampled: Ids) -> bool:
    end = len(earlier) + len(sampled)
    return len(sampled) > 0 and prompt[: len(earlier)] == earlier and prompt[len(earlier) : end] == sampled


def _for_chat(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the message as chat takes it: without nulls on its top level, and with the arguments of calls as text.

    The protocol allows objects there, which vLLM (0.32.0) and OpenAI refuse.
    """
    said = {name: value for name, value in message.items() if value is not None}
    return {**said, "tool_calls": list(map(_call_for_chat, said["tool_calls"]))} if said.get("tool_calls") else said


def _call_for_chat(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), Mapping):
        return call
    return {**call, "function": {**function, "arguments": orjson.dumps(function["arguments"]).decode()}}
