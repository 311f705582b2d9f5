"""The step: one recorded call, whole.

Holds the frozen values that a step is made of, and nothing that makes, checks, stores or joins them: `fidelity`
checks, `record` encodes, `tree` joins. Ids are `array('i')` (int32), logprobs `array('f')` where float32 carries
them without loss, else `array('d')`; JSON of other people stays as it was parsed.
"""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from proxy.trajectory.shared_ids import SharedIds

Status = Literal["complete", "partial", "error"]
Dialect = Literal["chat", "completions", "generate", "messages", "responses"]
_BY_WAY_OF_CHAT = ("chat", "messages", "responses")

Ids: TypeAlias = "array[int]"  # array itself takes no index before Python 3.12
Prompt: TypeAlias = "Ids | SharedIds"
Logprobs: TypeAlias = "array[float]"


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of one choice's sampled ids, half open, and the version of the weights that sampled it."""

    start: int
    end: int
    policy_version: str | None = None


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts that a mixture routed tokens to, as the engine gave them; `packing` makes and reads it.

    `form` says what `raw` is: a .npy file (vLLM: tokens - 1, layers, experts per token), int32 without a shape
    (SGLang), or, where the engine gave something else, that as JSON.
    """

    form: Literal["npy", "int32", "json"]
    raw: bytes


@dataclass(frozen=True, slots=True)
class Mask:
    """The ids that sampling was left with at each position: those of position i are `ids[offsets[i]:offsets[i + 1]]`."""

    ids: Ids
    offsets: Ids


@dataclass(frozen=True, slots=True)
class Choice:
    """What was sampled for one choice.

    `prompt` is the index into the step's `prompts`. `logprobs` has one entry per id in an exact step; in a flagged one
    the lengths may differ, and a missing entry is NaN. `routed_experts` and `sampling_mask` are None where the engine
    gave none.
    """

    index: int
    ids: Ids
    logprobs: Logprobs
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt: int = 0
    spans: tuple[Span, ...] = ()
    routed_experts: Experts | None = None
    sampling_mask: Mask | None = None


@dataclass(frozen=True, slots=True)
class Timing:
    """Unix seconds. `received` is read off the wall clock; the others are it plus a monotonic duration."""

    received: float
    sent: float | None = None
    first_byte: float | None = None
    last_byte: float | None = None
    stored: float | None = None


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """The engine that answered: `name` of the endpoint, `kind` ("vllm", …), `version` if known, `url` without secrets."""

    name: str
    kind: str
    version: str | None
    url: str


@dataclass(frozen=True, slots=True)
class Step:
    """One recorded call.

    `request` is the client's body as it came; `sent` is `{"set": {field: value}, "unset": [field]}`, what the proxy
    changed of it on its top level; `response` is what the engine answered, folded, without what was injected (for a
    status "error", `{"status": int, "body": str}`). Dialects by way of chat have chat's response, and what their clients
    saw of it is told from that. `prompts` holds the ids of one prompt, or of each prompt of a
    completions call with a list of prompts: an array, or `SharedIds` in a step read from the store. It is empty when the
    engine gave no ids. `delivered`: the client got the whole answer, so a partial step never is. `problems` are codes of
    `fidelity.PROBLEMS`; a step without any is exact. `late`: it was stored after its rollout was finished.
    """

    step_id: str
    rollout_id: str
    dialect: Dialect
    endpoint: str
    engine: EngineFacts
    model_asked: str | None
    model_served: str | None
    request: Mapping[str, Any]
    sent: Mapping[str, Any]
    response: Mapping[str, Any] | None
    prompts: tuple[Prompt, ...]
    choices: tuple[Choice, ...]
    usage: Mapping[str, Any] | None
    sampling: Mapping[str, Any]
    timing: Timing
    status: Status
    reason: str | None = None
    delivered: bool = True
    policy_version: str | None = None
    policy_version_end: str | None = None
    problems: tuple[str, ...] = ()
    index: int | None = None
    late: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_chat(self) -> bool:
        """Whether the engine was asked for a chat: its response has messages, and so has `body`."""
        return self.dialect in _BY_WAY_OF_CHAT

    @property
    def body(self) -> dict[str, Any]:
        """The body as it was sent: the request with what was changed of it."""
        unset = set(self.sent.get("unset") or ())
        return {
            **{key: value for key, value in self.request.items() if key not in unset},
            **(self.sent.get("set") or {}),
        }

    @property
    def exact(self) -> bool:
        """Whether every check of `fidelity` passed."""
        return not self.problems

    @property
    def constrained(self) -> bool | None:
        """Whether its logprobs are of fewer tokens or other odds than the model's own: a forward pass does not give them.

        So they are under a grammar (`Engine.constrains`). None where that was not recorded.
        """
        said = self.sampling.get("constrained")
        return said if isinstance(said, bool) else None

    @property
    def trainable(self) -> bool:
        """Whether its sampled tokens may be trained without anybody asking for flagged ones."""
        return self.exact and self.delivered and not self.late and self.status == "complete"

    @property
    def sampled(self) -> int:
        """How many tokens were sampled, over all choices."""
        return sum(len(choice.ids) for choice in self.choices)


def answers_of(step: Step) -> dict[int, dict[str, Any]]:
    """Return the choices of a step's response by index; the first of each index, and one without an index is choice 0."""
    given = (step.response or {}).get("choices")
    found: dict[int, dict[str, Any]] = {}
    for answer in given if isinstance(given, list) else ():
        if isinstance(answer, dict) and type(index := answer.get("index", 0)) is int:
            found.setdefault(index, answer)
    return found


def messages_of(step: Step) -> list[Any]:
    """Return the messages that were sent; none if they are not a list."""
    messages = step.body.get("messages")
    return messages if isinstance(messages, list) else []
