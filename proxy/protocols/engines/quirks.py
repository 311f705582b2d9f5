"""The conditions of engines' known limitations (`Engine.quirks`), and what follows from them for a call.

A streamed call is sent as a stream (`live`), or sent unstreamed and returned as a stream (`replay`). docs/exactness.md is
generated from the limitations. A step that is inexact for a reason that they lack is logged as a new finding.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

from proxy.protocols.dialects.base import DialectName, is_on
from proxy.protocols.engines.base import CallOptions, Engine, Quirk
from proxy.trajectory.images import parts_of

Framing = Literal["whole", "live", "replay"]


def always(_body: Mapping[str, Any], _options: CallOptions) -> bool:
    """Apply to every call."""
    return True


def has(*fields: str) -> Callable[[Mapping[str, Any], CallOptions], bool]:
    """Apply to bodies with one of these fields."""
    return lambda body, _options: any(is_on(body[field]) for field in fields if field in body)


def several(body: Mapping[str, Any], _options: CallOptions) -> bool:
    """Apply to calls with several choices for a prompt."""
    n = body.get("n")
    return n is not None and n != 1


def requests_no_tokens(body: Mapping[str, Any], _options: CallOptions) -> bool:
    """Apply to calls that request no tokens."""
    return body.get("max_tokens") == 0


def has_more_than_text(body: Mapping[str, Any], _options: CallOptions | None = None) -> bool:
    """Return whether a message has a part that is not text."""
    return any(isinstance(part, dict) and part.get("type") != "text" for part in parts_of(body.get("messages")))


CHAT: Final[tuple[DialectName, ...]] = ("chat",)
COMPLETIONS: Final[tuple[DialectName, ...]] = ("completions",)
BOTH: Final[tuple[DialectName, ...]] = ("chat", "completions")

# The problems that show that an engine lost something; one of these that no quirk explains is a new finding.
QUIRK_CODES: Final = frozenset(
    {"no_token_ids", "no_prompt_ids", "no_logprobs", "logprob_count", "completion_count", "prompt_count", "ids_disagree",
     "bad_logprob"}
)  # fmt: skip

_REPLAYABLE_OPTIONS: Final = frozenset({"include_usage"})


def applicable(
    engine: Engine, dialect: DialectName, body: Mapping[str, Any], options: CallOptions, *, live: bool
) -> list[Quirk]:
    """Return the quirks of an engine that apply to a call. `live`: the call is sent as a stream."""
    return [
        quirk
        for quirk in engine.quirks
        if dialect in quirk.dialects and (live or quirk.framings == "always") and quirk.applies(body, options)
    ]


def choose_framing(engine: Engine, dialect: DialectName, body: Mapping[str, Any], options: CallOptions) -> Framing:
    """Return how a call is sent: `whole` if it is not streamed; else as configured, or as the quirks recommend.

    Only a stream with known options that the engine would not have refused can be replayed.
    """
    if not is_on(body.get("stream")):
        return "whole"
    usage = None if options.is_translated else body.get("stream_options")
    known = usage is None or (isinstance(usage, dict) and usage.keys() <= _REPLAYABLE_OPTIONS)
    if options.streaming == "live" or not known or body["stream"] is not True or not engine.can_replay(dialect, body):
        return "live"
    if options.streaming == "replay" or engine.must_replay(dialect, body, options):
        return "replay"
    found = applicable(engine, dialect, body, options, live=True)
    return "replay" if any(quirk.framings == "streams" for quirk in found) else "live"
