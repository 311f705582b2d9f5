"""The step: one recorded call, as frozen values; and its fidelity: the checks and problems that decide if it is exact.

Ids are `array('i')` (int32); logprobs are `array('f')` where float32 is lossless, else `array('d')`. JSON of clients
and engines is unchanged from parsing.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import Any, Final, Literal, NamedTuple

from proxy.trajectory.arrays import Experts, Ids, Logprobs, Mask, Prompt, has_negative

Status = Literal["complete", "partial", "error"]
Dialect = Literal["chat", "completions", "generate", "sglang_generate", "messages", "responses", "gemini"]
DEFAULT_POLICY: Final = "default"
EXPERTS_START: Final = "routed_experts_start"  # in `extra`: the first position for which experts were requested
RESUMED: Final = "resumed"  # in `extra`: how many times the call was resumed
INHERITED: Final = "inherited"  # in `extra`: the step that was sampled, of one that a playback answered from its tape
BRANCHED_FROM: Final = "branched_from"  # in `extra`: the step whose call a live step of a playback repeats
ANNOUNCED: Final = "announced_version"  # in `extra`: of the policy, if the engine reported an older one
CACHED_TOKENS: Final = "cached_tokens"  # in `extra`: the engine's count, if its usage has none
PROCESSED: Final = ("processed_logprobs", "processed_logits")  # modes after truncation, so logprobs are renormalized
# The parameters that truncate sampling, and their values without effect.
_TRUNCATES: Final = {"top_p": (None, 1), "top_k": (None, 0, -1), "min_p": (None, 0)}
_LARGEST: Final = 2**31  # of a sampling setting; a NaN is not below it
_OTHERS: Final = frozenset[Dialect]({"completions", "generate", "sglang_generate"})  # others are translated to chat


@dataclass(frozen=True, slots=True)
class Span:
    """A half-open range of one choice's sampled ids, and the policy version that sampled it."""

    start: int
    end: int
    policy_version: str | None = None
    epoch: int = 0  # the policy's, when the call was sent; versions of different epochs cannot be compared

    def as_dict(self) -> dict[str, Any]:
        """Return the span as JSON has it: the first epoch is not written."""
        shown = {"start": self.start, "end": self.end, "policy_version": self.policy_version}
        return {**shown, "epoch": self.epoch} if self.epoch else shown


@dataclass(frozen=True, slots=True)
class Choice:
    """The sampled tokens of one choice."""

    index: int
    ids: Ids
    logprobs: (
        Logprobs  # one for each id in an exact step; in a flagged one, lengths may differ, and a missing one is NaN
    )
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt: int = 0  # the index into the step's `prompts`
    spans: tuple[Span, ...] = ()
    routed_experts: Experts | None = None
    sampling_mask: Mask | None = None


@dataclass(frozen=True, slots=True)
class Timing:
    """Unix seconds. `received` is from the wall clock; the others are `received` plus a monotonic duration."""

    received: float
    sent: float | None = None
    first_byte: float | None = None
    last_byte: float | None = None
    stored: float | None = None


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """The engine of a call: `name` of the endpoint, `kind` ("vllm", …), `version` if known, `url` without secrets."""

    name: str
    kind: str
    version: str | None
    url: str


class Sampled(NamedTuple):
    """The step that was sampled, of one that a playback answered from its tape."""

    rollout_id: str
    step_id: str


@dataclass(frozen=True, slots=True)
class Step:
    """One recorded call."""

    step_id: str
    rollout_id: str
    dialect: Dialect
    endpoint: str
    engine: EngineFacts
    model_asked: str | None
    model_served: str | None
    request: Mapping[str, Any]  # the client's body, unchanged
    sent: Mapping[str, Any]  # `{"set": {field: value}, "unset": [field]}`: the proxy's changes of its top-level fields
    # The engine's response, accumulated, without what was injected (for a status "error", `{"status": int, "body": str}`).
    # Dialects that are translated to chat have chat's response, from which their own is rendered.
    response: Mapping[str, Any] | None
    # The ids of each prompt (several only of a completions call): arrays, or `SharedIds` in a step read from the store. Empty
    # if the engine returned no ids.
    prompts: tuple[Prompt, ...]
    choices: tuple[Choice, ...]
    usage: Mapping[str, Any] | None
    sampling: Mapping[str, Any]
    timing: Timing
    status: Status
    reason: str | None = None
    delivered: bool = True  # the client received the whole response, so a partial step never is
    policy: str = DEFAULT_POLICY  # of the model, when the step was recorded
    policy_version: str | None = None
    policy_version_end: str | None = None
    problems: tuple[str, ...] = ()  # codes of `PROBLEMS`; a step without any is exact
    index: int | None = None
    late: bool = False  # it was stored after its rollout finished
    extra: Mapping[str, Any] = field(default_factory=dict)
    thread: str | None = None  # the name of its thread if it was determined (`threads`); it is not stored

    @property
    def policy_epoch(self) -> int:
        """The epoch of the policy when the call was sent; 0 for a step without sampled ids."""
        return next((span.epoch for choice in self.choices for span in choice.spans), 0)

    @property
    def is_chat(self) -> bool:
        """Whether the engine received a chat completions request: `response` and `body` then have messages."""
        return self.dialect not in _OTHERS

    @property
    def body(self) -> dict[str, Any]:
        """The body that was sent to the engine: the request with the proxy's changes."""
        unset = self.sent.get("unset")
        kept = {key: value for key, value in self.request.items() if key not in unset} if unset else self.request
        return {**kept, **(self.sent.get("set") or {})}

    @property
    def exact(self) -> bool:
        """Whether `check_fidelity` found no problem."""
        return not self.problems

    @property
    def constrained(self) -> bool | None:
        """Whether sampling was restricted (a grammar, a forced tool call), so that a forward pass gives other logprobs.

        None if that was not recorded. See `Engine.constrains`.
        """
        constrained = self.sampling.get("constrained")
        return constrained if isinstance(constrained, bool) else None

    @property
    def resumed(self) -> int:
        """How many times the call was interrupted and resumed from what was sampled until then."""
        count = self.extra.get(RESUMED, 0)
        return count if type(count) is int and count > 0 else 0

    @property
    def inherited(self) -> Sampled | None:
        """The step that was sampled, if this one was answered from it; None for a live step."""
        of = self.extra.get(INHERITED)
        if not isinstance(of, dict):
            return None
        rollout_id, step_id = of.get("rollout_id"), of.get("step_id")
        return Sampled(rollout_id, step_id) if isinstance(rollout_id, str) and isinstance(step_id, str) else None

    def logprobs_over(self, choice: Choice) -> Literal["mask", "truncated"] | None:
        """Return what the logprobs of truncated sampling (top-k, top-p, min-p) are over, if it changes them; None: all tokens.

        `mask`: over the tokens of the choice's sampling mask; `truncated`: over tokens that the engine did not report.
        """
        if self.sampling.get("logprobs_mode") not in PROCESSED:
            return None
        if choice.sampling_mask is not None:
            return "mask"
        return "truncated" if truncation_of(self.sampling) else None

    @property
    def truncation(self) -> dict[str, Any]:
        """Return those of top_p, top_k and min_p that truncated the sampling. Values that are no numbers have no effect."""
        return {
            name: value
            for name, value in truncation_of(self.sampling).items()
            if (type(value) is int or (type(value) is float and name != "top_k")) and abs(value) < _LARGEST
        }

    @property
    def experts_start(self) -> int:
        """The position in the ids of a choice of the first token that has experts."""
        own = self.request.get("routed_experts_start_len") or self.request.get("routed_experts_prompt_start") or 0
        start = self.extra.get(EXPERTS_START, own)
        return start if type(start) is int and start >= 0 else 0

    @property
    def trainable(self) -> bool:
        """Whether its sampled tokens are exported for training by default."""
        return self.exact and self.delivered and not self.late and self.status == "complete"

    @property
    def sampled(self) -> int:
        """The number of sampled tokens, over all choices."""
        return sum([len(choice.ids) for choice in self.choices])

    @property
    def cached_tokens(self) -> int | None:
        """The number of prompt tokens that the engine read from its prefix cache; None if it did not report it."""
        details = self.usage.get("prompt_tokens_details") if isinstance(self.usage, Mapping) else None
        counted = details.get("cached_tokens") if isinstance(details, dict) else None
        count = self.extra.get(CACHED_TOKENS) if counted is None else counted
        return count if type(count) is int and 0 <= count <= sum(map(len, self.prompts)) else None


def truncation_of(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Return those parameters of truncated sampling (top-k, top-p, min-p) that take effect."""
    return {name: sampling[name] for name, off in _TRUNCATES.items() if sampling.get(name) not in off}


def answers_of(step: Step) -> dict[int, dict[str, Any]]:
    """Return the choices of a step's response by index: the first of each index; a choice without an index is choice 0."""
    given = (step.response or {}).get("choices")
    found: dict[int, dict[str, Any]] = {}
    for answer in given if isinstance(given, list) else ():
        if isinstance(answer, dict) and type(index := answer.get("index", 0)) is int:
            found.setdefault(index, answer)
    return found


def messages_of(step: Step) -> list[Any]:
    """Return the messages that were sent; none if they are not a list."""
    return sent_messages(step.request, step.sent)


def sent_messages(request: Mapping[str, Any], sent: Mapping[str, Any]) -> list[Any]:
    """Return the messages of a request with the changes in `sent`; none if they are not a list."""
    changed = sent.get("set") or {}
    unset = sent.get("unset") or ()
    place = changed if "messages" in changed or "messages" in unset else request
    messages = place.get("messages")
    return messages if isinstance(messages, list) else []


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


def check_fidelity(evidence: Evidence) -> tuple[str, ...]:
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


def describe_problems(codes: Iterable[str]) -> list[str]:
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
