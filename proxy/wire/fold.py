"""Chunks folded into the response that the unstreamed call would have given.

Holds one fold per shape that engines stream. A fold only gathers: it neither hides nor judges, and it never changes a
chunk it is fed (lists are extended into lists of its own).

Rule 1: text comes in pieces and is joined; of whatever else is repeated, the last value that is not null wins.
Rule 2: choices are told apart by `index` and may interleave in any order.
"""

from typing import Any, Protocol

Json = dict[str, Any]


class Fold(Protocol):
    """Gathers the chunks of one streamed call."""

    def feed(self, chunk: Json) -> None:
        """Take one chunk. Raises TypeError, KeyError or AttributeError if it has not the shape of one."""
        ...

    def finish(self) -> Json:
        """The response so far, its choices in the order of their index."""
        ...

    @property
    def finished(self) -> int:
        """How many choices have a finish reason by now."""
        ...


class _ChoiceFold:
    """One choice: what chat and completions have in common (ids, logprobs, why it finished), and any other field."""

    __slots__ = ("fields", "ids", "logprobs", "text")

    def __init__(self, index: int) -> None:
        self.fields: Json = {"index": index, "finish_reason": None}
        self.ids: list[int] | None = None
        self.logprobs: dict[str, list[Any]] | None = None
        self.text: list[str] = []

    def feed(self, choice: Json) -> None:
        for key, value in choice.items():
            if key in {"index", "delta"}:
                continue
            if value is None:
                self.fields.setdefault(key, None)  # what is never more than null is so in the response as well
            elif key == "token_ids":
                self.ids = self.ids or []
                self.ids.extend(value)
            elif key == "logprobs":
                self._extend_logprobs(value)
            elif key == "text":
                self.text.append(value)
            else:
                self.fields[key] = value

    def _extend_logprobs(self, logprobs: Json) -> None:
        self.logprobs = {} if self.logprobs is None else self.logprobs
        for name, values in logprobs.items():
            if values is not None:
                self.logprobs.setdefault(name, []).extend(values)

    def finish(self) -> Json:
        lists = {"logprobs": self.logprobs, "token_ids": self.ids}
        return {**self.fields, **{key: values for key, values in lists.items() if values is not None}}


class _Chunks:
    """A whole stream: the top-level fields and the choices by index."""

    __slots__ = ("choices", "finished", "head")

    def __init__(self) -> None:
        self.head: Json = {}
        self.choices: dict[int, _ChoiceFold] = {}
        self.finished = 0

    def feed(self, chunk: Json) -> list[Json]:
        """Take one chunk; give back its choices."""
        for key, value in chunk.items():
            if key != "choices" and (value is not None or key not in self.head):
                self.head[key] = value
        choices: list[Json] = chunk.get("choices") or []
        for choice in choices:
            self._feed_choice(choice)
        return choices

    def _feed_choice(self, choice: Json) -> None:
        index = choice["index"]
        if type(index) is not int:
            raise TypeError(f"a choice's index must be an integer, not {index!r}")
        fold = self.choices.get(index)
        if fold is None:
            fold = self.choices[index] = _ChoiceFold(index)
        was_open = fold.fields["finish_reason"] is None
        fold.feed(choice)
        if was_open and fold.fields["finish_reason"] is not None:
            self.finished += 1

    def finish(self, kind: str, choices: list[Json]) -> Json:
        usage = self.head.pop("usage", None)
        return {**self.head, "object": kind, "choices": choices, "usage": usage}


class CompletionsFold:
    """Folds `text_completion` chunks."""

    def __init__(self) -> None:
        self._chunks = _Chunks()

    @property
    def finished(self) -> int:
        """How many choices have a finish reason by now."""
        return self._chunks.finished

    def feed(self, chunk: Json) -> None:
        """Take one chunk."""
        self._chunks.feed(chunk)

    def finish(self) -> Json:
        """A `text_completion` response."""
        choices = [{**fold.finish(), "text": "".join(fold.text)} for _, fold in sorted(self._chunks.choices.items())]
        return self._chunks.finish("text_completion", choices)


class _MessageFold:
    """The message of one chat choice: texts by field, tool calls by index, and whatever else a delta holds."""

    __slots__ = ("calls", "fields", "texts")

    def __init__(self) -> None:
        self.texts: dict[str, list[str]] = {}
        self.calls: dict[int, Json] = {}
        self.fields: Json = {"role": "assistant", "content": None}

    def feed(self, delta: Json) -> None:
        for key, value in delta.items():
            if value is None:
                continue
            if key == "tool_calls":
                for call in value:
                    self._feed_call(call)
            elif isinstance(value, str) and key != "role":
                self.texts.setdefault(key, []).append(value)
            else:
                self.fields[key] = value

    def _feed_call(self, call: Json) -> None:
        kept = self.calls.setdefault(call["index"], {"id": None, "type": "function", "function": {}})
        function = kept["function"]
        for key, value in call.items():
            if key not in {"index", "function"} and value is not None:
                kept[key] = value
        for key, value in (call.get("function") or {}).items():
            if key == "arguments":
                function.setdefault(key, []).append(value or "")
            elif value is not None:
                function[key] = value

    def finish(self) -> Json:
        texts = {key: "".join(pieces) for key, pieces in self.texts.items()}
        message = {**self.fields, **{key: text for key, text in texts.items() if text or key != "content"}}
        if self.calls:
            message["tool_calls"] = [
                {
                    **call,
                    "function": {
                        **call["function"],
                        "arguments": "".join(call["function"].get("arguments", ())),
                    },
                }
                for _, call in sorted(self.calls.items())
            ]
        return message


class ChatFold:
    """Folds `chat.completion.chunk` chunks."""

    def __init__(self) -> None:
        self._chunks = _Chunks()
        self._messages: dict[int, _MessageFold] = {}

    @property
    def finished(self) -> int:
        """How many choices have a finish reason by now."""
        return self._chunks.finished

    def feed(self, chunk: Json) -> None:
        """Take one chunk."""
        for choice in self._chunks.feed(chunk):
            message = self._messages.get(choice["index"])
            if message is None:
                message = self._messages[choice["index"]] = _MessageFold()
            message.feed(choice.get("delta") or {})

    def finish(self) -> Json:
        """A `chat.completion` response."""
        choices = [
            {**fold.finish(), "message": self._messages[index].finish()}
            for index, fold in sorted(self._chunks.choices.items())
        ]
        return self._chunks.finish("chat.completion", choices)
