"""The parts of a resumed call: what several engine responses, one after the other, are for its client and in its step.

Each part is one response, whose prompt is the prompt of the call and all that was sampled of it before.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from proxy.errors import EngineDisconnected
from proxy.protocols.dialects.base import Json
from proxy.trajectory.arrays import Ids

_HEAD: Final = ("id", "request_id", "created")
PARSED: Final = ("reasoning", "reasoning_content", "tool_calls")
_COUNTS: Final = ("prompt_tokens", "completion_tokens", "total_tokens")
_DETAILS: Final = "completion_tokens_details"
_OF_PROMPT: Final = ("prompt_token_ids", "mm_placeholders")  # of `/inference/v1/generate` (vLLM 0.32.0)
# SGLang's `/generate` (0.5.23) has counts and lists of the sampled tokens in `meta_info`, and of the prompt.
_SUMS: Final = ("completion_tokens", "output_token_logprobs_length", "reasoning_tokens", "num_retractions")
_OF_NATIVE_PROMPT: Final = ("id", "prompt_tokens", "input_", "cached_")
_THOUGHTS: Final = (
    "reasoning_tokens"  # in the details (vLLM 0.32.0); SGLang (0.5.23) has them beside the counts as well
)


class PartsDiffer(EngineDisconnected):
    """The response of a part does not go on with the part before: the prompt is another one, or it is parsed otherwise."""


@dataclass(frozen=True, slots=True)
class Told:
    """The reply of all parts as one: its message or text and how it ended, and how many sampled tokens it has.

    The parts themselves do not show it if a cut was inside what a parser reads, a stop string or a character.
    """

    fields: Mapping[str, Any]  # of the choice
    count: int


@dataclass(frozen=True, slots=True)
class Before:
    """The parts before. `response`: what the client received of them, as a whole response.

    `is_withheld`: the last part is not shown before the reply of all parts is `told`; `is_stream`: the client reads a stream,
    which gets the rest then.
    """

    response: Mapping[str, Any]
    prompt_tokens: int | None = None  # None: nothing was kept of the parts before, and the next one counts as the first
    sampled_tokens: int = 0
    prompt: "Ids | None" = None  # of the part that follows
    is_withheld: bool = False
    is_stream: bool = False
    told: Told | None = None

    @property
    def _choice(self) -> Json:
        return (self.response.get("choices") or ({},))[0]

    def chunk(self, chunk: Json) -> Json | None:
        """Return a chat or completions chunk as one of the same stream; None if the client has received its like before.

        Raises PartsDiffer.
        """
        shown = {**chunk, **self._head(chunk)}
        if chunk.get("usage") is not None:
            shown["usage"] = self.usage(chunk["usage"])
        choice: Json = (chunk.get("choices") or ({},))[0]
        if self.prompt_tokens is not None:
            shown = {key: value for key, value in shown.items() if key not in _OF_PROMPT}
            if choice.get("weight_versions") is not None:
                shown["choices"] = [{**choice, "weight_versions": self._versions(self._choice, choice)}]
        delta = choice.get("delta")
        if isinstance(delta, dict):
            if self.prompt_tokens is not None:
                _check_plain(delta)
            if delta.get("role"):
                rest = {key: value for key, value in delta.items() if key != "role"}
                if choice.get("finish_reason") is None and not any(rest.values()):
                    return None
                shown["choices"] = [{**choice, "delta": rest}]
        return shown

    def check_prompt(self, response: Json) -> None:
        """Raise PartsDiffer if a response, or an event, has other prompt ids than those that were sent."""
        choice: Json = (response.get("choices") or ({},))[0]
        returned = response.get("prompt_token_ids") or choice.get("prompt_token_ids")
        if returned is not None and self.prompt is not None and [*returned] != [*self.prompt]:
            raise PartsDiffer("the engine did not go on with the ids that were sampled before")

    def whole(self, response: Json) -> Json:
        """Return the whole response of all parts. Raises PartsDiffer."""
        if not response.get("choices"):
            return {**self.response}
        if self.prompt_tokens is None:
            return {**response, **self._head(response)}
        (last,) = response["choices"]
        if self.is_withheld:
            kept = {name: self._choice[name] for name in ("message", "text") if name in self._choice}
            # A stream has shown the first ones.
            logprobs = {} if self.is_stream else _joined_logprobs(self._choice, last)
            if self.told is not None:
                logprobs = {name: _cut(lists, self.told.count) for name, lists in logprobs.items()}
            choice = {**last, **logprobs, **(kept if self.told is None else self.told.fields)}
        else:
            choice = self._joined_choice(last)
        shown = {**response, **self._head(response), "choices": [choice]}
        shown |= {name: self.response.get(name) for name in _OF_PROMPT if shown.get(name) is not None}
        if isinstance(versions := response.get("metadata"), dict):
            own = self.response.get("metadata")
            joined = self._versions(own if isinstance(own, dict) else {}, versions)
            shown["metadata"] = {**versions, "weight_versions": joined} if "weight_versions" in versions else versions
        if response.get("usage") is not None:
            shown["usage"] = self.usage(response["usage"])
        return shown

    def usage(self, usage: Any) -> Any:
        """Return the token counts of all parts; what is not a count is the last part's."""
        counted = usage.get("completion_tokens") if isinstance(usage, dict) else None
        if type(counted) is not int or self.prompt_tokens is None:
            return usage
        completion = self.sampled_tokens + counted if self.told is None else self.told.count
        counts = (self.prompt_tokens, completion, self.prompt_tokens + completion)
        own = self.response.get("usage")
        first: Json = own if isinstance(own, dict) else {}
        shown = {**usage, **{name: count for name, count in zip(_COUNTS, counts, strict=True) if name in usage}}
        if "prompt_tokens_details" in usage:
            shown["prompt_tokens_details"] = first.get("prompt_tokens_details")
        if isinstance(details := usage.get(_DETAILS), dict):
            shown[_DETAILS] = _with_thoughts(first.get(_DETAILS), details)
        return _with_thoughts(first, shown)

    def rest_of(self, response: Json) -> Json:
        """Return a whole response with only what the client has not received of it. Raises PartsDiffer."""
        (choice,) = response["choices"]
        rest = {**choice}
        if "text" in choice:
            rest["text"] = _rest(choice["text"], self._choice.get("text"))
        if "message" in choice:
            shown, message = self._choice.get("message") or {}, choice["message"]
            rest["message"] = {
                name: _rest(value, shown.get(name)) if isinstance(value, str) and name != "role" else value
                for name, value in message.items()
            }
            if shown.get("tool_calls"):
                rest["message"]["tool_calls"] = _rest_of_calls(message.get("tool_calls") or [], shown["tool_calls"])
        return {**response, "choices": [rest]}

    def _head(self, response: Json) -> Json:
        return {key: self.response[key] for key in _HEAD if key in response and key in self.response}

    def _versions(self, first: Mapping[str, Any], last: Mapping[str, Any]) -> list[Json] | None:
        """Return the engine's weight versions of all parts, which count sampled tokens; None if one part has none."""
        spans, more = first.get("weight_versions"), last.get("weight_versions")
        if not (isinstance(spans, list) and isinstance(more, list)):
            return None
        count, joined = self.sampled_tokens, [*spans]
        for span in more:
            end = span["end"] + count
            if joined and joined[-1]["version"] == span["version"]:
                joined[-1] = {**joined[-1], "end": end}
            else:
                joined.append({**span, "start": span["start"] + count, "end": end})
        if self.told is not None:  # it may end before the last sampled token
            kept = [span for span in joined if span["start"] < self.told.count]
            joined = [{**span, "end": min(span["end"], self.told.count)} for span in kept]
        return joined

    def _joined_choice(self, last: Json) -> Json:
        first, choice = self._choice, {**last}
        if isinstance(last.get("message"), dict):
            _check_plain(last["message"])
            if text := first.get("message", {}).get("content"):
                choice["message"] = {**last["message"], "content": text + (last["message"].get("content") or "")}
        if isinstance(last.get("text"), str):
            choice["text"] = first.get("text", "") + last["text"]
        for name in ("token_ids", "output_ids", "sampling_mask"):
            if isinstance(last.get(name), list):
                choice[name] = [*(first.get(name) or ()), *last[name]]
        if "weight_versions" in last:
            choice["weight_versions"] = self._versions(first, last)
        if "prompt_token_ids" in first:
            choice["prompt_token_ids"] = first["prompt_token_ids"]
        if isinstance(last.get("meta_info"), dict) and isinstance(first.get("meta_info"), dict):
            choice["meta_info"] = self._joined_meta(first["meta_info"], last["meta_info"])
        if last.get("routed_experts") is not None:
            raise PartsDiffer("the experts of a resumed call are those of its last part")
        return choice | _joined_logprobs(first, last)

    def _joined_meta(self, first: Json, last: Json) -> Json:
        lists = {name: value for name, value in last.items() if name.startswith("output_") and isinstance(value, list)}
        reason = last.get("finish_reason")
        if isinstance(reason, dict) and type(limit := reason.get("length")) is int:
            last = {**last, "finish_reason": {**reason, "length": limit + self.sampled_tokens}}
        if last.get("completion_tokens") == 0:  # aborted in the queue, it lacks counts, versions and some lists
            return {**last, **first, "finish_reason": last.get("finish_reason")}
        return {
            **last,
            **{name: value for name, value in first.items() if name.startswith(_OF_NATIVE_PROMPT)},
            **{
                name: first[name] + last[name] for name in _SUMS if type(first.get(name)) is type(last.get(name)) is int
            },
            **{name: [*(first.get(name) or ()), *values] for name, values in lists.items()},
            **({"weight_versions": self._versions(first, last)} if "weight_versions" in last else {}),
        }


def _with_thoughts(first: Any, last: Json) -> Json:
    """Return counts with the reasoning tokens of both parts, or null if one part does not say them."""
    if _THOUGHTS not in last:
        return last
    counts = (first.get(_THOUGHTS) if isinstance(first, dict) else None, last[_THOUGHTS])
    return {**last, _THOUGHTS: sum(counts) if all(type(count) is int for count in counts) else None}


def _rest(text: str, shown: Any) -> str:
    if not text.startswith(shown or ""):
        raise PartsDiffer("the client has received another text than the reply of the whole call")
    return text[len(shown or "") :]


def _rest_of_calls(calls: list[Json], shown: list[Json]) -> list[Json]:
    """Return what is missing of tool calls; one that has begun has only the rest of its arguments."""
    if len(calls) < len(shown) or any(
        call["function"]["name"] != begun["function"].get("name") for call, begun in zip(calls, shown, strict=False)
    ):
        raise PartsDiffer("the client has received other tool calls than the reply of the whole call has")
    rest = []
    for index, call in enumerate(calls):
        if index < len(shown):
            missing = _rest(call["function"]["arguments"], shown[index]["function"].get("arguments"))
            rest += [{"index": index, "function": {"arguments": missing}}] if missing else []
        else:
            rest.append({**call, "index": index})
    return rest


def _check_plain(message: Mapping[str, Any]) -> None:
    if any(message.get(name) for name in PARSED):
        raise PartsDiffer("the engine's parsers read the rest of a resumed call otherwise than the whole")


def _cut(lists: Mapping[str, Any], count: int) -> Json:
    return {name: values[:count] if isinstance(values, list) else values for name, values in lists.items()}


def _joined_logprobs(first: Mapping[str, Any], last: Json) -> dict[str, dict[str, Any]]:
    """Return the field of a choice with the logprobs of both parts; empty if there are none."""
    before, after = first.get("logprobs"), last.get("logprobs")
    if not (isinstance(before, dict) and isinstance(after, dict)):
        return {}
    lists = {name: values for name, values in after.items() if isinstance(values, list)}
    return {"logprobs": {**after, **{name: [*(before.get(name) or ()), *values] for name, values in lists.items()}}}
