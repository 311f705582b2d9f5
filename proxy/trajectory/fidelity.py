"""Fidelity: what keeps a step from being exact, and how that is said to people.

Holds the table of problems and the checks that find them in what the engine gave. It must not repair
anything, nor know engines: what only the engine's file or the exchange can tell comes in as `special`.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any, Final

from proxy.trajectory.arrays import to_little_endian
from proxy.trajectory.step import Choice, Ids, Logprobs, Status, Step

PROBLEMS: Final[dict[str, str]] = {
    "no_token_ids": "The engine gave no ids of the sampled tokens.",
    "no_prompt_ids": "The engine gave no ids of the prompt.",
    "no_logprobs": "The engine gave no logprobs of the sampled tokens.",
    "logprob_count": "A choice has another number of logprobs than of sampled ids.",
    "completion_count": "The engine counts another number of sampled tokens than it gave ids of.",
    "prompt_count": "The engine counts another number of prompt tokens than it gave ids of.",
    "bad_token_id": "A token id is negative.",
    "bad_logprob": "A logprob is missing, not a finite number, or above zero.",
    "clamped_logprob": "A logprob is the engine's stand-in for one that is missing or too low (-9999).",
    "stream_cut": "The answer broke off before its end.",
    "choice_count": "The answer has another number of choices than were asked for.",
    "no_finish_reason": "The answer ended without saying why a choice did.",
    "empty_completion": "A choice has no ids, and the engine's count does not show that it sampled none.",
    "aborted": "The engine was told to abort the call.",
    "engine_error": "The engine answered with an error.",
    "echo": "The client asked for its prompt to be echoed; the engine's ids cannot be trusted then.",
    "beam_search": "The tokens were found by beam search, not sampled.",
    "forced_tokens": "The engine was told which tokens to emit; they were not sampled.",
    "phantom_token": "The engine reports a sampled token that nobody asked for.",
    "reasoning_withheld": "The client asked for no reasoning; the engine gives no ids then.",
    "mixed_prompts": "Choices of one prompt came with different prompt ids, or a prompt without choices.",
    "other_prompt": "The engine gave other prompt ids than the request did.",
    "unparsed_event": "A part of the answer is not what this engine's answers are made of.",
    "no_message": "A choice has no message or text.",
    "unknown_finish_reason": "A finish reason is not one that engines are known to give.",
    "two_finish_reasons": "A choice has more than one finish reason.",
    "content_after_end": "Content came after a choice's finish reason, or after the end of the stream.",
    "changed_midstream": "The id, the model or the prompt ids changed within the stream.",
    "running_count": "A running count of the stream's tokens goes back, repeats, or does not fit the ids beside it.",
    "no_usage": "The answer lacks the token counts that this engine always gives.",
    "bad_usage": "A token count is not a whole number.",
    "too_many_tokens": "A choice has more sampled ids than max_tokens allows.",
    "other_model": "The answer names a model that the engine does not serve.",
    "ids_disagree": "The engine gave the sampled ids twice, and they differ.",
    "uncounted": "Nothing counts the sampled tokens of each choice, so one could be missing unseen.",
    "retokenized": "Its ids were made from text by a configured tokenizer: nobody sampled them.",
    "mask_count": "The sampling mask has another number of positions than there are sampled ids.",
    "version_spans": "The engine's spans of policy versions do not cover the sampled ids.",
}

_ORDER: Final = {code: place for place, code in enumerate(PROBLEMS)}

# What ends a choice: OpenAI's reasons, vLLM 0.32's (abort, error, repetition) and SGLang 0.5.23's native ones.
FINISH_REASONS: Final = frozenset(
    {"stop", "length", "tool_calls", "function_call", "content_filter", "abort", "error", "repetition"}
)

LOGPROB_CEILING: Final = 1e-6  # rounding lifts a logprob of 0 that much
LOGPROB_CLAMP: Final = -9999.0  # vLLM 0.32 writes this for lower and for missing ones


@dataclass(frozen=True, slots=True)
class Evidence:
    """What the checks look at.

    `usage` is the engine's own count. `asked` is how many choices were asked for, over all prompts, if known.
    `ended` says that the terminal event, or the whole body, came. `wants_logprobs`: unset where nobody asked for any, and
    none are missed. `max_tokens` bounds the sampled ids of a choice, unless its finish reason is one of `unbounded`.
    `counts_tokens`: unset where usage cannot be compared with ids. `special` are codes that somebody else found.
    """

    prompts: tuple[Ids, ...]
    choices: tuple[Choice, ...]
    usage: Mapping[str, Any] | None
    asked: int | None
    ended: bool
    status: Status
    wants_logprobs: bool = True
    max_tokens: int | None = None
    unbounded: Collection[str] = ()
    counts_tokens: bool = True
    special: Collection[str] = ()


def check(evidence: Evidence) -> tuple[str, ...]:
    """The codes of all problems, in the order of `PROBLEMS`; none: the step is exact.

    A step of status "error" has nothing to check and is just that. Raises `KeyError` for an unknown special
    code.
    """
    checks = {"engine_error": _always} if evidence.status == "error" else _CHECKS
    found = {code for code, holds in checks.items() if holds(evidence)}
    return tuple(sorted(found.union(evidence.special), key=_ORDER.__getitem__))


def describe(codes: Iterable[str]) -> list[str]:
    """A sentence for each code; a code of another version is said to be one."""
    return [PROBLEMS.get(code, f"{code}: a problem that this version does not know.") for code in codes]


def is_unlogged(step: Step) -> bool:
    """Whether it has no logprobs because nobody asked for any; those that an engine failed to give are a problem."""
    return step.sampled > 0 and not any(each.logprobs for each in step.choices) and "no_logprobs" not in step.problems


def _always(_evidence: Evidence) -> bool:
    return True


def _counted(evidence: Evidence, field: str) -> int | None:
    count = evidence.usage.get(field) if isinstance(evidence.usage, Mapping) else None
    return count if type(count) is int else None  # True is an int to isinstance


def _sampled(evidence: Evidence) -> int:
    return sum(len(choice.ids) for choice in evidence.choices)


def _no_token_ids(evidence: Evidence) -> bool:
    """No ids at all, where tokens were sampled, or nothing shows that none were."""
    if not evidence.ended or _sampled(evidence):
        return False
    counted = _counted(evidence, "completion_tokens")
    aborted = evidence.choices and all(choice.finish_reason == "abort" for choice in evidence.choices)
    return not aborted if counted is None else counted > 0


def _no_prompt_ids(evidence: Evidence) -> bool:
    prompts = len(evidence.prompts)
    astray = any(not 0 <= choice.prompt < prompts for choice in evidence.choices)
    return not prompts or astray or not all(evidence.prompts)


def _no_logprobs(evidence: Evidence) -> bool:
    if not evidence.wants_logprobs:
        return False
    if _no_token_ids(evidence):
        return not any(choice.logprobs for choice in evidence.choices)
    return any(choice.ids and not choice.logprobs for choice in evidence.choices)


def _logprob_count(evidence: Evidence) -> bool:
    return any(choice.logprobs and len(choice.logprobs) != len(choice.ids) for choice in evidence.choices)


def _completion_count(evidence: Evidence) -> bool:
    return evidence.counts_tokens and _counted(evidence, "completion_tokens") not in (None, _sampled(evidence))


def _prompt_count(evidence: Evidence) -> bool:
    return evidence.counts_tokens and _counted(evidence, "prompt_tokens") not in (None, sum(map(len, evidence.prompts)))


def _bad_token_id(evidence: Evidence) -> bool:
    # The sign is the top bit of every fourth byte: this way a long prompt takes microseconds.
    arrays = (*evidence.prompts, *(choice.ids for choice in evidence.choices))
    return not all(to_little_endian(ids)[3::4].isascii() for ids in arrays)


def _bad_logprob(evidence: Evidence) -> bool:
    return any(not _sound(choice.logprobs) for choice in evidence.choices)


def _sound(logprobs: Logprobs) -> bool:
    """Whether all are finite and at most the ceiling: one NaN or infinity among them makes the sum one."""
    return isfinite(sum(logprobs)) and max(logprobs, default=0.0) <= LOGPROB_CEILING


def _clamped_logprob(evidence: Evidence) -> bool:
    return any(
        # The minimum is cheap and settles it, unless it is NaN or -inf; those are bad, not clamped.
        not min(choice.logprobs, default=0.0) > LOGPROB_CLAMP
        and any(-inf < logprob <= LOGPROB_CLAMP for logprob in choice.logprobs)
        for choice in evidence.choices
    )


def _stream_cut(evidence: Evidence) -> bool:
    return not evidence.ended


def _choice_count(evidence: Evidence) -> bool:
    if evidence.asked is None or not evidence.ended:
        return False
    # Compared by number first: what a client asks for may be any number.
    indexes = {choice.index for choice in evidence.choices}
    return len(evidence.choices) != evidence.asked or indexes != set(range(evidence.asked))


def _no_finish_reason(evidence: Evidence) -> bool:
    return evidence.ended and any(choice.finish_reason is None for choice in evidence.choices)


def _empty_completion(evidence: Evidence) -> bool:
    """One choice without ids beside others with, unless the engine's count shows that nothing is missing."""
    if not evidence.ended or not _sampled(evidence):
        return False
    empty = any(not choice.ids and choice.finish_reason != "abort" for choice in evidence.choices)
    return empty and _counted(evidence, "completion_tokens") != _sampled(evidence)


def _too_many_tokens(evidence: Evidence) -> bool:
    most = evidence.max_tokens
    bounded = (choice for choice in evidence.choices if choice.finish_reason not in evidence.unbounded)
    return most is not None and any(len(choice.ids) > most for choice in bounded)


def _aborted(evidence: Evidence) -> bool:
    return any(choice.finish_reason == "abort" for choice in evidence.choices)


def _engine_error(evidence: Evidence) -> bool:
    return any(choice.finish_reason == "error" for choice in evidence.choices)


_CHECKS: Final[dict[str, Callable[[Evidence], bool]]] = {
    "no_token_ids": _no_token_ids,
    "no_prompt_ids": _no_prompt_ids,
    "no_logprobs": _no_logprobs,
    "logprob_count": _logprob_count,
    "completion_count": _completion_count,
    "prompt_count": _prompt_count,
    "bad_token_id": _bad_token_id,
    "bad_logprob": _bad_logprob,
    "clamped_logprob": _clamped_logprob,
    "stream_cut": _stream_cut,
    "choice_count": _choice_count,
    "no_finish_reason": _no_finish_reason,
    "empty_completion": _empty_completion,
    "too_many_tokens": _too_many_tokens,
    "aborted": _aborted,
    "engine_error": _engine_error,
}
