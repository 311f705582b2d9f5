"""Fidelity: the problems that keep a step from being exact, with the checks that find them and a sentence for each."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any, Final

from proxy.trajectory.arrays import has_negative
from proxy.trajectory.step import Choice, Ids, Logprobs, Status, Step

PROBLEMS: Final[dict[str, str]] = {
    "no_token_ids": "The engine returned no ids of the sampled tokens.",
    "no_prompt_ids": "The engine returned no ids of the prompt.",
    "no_logprobs": "The engine returned no logprobs of the sampled tokens.",
    "logprob_count": "A choice has a different number of logprobs and sampled ids.",
    "completion_count": "The engine's count of sampled tokens differs from the number of ids.",
    "prompt_count": "The engine's count of prompt tokens differs from the number of ids.",
    "image_count": "The prompt has a different number of image placeholders than the call has images.",
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
    "changed_midstream": "The id, the model, the prompt ids or the token counts changed within the stream.",
    "running_count": "A running token count in the stream decreases, repeats, or does not match the ids.",
    "no_usage": "The response has no token counts, which this engine always returns.",
    "bad_usage": "A token count is missing, is not an integer, or is negative.",
    "usage_sum": "The engine's total of tokens is not the sum of its counts of prompt and sampled tokens.",
    "too_many_tokens": "A choice has more sampled ids than max_tokens allows.",
    "other_model": "The response names a model that the engine does not serve.",
    "ids_disagree": "The engine returned the sampled ids twice, and they differ.",
    "uncounted": "There is no count of the sampled tokens of each choice, so a missing token would not be noticed.",
    "retokenized": "The ids were tokenized from text with a configured tokenizer and not sampled.",
    "mask_count": "The sampling mask and the sampled ids differ in length.",
    "bad_mask": "A sampling mask is no list of token ids, or does not contain the token that was sampled.",
    "bad_experts": "The routed experts are not those of each token of a choice.",
    "version_spans": "The engine's spans of policy versions do not cover the sampled ids.",
}

_ORDER: Final = {code: position for position, code in enumerate(PROBLEMS)}

# Finish reasons: OpenAI's, vLLM 0.32's (abort, error, repetition) and SGLang 0.5.23's native ones.
FINISH_REASONS: Final = frozenset(
    {"stop", "length", "tool_calls", "function_call", "content_filter", "abort", "error", "repetition"}
)

# The problems of a response that ended early, all of whose ids are right. Joined to the rest, it has none of them.
CUT: Final = frozenset({"aborted", "stream_cut", "no_finish_reason", "no_usage"})
_BAD_ENDS: Final = {"abort": "aborted", "error": "engine_error"}  # the problem of a finish reason

LOGPROB_CEILING: Final = 1e-6  # rounding can raise a logprob of 0 by this much
LOGPROB_CLAMP: Final = -9999.0  # vLLM 0.32 returns it instead of lower and missing ones


@dataclass(frozen=True, slots=True)
class Evidence:
    """The input of the checks."""

    prompts: tuple[Ids, ...]
    choices: tuple[Choice, ...]
    usage: Mapping[str, Any] | None  # the engine's token counts
    asked: int | None  # the number of requested choices over all prompts, if known
    ended: bool  # the terminal event, or the whole body, arrived
    status: Status
    wants_logprobs: bool = True  # false if none were requested, so that none are missed
    max_tokens: int | None = None  # the maximum of sampled ids of a choice
    counts_tokens: bool = True  # false if usage cannot be compared with ids
    special: Collection[str] = ()  # codes that were found elsewhere


def check(evidence: Evidence) -> tuple[str, ...]:
    """Return the codes of all problems, in the order of `PROBLEMS`; a step without any is exact.

    A step of status "error" has nothing to check, and its only problem is that error. Raises KeyError if a special code is
    unknown.
    """
    if _is_usual(evidence):
        return ()
    found = set(evidence.special)
    if evidence.status == "error":
        found.add("engine_error")
    else:
        _check_prompts(evidence, found)
        for choice in evidence.choices:
            _check_choice(choice, evidence, found)
        _check_counts(evidence, found)
        _check_end(evidence, found)
    return tuple(sorted(found, key=_ORDER.__getitem__)) if found else ()


def _is_usual(evidence: Evidence) -> bool:
    """Return whether this is one whole response, with one choice and plain counts, in which the checks would find nothing."""
    prompts, choices, usage = evidence.prompts, evidence.choices, evidence.usage
    if len(prompts) != 1 or len(choices) != 1 or type(usage) is not dict or evidence.special:
        return False
    prompt, choice = prompts[0], choices[0]
    count, logprobs, limit = len(choice.ids), choice.logprobs, evidence.max_tokens
    if logprobs:  # NaN and infinity make the sum non-finite, or exceed the ceiling
        are_sound = len(logprobs) == count and max(logprobs) <= LOGPROB_CEILING and sum(logprobs) > LOGPROB_CLAMP / 2
    else:
        are_sound = not evidence.wants_logprobs
    return (
        are_sound
        and evidence.ended
        and evidence.status != "error"
        and choice.finish_reason is not None
        and choice.finish_reason not in _BAD_ENDS
        and choice.prompt == 0
        and (evidence.asked is None or (evidence.asked == 1 and choice.index == 0))
        and (limit is None or count <= limit)
        and 0 < count == usage.get("completion_tokens")
        and 0 < len(prompt) == usage.get("prompt_tokens")
        and not has_negative(choice.ids)
        and not has_negative(prompt)
    )


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


def _check_prompts(evidence: Evidence, found: set[str]) -> None:
    if not evidence.prompts:
        found.add("no_prompt_ids")
    for prompt in evidence.prompts:
        if not prompt:
            found.add("no_prompt_ids")
        elif has_negative(prompt):
            found.add("bad_token_id")


def _check_choice(choice: Choice, evidence: Evidence, found: set[str]) -> None:
    count, reason = len(choice.ids), choice.finish_reason
    if not 0 <= choice.prompt < len(evidence.prompts):
        found.add("no_prompt_ids")
    if count and has_negative(choice.ids):
        found.add("bad_token_id")
    if choice.logprobs:
        if len(choice.logprobs) != count:
            found.add("logprob_count")
        _check_logprobs(choice.logprobs, found)
    elif count and evidence.wants_logprobs:
        found.add("no_logprobs")
    if evidence.max_tokens is not None and count > evidence.max_tokens:
        found.add("too_many_tokens")
    if reason is None and evidence.ended:
        found.add("no_finish_reason")
    elif reason in _BAD_ENDS:
        found.add(_BAD_ENDS[reason])


def _check_logprobs(logprobs: Logprobs, found: set[str]) -> None:
    total = sum(logprobs)  # one NaN or infinity makes it non-finite
    if not isfinite(total) or max(logprobs) > LOGPROB_CEILING:
        found.add("bad_logprob")
    elif total > LOGPROB_CLAMP / 2:
        return  # none is the placeholder: the others, at most the ceiling, could not raise the sum to this
    # The minimum is cheap and sufficient, unless it is NaN or -inf, which are bad, not clamped.
    if not min(logprobs) > LOGPROB_CLAMP and any(-inf < logprob <= LOGPROB_CLAMP for logprob in logprobs):
        found.add("clamped_logprob")


def _check_counts(evidence: Evidence, found: set[str]) -> None:
    sampled = sum([len(choice.ids) for choice in evidence.choices])
    counted = _counted(evidence, "completion_tokens")
    if evidence.counts_tokens:
        if counted is not None and counted != sampled:
            found.add("completion_count")
        prompt = _counted(evidence, "prompt_tokens")
        if prompt is not None and prompt != sum(map(len, evidence.prompts)):
            found.add("prompt_count")
    if not evidence.ended:
        return
    if not sampled:
        # Tokens were sampled, or nothing proves that none were.
        if counted > 0 if counted is not None else not _all_aborted(evidence):
            found.add("no_token_ids")
            if evidence.wants_logprobs and not any(choice.logprobs for choice in evidence.choices):
                found.add("no_logprobs")
    elif counted != sampled and any(not choice.ids and choice.finish_reason != "abort" for choice in evidence.choices):
        found.add("empty_completion")


def _check_end(evidence: Evidence, found: set[str]) -> None:
    if not evidence.ended:
        found.add("stream_cut")
    elif evidence.asked is not None and (
        # Compare the lengths first: a client can request any number.
        len(evidence.choices) != evidence.asked
        or sorted([choice.index for choice in evidence.choices]) != list(range(evidence.asked))
    ):
        found.add("choice_count")


def _counted(evidence: Evidence, field: str) -> int | None:
    count = evidence.usage.get(field) if isinstance(evidence.usage, Mapping) else None
    return count if type(count) is int else None  # isinstance accepts True


def _all_aborted(evidence: Evidence) -> bool:
    choices = evidence.choices
    return bool(choices) and all(choice.finish_reason == "abort" for choice in choices)
