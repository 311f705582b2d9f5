"""The known limitations of each engine, with the version and the source, in one table.

`choose_framing` uses the table to decide whether a streamed call is sent as a stream (`live`), or sent unstreamed and
returned as a stream (`replay`). docs/exactness.md is generated from it. A step that is inexact for a reason that the
table lacks is logged as a new finding.

A quirk has `codes` of `fidelity.PROBLEMS`, some of which an affected step may have. It affects live streams only (replay
avoids it), or every call.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, Final, Literal

from proxy.protocols.dialects.base import DialectName, is_on
from proxy.protocols.dialects.sglang_generate import has_beams
from proxy.protocols.engines.base import EngineCall
from proxy.protocols.engines.sglang import returns_mask

Framing = Literal["whole", "live", "replay"]
Streaming = Literal["auto", "live", "replay"]


@dataclass(frozen=True, slots=True)
class Quirk:
    """One limitation of an engine."""

    engine: str
    dialects: tuple[DialectName, ...]
    framings: Literal["streams", "always"]
    what: str
    codes: tuple[str, ...]
    source: str
    applies: Callable[[EngineCall], bool]


def _always(_call: EngineCall) -> bool:
    return True


def _loses_logprobs_without_parser(call: EngineCall) -> bool:
    return call.wants_logprobs and not call.traits.has_parser


def _older_than_0_5_23(call: EngineCall) -> bool:
    """Return whether the version is older, or unknown."""
    return call.traits.version is None or version_numbers(call.traits.version) < (0, 5, 23)


@lru_cache(64)
def version_numbers(version: str) -> tuple[int, ...]:
    """Return `0.5.23.post1` as (0, 5, 23)."""
    numbers: list[int] = []
    for part in version.split("."):
        if not part.isdecimal():
            break
        numbers.append(int(part))
    return tuple(numbers)


def _has(*fields: str) -> Callable[[EngineCall], bool]:
    return lambda call: any(is_on(call.body.get(field)) for field in fields)


def _no_reasoning(call: EngineCall) -> bool:
    return call.body.get("include_reasoning") is False and not call.keep_reasoning


def _several(call: EngineCall) -> bool:
    n = call.body.get("n")
    return n is not None and n != 1


def _several_in_all(call: EngineCall) -> bool:
    """Return whether a completions call may have more than one choice over all its prompts."""
    prompt = call.body.get("prompt")
    prompts = len(prompt) if isinstance(prompt, list) and prompt and type(prompt[0]) is not int else 1
    return _several(call) or prompts > 1


def _requests_no_tokens(call: EngineCall) -> bool:
    return call.body.get("max_tokens") == 0


def _requests_no_alternatives(call: EngineCall) -> bool:
    return type(call.body.get("logprobs")) is int and call.body["logprobs"] == 0


def _has_more_than_text(call: EngineCall) -> bool:
    """Return whether a message has a part that is not text."""
    messages = call.body.get("messages")
    contents = [message.get("content") for message in messages or () if isinstance(message, dict)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return any(isinstance(part, dict) and part.get("type") != "text" for part in parts)


def _is_list_but_not_of_ids(prompt: Any) -> bool:
    return isinstance(prompt, list) and not all(type(token) is int for token in prompt)


_CHAT: Final[tuple[DialectName, ...]] = ("chat",)
_COMPLETIONS: Final[tuple[DialectName, ...]] = ("completions",)
_NATIVE: Final[tuple[DialectName, ...]] = ("sglang_generate",)
_BOTH: Final[tuple[DialectName, ...]] = ("chat", "completions")

QUIRKS: Final[tuple[Quirk, ...]] = (
    Quirk(
        "vllm", _CHAT, "always", "`include_reasoning: false` with any parser: no ids and no logprobs (overridden by "
        "default).", ("reasoning_withheld",),
        "seen on 0.32.0; chat_completion/serving.py:702-715, 1004-1008", _no_reasoning,
    ),
    Quirk(
        "vllm", _COMPLETIONS, "always", "`echo` with ids omits the echoed prompt, so no ids are requested.", ("echo",),
        "seen on 0.32.0; completion/serving.py:341, 537", _has("echo"),
    ),
    Quirk(
        "vllm", _COMPLETIONS, "always", "`max_tokens: 0` still samples one token.", ("phantom_token",),
        "seen on 0.32.0; completion/protocol.py:377", _requests_no_tokens,
    ),
    Quirk(
        "vllm", _BOTH, "always", "Beam search: the logprobs are not those of a sampled path.", ("beam_search",),
        "seen on 0.32.0", _has("use_beam_search"),
    ),
    Quirk(
        "vllm", _CHAT, "always", "`top_logprobs` without `logprobs`: the engine returns 400.", ("no_logprobs",),
        "seen on 0.32.0; chat_completion/protocol.py:884", lambda call: bool(call.body.get("top_logprobs"))
        and not is_on(call.body.get("logprobs")),
    ),
    Quirk(
        "sglang", _CHAT, "streams", "Without a parser, events without text, such as the EOS, have no logprobs.",
        ("logprob_count",), "seen on 0.5.23; serving_chat.py:1054-1080", _loses_logprobs_without_parser,
    ),
    Quirk(
        "sglang", _CHAT, "streams", "Before 0.5.23 or of unknown version: ids may be missing.",
        ("no_token_ids", "no_prompt_ids"), "read; PR #34488 (August 2026)", _older_than_0_5_23,
    ),
    Quirk(
        "sglang", _CHAT, "always", "Images and other media are not in the prompt ids.",
        ("prompt_count",), "read in 0.5.23; tokenizer_manager.py:948", _has_more_than_text,
    ),
    Quirk(
        "sglang", _COMPLETIONS, "streams", "Several choices or prompts: usage is only their sum, so errors may cancel "
        "out.", ("uncounted",), "seen on 0.5.23; serving_completions.py", _several_in_all,
    ),
    Quirk(
        "sglang", _BOTH, "always", "`echo` and beam search: the response has another format.", ("echo", "beam_search"),
        "seen (`echo`) and read in 0.5.23", _has("echo", "use_beam_search"),
    ),
    Quirk(
        "sglang", _NATIVE, "always", "Images and other media, and the earlier turns of `session_params`, are not in the prompt "
        "ids.", ("prompt_count",), "read in 0.5.23; tokenizer_manager.py:948",
        _has("image_data", "video_data", "audio_data", "session_params"),
    ),
    Quirk(
        "sglang", _NATIVE, "always", "`input_embeds`: no prompt ids.", ("no_prompt_ids",), "read in 0.5.23",
        _has("input_embeds"),
    ),
    Quirk(
        "sglang", _NATIVE, "always", "Beam search (`beam_width`): the best sequence without logprobs.",
        ("beam_search", "no_logprobs"), "run on 0.5.23", lambda call: has_beams(call.body.get("sampling_params")),
    ),
    Quirk(
        "llamacpp", _CHAT, "streams", "The EOS has no logprob, and `verbose` lists no tokens.",
        ("logprob_count", "completion_count", "no_logprobs"), "seen on 2026.10", _always,
    ),
    Quirk(
        "llamacpp", _BOTH, "always", "A character of several tokens has a logprob for the last one only. Some tokens of a "
        "matched stop string have none.", ("logprob_count", "completion_count", "no_logprobs"), "seen on 2026.10",
        _always,
    ),
    Quirk(
        "llamacpp", _BOTH, "always", "Several choices: usage counts only one of them.",
        ("uncounted",), "seen on 2026.10", _several,
    ),
    Quirk(
        "llamacpp", _COMPLETIONS, "always", "Several prompts, or one of text and ids: their ids are unavailable.",
        ("no_prompt_ids", "uncounted"), "seen on 2026.10", lambda call: _is_list_but_not_of_ids(call.body.get("prompt")),
    ),
    Quirk(
        "llamacpp", _COMPLETIONS, "always", "`logprobs: 0`: no logprobs, and a stream has no ids then.",
        ("no_logprobs", "no_token_ids", "completion_count"), "run on 2026.10", _requests_no_alternatives,
    ),
    Quirk(
        "llamacpp", _BOTH, "always", "`max_tokens: 0` still samples one token.", ("phantom_token",),
        "seen on 2026.10", _requests_no_tokens,
    ),
    Quirk(
        "llamacpp", _BOTH, "always", "`post_sampling_probs`: probabilities in place of logprobs.",
        ("bad_logprob",), "seen on 2026.10", _has("post_sampling_probs"),
    ),
    Quirk(
        "plain", _BOTH, "always", "No ids.", ("no_token_ids",), "by definition", _always,
    ),
)  # fmt: skip

# The problems that show that an engine lost something; one of these that no quirk explains is a new finding.
QUIRK_CODES: Final = frozenset(
    {"no_token_ids", "no_prompt_ids", "no_logprobs", "logprob_count", "completion_count", "prompt_count", "ids_disagree",
     "bad_logprob"}
)  # fmt: skip

_REPLAYABLE_OPTIONS: Final = frozenset({"include_usage"})


def applicable(engine: str, call: EngineCall, *, live: bool) -> list[Quirk]:
    """Return the quirks that apply to a call. `live`: the call is sent as a stream."""
    return [
        quirk
        for quirk in _quirks_of(engine, call.dialect)
        if (live or quirk.framings == "always") and quirk.applies(call)
    ]


@cache
def _quirks_of(engine: str, dialect: DialectName) -> tuple[Quirk, ...]:
    return tuple(quirk for quirk in QUIRKS if quirk.engine == engine and dialect in quirk.dialects)


def choose_framing(streaming: Streaming, engine: str, call: EngineCall, *, can_replay: bool) -> Framing:
    """Return how a call is sent: `whole` if it is not streamed; else as configured, or as the table recommends.

    Only a stream with known options that the engine would not have refused can be replayed.
    """
    if not is_on(call.body.get("stream")):
        return "whole"
    options = call.body.get("stream_options")
    known = options is None or (isinstance(options, dict) and options.keys() <= _REPLAYABLE_OPTIONS)
    if streaming == "live" or not known or not can_replay or call.body["stream"] is not True:
        return "live"
    if streaming == "replay":
        return "replay"
    if engine == "sglang" and call.dialect == "chat" and (returns_mask(call) or call.routed_experts):
        return "replay"  # streams have no masks, and the experts of one choice only
    return "replay" if any(quirk.framings == "streams" for quirk in applicable(engine, call, live=True)) else "live"
