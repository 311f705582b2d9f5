"""The validation of an engine's response: its tokens as arrays, and its values and messages checked.

Any value of a response may have any type. Everything that readers rely on (ids, logprobs, indexes, finish reasons, policy
versions, messages) is checked here, once. An invalid value becomes a problem of the step, and is not passed to readers.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from proxy.protocols.dialects.base import DialectName
from proxy.protocols.engines.base import Json, Sampled, Tokens
from proxy.trajectory.arrays import pack_experts, pack_ids, pack_logprobs, pack_mask
from proxy.trajectory.fidelity import FINISH_REASONS
from proxy.trajectory.step import Choice, Ids, Span

_MAX_REASON_CHARS: Final = 100  # maximum length of a finish reason in characters
_TEXTS: Final = ("reasoning", "reasoning_content", "refusal", "role")
_TEXT_OR_NONE: Final = frozenset({str, type(None)})
_COUNTS: Final = ("prompt_tokens", "completion_tokens", "total_tokens")
_SCALARS: Final = frozenset({int, type(None), bool, float, str})
_USAGE_DEPTH: Final = 3  # counts, objects of counts, and those by modality (vLLM 0.32: multimodal_tokens)


@dataclass(frozen=True, slots=True)
class Packed:
    """The tokens of a response as arrays: the prompts, the choices, the problems, and notes.

    `has_versions`: the engine itself reported the policy versions of the tokens.
    """

    prompts: tuple[Ids, ...] = ()
    choices: tuple[Choice, ...] = ()
    problems: frozenset[str] = frozenset()
    notes: Mapping[str, Any] = field(default_factory=dict)
    has_versions: bool = False


def pack_tokens(
    tokens: Tokens,
    samples: int | None,
    policy_version: str | None,
    sent_prompts: Sequence[list[int]] | None = None,
    *,
    epoch: int = 0,
) -> Packed:
    """Pack the engine's lists.

    Choice index = prompt index times `samples` plus sample index, if each choice has a prompt of its own. `sent_prompts`
    are the prompts of the request, if it has ids; `epoch` is that of the policy when the call was sent. Raises ValueError,
    TypeError or OverflowError for invalid ids.
    """
    problems = set(tokens.problems)
    prompts: dict[int, list[int]] = {} if tokens.prompt_ids is None else {0: tokens.prompt_ids}
    choices = []
    for sampled in tokens.choices:
        prompt = sampled.index // (samples or 1) if tokens.prompt_ids is None else 0
        if sampled.prompt_ids is not None and prompts.setdefault(prompt, sampled.prompt_ids) != sampled.prompt_ids:
            problems.add("mixed_prompts")
        choices.append(_choice(sampled, prompt, policy_version, epoch, problems))
    if (
        sent_prompts is not None
        and prompts
        and not _are_equal([prompts[index] for index in sorted(prompts)], sent_prompts)
    ):
        problems.add("other_prompt")
    packed: tuple[Ids, ...] = ()
    if "mixed_prompts" in problems or list(prompts) != list(range(len(prompts))):
        problems.add("mixed_prompts")  # an index would point to the wrong prompt
    else:
        packed = tuple([pack_ids(ids) for ids in prompts.values()])
    has_versions = any(sampled.spans is not None for sampled in tokens.choices)
    return Packed(packed, tuple(choices), frozenset(problems), tokens.notes, has_versions)


def _are_equal(returned: Sequence[Sequence[int]], sent: Sequence[Sequence[int]]) -> bool:
    """Return whether prompts are equal; each is a list, or an array of ids that were parsed apart."""
    return len(returned) == len(sent) and all(
        ours == theirs if type(ours) is type(theirs) else _listed(ours) == _listed(theirs)
        for ours, theirs in zip(returned, sent, strict=True)
    )


def _listed(prompt: Sequence[int]) -> list[int]:
    """Return a prompt as a list; one that is a list is not copied."""
    if isinstance(prompt, list):
        return prompt
    return prompt.tolist() if isinstance(prompt, array) else list(prompt)


def _choice(sampled: Sampled, prompt: int, policy_version: str | None, epoch: int, problems: set[str]) -> Choice:
    ids = pack_ids(sampled.ids or [])
    if ids and sampled.counted is not None and sampled.counted != len(ids):
        problems.add("completion_count")
    if sampled.sampling_mask is not None and len(sampled.sampling_mask) != len(ids):
        problems.add("mask_count")
    spans = _spans(sampled, len(ids), policy_version, epoch)
    if spans is None:
        problems.add("version_spans")
    return Choice(
        index=sampled.index,
        ids=ids,
        logprobs=pack_logprobs(sampled.logprobs or []),
        finish_reason=_finish_reason(sampled.finish_reason, problems),
        stop_reason=_stop_reason(sampled.stop_reason, problems),
        prompt=prompt,
        spans=spans or (),
        routed_experts=None if sampled.routed_experts is None else pack_experts(sampled.routed_experts),
        sampling_mask=None if sampled.sampling_mask is None else pack_mask(sampled.sampling_mask),
    )


def _finish_reason(value: Any, problems: set[str]) -> str | None:
    """Return the reason as text. SGLang's native object (0.5.23) has it in `type`."""
    reason = value.get("type") if isinstance(value, dict) else value
    if reason is None and value is None:
        return None
    if isinstance(reason, str) and reason in FINISH_REASONS:
        return reason
    problems.add("unknown_finish_reason")
    return reason if isinstance(reason, str) and len(reason) <= _MAX_REASON_CHARS else None


def _stop_reason(value: Any, problems: set[str]) -> int | str | None:
    """Return a stop string, or the id of a stop token."""
    if value is None or isinstance(value, str) or (type(value) is int and 0 <= value < 2**31):
        return value
    problems.add("unparsed_event")
    return None


def _spans(sampled: Sampled, count: int, policy_version: str | None, epoch: int) -> tuple[Span, ...] | None:
    """Return the spans of policy versions: the engine's own, else one for all. None: the engine's do not cover the ids.

    A numeric version is kept as its digits, as in `PUT /policy`.
    """
    if sampled.spans is None or not count:
        return (Span(0, count, policy_version, epoch),) if count else ()
    spans = []
    for start, end, version in sampled.spans:
        named = str(version) if type(version) is int else version
        if type(start) is not int or type(end) is not int or not (named is None or isinstance(named, str)):
            return None
        if start > end:
            return None
        if start < end:
            spans.append(Span(start, end, named, epoch))
    bounds = [0, *(span.end for span in spans)]
    joined = all(span.start == bound for span, bound in zip(spans, bounds, strict=False))
    return tuple(spans) if joined and bounds[-1] == count else None


def check_usage(usage: Any) -> tuple[Json | None, str | None]:
    """Return the usage to record, and its problem: it must have the counts of both prompt and completion, and their sum."""
    if usage is None:
        return None, None
    if not isinstance(usage, dict) or not _is_flat(usage, _USAGE_DEPTH):
        return None, "bad_usage"
    known = [usage[name] for name in _COUNTS if usage.get(name) is not None]
    for count in known:
        if type(count) is not int or count < 0:
            return usage, "bad_usage"
    if any(usage.get(name) is None for name in _COUNTS[:2]):
        return usage, "bad_usage"  # it would confirm nothing
    return usage, None if len(known) < 3 or 2 * known[2] == sum(known) else "usage_sum"


def _is_flat(value: Any, depth: int) -> bool:
    if type(value) in _SCALARS:
        return True
    return isinstance(value, dict) and depth > 0 and all(_is_flat(inner, depth - 1) for inner in value.values())


def check_messages(dialect: DialectName, response: Json) -> set[str]:
    """Return the problems of a whole or accumulated response: each choice must have a message or text of the expected type."""
    if dialect == "generate":
        return set()
    check = _check_message if dialect == "chat" else _check_text
    choices = response.get("choices")
    return {code for choice in choices or () for code in check(choice)} if isinstance(choices, list) else set()


def _check_text(choice: Any) -> set[str]:
    text = choice.get("text") if isinstance(choice, dict) else None
    return set() if isinstance(text, str) else {"no_message"}


def _check_message(choice: Any) -> set[str]:
    message = choice.get("message") if isinstance(choice, dict) else None
    if not isinstance(message, dict):
        return {"no_message"}
    calls = message.get("tool_calls")
    sound = (
        (message.get("content") is None or isinstance(message["content"], str | list))
        and {type(message.get(name)) for name in _TEXTS} <= _TEXT_OR_NONE
        and (calls is None or (isinstance(calls, list) and all(map(_is_call, calls))))
    )
    return set() if sound else {"unparsed_event"}


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str | None)
