"""A choice of an OpenAI-shaped answer: the few readings of it that engines share.

Holds what is the same wherever choices have an index and logprobs. What one engine alone writes is in its own file.
"""

from typing import Any

from proxy.engines.base import Hidden, Json


def index_of(choice: Json) -> int:
    """The index of a choice. Raises TypeError for what is no integer: nothing could be paired by it."""
    index = choice["index"]
    if type(index) is not int:
        raise TypeError(f"a choice's index must be an integer, not {index!r}")
    return index


def logprobs_of(choice: Json) -> list[float | None] | None:
    """One logprob a sampled token: chat has `logprobs.content[].logprob`, completions `logprobs.token_logprobs`."""
    logprobs: Any = choice.get("logprobs")
    if not isinstance(logprobs, dict):
        return None
    content = logprobs.get("content")
    return [entry.get("logprob") for entry in content] if content is not None else logprobs.get("token_logprobs")


def without(choice: Json, hidden: Hidden) -> Json:
    """A choice, anew, without the keys that flags brought, and its logprobs null again if they were."""
    shown = {key: value for key, value in choice.items() if key not in hidden.keys}
    if hidden.logprobs and "logprobs" in shown:
        shown["logprobs"] = None
    return shown
