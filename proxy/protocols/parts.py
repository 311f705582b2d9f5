"""The parts of a resumed call: what several engine responses, one after the other, are for its client and in its step.

Each part is one response, whose prompt is the prompt of the call and all that was sampled of it before.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from proxy.errors import EngineDisconnected
from proxy.protocols.dialects.base import Json
from proxy.trajectory.step import Ids

_HEAD: Final = ("id", "created")
_PARSED: Final = ("reasoning", "reasoning_content", "tool_calls")
_COUNTS: Final = ("prompt_tokens", "completion_tokens", "total_tokens")


class PartsDiffer(EngineDisconnected):
    """The response of a part does not go on with the part before: the prompt is another one, or it is parsed otherwise."""


@dataclass(frozen=True, slots=True)
class Before:
    """The parts before. `response`: what the client received of them, as a whole response."""

    response: Mapping[str, Any]
    prompt_tokens: int | None = None  # None: nothing was kept of the parts before, and the next one counts as the first
    sampled_tokens: int = 0
    prompt: "Ids | None" = None  # of the part that follows

    def chunk(self, chunk: Json) -> Json | None:
        """Return a chat or completions chunk as one of the same stream; None if the client has received its like before.

        Raises PartsDiffer.
        """
        shown = {**chunk, **self._head(chunk)}
        if chunk.get("usage") is not None:
            shown["usage"] = self.usage(chunk["usage"])
        choice: Json = (chunk.get("choices") or ({},))[0]
        delta = choice.get("delta")
        if isinstance(delta, dict):
            _check_plain(delta)
            if "role" in delta:
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
        first: Json = (self.response.get("choices") or ({},))[0]
        last = response["choices"][0]
        shown = {**response, **self._head(response), "choices": [_joined_choice(first, last)]}
        if isinstance(versions := response.get("metadata"), dict):
            shown["metadata"] = self._metadata(versions)
        if response.get("usage") is not None:
            shown["usage"] = self.usage(response["usage"])
        return shown

    def usage(self, usage: Any) -> Any:
        """Return the token counts of all parts; what is not a count is the last part's."""
        counted = usage.get("completion_tokens") if isinstance(usage, dict) else None
        if type(counted) is not int or self.prompt_tokens is None:
            return usage
        completion = self.sampled_tokens + counted
        counts = (self.prompt_tokens, completion, self.prompt_tokens + completion)
        own = self.response.get("usage")
        details = own.get("prompt_tokens_details") if isinstance(own, dict) else None
        shown = {**usage, **{name: count for name, count in zip(_COUNTS, counts, strict=True) if name in usage}}
        return {**shown, "prompt_tokens_details": details} if "prompt_tokens_details" in usage else shown

    def _head(self, response: Json) -> Json:
        return {key: self.response[key] for key in _HEAD if key in response and key in self.response}

    def _metadata(self, last: Json) -> Json:
        """Return SGLang's weight versions (0.5.23), which count sampled tokens, of all parts."""
        first = self.response.get("metadata")
        spans = first.get("weight_versions") if isinstance(first, dict) else None
        more = last.get("weight_versions")
        if not (isinstance(spans, list) and isinstance(more, list)):
            return last
        count, joined = self.sampled_tokens, [*spans]
        for span in more:
            end = span["end"] + count
            if joined and joined[-1]["version"] == span["version"]:
                joined[-1] = {**joined[-1], "end": end}
            else:
                joined.append({**span, "start": span["start"] + count, "end": end})
        return {**last, "weight_versions": joined}


def _check_plain(message: Mapping[str, Any]) -> None:
    if any(message.get(name) for name in _PARSED):
        raise PartsDiffer("the engine's parsers read the rest of a resumed call otherwise than the whole")


def _joined_choice(first: Mapping[str, Any], last: Json) -> Json:
    choice = {**last}
    if isinstance(last.get("message"), dict):
        _check_plain(last["message"])
        if text := first.get("message", {}).get("content"):
            choice["message"] = {**last["message"], "content": text + (last["message"].get("content") or "")}
    if isinstance(last.get("text"), str):
        choice["text"] = first.get("text", "") + last["text"]
    before, after = first.get("logprobs"), last.get("logprobs")
    if isinstance(before, dict) and isinstance(after, dict):
        choice["logprobs"] = {
            name: [*before[name], *values]
            if isinstance(before.get(name), list) and isinstance(values, list)
            else values
            for name, values in after.items()
        }
    return choice
