"""The known limitations of each engine, with the version and the source, in one table.

`choose_framing` uses the table to decide whether a streamed call is sent as a stream (`live`), or sent unstreamed and
returned as a stream (`replay`). docs/exactness.md is generated from it. A step that is inexact for a reason that the
table lacks is logged as a new finding.

A quirk has `codes` of `fidelity.PROBLEMS`, some of which an affected step may have. It affects live streams only (replay
avoids it), or every call.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, Final, Literal

from proxy.protocols.dialects.base import DialectName, is_on
from proxy.protocols.dialects.generate import has_beams
from proxy.protocols.engines.base import CallOptions
from proxy.protocols.engines.sglang import returns_mask
from proxy.trajectory.images import parts_of

Framing = Literal["whole", "live", "replay"]
Applies = Callable[[Mapping[str, Any], CallOptions], bool]


@dataclass(frozen=True, slots=True)
class Quirk:
    """One limitation of an engine."""

    engine: str
    dialects: tuple[DialectName, ...]
    framings: Literal["streams", "always"]
    what: str
    codes: tuple[str, ...]
    source: str
    applies: Applies  # to a body and its options


def _always(_body: Mapping[str, Any], _options: CallOptions) -> bool:
    return True


def _loses_logprobs_without_parser(_body: Mapping[str, Any], options: CallOptions) -> bool:
    return options.wants_logprobs and not options.traits.has_parser


def _older_than_0_5_23(_body: Mapping[str, Any], options: CallOptions) -> bool:
    """Return whether the version is older, or unknown."""
    version = options.traits.version
    return version is None or version_numbers(version) < (0, 5, 23)


@lru_cache(64)
def version_numbers(version: str) -> tuple[int, ...]:
    """Return `0.5.23.post1` as (0, 5, 23)."""
    numbers: list[int] = []
    for part in version.split("."):
        if not part.isdecimal():
            break
        numbers.append(int(part))
    return tuple(numbers)


def _has(*fields: str) -> Applies:
    return lambda body, _options: any(is_on(body[field]) for field in fields if field in body)


def _no_reasoning(body: Mapping[str, Any], options: CallOptions) -> bool:
    return body.get("include_reasoning") is False and not options.keep_reasoning


def _several(body: Mapping[str, Any], _options: CallOptions) -> bool:
    n = body.get("n")
    return n is not None and n != 1


def _several_in_all(body: Mapping[str, Any], options: CallOptions) -> bool:
    """Return whether a completions call may have more than one choice over all its prompts."""
    prompt = body.get("prompt")
    prompts = len(prompt) if isinstance(prompt, list) and prompt and type(prompt[0]) is not int else 1
    return _several(body, options) or prompts > 1


def _requests_no_tokens(body: Mapping[str, Any], _options: CallOptions) -> bool:
    return body.get("max_tokens") == 0


def _requests_no_alternatives(body: Mapping[str, Any], _options: CallOptions) -> bool:
    return type(body.get("logprobs")) is int and body["logprobs"] == 0


def has_more_than_text(body: Mapping[str, Any], _options: CallOptions | None = None) -> bool:
    """Return whether a message has a part that is not text."""
    return any(isinstance(part, dict) and part.get("type") != "text" for part in parts_of(body.get("messages")))


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
        "seen on 0.32.0; chat_completion/protocol.py:884", lambda body, _: bool(body.get("top_logprobs"))
        and not is_on(body.get("logprobs")),
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
        ("prompt_count",), "read in 0.5.23; tokenizer_manager.py:948", has_more_than_text,
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
        ("beam_search", "no_logprobs"), "run on 0.5.23", lambda body, _: has_beams(body.get("sampling_params")),
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
        ("no_prompt_ids", "uncounted"), "seen on 2026.10", lambda body, _: _is_list_but_not_of_ids(body.get("prompt")),
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


def applicable(dialect: DialectName, body: Mapping[str, Any], options: CallOptions, *, live: bool) -> list[Quirk]:
    """Return the quirks of the engine that apply to a call. `live`: the call is sent as a stream."""
    return [
        quirk
        for quirk in _quirks_of(options.traits.kind, dialect)
        if (live or quirk.framings == "always") and quirk.applies(body, options)
    ]


@cache
def _quirks_of(engine: str, dialect: DialectName) -> tuple[Quirk, ...]:
    return tuple(quirk for quirk in QUIRKS if quirk.engine == engine and dialect in quirk.dialects)


def choose_framing(
    dialect: DialectName, body: Mapping[str, Any], options: CallOptions, *, can_replay: bool = True
) -> Framing:
    """Return how a call is sent: `whole` if it is not streamed; else as configured, or as the table recommends.

    Only a stream with known options that the engine would not have refused can be replayed.
    """
    if not is_on(body.get("stream")):
        return "whole"
    usage = None if options.is_translated else body.get("stream_options")
    known = usage is None or (isinstance(usage, dict) and usage.keys() <= _REPLAYABLE_OPTIONS)
    if options.streaming == "live" or not known or not can_replay or body["stream"] is not True:
        return "live"
    if options.streaming == "replay":
        return "replay"
    if (
        options.traits.kind == "sglang"
        and dialect == "chat"
        and (returns_mask(body, options) or options.routed_experts)
    ):
        return "replay"  # streams have no masks, and the experts of one choice only
    found = applicable(dialect, body, options, live=True)
    return "replay" if any(quirk.framings == "streams" for quirk in found) else "live"
