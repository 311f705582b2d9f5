"""The suite: each shape is sent to the engine alone and through TokenTape, and the recorded step is verified."""

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from http.client import BAD_REQUEST, FORBIDDEN, METHOD_NOT_ALLOWED, NOT_FOUND, NOT_IMPLEMENTED, OK, UNPROCESSABLE_ENTITY
from typing import Any, Final

from proxy.cli.certify.access import Access, Answer, Unanswered
from proxy.cli.certify.certificate import Cell, Certificate
from proxy.cli.certify.comparing import (
    ASKING,
    Merged,
    are_equal,
    difference,
    formats,
    last_events,
    merged,
    payloads,
    sampled_ids,
    short,
)
from proxy.cli.certify.shapes import SGLANG_GENERATE, TOKENS, Body, Shape
from proxy.protocols.dialects import DIALECTS
from proxy.protocols.engines import ENGINES
from proxy.protocols.engines.base import QUIRK_CODES, CallOptions, Quirk, Traits
from proxy.rollouts.scoring.audit import NOT_SCORED, AuditLog, AuditOptions, Result, audit_rows
from proxy.rollouts.scoring.requests import Scorer
from proxy.trajectory.fidelity import describe

_REFUSALS: Final = frozenset(
    {BAD_REQUEST, FORBIDDEN, NOT_FOUND, METHOD_NOT_ALLOWED, UNPROCESSABLE_ENTITY, NOT_IMPLEMENTED}
)
_LEAST: Final = 8  # tokens of a reply
_FAST: Final = (
    50  # tokens per second; a slower engine gets shorter replies, so that the suite takes less than three minutes
)
# Times the tolerance, on average over a row and for one token. In bfloat16, what vLLM 0.32 scores and what it sampled differ by
# up to 0.07 on average over 23 tokens, and by up to 0.28. A wrong token, and those in its context, differ by more.
_SMALL, _SMALL_ALONE = 20, 100
_TRUNCATING: Final = frozenset({"top_k", "top_p", "min_p"})
_GREEDY: Final = {
    "temperature": 1,
    "top_k": 1,
}  # scored as it was sampled, which temperature 0 is not after temperature


class Gone(Exception):
    """The engine does not answer any more; the message is the reason."""


@dataclass
class Suite:
    """Runs shapes against an engine. Each method returns a cell, or raises `Gone`."""

    access: Access
    certificate: Certificate
    traits: Traits
    model: str
    logprobs_mode: str | None
    words: dict[str, int]  # the ids of special tokens, by their text
    has_seeds: bool  # two requests with one seed get the same tokens
    tokens_per_s: float  # of one call
    scorer: Scorer | None
    tolerance: float
    _rollouts: int = 0
    _slow: int = 0
    _ids: dict[str, dict[int, list[int]] | None] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """The engine type."""
        return self.traits.kind

    def new_rollout(self) -> str:
        """Return the ID of a new rollout."""
        self._rollouts += 1
        return f"certify-{self._rollouts}"

    def body_of(self, shape: Shape, *, stream: bool) -> Body:
        """Return the request of a shape to this engine."""
        body = shape.body_for(self.kind, self.model, self.words)
        if not self.has_seeds and not shape.draws and "seed" in body:
            body |= _GREEDY
        if body.get("max_tokens") == TOKENS:
            body["max_tokens"] = max(_LEAST, min(TOKENS, int(TOKENS * self.tokens_per_s / _FAST)))
        return body | ({"stream": True} if stream else {})

    async def run(self, shape: Shape, *, stream: bool) -> Cell:
        """Run a shape."""
        try:
            cell = await self._run(shape, stream=stream)
        except Unanswered as error:
            await self.is_gone(error)
            return Cell("failed", str(error))
        self._slow = 0
        return cell

    async def is_gone(self, error: Unanswered) -> None:
        """Raise Gone if the engine does not answer other requests either, or was too slow twice in a row."""
        self._slow = self._slow + 1 if error.is_slow else 0
        if self._slow > 1:
            raise Gone(str(error)) from error
        try:
            await self.access.engine.get("/v1/models")
        except Unanswered as another:
            raise Gone(str(another)) from error

    async def _run(self, shape: Shape, *, stream: bool) -> Cell:
        body = self.body_of(shape, stream=stream)
        rollout = self.new_rollout()
        through = f"/rollouts/{rollout}{shape.path}"
        if shape.treatment == "translated":
            shown = await self.access.proxy.post(through, body)
            return await self._recorded(shape, body, rollout) if shown.status == OK else _refused(shown)
        alone = await self.access.engine.post(shape.path, body)
        if shape.treatment == "refused":
            return _same_error(alone, await self.access.proxy.post(through, body))
        if alone.status in _REFUSALS:
            return _refused(alone)
        if alone.status != OK:
            return Cell("failed", f"the engine returns {alone.status}: {alone.message}")
        shown = await self.access.proxy.post(through, body)
        if shown.status != OK:
            return Cell(
                "differs", f"the engine alone returns {alone.status}, TokenTape {shown.status}: {shown.message}"
            )
        other = await self._compare(shape, body, alone, shown)
        if other is not None and other.verdict == "failed":
            return other
        recorded = await self._recorded(shape, body, rollout)
        if other is None or recorded.verdict == "wrong":
            return recorded
        return Cell(other.verdict, other.why, recorded.problems)

    async def _compare(self, shape: Shape, body: Body, alone: Answer, shown: Answer) -> Cell | None:
        """Return how the agent's response differs from the engine's own; None if it does not."""
        is_stream = bool(body.get("stream"))
        is_replayed = is_stream and "replay" in self.certificate.facts["streams"].values()

        def read(answer: Answer) -> Merged:
            values = payloads(answer.content_type, answer.body)
            if is_stream and shape.path == SGLANG_GENERATE:
                values = last_events(values)
            found = merged(values, is_stream=is_stream)
            # A replayed stream has the logprobs that the engine's own stream loses.
            return {path: value for path, value in found.items() if not (is_replayed and "logprobs" in path)}

        try:
            expected = read(alone)
        except ValueError as error:
            return Cell("failed", f"the engine's response cannot be read: {error}")
        try:
            actual = read(shown)
        except ValueError as error:
            return Cell("differs", f"the response through TokenTape cannot be read: {error}")
        if are_equal(expected, actual):
            return None
        again = await self.access.engine.post(shape.path, body)
        try:
            second = read(again)
        except ValueError as error:
            return Cell("failed", f"the engine's second response cannot be read: {error}")
        if are_equal(second, actual):
            return None
        if not are_equal(second, expected) and formats(actual) <= formats(expected) | formats(second):
            self.certificate.facts["compared_by_format"] = self.certificate.facts.get("compared_by_format", 0) + 1
            return None
        return Cell("differs", difference(expected, actual))

    async def _recorded(self, shape: Shape, body: Body, rollout: str) -> Cell:
        """Return whether the step of this call is exact, after comparing and scoring its ids."""
        steps = await self.steps(rollout)
        if len(steps) != 1:
            return Cell("wrong", f"{len(steps)} steps are recorded of one call")
        if (cell := self.flags(shape.path, body, steps[0])) is not None:
            return cell
        if (cell := await self._other_ids(shape, steps[0])) is not None:
            return cell
        if self.logprobs_mode == "processed_logprobs" and _TRUNCATING & body.keys():
            return Cell("exact")  # its logprobs are of the kept tokens only, and scores are of all
        return await self.scored(rollout) or Cell("exact")

    async def steps(self, rollout: str) -> list[dict[str, Any]]:
        """Return the recorded steps of a rollout. Raises Unanswered."""
        answer = await self.access.proxy.get(f"/rollouts/{rollout}/steps?limit=100")
        found = answer.json()
        return list(found["steps"]) if answer.status == OK else []

    def flags(self, path: str, body: Mapping[str, Any], step: Mapping[str, Any]) -> Cell | None:
        """Return the problems of a step, and whether a known limitation of the engine explains them; None if it is exact."""
        problems = tuple(step["fidelity"]["problems"])
        if not problems:
            return None
        quirks = self._quirks(path, body, step)
        codes = {code for quirk in quirks for code in quirk.codes}
        codes |= QUIRK_CODES if "no_token_ids" in codes else set()  # without ids there is nothing of the others either
        why = " ".join(quirk.what for quirk in quirks if set(quirk.codes) & set(problems)) or " ".join(
            describe(problems)
        )
        # A limitation with a problem of its own, such as echo, explains the others.
        if set(problems) <= codes or (codes - QUIRK_CODES) & set(problems):
            return Cell("flagged", why, problems)
        return Cell("unexpected", " ".join(describe(problems)), problems)

    def _quirks(self, path: str, body: Mapping[str, Any], step: Mapping[str, Any]) -> list[Quirk]:
        dialect = DIALECTS[path].name if path in DIALECTS else "chat"  # to which the others are translated
        options, live = CallOptions(traits=self.traits), step["extra"].get("streaming") == "live"
        return ENGINES[self.kind].expected_quirks(dialect, body, options, live=live)

    async def _other_ids(self, shape: Shape, step: Mapping[str, Any]) -> Cell | None:
        """Return a cell if the engine returns other ids for the same request, where its text is the same."""
        kind = self.kind
        if shape.treatment != "compared" or shape.draws or kind not in ASKING or shape.path not in DIALECTS:
            return None
        if shape.name not in self._ids:
            self._ids[shape.name] = await self._asked(shape, kind)
        expected = self._ids[shape.name]
        actual = {choice["index"]: choice["ids"] for choice in step["choices"]}
        if expected is None or expected == actual:
            return None
        again = await self._asked(shape, kind)
        if again != expected:
            return None  # it samples other tokens each time
        return Cell("wrong", f"recorded ids {short(actual)}, the engine alone returns {short(expected)}")

    async def _asked(self, shape: Shape, kind: str) -> dict[int, list[int]] | None:
        answer = await self.access.engine.post(shape.path, self.body_of(shape, stream=False) | ASKING[kind])
        return sampled_ids(kind, answer.json()) if answer.status == OK else None

    async def scored(self, rollout: str) -> Cell | None:
        """Let the engine score what a rollout exports; return a cell if it contradicts."""
        scorer, mode = self.scorer, self.logprobs_mode
        if scorer is None or mode not in {"raw_logprobs", "processed_logprobs", "after_temperature_logprobs"}:
            return None
        answer = await self.access.proxy.get(f"/rollouts/{rollout}/export?format=sequences")
        rows = answer.json()["rows"] if answer.status == OK else []
        options = AuditOptions(self.tolerance, mode, at_once=1)  # type: ignore[arg-type]  # checked above
        results = await audit_rows(_each(rows), scorer, options, AuditLog(None), lambda _result: None)
        for result in results:
            if result.mean is not None and result.max is not None:
                self.certificate.scores.add(result.count, result.mean, result.max)
            if result.verdict == NOT_SCORED:
                self.certificate.scores.reason = result.note
            elif result.mean is not None and self._is_wrong(result):
                first = result.first or {}
                place = f"{first.get('position')}, recorded {first.get('recorded')}, scored {first.get('scored')}"
                return Cell("wrong", f"scored again, the row is {result.verdict}: {result.note}; first at {place}")
        return None

    def _is_wrong(self, result: Result) -> bool:
        if result.verdict == "other weights":
            limit = self.tolerance
            return (result.mean or 0) >= _SMALL * limit or (result.max or 0) >= _SMALL_ALONE * limit
        return not result.is_well


async def _each(rows: list[Any]) -> AsyncIterator[Any]:
    for row in rows:
        yield row


def _refused(answer: Answer) -> Cell:
    return Cell("not served", f"the engine returns {answer.status}: {answer.message}")


def _same_error(alone: Answer, shown: Answer) -> Cell:
    """Compare two errors; a stream may contain its error in an event."""
    if alone.status == OK and b"error" not in alone.body:
        return Cell("not served", f"the engine accepts it ({alone.status})")
    if (alone.status, alone.content_type, _unnamed(alone)) == (shown.status, shown.content_type, _unnamed(shown)):
        return Cell("ok")
    return Cell(
        "differs", f"the engine alone: {alone.status} {alone.message}; TokenTape: {shown.status} {shown.message}"
    )


def _unnamed(answer: Answer) -> Any:
    """Return an error byte for byte, or the contents of a stream, without its time and name."""
    try:
        return answer.body if answer.status != OK else merged(payloads(answer.content_type, answer.body))
    except ValueError:
        return answer.body
