"""The values of exact continuation: requests to the engine, results, and the reasons for refusals."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final, Literal, TypeAlias

from proxy.trajectory.arrays import Ids, to_little_endian

Mode = Literal["off", "faithful", "append"]
Message: TypeAlias = Mapping[str, Any]

Reason = Literal[
    "edited", "ambiguous", "options", "model", "content", "prefill", "no_user", "flagged", "own_ids", "echo", "unsupported",
    "history", "reasoning_stripped", "content_stripped", "tool_calls_stripped", "close", "stop_string", "other_stop", "empty",
    "hidden_output", "twin", "window", "tokenize", "timeout", "returned_ids", "refused_ids", "unverified",
    "store", "internal",
]  # fmt: skip

REASONS: Final[dict[Reason, str]] = {
    "edited": "The messages continue no earlier step: the agent changed a message or its reasoning.",
    "ambiguous": "Several earlier replies are equal to the one that the agent sends back, and their token ids differ.",
    "options": "The tools, the chat template or another field that changes the prompt differ from the earlier step, or "
    "the call truncates its prompt.",
    "model": "The earlier step was sampled by another model, another policy or another kind of engine.",
    "content": "A message has content that is not text.",
    "prefill": "The call continues the last message, or disables the generation prompt.",
    "no_user": "The conversation has no user message.",
    "flagged": "The earlier step is flagged, partial or aborted.",
    "own_ids": "The client sends prompt ids itself.",
    "echo": "The client requests the prompt in the response.",
    "unsupported": "The engine accepts no prompt ids, or cannot render messages.",
    "history": "The template renders earlier turns differently, such as without their reasoning.",
    "reasoning_stripped": "The template drops the reasoning of the earlier turn.",
    "content_stripped": "The template drops content of the earlier turn.",
    "tool_calls_stripped": "The template drops tool calls of the earlier turn.",
    "close": "The place at which the earlier turn ends was not found in the template's rendering of this call: max_tokens cut "
    "the turn within a tool call or a thought, or a message repeats the reply. (Text completions: the prompt does not begin "
    "with the sampled text.)",
    "stop_string": "The earlier turn ended with a stop string, which was sampled and is not in its message.",
    "other_stop": "The template ends a turn with another stop token than the one that was sampled.",
    "empty": "The earlier step sampled no token.",
    "hidden_output": "The message of the earlier step does not contain all of its sampled text.",
    "twin": "The template cannot render the variants of the conversation that locate the end of the turn.",
    "window": "The continued prompt does not fit into the context window.",
    "tokenize": "The engine could not render or detokenize.",
    "store": "The earlier steps could not be read from the store.",
    "internal": "TokenTape failed; its log has the error.",
    "timeout": "The engine did not render within continuation.timeout_s, or three times in a row within the last minute.",
    "returned_ids": "The endpoint returned other prompt ids than were sent, to this rollout or to several others.",
    "refused_ids": "The endpoint rejected prompt ids, of this rollout or of several others.",
    "unverified": "No rendering of this endpoint has matched the prompt ids of a step yet.",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Render:
    """Render messages with the call's tools and template arguments and a generation prompt. The result is token ids."""

    messages: list[Message]


@dataclass(frozen=True, slots=True)
class Detokenize:
    """Convert token ids to text, with special tokens."""

    ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Tokenize:
    """Convert text to token ids, without special tokens at its beginning."""

    text: str


Lookup: TypeAlias = Render | Detokenize | Tokenize
LookupResult: TypeAlias = "Sequence[int] | str | None"


class LookupFailed(Exception):
    """The engine could not serve a lookup that is necessary. Raised into the generator of a continuation by its caller."""


@dataclass(frozen=True, slots=True)
class Rendering:
    """What identifies the rendering of a step's messages."""

    length: int
    digest: str  # of all ids but the last
    last: int


@dataclass(frozen=True, slots=True)
class Continuation:
    """The result for one call: the prompt ids to send, or the reason why the call is sent unchanged.

    A continued call has a `reason` as well if its prompt differs from what the agent sent: `history` (mode `append`) or
    `stop_string`.
    """

    ids: "Ids | None"  # None: the call is sent unchanged
    reason: Reason | None = None
    kept: int = 0  # the number of recorded ids, with which it begins
    bridge: int = 0  # the number of ids after them
    rendering: Rendering | None = None  # of the call's messages, if it differs from `ids`
    is_unchanged: bool = False  # the ids are the engine's own rendering of the call


def rendering_of(ids: Ids) -> Rendering:
    """Return what identifies a rendering. Raises ValueError if it is empty."""
    if not ids:
        raise ValueError("a rendering has at least one id")
    return Rendering(len(ids), digest_of(ids[:-1]), ids[-1])


def digest_of(ids: Ids) -> str:
    """Return the digest of ids."""
    return blake2b(to_little_endian(ids), digest_size=16).hexdigest()
