"""Chunks of vLLM's generate endpoint, accumulated into the response that the unstreamed call would have given.

As vLLM 0.32.0 streams them: a chunk has one choice; `token_ids`, `logprobs.content`, `sampling_mask` (and `text`, in
output mode "text") are of its own tokens; `routed_experts` and `weight_versions` come with the finish and are of the
whole choice. `prompt_token_ids` is in the first chunk only; `usage` in a last one without choices, on request.
"""

from typing import Any

from proxy.wire.fold import Chunks, Json, extended, replace, text_of


class GenerateFold:
    """Accumulates the chunks of `/inference/v1/generate`."""

    def __init__(self) -> None:
        self._chunks = Chunks(lambda _: _ChoiceFold())
        self.problems = self._chunks.problems

    @property
    def finished(self) -> int:
        """The number of choices that have a finish reason."""
        return self._chunks.finished

    def feed(self, chunk: Json) -> None:
        """Add one chunk."""
        self._chunks.feed(chunk)

    def finish(self) -> Json:
        """A response of the endpoint."""
        choices = [fold.finish() for _, fold in sorted(self._chunks.choices.items())]
        return self._chunks.finish(None, choices)


class _ChoiceFold:
    """One choice."""

    __slots__ = ("_content", "_lists", "_texts", "counted", "fields")

    def __init__(self) -> None:
        self.fields: Json = {"finish_reason": None}
        self.counted = 0
        self._lists: dict[str, list[Any]] = {}
        self._texts: list[str] = []
        self._content: list[Any] | None = None

    def feed(self, choice: Json, problems: set[str]) -> None:
        """Add what a chunk has of this choice."""
        for key, value in choice.items():
            if value is None:
                self.fields.setdefault(key, None)
            elif key == "text":
                self._texts.append(text_of(value))
                self.fields[key] = None
            elif key == "logprobs":
                self._content = extended(self._content, value.get("content") or [])
            elif key in {"token_ids", "sampling_mask"}:
                self._lists[key] = extended(self._lists.get(key), value)
            elif key == "index":
                self.fields[key] = value
            else:
                replace(self.fields, key, value, problems)

    def finish(self) -> Json:
        """The choice so far."""
        texts = {"text": "".join(self._texts)} if "text" in self.fields else {}
        logprobs = None if self._content is None else {"content": self._content}
        return {**self.fields, **self._lists, **texts, "logprobs": logprobs}
