"""Warnings of trained tokens for which importance ratios are wrong, found by how they were recorded.

No statistic shows them: a trainer can compute exactly the recorded logprobs, of a distribution that was not sampled.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeGuard

from proxy.trajectory.facts import is_older
from proxy.trajectory.retokenize import RETOKENIZED
from proxy.trajectory.sequence import version_spans
from proxy.trajectory.step import ANNOUNCED, Choice, Step, is_unlogged, truncation_of

_PENALTIES: Final = (("presence_penalty", 0), ("frequency_penalty", 0), ("repetition_penalty", 1))  # and without effect
_RAW: Final = "raw_logprobs"
_OVER_ALL: Final = (_RAW, "after_temperature_logprobs")  # before top-k, top-p and min-p
_LOGITS: Final = ("raw_logits", "processed_logits")
_LARGEST: Final = 2**53
_SHOWN: Final = 3  # values in a text
_LONGEST: Final = 60  # characters of each


class Recorded(NamedTuple):
    """How tokens were recorded, as far as their importance ratios depend on it."""

    endpoint: str
    kind: str  # of the engine
    mode: str | None  # of its logprobs; None if it is unknown, or if the tokens have no logprobs
    temperature: float | None = None  # None if it is unknown
    truncation: tuple[str, ...] = ()  # the parameters that take effect, such as "top_p 0.9"
    penalties: tuple[str, ...] = ()
    has_mask: bool = False  # of the tokens that sampling could choose from
    epoch: int = 0
    older: tuple[str, str] | None = None  # the version that the engine reported, and the later one that was announced


class Trained(NamedTuple):
    """The tokens of a choice that are trained: `tokens`, from the first one on."""

    step: Step
    choice: Choice
    tokens: int


@dataclass(frozen=True, slots=True)
class RatioWarning:
    """Why the importance ratios of `tokens` of the `of` trained tokens are wrong, and what to change."""

    code: str
    tokens: int
    of: int
    why: str
    fix: str


def tally(trained: Iterable[Trained]) -> Counter[Recorded]:
    """Count trained tokens by how they were recorded."""
    counts: Counter[Recorded] = Counter()
    for step, choice, trained_tokens in trained:
        known = _terms_of(step, choice)
        announced = step.extra.get(ANNOUNCED)
        if announced is not None and step.resumed:
            announced = None  # it is of one of the parts
        for span in version_spans(step, choice):
            tokens = min(span.end, trained_tokens) - span.start
            older = None if announced is None else _older(span.policy_version, announced)
            terms = known if older is None and not span.epoch else known._replace(epoch=span.epoch, older=older)
            if tokens > 0:
                counts[terms] += tokens
    return counts


def recorded_as(endpoint: str, kind: str, sampling: Mapping[str, Any], *, has_mask: bool = False) -> Recorded:
    """Return how tokens are recorded that an endpoint samples with these parameters, of which one is `logprobs_mode`."""
    mode, temperature = sampling.get("logprobs_mode"), sampling.get("temperature")
    penalties = {name: sampling[name] for name, off in _PENALTIES if sampling.get(name) not in (None, off)}
    return Recorded(
        endpoint,
        kind,
        mode if isinstance(mode, str) else None,
        float(temperature) if _is_number(temperature) else None,
        _described(truncation_of(sampling)),
        _described(penalties),
        has_mask,
    )


def _terms_of(step: Step, choice: Choice) -> Recorded:
    engine = step.engine
    if (not choice.logprobs and is_unlogged(step)) or RETOKENIZED in step.problems:
        return Recorded(engine.name, engine.kind, None)
    return recorded_as(engine.name, engine.kind, step.sampling, has_mask=choice.sampling_mask is not None)


def _is_number(value: Any) -> TypeGuard[float]:
    return type(value) in (int, float) and abs(value) < _LARGEST  # false for NaN


def _older(version: str | None, announced: Any) -> tuple[str, str] | None:
    if version is None or not isinstance(announced, str) or not is_older(version, announced):
        return None
    return version, announced


def _described(parameters: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the parameters as texts; without a value that is no number, which the client chose."""
    return tuple([f"{name} {value:g}" if _is_number(value) else name for name, value in parameters.items()])


def ratio_warnings(counts: Mapping[Recorded, int], epoch: int = 0) -> list[RatioWarning]:
    """Return the warnings of trained tokens that `tally` counted; `epoch` is the announced one of the policy.

    There is one warning for each code and kind of engine.
    """
    of = sum(counts.values())
    found = []
    for code, rule in _RULES.items():
        terms = [each for each in counts if rule.applies(each, epoch)]
        for kind in sorted({each.kind for each in terms}):
            own = [each for each in terms if each.kind == kind]
            tokens = sum(counts[each] for each in own)
            found.append(RatioWarning(code, tokens, of, rule.why(own), rule.fix(kind)))
    return found


def _why_raw_temperature(terms: Sequence[Recorded]) -> str:
    return (
        f"sampled at temperature {_listed(f'{each.temperature:g}' for each in terms)}, with logprobs of temperature 1 "
        f"({_modes(terms)}): if the trainer divides logits by the temperature, it compares logprobs of two temperatures; if "
        "not, both are of a distribution that was not sampled"
    )


def _why_greedy(_: Sequence[Recorded]) -> str:
    return (
        "sampled at temperature 0, where the likeliest token is certain: the trainer's logprobs are compared with those of a "
        "distribution that was not sampled"
    )


def _why_raw_penalties(terms: Sequence[Recorded]) -> str:
    return (
        f"sampled with {_listed(value for each in terms for value in each.penalties)}, with logprobs from before the penalties "
        f"({_modes(terms)}): the trainer's logprobs are compared with those of a distribution that was not sampled"
    )


def _why_untruncated(terms: Sequence[Recorded]) -> str:
    return (
        f"sampled with {_truncations(terms)}, with logprobs over all tokens ({_modes(terms)}): the trainer's logprobs are "
        "compared with those of a distribution that was not sampled, because only the kept tokens could be"
    )


def _why_no_mask(terms: Sequence[Recorded]) -> str:
    return (
        f"sampled with {_truncations(terms)}, with logprobs over the kept tokens ({_modes(terms)}), which were not recorded: "
        "the trainer's logprobs, over all tokens, are compared with logprobs over a part of them"
    )


def _why_logits(terms: Sequence[Recorded]) -> str:
    return (
        f"recorded with logits in place of logprobs ({_modes(terms)}): the trainer's logprobs are compared with logits"
    )


def _why_earlier_epoch(terms: Sequence[Recorded]) -> str:
    return (
        f"sampled in epoch {_listed(str(each.epoch) for each in terms)} of the policy, before the announced one: the trainer's "
        "logprobs are compared with those of weights that its run does not continue, at a distance that versions do not show"
    )


def _why_older_version(terms: Sequence[Recorded]) -> str:
    known = [(each.endpoint, *each.older) for each in terms if each.older is not None]
    shown = _listed(f"{endpoint}: {version} after {announced}" for endpoint, version, announced in known)
    return (
        f"sampled by an endpoint that reported an older version than the announced one ({shown}): the trainer's logprobs are "
        "compared with those of weights that an update did not reach, or the label of the weights was not updated"
    )


def _truncations(terms: Sequence[Recorded]) -> str:
    return _listed(value for each in terms for value in each.truncation)


def _modes(terms: Sequence[Recorded]) -> str:
    return _listed(f"{each.mode} of {each.kind}" for each in terms)


def _listed(values: Iterable[str]) -> str:
    """Return the first distinct values."""
    distinct = [*dict.fromkeys(value[:_LONGEST] for value in values)]
    return ", ".join([*distinct[:_SHOWN], *(["…"] if len(distinct) > _SHOWN else [])])


_PROCESSED: Final = "start vLLM with --logprobs-mode processed_logprobs and set engines.endpoints[].logprobs_mode to it"
_AFTER_TEMPERATURE: Final = {
    "vllm": f", or {_PROCESSED}",
    "sglang": ", or start SGLang without SGLANG_RETURN_ORIGINAL_LOGPROB and set no engines.endpoints[].logprobs_mode",
}
_MASKS: Final = {
    "vllm": ", or record sampling masks (/inference/v1/generate with --return-sampling-mask and processed_logprobs)",
    "sglang": ", or record sampling masks (record.sampling_masks, for chat calls with a top_k)",
}


def _fix_temperature(kind: str) -> str:
    return f"sample at temperature 1 (sampling.override){_AFTER_TEMPERATURE.get(kind, '')}"


def _fix_truncation(kind: str) -> str:
    return f"sample with top_p 1, top_k -1 and min_p 0 (sampling.override){_MASKS.get(kind, '')}"


class _Rule(NamedTuple):
    applies: Callable[[Recorded, int], bool]  # to tokens, in the announced epoch
    why: Callable[[Sequence[Recorded]], str]
    fix: Callable[[str], str]  # for a kind of engine


_RULES: Final[Mapping[str, _Rule]] = {
    "raw_temperature": _Rule(
        lambda it, _: it.mode == _RAW and it.temperature not in (None, 0, 1),
        _why_raw_temperature,
        _fix_temperature,
    ),
    "greedy": _Rule(
        lambda it, _: it.mode is not None and it.temperature == 0,
        _why_greedy,
        lambda _: "sample at temperature 1 (sampling.override)",
    ),
    "raw_penalties": _Rule(
        lambda it, _: it.mode == _RAW and it.penalties != (),
        _why_raw_penalties,
        lambda _: "sample without penalties (sampling.override)",
    ),
    "untruncated_logprobs": _Rule(
        lambda it, _: it.mode in _OVER_ALL and it.truncation != () and it.temperature != 0,
        _why_untruncated,
        _fix_truncation,
    ),
    "no_sampling_mask": _Rule(
        lambda it, _: (
            it.mode == "processed_logprobs" and it.truncation != () and it.temperature != 0 and not it.has_mask
        ),
        _why_no_mask,
        _fix_truncation,
    ),
    "logits": _Rule(lambda it, _: it.mode in _LOGITS, _why_logits, lambda _: _PROCESSED),
    "earlier_epoch": _Rule(
        lambda it, epoch: it.epoch < epoch,
        _why_earlier_epoch,
        lambda _: "drop such groups (earlier_epochs: drop of the claim, or groups.earlier_epochs)",
    ),
    "older_version": _Rule(
        lambda it, _: it.older is not None,
        _why_older_version,
        lambda _: "update the weights of each endpoint, and their version, before the version is announced",
    ),
}
RATIO_WARNINGS: Final = tuple(_RULES)
