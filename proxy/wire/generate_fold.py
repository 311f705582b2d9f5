"""Chunks of vLLM's generate endpoint, folded into the response that the unstreamed call would have given.

Holds one fold beside those of `fold`: ids, logprobs and masks come in pieces and are joined, and so is the text. It
neither hides nor judges, and never changes a chunk it is fed.

As vLLM 0.32.0 streams them: a chunk has one choice; `token_ids`, `logprobs.content`, `sampling_mask` (and `text`, in
output mode "text") are of its own tokens; `routed_experts` and `weight_versions` come with the finish and are of the
whole choice. `prompt_token_ids` is in the first chunk only; `usage` in a last one without choices, if asked.
"""

from typing import Any

from proxy.wire.fold import Json

_JOINED = frozenset({"token_ids", "sampling_mask", "text", "logprobs"})


class GenerateFold:
    """Folds the chunks of `/inference/v1/generate`."""

    def __init__(self) -> None:
        self._head: Json = {}
        self._choices: dict[int, _ChoiceFold] = {}
        self._finished: set[int] = set()

    @property
    def finished(self) -> int:
        """How many choices have a finish reason by now."""
        return len(self._finished)

    def feed(self, chunk: Json) -> None:
        """Take one chunk."""
        for key, value in chunk.items():
            if key != "choices" and (value is not None or key not in self._head):
                self._head[key] = value
        for choice in chunk.get("choices") or []:
            self._feed_choice(choice)

    def _feed_choice(self, choice: Json) -> None:
        index = choice["index"]
        if type(index) is not int:
            raise TypeError(f"a choice's index must be an integer, not {index!r}")
        self._choices.setdefault(index, _ChoiceFold()).feed(choice)
        if choice.get("finish_reason") is not None:
            self._finished.add(index)

    def finish(self) -> Json:
        """A response of the endpoint."""
        choices = [fold.finish() for _, fold in sorted(self._choices.items())]
        return {**self._head, "choices": choices, "usage": self._head.get("usage")}


class _ChoiceFold:
    """One choice."""

    __slots__ = ("_content", "_fields", "_lists", "_texts")

    def __init__(self) -> None:
        self._fields: Json = {"finish_reason": None}
        self._lists: dict[str, list[Any]] = {}
        self._texts: list[str] = []
        self._content: list[Any] | None = None

    def feed(self, choice: Json) -> None:
        for key, value in choice.items():
            if value is None or key not in _JOINED:
                if value is not None or key not in self._fields:
                    self._fields[key] = value
            elif key == "text":
                self._texts.append(value)
                self._fields[key] = None
            elif key == "logprobs":
                self._content = [] if self._content is None else self._content
                self._content.extend(value.get("content") or ())
            else:
                self._lists.setdefault(key, []).extend(value)

    def finish(self) -> Json:
        texts = {"text": "".join(self._texts)} if "text" in self._fields else {}
        logprobs = None if self._content is None else {"content": self._content}
        return {**self._fields, **self._lists, **texts, "logprobs": logprobs}
