"""A choice of an OpenAI-shaped answer: the few readings of it that engines share.

Holds what is the same wherever choices have an index and logprobs. What one engine alone writes is in its own file.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from proxy.dialects.base import is_on
from proxy.engines.base import Hidden, Json, Wish

_HIGHEST_INDEX: Final = 2**31 - 1
# vLLM 0.32.0 names tokens by their ids on request, or with the server flag --return-tokens-as-token-ids.
_NAMED: Final = "token_id:"
_BOOLEANS: Final = frozenset({"0", "off", "f", "false", "n", "no", "1", "on", "t", "true", "y", "yes"})


def index_of(choice: Json) -> int:
    """The index of a choice. Raises TypeError for what is no index: nothing could be paired by it."""
    index = choice["index"]
    if type(index) is not int or not 0 <= index <= _HIGHEST_INDEX:
        raise TypeError("a choice's index must be a small integer from 0 on")
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


def names_other_ids(choice: Json, ids: Sequence[Any] | None) -> bool:
    """Whether the logprobs of a choice name tokens by ids that are not the sampled ones."""
    logprobs = choice.get("logprobs")
    if not ids or not isinstance(logprobs, dict):
        return False
    content = logprobs.get("content")
    names = logprobs.get("tokens") or () if content is None else [entry.get("token") for entry in content]
    with suppress(TypeError):  # a name that is no string is looked at below
        if _NAMED not in "\n".join(names):
            return False  # tokens are named by their texts, as almost always
    return any(
        isinstance(name, str) and name.startswith(_NAMED) and name != f"{_NAMED}{token}"
        for name, token in zip(names, ids, strict=False)
    )


def usage_options(wish: Wish, *, running: bool) -> Json:
    """What to set of `stream_options`, so that a stream counts its tokens; empty where that is not to be changed.

    `running`: each event counts the tokens of its choice, too. Options that an engine refuses stay as they are.
    """
    if wish.forces_usage:
        return {}
    given = wish.body.get("stream_options")
    options = {} if given is None else given
    if not is_on(wish.body.get("stream")) or not isinstance(options, dict):
        return {}
    if not all(_is_boolean(options.get(name)) for name in ("include_usage", "continuous_usage_stats")):
        return {}
    wanted = {"include_usage": True, "continuous_usage_stats": running or has_running_usage(wish.body)}
    changed = {name: value for name, value in wanted.items() if is_on(options.get(name)) != value}
    return {**options, **changed} if changed else {}


def has_running_usage(body: Mapping[str, Any]) -> bool:
    """Whether a client asks for usage on each event: `continuous_usage_stats` counts for nothing without `include_usage`."""
    options = body.get("stream_options")
    return isinstance(options, dict) and all(map(is_on, map(options.get, ("include_usage", "continuous_usage_stats"))))


def _is_boolean(value: Any) -> bool:
    """Whether pydantic reads it as a boolean or as absent."""
    return value.lower() in _BOOLEANS if isinstance(value, str) else value in (None, True, False)
