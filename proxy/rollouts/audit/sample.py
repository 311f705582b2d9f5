"""One sequence as it was recorded: its ids, and which logprob belongs to which of them.

Holds the reading of an exported row (format `sequences`) and of a step, and what is left out of the comparison because no
engine can score it again. Pure; it compares nothing: `verdict` does.

Rule 1: a row is taken as it is. Arrays of different lengths, and a mask that covers other tokens than the logprobs do
        however it is moved, are no sequence at all: ValueError says so.
Rule 2: logprobs taken after temperature are compared only where the temperature was 1: to scale others back takes the
        logprobs of the whole vocabulary, which nobody recorded.
Rule 3: what was sampled under a constraint (`Step.constrained`) is not compared. No engine scores a prompt under a grammar:
        vLLM 0.32's prompt_logprobs know none, and its trace_decode_token_ids refuse one.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any, Literal

from proxy.trajectory.step import Choice, Step

LogprobsMode = Literal["raw_logprobs", "processed_logprobs", "after_temperature_logprobs"]

OFFSETS = (1, -1, 2, -2, 3, -3)


@dataclass(frozen=True, slots=True)
class SampledSpan:
    """A sampled stretch, half open, and what it was sampled with."""

    start: int
    end: int
    step_id: str
    policy_version: str | None = None
    temperature: float | None = None
    constrained: bool = False

    def can_be_scored(self, mode: LogprobsMode) -> bool:
        """Whether an engine that is given its ids as a prompt scores them as they were recorded in this mode."""
        return not self.constrained and (mode == "raw_logprobs" or self.temperature in (None, 1))


@dataclass(frozen=True, slots=True)
class AuditSample:
    """A sequence. `logprobs` is None where there is nothing to compare.

    `mask_offset` says by how many places the mask stands too late against the logprobs; 0 in an honest row.
    """

    name: str
    branch: int
    token_ids: Sequence[int]
    logprobs: Sequence[float | None]
    stretches: tuple[SampledSpan, ...] = ()
    mask_offset: int = 0

    def stretch_at(self, place: int) -> SampledSpan | None:
        """The sampled stretch that a token is of, if the row says so."""
        at = bisect_right(self.stretches, place, key=lambda one: one.start) - 1  # they follow each other in a row
        return self.stretches[at] if at >= 0 and place < self.stretches[at].end else None

    @property
    def temperatures(self) -> tuple[float, ...]:
        """The temperatures other than 1 that it was sampled with, as far as known."""
        found = {one.temperature for one in self.stretches}
        return tuple(sorted(value for value in found if value is not None and value != 1))

    def comparable(self, mode: LogprobsMode) -> "AuditSample":
        """Without the logprobs that no engine can score again."""
        left_out = [one for one in self.stretches if not one.can_be_scored(mode)]
        if not left_out:
            return self
        logprobs = list(self.logprobs)
        for one in left_out:
            logprobs[one.start : one.end] = [None] * len(logprobs[one.start : one.end])
        return replace(self, logprobs=logprobs)

    def left_out(self, mode: LogprobsMode) -> tuple[int, str]:
        """How many logprobs `comparable` leaves out, and why."""
        reasons = []
        if any(one.constrained for one in self.stretches):
            reasons.append("sampled under a constraint (a grammar, a forced tool call)")
        if self.temperatures and mode != "raw_logprobs":
            reasons.append(f"recorded after temperature {', '.join(map(str, self.temperatures))}")
        count = self.count - self.comparable(mode).count
        return count, f"{count} left out, which no engine scores again: {'; '.join(reasons)}" if count else ""

    @property
    def count(self) -> int:
        """How many of its tokens have a logprob to compare."""
        return sum(value is not None for value in self.logprobs)


def name_of(row: Any) -> tuple[str, int]:
    """The rollout and the branch that a row is of, also where it is no row at all."""
    named = row if isinstance(row, dict) else {}
    branch = named.get("branch")
    return str(named.get("rollout_id")), branch if isinstance(branch, int) else 0


def of_row(row: Any) -> AuditSample:
    """An exported row of format `sequences`. Raises ValueError saying what is missing or does not fit."""
    if not isinstance(row, dict) or not all(
        isinstance(row.get(key), list) for key in ("token_ids", "mask", "logprobs")
    ):
        raise ValueError(
            "it has no token_ids, mask and logprobs: it is no row of `tokentape export --format sequences`"
        )
    ids, mask, logprobs = row["token_ids"], row["mask"], row["logprobs"]
    if not len(ids) == len(mask) == len(logprobs):
        lengths = f"{len(ids)} token_ids, {len(mask)} mask, {len(logprobs)} logprobs"
        raise ValueError(f"its arrays are of different lengths: {lengths}")
    if not all(type(token) is int and token >= 0 for token in ids):
        raise ValueError("its token_ids are not all ids: integers from 0 on")
    if not all(value is None or (type(value) in {int, float} and isfinite(value)) for value in logprobs):
        raise ValueError("its logprobs are not all numbers or null")
    name, branch = name_of(row)
    return AuditSample(
        name=name,
        branch=branch,
        token_ids=ids,
        logprobs=logprobs,
        stretches=tuple(_stretch(span) for span in row.get("spans") or () if isinstance(span, dict)),
        mask_offset=_mask_offset(mask, logprobs),
    )


def of_choice(step: Step, choice: Choice) -> AuditSample:
    """One choice of a step, with its prompt before it."""
    prompt = step.prompts[choice.prompt]
    start, end = len(prompt), len(prompt) + len(choice.ids)
    nothing: list[float | None] = [None] * start
    temperature = step.sampling.get("temperature")
    stretch = SampledSpan(start, end, step.step_id, step.policy_version, temperature, step.constrained is True)
    return AuditSample(
        name=step.rollout_id,
        branch=choice.index,
        token_ids=(prompt + choice.ids).tolist(),
        logprobs=[*nothing, *choice.logprobs],
        stretches=(stretch,),
    )


def _stretch(span: Mapping[str, Any]) -> SampledSpan:
    start, end, temperature = span.get("start"), span.get("end"), span.get("temperature")
    if type(start) is not int or type(end) is not int or not 0 <= start <= end:
        raise ValueError("one of its spans has no start and end")
    known = temperature if type(temperature) in {int, float} else None
    version = span.get("policy_version")
    version = None if version is None else str(version)
    return SampledSpan(start, end, str(span.get("step_id")), version, known, span.get("constrained") is True)


def _mask_offset(mask: Sequence[Any], logprobs: Sequence[float | None]) -> int:
    """By how many places the mask stands later than the logprobs."""
    masked = [bool(value) for value in mask]
    filled = [value is not None for value in logprobs]
    if not any(filled):
        return 0  # nobody asked for any (record.logprobs: off), or all are context
    for offset in (0, *OFFSETS):
        # What is moved over an end may come in again at the other (rotated) or be lost.
        moved = masked[offset:] + masked[:offset]
        inner = slice(max(-offset, 0), len(masked) - max(offset, 0))
        if moved == filled or (any(filled) and moved[inner] == filled[inner]):
            return offset
    raise ValueError("its mask and its logprobs do not cover the same tokens, however one is moved against the other")
