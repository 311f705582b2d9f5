"""Recorded sequences to audit: token ids with their logprobs, from exported rows (format `sequences`) and steps.

Rule 1: rows are never repaired. Arrays of different lengths, and a mask that covers other tokens than the logprobs at every
        offset, raise ValueError.
Rule 2: logprobs after temperature are compared only where the temperature was 1: scaling others back requires the logprobs of
        the whole vocabulary, which are not recorded.
Rule 3: tokens sampled under a constraint (`Step.constrained`) are not compared. No engine scores a prompt under a grammar:
        vLLM 0.32's prompt_logprobs ignore it, and its trace_decode_token_ids reject it.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Any, Literal

from proxy.rollouts.scoring.requests import Kept
from proxy.trajectory.arrays import unpack_mask
from proxy.trajectory.step import Choice, Step

LogprobsMode = Literal["raw_logprobs", "processed_logprobs", "after_temperature_logprobs"]

OFFSETS = (1, -1, 2, -2, 3, -3)


@dataclass(frozen=True, slots=True)
class SampledSpan:
    """A half-open span of sampled tokens, with its sampling parameters."""

    start: int
    end: int
    step_id: str
    policy_version: str | None = None
    temperature: float | None = None
    constrained: bool = False
    over: str | None = None

    def can_be_scored(self, mode: LogprobsMode) -> bool:
        """Return whether an engine scores its ids in a prompt as they were recorded in this mode."""
        if self.constrained or self.over == "truncated":
            return False
        return self.over == "mask" or mode == "raw_logprobs" or self.temperature in (None, 1)


@dataclass(frozen=True, slots=True)
class AuditSample:
    """A recorded sequence. The names of fields are part of the keys of audit logs: a renamed field invalidates them."""

    name: str
    branch: int
    token_ids: Sequence[int]
    logprobs: Sequence[float | None]  # None for tokens that are not compared
    stretches: tuple[SampledSpan, ...] = ()
    mask_offset: int = 0  # positions by which the mask is late against the logprobs
    masks: Mapping[int, Kept] = field(default_factory=dict)  # the tokens over which logprobs were recorded, by position

    def span_at(self, index: int) -> SampledSpan | None:
        """Return the span of a token, or None."""
        found = bisect_right(self.stretches, index, key=lambda span: span.start) - 1  # spans are in order
        return self.stretches[found] if found >= 0 and index < self.stretches[found].end else None

    @property
    def temperatures(self) -> tuple[float, ...]:
        """The known sampling temperatures other than 1."""
        found = {span.temperature for span in self.stretches}
        return tuple(sorted(value for value in found if value is not None and value != 1))

    def comparable(self, mode: LogprobsMode) -> "AuditSample":
        """Return the sequence without the logprobs that no engine can score again."""
        skipped = [span for span in self.stretches if not span.can_be_scored(mode)]
        if not skipped:
            return self
        logprobs = list(self.logprobs)
        for span in skipped:
            logprobs[span.start : span.end] = [None] * len(logprobs[span.start : span.end])
        return replace(self, logprobs=logprobs)

    def skipped(self, mode: LogprobsMode) -> tuple[int, str]:
        """Return the number of logprobs that `comparable` removes, and the reason."""
        reasons = []
        if any(span.constrained for span in self.stretches):
            reasons.append("sampled with a constraint (a grammar or a forced tool call)")
        if any(span.over == "truncated" for span in self.stretches):
            reasons.append("recorded over tokens that truncated sampling kept and the engine did not report")
        if self.temperatures and mode != "raw_logprobs" and any(span.over != "mask" for span in self.stretches):
            reasons.append(f"recorded after temperature {', '.join(map(str, self.temperatures))}")
        count = self.count - self.comparable(mode).count
        return count, f"{count} skipped because engines cannot score them again: {'; '.join(reasons)}" if count else ""

    @property
    def count(self) -> int:
        """The number of tokens with a logprob."""
        return sum(value is not None for value in self.logprobs)


def name_of(row: Any) -> tuple[str, int]:
    """Return the rollout ID and the branch of a row, also of an invalid one."""
    named = row if isinstance(row, dict) else {}
    branch = named.get("branch")
    return str(named.get("rollout_id")), branch if isinstance(branch, int) else 0


def of_row(row: Any) -> AuditSample:
    """Return the sequence of an exported row of format `sequences`. Raises ValueError for an invalid row."""
    if not isinstance(row, dict) or not all(
        isinstance(row.get(key), list) for key in ("token_ids", "mask", "logprobs")
    ):
        raise ValueError("token_ids, mask or logprobs are missing; use rows of `tokentape export --format sequences`")
    ids, mask, logprobs = row["token_ids"], row["mask"], row["logprobs"]
    if not len(ids) == len(mask) == len(logprobs):
        lengths = f"{len(ids)} token_ids, {len(mask)} mask, {len(logprobs)} logprobs"
        raise ValueError(f"token_ids, mask and logprobs differ in length: {lengths}")
    if not all(type(token) is int and token >= 0 for token in ids):
        raise ValueError("token_ids must be non-negative integers")
    if not all(value is None or (type(value) in {int, float} and isfinite(value)) for value in logprobs):
        raise ValueError("logprobs must be numbers or null")
    name, branch = name_of(row)
    spans = tuple(_span(span) for span in row.get("spans") or () if isinstance(span, dict))
    return AuditSample(
        name=name,
        branch=branch,
        token_ids=ids,
        logprobs=logprobs,
        stretches=spans,
        mask_offset=_mask_offset(mask, logprobs),
        masks=_kept(row.get("sampling_mask"), spans),
    )


def of_choice(step: Step, choice: Choice) -> AuditSample:
    """Return the sequence of one choice of a step: its prompt and its completion."""
    prompt = step.prompts[choice.prompt]
    start, end = len(prompt), len(prompt) + len(choice.ids)
    nothing: list[float | None] = [None] * start
    temperature = step.sampling.get("temperature")
    over = step.logprobs_over(choice)
    span = SampledSpan(start, end, step.step_id, step.policy_version, temperature, step.constrained is True, over)
    kept: list[list[int]] = [] if choice.sampling_mask is None else unpack_mask(choice.sampling_mask)
    return AuditSample(
        name=step.rollout_id,
        branch=choice.index,
        token_ids=(prompt + choice.ids).tolist(),
        logprobs=[*nothing, *choice.logprobs],
        stretches=(span,),
        masks=_kept([[]] * start + kept, (span,)),
    )


def _span(span: Mapping[str, Any]) -> SampledSpan:
    start, end, temperature = span.get("start"), span.get("end"), span.get("temperature")
    if type(start) is not int or type(end) is not int or not 0 <= start <= end:
        raise ValueError("a span has no valid start and end")
    known = temperature if type(temperature) in {int, float} else None
    version = span.get("policy_version")
    version = None if version is None else str(version)
    over = span.get("logprobs_over")
    return SampledSpan(start, end, str(span.get("step_id")), version, known, span.get("constrained") is True, over)


def _kept(masks: Any, spans: Sequence[SampledSpan]) -> Mapping[int, Kept]:
    """Return the tokens of the masks by position, in spans whose logprobs are over them. Raises ValueError for invalid ones."""
    found = {}
    for span in spans:
        if span.over == "mask":
            kept = masks[span.start : span.end] if isinstance(masks, list) else []
            if len(kept) != span.end - span.start:
                raise ValueError("sampling_mask has no entry for each token of its span")
            for position, ids in enumerate(kept, span.start):
                if not isinstance(ids, list) or not all(type(token) is int for token in ids):
                    raise ValueError("sampling_mask must be lists of token ids")
                if ids:  # none where the token is trained in another row
                    found[position] = Kept(ids, span.temperature or 1)
    return found


def _mask_offset(mask: Sequence[Any], logprobs: Sequence[float | None]) -> int:
    """Return the number of positions by which the mask is later than the logprobs."""
    masked = [bool(value) for value in mask]
    filled = [value is not None for value in logprobs]
    if not any(filled):
        return 0  # none were requested (record.logprobs: off), or all tokens are context
    for offset in (0, *OFFSETS):
        # Values that are shifted over an end may reappear at the other one (rotated) or be lost.
        moved = masked[offset:] + masked[:offset]
        inner = slice(max(-offset, 0), len(masked) - max(offset, 0))
        if moved == filled or (any(filled) and moved[inner] == filled[inner]):
            return offset
    raise ValueError("mask and logprobs cover different tokens at every offset")
