"""The step: one recorded call, as frozen values.

Ids are `array('i')` (int32); logprobs are `array('f')` where float32 is lossless, else `array('d')`. JSON of clients
and engines is unchanged from parsing.
"""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from proxy.trajectory.shared_ids import SharedIds

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
_TRUNCATES: Final[dict[str, tuple[float, ...]]] = {"top_p": (1,), "top_k": (0, -1), "min_p": (0,)}  # and without effect
_LARGEST: Final = 2**31  # of a sampling setting; a NaN is not below it
_OTHERS: Final = frozenset[Dialect]({"completions", "generate", "sglang_generate"})  # others are translated to chat

Ids: TypeAlias = "array[int]"  # array itself takes no index before Python 3.12
Prompt: TypeAlias = "Ids | SharedIds"
Logprobs: TypeAlias = "array[float]"


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
class Experts:
    """The experts to which a mixture-of-experts model routed tokens, unchanged from the engine."""

    # A .npy file (vLLM: tokens - 1, layers, experts per token), int32 without a shape (SGLang), or anything else as JSON.
    form: Literal["npy", "int32", "json"]
    raw: bytes


@dataclass(frozen=True, slots=True)
class Mask:
    """The ids that sampling could choose from: `ids[offsets[i]:offsets[i + 1]]` at position i."""

    ids: Ids
    offsets: Ids


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
    problems: tuple[str, ...] = ()  # codes of `fidelity.PROBLEMS`; a step without any is exact
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
        """Whether every check of `fidelity` passed."""
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
        if not isinstance(of, Mapping):
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
    return {name: sampling[name] for name, off in _TRUNCATES.items() if sampling.get(name) not in (None, *off)}


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
