"""Recorded sequences to audit, and the verdict on each from the differences between its recorded and its scored logprobs.

A *difference* is recorded minus scored. An *offset* d supposes that recorded logprob i belongs to token i - d: that the
logprobs are d positions late. Most tokens of a good model have a logprob near 0, and agree at any offset, so a token counts as
evidence only if it is *informative*: few of the other scored values are within the tolerance of its recorded one. The
probability that the agreeing informative tokens agree by chance is the product of the shares of values that would agree as
well; agreement is evidence if it is below one in a thousand (in 3: one in a hundred thousand, since some logprobs do not
change with the temperature).

The rule, in order:

1. `aligned`: every difference is within the tolerance, and the mask covers the tokens that have logprobs. With few informative
   tokens this is weak evidence; `informative` is their number.
2. `shifted`: at another offset nearly all informative tokens agree, beyond chance. Or they agree at offset 0 after the ids
   are shifted and scored again (a shifted context changes all values, so no offset of the first scores shows it). Or only the
   mask is shifted.
3. `wrong tokens`: the values before the first difference agree, beyond chance, and from there on the differences are much
   larger: after a wrong token, every later one is scored in another context. If the differing span was sampled by other
   weights or at another temperature than the agreeing one, it is 5.
4. `shifted`: at another offset the values are not equal but correlate, and do not at offset 0. An id is missing at the start,
   and the context is nearly the same.
5. `other weights`: all other cases. The differences begin at the start. The note has the correlation: a strong one indicates
   another temperature, precision or a neighboring version; none indicates another model, or another first prompt.

Of a sample, an exported row (format `sequences`) or a choice of a step:

- Rows are never repaired. Arrays of different lengths, and a mask that covers other tokens than the logprobs at every offset,
  raise ValueError.
- Logprobs after temperature are compared only where the temperature was 1: scaling others back requires the logprobs of the
  whole vocabulary, which are not recorded.
- Tokens sampled over the cache of other weights (`mixed_from`) are not compared: they score under neither version. Of a call
  that was resumed, spans are not compared that another version than the engine's sampled, if the engine's is known.
- Tokens sampled under a constraint (`Step.constrained`) are not compared. No engine scores a prompt under a grammar: vLLM
  0.32's prompt_logprobs ignore it, and its trace_decode_token_ids reject it.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite, log, sqrt
from typing import Any, Literal

from proxy.rollouts.scoring.requests import Kept
from proxy.trajectory.arrays import unpack_mask
from proxy.trajectory.sequence import mixed_from, version_spans
from proxy.trajectory.step import Choice, Step

LogprobsMode = Literal["raw_logprobs", "processed_logprobs", "after_temperature_logprobs"]

Verdict = Literal["aligned", "shifted", "other weights", "wrong tokens"]
Scored = Sequence[float | None]

OFFSETS = (1, -1, 2, -2, 3, -3)

# A wrong token moves what follows by far more than engines differ among themselves (on one vLLM 0.32 by 1e-4 in float32, and
# by 0.04 on average in bfloat16).
_JUMP = 20
_STEEP_JUMP = 200  # where few tokens come before: at another temperature a few likelihoods happen to be nearly the same
# Times the tolerance. Rounding of 28 layers in bfloat16 is 0.06 on average where it differs by more than 0.01, and may reach
# 0.28; a wrong token of a prompt, to which a model of two layers hardly attends, makes the reply after it differ by 0.12.
_LARGE, _LARGE_ON_AVERAGE = 10, 8
_RARE = 0.05  # a token is informative if at most this share of the other values would agree with it as well
_ONCE_IN_A_THOUSAND, _NEVER = 1e-3, 1e-5
_MISSES = 0.1  # the share of informative tokens that may disagree at an offset: the ends of spans have no counterpart
_TOGETHER = 0.8  # a correlation that 20 unrelated pairs reach about once in 30 000 times
_ENOUGH = 20


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
    resumed: int = 0
    mixed: bool = False

    def is_of_other(self, version: str | None) -> bool:
        """Return whether another version than the engine's sampled a part of a call that was resumed."""
        return self.resumed > 0 and None not in (version, self.policy_version) and version != self.policy_version

    def can_be_scored(self, mode: LogprobsMode, version: str | None) -> bool:
        """Return whether an engine with this version scores its ids in a prompt as they were recorded in this mode."""
        if self.constrained or self.mixed or self.over == "truncated" or self.is_of_other(version):
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

    def comparable(self, mode: LogprobsMode, version: str | None = None) -> "AuditSample":
        """Return the sequence without the logprobs that an engine cannot score again. `version`: of its weights, if known."""
        skipped = [span for span in self.stretches if not span.can_be_scored(mode, version)]
        if not skipped:
            return self
        logprobs = list(self.logprobs)
        for span in skipped:
            logprobs[span.start : span.end] = [None] * len(logprobs[span.start : span.end])
        return replace(self, logprobs=logprobs)

    def skipped(self, mode: LogprobsMode, version: str | None = None) -> tuple[int, str]:
        """Return the number of logprobs that `comparable` removes, and the reason."""
        reasons = []
        if any(span.constrained for span in self.stretches):
            reasons.append("sampled with a constraint (a grammar or a forced tool call)")
        if any(span.over == "truncated" for span in self.stretches):
            reasons.append("recorded over tokens that truncated sampling kept and the engine did not report")
        if any(span.mixed for span in self.stretches):
            reasons.append("sampled while the weights changed, over a cache of two versions (in_flight: continue)")
        if others := {str(span.policy_version) for span in self.stretches if span.is_of_other(version)}:
            names = ", ".join(sorted(others))
            reasons.append(
                f"sampled by version {names} before a call was resumed, and the engine has version {version}"
            )
        if self.temperatures and mode != "raw_logprobs" and any(span.over != "mask" for span in self.stretches):
            reasons.append(f"recorded after temperature {', '.join(map(str, self.temperatures))}")
        count = self.count - self.comparable(mode, version).count
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
    start = len(prompt)
    nothing: list[float | None] = [None] * start
    temperature = step.sampling.get("temperature")
    over = step.logprobs_over(choice)
    mixed = mixed_from(step, choice)
    spans = tuple(
        SampledSpan(
            start + span.start,
            start + span.end,
            step.step_id,
            span.policy_version,
            temperature,
            step.constrained is True,
            over,
            step.resumed,
            mixed is not None and span.start >= mixed,
        )
        for span in version_spans(step, choice)
    )
    kept: list[list[int]] = [] if choice.sampling_mask is None else unpack_mask(choice.sampling_mask)
    return AuditSample(
        name=step.rollout_id,
        branch=choice.index,
        token_ids=(prompt + choice.ids).tolist(),
        logprobs=[*nothing, *choice.logprobs],
        stretches=spans,
        masks=_kept([[]] * start + kept, spans),
    )


def _span(span: Mapping[str, Any]) -> SampledSpan:
    start, end, temperature = span.get("start"), span.get("end"), span.get("temperature")
    if type(start) is not int or type(end) is not int or not 0 <= start <= end:
        raise ValueError("a span has no valid start and end")
    known = temperature if type(temperature) in {int, float} else None
    version = span.get("policy_version")
    version = None if version is None else str(version)
    over, resumed = span.get("logprobs_over"), span.get("resumed")
    return SampledSpan(
        start,
        end,
        str(span.get("step_id")),
        version,
        known,
        span.get("constrained") is True,
        over,
        resumed if type(resumed) is int else 0,
        span.get("mixed") is True,
    )


def _kept(masks: Any, spans: Sequence[SampledSpan]) -> Mapping[int, Kept]:
    """Return the tokens of masks by position, in spans with logprobs over the mask. Raises ValueError for invalid masks."""
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


@dataclass(frozen=True, slots=True)
class Pair:
    """One token's recorded and scored logprob."""

    position: int
    recorded: float
    scored: float

    @property
    def size(self) -> float:
        """The size of the difference."""
        return abs(self.recorded - self.scored)


class ChanceModel:
    """How common each recorded value is among the scored ones."""

    def __init__(self, pairs: Sequence[Pair], tolerance: float) -> None:
        self.tolerance = tolerance
        self._values = sorted(pair.scored for pair in pairs)

    def is_informative(self, pair: Pair) -> bool:
        """Return whether the agreement of this token is evidence."""
        return self._others(pair) <= _RARE * len(self._values)

    def log_chance(self, pair: Pair) -> float:
        """Return the logarithm of the odds that a value drawn from the scored ones agrees with this token."""
        return log(max(self._others(pair), 1) / (len(self._values) + 1))

    def _others(self, pair: Pair) -> int:
        """Return the number of scored values, other than its own, within the tolerance of its recorded one."""
        low = bisect_left(self._values, pair.recorded - self.tolerance)
        high = bisect_right(self._values, pair.recorded + self.tolerance)
        return high - low - (pair.size <= self.tolerance)


def no_chance(pairs: Iterable[Pair], model: ChanceModel, below: float = _ONCE_IN_A_THOUSAND) -> bool:
    """Return whether the probability that these tokens agree by chance is below `below`."""
    return sum(model.log_chance(pair) for pair in pairs if model.is_informative(pair)) <= log(below)


def nearly_all_agree(pairs: Sequence[Pair], tolerance: float) -> bool:
    """Return whether nearly all informative tokens agree, beyond chance."""
    model = ChanceModel(pairs, tolerance)
    informative = [pair for pair in pairs if model.is_informative(pair)]
    agreeing = [pair for pair in informative if pair.size <= tolerance]
    return len(informative) - len(agreeing) <= max(1, _MISSES * len(informative)) and no_chance(agreeing, model)


def go_together(pairs: Sequence[Pair]) -> bool:
    """Return whether two sequences of numbers correlate, with enough values to decide."""
    return len(pairs) >= _ENOUGH and line_through(pairs)[0] >= _TOGETHER


def line_through(pairs: Sequence[Pair]) -> tuple[float, float]:
    """Return the correlation of recorded and scored values, and the slope of recorded over scored; 0 if undefined."""
    count = len(pairs)
    x_mean = sum(pair.scored for pair in pairs) / count
    y_mean = sum(pair.recorded for pair in pairs) / count
    xx = sum((pair.scored - x_mean) ** 2 for pair in pairs)
    yy = sum((pair.recorded - y_mean) ** 2 for pair in pairs)
    xy = sum((pair.scored - x_mean) * (pair.recorded - y_mean) for pair in pairs)
    if xx <= 0 or yy <= 0:
        return 0.0, 0.0
    return xy / sqrt(xx * yy), xy / xx


@dataclass(frozen=True, slots=True)
class Assessment:
    """An outcome."""

    verdict: Verdict
    count: int
    informative: int
    mean: float  # of |difference| at offset 0
    max: float
    first: int | None = None  # the first token beyond the tolerance
    offset: int = 0
    note: str = ""


def moved_ids(token_ids: Sequence[int], offset: int) -> list[int]:
    """Return the ids as they would be if recorded logprob i belonged to the token at i - offset."""
    ids = list(token_ids)
    return ids[-offset:] + ids[:-offset]


def pairs_of(recorded: AuditSample, scored: Scored, offset: int = 0) -> list[Pair]:
    """Return every token with both values, at an offset."""
    length = len(scored)
    found = []
    for position, value in enumerate(recorded.logprobs):
        other = scored[position - offset] if 0 <= position - offset < length else None
        if value is not None and other is not None:
            found.append(Pair(position, value, other))
    return found


def judge(
    recorded: AuditSample, scored: Scored, tolerance: float, moved: Mapping[int, Scored] | None = None
) -> Assessment | None:
    """Return the assessment; None if there is nothing to compare. `moved`: the scores of the ids shifted by an offset."""
    pairs = pairs_of(recorded, scored)
    if not pairs:
        nothing = Assessment("shifted", 0, 0, 0.0, 0.0)
        return _mask_moved(nothing, recorded) if recorded.mask_offset else None
    likeness = ChanceModel(pairs, tolerance)
    beyond = [pair for pair in pairs if pair.size > tolerance]
    finding = Assessment(
        verdict="aligned",
        count=len(pairs),
        informative=sum(map(likeness.is_informative, pairs)),
        mean=sum(pair.size for pair in pairs) / len(pairs),
        max=max(pair.size for pair in pairs),
        first=beyond[0].position if beyond else None,
    )
    if not beyond and not recorded.mask_offset:
        return finding
    if not beyond:
        return _mask_moved(finding, recorded)
    return (
        _shifted(finding, recorded, scored, moved or {}, tolerance)
        or _broken(finding, recorded, pairs, likeness)
        or _shifted_nearly(finding, recorded, scored, moved or {})
        or replace(finding, verdict="other weights", note=_differing(recorded, pairs, beyond, tolerance))
    )


def may_be_moved(finding: Assessment | None, recorded: AuditSample, scored: Scored) -> bool:
    """Return whether scoring the ids shifted may explain the differences: not if the values correlate without a shift."""
    return finding is not None and finding.verdict == "other weights" and not go_together(pairs_of(recorded, scored))


def _mask_moved(finding: Assessment, recorded: AuditSample) -> Assessment:
    offset = recorded.mask_offset
    return replace(finding, verdict="shifted", offset=offset, note=f"the mask is {_places(offset)}")


def _shifted(
    finding: Assessment, recorded: AuditSample, scored: Scored, moved: Mapping[int, Scored], tolerance: float
) -> Assessment | None:
    """Return the verdict if the values agree at an offset."""
    for offset in OFFSETS:
        if nearly_all_agree(pairs_of(recorded, scored, offset), tolerance):
            what = "logprobs are" if recorded.mask_offset else "mask and logprobs are"
            return replace(finding, verdict="shifted", offset=offset, note=f"the {what} {_places(offset)}")
    for offset, others in moved.items():
        if nearly_all_agree(pairs_of(recorded, others), tolerance):
            return replace(finding, verdict="shifted", offset=offset, note=f"the ids are {_places(-offset)}")
    return None


def _shifted_nearly(
    finding: Assessment, recorded: AuditSample, scored: Scored, moved: Mapping[int, Scored]
) -> Assessment | None:
    """Return the verdict if the values correlate at an offset, and do not at 0."""
    if go_together(pairs_of(recorded, scored)):
        return None
    tried = {offset: pairs_of(recorded, scored, offset) for offset in OFFSETS}
    near = [offset for offset, pairs in tried.items() if go_together(pairs)]
    near += [offset for offset, others in moved.items() if go_together(pairs_of(recorded, others))]
    if not near:
        return None
    note = f"the logprobs are about {_places(near[0])} against the ids: an id was lost or added at the start"
    return replace(finding, verdict="shifted", offset=near[0], note=note)


def _broken(
    finding: Assessment, recorded: AuditSample, pairs: Sequence[Pair], likeness: ChanceModel
) -> Assessment | None:
    """Return the verdict if a wrong token follows correct ones."""
    before = [pair for pair in pairs if pair.position < (finding.first or 0)]
    informative = [pair.size for pair in before if likeness.is_informative(pair)]
    after = [pair for pair in pairs[len(before) :] if pair.size > likeness.tolerance]
    jump = sum(pair.size for pair in after) / len(after)
    # In bfloat16 the first tokens may agree exactly, and later ones be rounded differently.
    is_large = finding.max >= _LARGE * likeness.tolerance and jump >= _LARGE_ON_AVERAGE * likeness.tolerance
    if not no_chance(before, likeness, _NEVER) or not is_large:
        return None
    long_right = no_chance(before, likeness, _NEVER**2)
    if sum(informative) / len(informative) * (_JUMP if long_right else _STEEP_JUMP) > jump:
        return None
    other = _other_conditions(recorded, before, after)
    if other:
        return replace(finding, verdict="other weights", note=other)
    return replace(finding, verdict="wrong tokens", note=_where(before[-1].position, after, pairs))


def _other_conditions(recorded: AuditSample, before: Sequence[Pair], after: Sequence[Pair]) -> str:
    """Return why the differing tokens may be correct: other weights or another temperature sampled them."""
    right = {_condition(recorded.span_at(pair.position)) for pair in before}
    wrong = {_condition(recorded.span_at(pair.position)) for pair in after}
    if right & wrong:
        return ""
    versions = ", ".join(sorted(version or "unnamed" for version, _ in wrong))
    warmth = ", ".join(sorted(str(temperature) for _, temperature in wrong))
    return f"only tokens sampled by policy version {versions} at temperature {warmth} differ"


def _condition(span: SampledSpan | None) -> tuple[str | None, float | None]:
    return (None, None) if span is None else (span.policy_version, span.temperature)


def _where(last_right: int, after: Sequence[Pair], pairs: Sequence[Pair]) -> str:
    first = after[0].position
    if first > last_right + 1:
        return f"the first wrong id is one of {last_right + 1} to {first}: the ids between were not sampled"
    later = [pair for pair in pairs if pair.position > first]
    if later and len(after) == 1:
        return "later tokens agree: this token or its logprob was changed, but not its context"
    return ""


def _differing(recorded: AuditSample, pairs: Sequence[Pair], beyond: Sequence[Pair], tolerance: float) -> str:
    """Describe the differences, to help find their cause."""
    correlation, slope = line_through(pairs)
    if max(pair.size for pair in beyond) < _LARGE * tolerance:
        return "the differences are small, as between precisions or kernels; --tolerance sets the limit"
    notes = []
    if correlation >= _TOGETHER:
        notes.append(
            f"the values correlate (correlation {correlation:.2f}, slope {slope:.2f}): "
            "another temperature (a slope near 1/temperature), or weights near these"
        )
    else:
        notes.append(
            f"the values hardly correlate (correlation {correlation:.2f}): another model, or a first prompt "
            "that is not the one sampled after"
        )
    if recorded.temperatures:
        temperatures = ", ".join(map(str, recorded.temperatures))
        notes.append(
            f"sampled at temperature {temperatures}: if recorded after temperature, --logprobs-mode processed_logprobs"
        )
    if len(beyond) > 1 and all(pair.recorded > pair.scored for pair in beyond):
        notes.append("every recorded value is higher, as under a grammar, a forced tool call or top-k")
    return "; ".join(notes)


def _places(offset: int) -> str:
    count = abs(offset)
    return f"{count} position{'s' if count > 1 else ''} too {'late' if offset > 0 else 'early'}"
