"""Fidelity: the problems that keep a step from being exact, with the checks that find them and a sentence for each."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any, Final

from proxy.trajectory.arrays import to_little_endian
from proxy.trajectory.step import Choice, Ids, Logprobs, Status, Step

PROBLEMS: Final[dict[str, str]] = {
    "no_token_ids": "The engine returned no ids of the sampled tokens.",
    "no_prompt_ids": "The engine returned no ids of the prompt.",
    "no_logprobs": "The engine returned no logprobs of the sampled tokens.",
    "logprob_count": "A choice has a different number of logprobs and sampled ids.",
    "completion_count": "The engine's count of sampled tokens differs from the number of ids.",
    "prompt_count": "The engine's count of prompt tokens differs from the number of ids.",
    "bad_token_id": "A token id is negative.",
    "bad_logprob": "A logprob is missing, not a finite number, or above zero.",
    "clamped_logprob": "A logprob is the engine's placeholder for a missing or very low one (-9999).",
    "stream_cut": "The response ended early.",
    "choice_count": "The response has a different number of choices than requested.",
    "no_finish_reason": "The response ended without a finish reason for a choice.",
    "empty_completion": "A choice has no ids, but the engine's count does not confirm that no token was sampled.",
    "aborted": "The engine aborted the call.",
    "engine_error": "The engine returned an error.",
    "echo": "The client requested `echo`, with which the engine's ids are unreliable.",
    "beam_search": "The tokens come from beam search and were not sampled.",
    "forced_tokens": "The tokens were forced by the request and not sampled.",
    "phantom_token": "The engine returned a sampled token that was not requested.",
    "reasoning_withheld": "The client disabled reasoning in the response, and the engine then returns no ids.",
    "mixed_prompts": "Choices of one prompt have different prompt ids, or a prompt has no choices.",
    "other_prompt": "The engine's prompt ids differ from those of the request.",
    "unparsed_event": "A part of the response is unknown for this engine.",
    "no_message": "A choice has no message or text.",
    "unknown_finish_reason": "A finish reason is unknown.",
    "two_finish_reasons": "A choice has more than one finish reason.",
    "content_after_end": "Content followed a choice's finish reason or the end of the stream.",
    "changed_midstream": "The id, the model or the prompt ids changed within the stream.",
    "running_count": "A running token count in the stream decreases, repeats, or does not match the ids.",
    "no_usage": "The response has no token counts, which this engine always returns.",
    "bad_usage": "A token count is not an integer.",
    "too_many_tokens": "A choice has more sampled ids than max_tokens allows.",
    "other_model": "The response names a model that the engine does not serve.",
    "ids_disagree": "The engine returned the sampled ids twice, and they differ.",
    "uncounted": "There is no count of the sampled tokens of each choice, so a missing token would not be noticed.",
    "retokenized": "The ids were tokenized from text with a configured tokenizer and not sampled.",
    "mask_count": "The sampling mask and the sampled ids differ in length.",
    "version_spans": "The engine's spans of policy versions do not cover the sampled ids.",
}

_ORDER: Final = {code: position for position, code in enumerate(PROBLEMS)}

# Finish reasons: OpenAI's, vLLM 0.32's (abort, error, repetition) and SGLang 0.5.23's native ones.
FINISH_REASONS: Final = frozenset(
    {"stop", "length", "tool_calls", "function_call", "content_filter", "abort", "error", "repetition"}
)

LOGPROB_CEILING: Final = 1e-6  # rounding can raise a logprob of 0 by this much
LOGPROB_CLAMP: Final = -9999.0  # vLLM 0.32 returns it instead of lower and missing ones


@dataclass(frozen=True, slots=True)
class Evidence:
    """The input of the checks.

    `usage`: the engine's token counts. `asked`: the number of requested choices over all prompts, if known. `ended`:
    the terminal event, or the whole body, arrived. `wants_logprobs`: false if none were requested, so that none are
    missed. `max_tokens`: the maximum of sampled ids of a choice, unless its finish reason is one of `unbounded`.
    `counts_tokens`: false if usage cannot be compared with ids. `special`: codes that were found elsewhere.
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
    """Return the codes of all problems, in the order of `PROBLEMS`; a step without any is exact.

    A step of status "error" has nothing to check, and its only problem is that error.

    Raises:
        KeyError: A special code is unknown.
    """
    checks = {"engine_error": _always} if evidence.status == "error" else _CHECKS
    found = {code for code, holds in checks.items() if holds(evidence)}
    return tuple(sorted(found.union(evidence.special), key=_ORDER.__getitem__))


def describe(codes: Iterable[str]) -> list[str]:
    """Return a sentence for each code. Codes of other versions are described as unknown."""
    return [PROBLEMS.get(code, f"{code}: unknown problem.") for code in codes]


def is_unlogged(step: Step) -> bool:
    """Return whether a step has no logprobs because none were requested.

    If the engine omitted requested ones, that is a problem.
    """
    for choice in step.choices:
        if choice.logprobs:
            return False
    return step.sampled > 0 and "no_logprobs" not in step.problems


def _always(_evidence: Evidence) -> bool:
    return True


def _counted(evidence: Evidence, field: str) -> int | None:
    count = evidence.usage.get(field) if isinstance(evidence.usage, Mapping) else None
    return count if type(count) is int else None  # isinstance accepts True


def _sampled(evidence: Evidence) -> int:
    return sum(len(choice.ids) for choice in evidence.choices)


def _no_token_ids(evidence: Evidence) -> bool:
    """Return whether there are no ids although tokens were sampled, or nothing proves that none were."""
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
    # The sign is the top bit of every fourth byte. Testing these takes microseconds for a long prompt.
    arrays = (*evidence.prompts, *(choice.ids for choice in evidence.choices))
    return not all(to_little_endian(ids)[3::4].isascii() for ids in arrays)


def _bad_logprob(evidence: Evidence) -> bool:
    return any(not _sound(choice.logprobs) for choice in evidence.choices)


def _sound(logprobs: Logprobs) -> bool:
    """Return whether all are finite and at most the ceiling. One NaN or infinity makes the sum non-finite."""
    return isfinite(sum(logprobs)) and max(logprobs, default=0.0) <= LOGPROB_CEILING


def _clamped_logprob(evidence: Evidence) -> bool:
    return any(
        # The minimum is cheap and sufficient, unless it is NaN or -inf, which are bad, not clamped.
        not min(choice.logprobs, default=0.0) > LOGPROB_CLAMP
        and any(-inf < logprob <= LOGPROB_CLAMP for logprob in choice.logprobs)
        for choice in evidence.choices
    )


def _stream_cut(evidence: Evidence) -> bool:
    return not evidence.ended


def _choice_count(evidence: Evidence) -> bool:
    if evidence.asked is None or not evidence.ended:
        return False
    # Compare the lengths first: a client can request any number.
    indexes = {choice.index for choice in evidence.choices}
    return len(evidence.choices) != evidence.asked or indexes != set(range(evidence.asked))


def _no_finish_reason(evidence: Evidence) -> bool:
    return evidence.ended and any(choice.finish_reason is None for choice in evidence.choices)


def _empty_completion(evidence: Evidence) -> bool:
    """Return whether one choice has no ids while others have, unless the engine's count proves that nothing is missing."""
    if not evidence.ended or not _sampled(evidence):
        return False
    empty = any(not choice.ids and choice.finish_reason != "abort" for choice in evidence.choices)
    return empty and _counted(evidence, "completion_tokens") != _sampled(evidence)


def _too_many_tokens(evidence: Evidence) -> bool:
    limit = evidence.max_tokens
    bounded = (choice for choice in evidence.choices if choice.finish_reason not in evidence.unbounded)
    return limit is not None and any(len(choice.ids) > limit for choice in bounded)


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
