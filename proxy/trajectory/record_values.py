"""Validation of the values of a decoded record.

Earlier versions stored an engine's response without checking its types. A value of another type is dropped, and the
step is flagged, so that readers of steps can rely on the types. `ValueError` is raised for a value that a step
requires. Heads whose values all have their types do not need it: see `record_head`.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from typing import Any, Final, get_args

from proxy.trajectory.record_head import EXTRA_TYPES, LARGEST, LATEST_S, ChoiceHead, Head, PromptHead
from proxy.trajectory.step import DEFAULT_POLICY, Dialect, EngineFacts, Span, Status, Timing

ODD: Final = "unparsed_event"
ODD_SPANS: Final = "version_spans"

_STATUSES: Final = get_args(Status)
_DIALECTS: Final = get_args(Dialect)
_NUMBERS: Final = frozenset({int, float})
_NO_SPAN: Final = Span(-1, -1)  # outside of any choice


class Typed:
    """Reads the values of one record. `problems` are the codes of dropped values."""

    def __init__(self) -> None:
        self.problems: dict[str, None] = {}

    def text(self, value: Any) -> str | None:
        """Return a string or null; null for anything else."""
        if value is None or isinstance(value, str):
            return value
        self.problems[ODD] = None
        return None

    def version(self, value: Any) -> str | None:
        """Return a policy version; an integer becomes a string."""
        return str(value) if type(value) is int else self.text(value)

    def epoch(self, value: Any) -> int:
        """Return the epoch of a span; the first one, 0, if it is no count."""
        if type(value) is int and 0 <= value <= LARGEST:
            return value
        self.problems[ODD] = None
        return 0

    def stop_reason(self, value: Any) -> int | str | None:
        """Return a stop reason: a token id or a string."""
        return value if type(value) is int and abs(value) <= LARGEST else self.text(value)

    def mapping(self, value: Any) -> dict[str, Any] | None:
        """Return an object or null; null for anything else."""
        if value is None or isinstance(value, dict):
            return value
        self.problems[ODD] = None
        return None

    def spans(self, value: Any, ids: int) -> tuple[Span, ...]:
        """Return the spans of a choice with this number of ids; none if one of them is out of range."""
        if not value:
            return ()
        spans = []
        for given in value if isinstance(value, list) else ():
            span = _span(given, self) if isinstance(given, dict) else _NO_SPAN
            if 0 <= span.start <= span.end <= ids:
                spans.append(span)
        if len(spans) == len(value):
            return tuple(spans)
        self.problems[ODD_SPANS] = None
        return ()

    def head(self, given: Mapping[str, Any]) -> Head:
        """Return the head of a record with these values; its problems include those found here."""
        facts = self._facts(given)
        prompts = [PromptHead(prompt["end"], _count(prompt["tail"])) for prompt in given["prompts"]]
        choices = [self._choice(choice) for choice in given["choices"]]
        facts["problems"] = flagged(facts["problems"], self.problems)
        return Head(
            **facts,
            prompts=prompts,
            choices=choices,
            chains=given.get("chains", {}),
            again=given.get("again", []),
            policy=_required(given.get("policy", DEFAULT_POLICY), str),
        )

    def _facts(self, head: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "step_id": _required(head["step_id"], str),
            "rollout_id": _required(head["rollout_id"], str),
            "dialect": _one_of(head["dialect"], _DIALECTS),
            "endpoint": _required(head["endpoint"], str),
            "engine": self._engine(head["engine"]),
            "model_asked": self.text(head["model_asked"]),
            "model_served": self.text(head["model_served"]),
            "usage": self.mapping(head["usage"]),
            "sampling": self.mapping(head["sampling"]),
            "timing": _timing(head["timing"]),
            "status": _one_of(head["status"], _STATUSES),
            "reason": self.text(head["reason"]),
            "delivered": _required(head["delivered"], bool),
            "policy_version": self.version(head["policy_version"]),
            "policy_version_end": self.version(head["policy_version_end"]),
            "problems": tuple([_required(code, str) for code in _required(head["problems"], list)]),
            "extra": _extra(self.mapping(head["extra"]) or {}),
        }

    def _choice(self, head: Mapping[str, Any]) -> ChoiceHead:
        ids = _count(head["ids"])
        return ChoiceHead(
            index=_index(head["index"]),
            prompt=_index(head["prompt"]),
            finish_reason=self.text(head["finish_reason"]),
            stop_reason=self.stop_reason(head["stop_reason"]),
            spans=self.spans(head["spans"], ids),
            ids=ids,
            logprobs=_count(head["logprobs"]),
            code=_one_of(head["code"], ("f", "d")),
            experts=head.get("experts"),
            mask=head.get("mask"),
        )

    def _engine(self, value: Any) -> EngineFacts:
        name, kind, url = [_required(value[field], str) for field in ("name", "kind", "url")]
        return EngineFacts(name, kind, self.text(value["version"]), url)


def flagged(problems: tuple[str, ...], found: Iterable[str]) -> tuple[str, ...]:
    """Return the problems with the found ones that are not among them."""
    return (*problems, *(code for code in found if code not in problems))


def _index(value: Any) -> int:
    """Return a required integer of 64 bits."""
    if abs(_required(value, int)) > LARGEST:
        raise ValueError("an integer has more than 64 bits")
    return int(value)


def _count(value: Any) -> int:
    """Return a required integer that is not negative."""
    if _index(value) < 0:
        raise ValueError("a number of values is negative")
    return int(value)


def object_of(value: Any) -> dict[str, Any]:
    """Return a required object."""
    return dict(_required(value, dict))


def number(value: Any) -> float | None:
    """Return a finite number; None for anything else, such as a temperature that a client sent as a string."""
    return value if type(value) in _NUMBERS and isfinite(value) else None


def sent_of(value: Any) -> dict[str, Any]:
    """Return the changes of a request: an object `set` and a list of names `unset`, where it has them."""
    sent = object_of(value)
    _required(sent.get("set") or {}, dict)
    for name in _required(sent.get("unset") or [], list):
        _required(name, str)
    return sent


def _required(value: Any, kind: type[Any]) -> Any:
    """Return a value of this type; True is not an integer.

    Raises:
        ValueError: It has another type.
    """
    if type(value) is not kind:
        raise ValueError(f"expected {kind.__name__}, found {type(value).__name__}")
    return value


def _one_of(value: Any, known: Sequence[str]) -> Any:
    if value not in known:
        raise ValueError(f"a value is not one of {', '.join(known)}")
    return value


def _span(value: Mapping[str, Any], typed: Typed) -> Span:
    start, end = value.get("start"), value.get("end")
    if type(start) is not int or type(end) is not int:
        return _NO_SPAN
    return Span(start, end, typed.version(value.get("policy_version")), typed.epoch(value.get("epoch", 0)))


def _timing(value: Mapping[str, Any]) -> Timing:
    received = _time(value["received"])
    if received is None:
        raise ValueError("timing.received is not a time")
    get = value.get
    return Timing(received, _time(get("sent")), _time(get("first_byte")), _time(get("last_byte")), _time(get("stored")))


def _time(value: Any) -> float | None:
    found = number(value)
    return found if found is not None and abs(found) < LATEST_S else None


def _extra(value: dict[str, Any]) -> dict[str, Any]:
    """Return the extra facts, without those of a wrong type that readers use."""
    for name, kind in EXTRA_TYPES.items():
        if name in value and type(value[name]) is not kind:
            del value[name]
    return value
