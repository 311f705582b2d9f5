"""The suite: each shape is sent to the engine alone and through TokenTape, and the recorded step is verified."""

from collections.abc import AsyncIterator, Awaitable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from http.client import BAD_REQUEST, FORBIDDEN, METHOD_NOT_ALLOWED, NOT_FOUND, NOT_IMPLEMENTED, OK, UNPROCESSABLE_ENTITY
from importlib.metadata import version
from time import monotonic
from typing import Any, Final

from proxy.cli.certify.access import Access, Answer, Unanswered
from proxy.cli.certify.certificate import Cell, Certificate, Ended
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
from proxy.cli.certify.shapes import CHAT, QUESTION, SEED, SGLANG_GENERATE, TOKENS, WORDS, Body, Shape
from proxy.cli.check import model_names
from proxy.protocols.dialects import DIALECTS
from proxy.protocols.engines import ENGINES
from proxy.protocols.engines.base import QUIRK_CODES, CallOptions, Traits
from proxy.rollouts.scoring.audit import NOT_SCORED, AuditLog, AuditOptions, Result, audit_rows
from proxy.rollouts.scoring.requests import NotScored, Scorer, find_scorer
from proxy.trajectory.step import describe_problems

_REFUSALS: Final = frozenset(
    {BAD_REQUEST, FORBIDDEN, NOT_FOUND, METHOD_NOT_ALLOWED, UNPROCESSABLE_ENTITY, NOT_IMPLEMENTED}
)
_TOKENIZERS: Final = {"vllm": "/tokenize", "sglang": "/v1/tokenize", "llamacpp": "/tokenize"}
_DETECTIONS: Final = 5
_SAMPLED: Final = 16  # tokens of a call that is measured
_LEAST: Final = 8  # tokens of a reply
_FAST: Final = 50  # tokens per second; a slower engine gets shorter replies: the suite takes less than three minutes
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
    """Runs shapes against an engine. Each method returns a cell, or raises `Ended` with one."""

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

    async def result(self, test: Awaitable[Cell]) -> Cell:
        """Return the result of a test, which is a failure if the engine or TokenTape does not answer as it must.

        Raises Gone if the engine does not answer other requests either, or was too slow twice in a row.
        """
        try:
            cell = await test
        except Ended as ended:
            cell = ended.cell
        except Unanswered as error:
            self._slow = self._slow + 1 if error.is_slow else 0
            if self._slow > 1:
                raise Gone(str(error)) from error
            try:
                await self.access.engine.get("/v1/models")
            except Unanswered as another:
                raise Gone(str(another)) from error
            return Cell("failed", str(error))
        except TimeoutError:
            return Cell("failed", "TokenTape stored no step in time")
        except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
            return Cell("failed", f"a response or a step lacks what it must have: {error!r}")
        self._slow = 0
        return cell

    async def run(self, shape: Shape, *, stream: bool) -> Cell:
        """Run a shape."""
        body = self.body_of(shape, stream=stream)
        rollout = self.new_rollout()
        through = f"/rollouts/{rollout}{shape.path}"
        if shape.treatment == "translated":
            served(await self.access.proxy.post(through, body))
            return await self._recorded(shape, body, rollout)
        alone = await self.access.engine.post(shape.path, body)
        if shape.treatment == "refused":
            return _same_error(alone, await self.access.proxy.post(through, body))
        if alone.status in _REFUSALS:
            served(alone)
        if alone.status != OK:
            return Cell("failed", f"the engine returns {alone.status}: {alone.message}")
        shown = await self.access.proxy.post(through, body)
        if shown.status != OK:
            why = f"the engine alone returns {alone.status}, TokenTape {shown.status}: {shown.message}"
            return Cell("differs", why)
        other = await self._difference(shape, body, alone, shown)
        try:
            recorded = await self._recorded(shape, body, rollout)
        except Ended as ended:
            recorded = ended.cell
        return Cell("differs", other, recorded.problems) if other and recorded.verdict != "wrong" else recorded

    async def _difference(self, shape: Shape, body: Body, alone: Answer, shown: Answer) -> str:
        """Return how the agent's response differs from the engine's own; empty if it does not."""
        expected = self._read(shape, body, alone, "the engine's response")
        try:
            actual = self._read(shape, body, shown, "the response through TokenTape")
        except Ended as ended:
            return ended.cell.why
        if are_equal(expected, actual):
            return ""
        again = await self.access.engine.post(shape.path, body)
        second = self._read(shape, body, again, "the engine's second response")
        if are_equal(second, actual):
            return ""
        if not are_equal(second, expected) and formats(actual) <= formats(expected) | formats(second):
            self.certificate.facts["compared_by_format"] = self.certificate.facts.get("compared_by_format", 0) + 1
            return ""
        return difference(expected, actual)

    def _read(self, shape: Shape, body: Body, answer: Answer, name: str) -> Merged:
        """Return the contents of a response. Raises Ended if it cannot be read."""
        is_stream = bool(body.get("stream"))
        is_replayed = is_stream and "replay" in self.certificate.facts["streams"].values()
        try:
            values = payloads(answer.content_type, answer.body)
            if is_stream and shape.path == SGLANG_GENERATE:
                values = last_events(values)
            found = merged(values, is_stream=is_stream)
        except ValueError as error:
            raise Ended("failed", f"{name} cannot be read: {error}") from error
        # A replayed stream has the logprobs that the engine's own stream loses.
        return {path: value for path, value in found.items() if not (is_replayed and "logprobs" in path)}

    async def _recorded(self, shape: Shape, body: Body, rollout: str) -> Cell:
        """Verify that the step of this call is exact, by comparing and scoring its ids."""
        step = await self.only_step(rollout)
        self.check_flags(shape.path, body, step)
        await self._check_ids(shape, step)
        # Truncated logprobs are of the kept tokens only, and scores are of all.
        if not (self.logprobs_mode == "processed_logprobs" and _TRUNCATING & body.keys()):
            await self.check_scores(rollout)
        return Cell("exact")

    async def steps(self, rollout: str) -> list[dict[str, Any]]:
        """Return the recorded steps of a rollout. Raises Unanswered."""
        answer = await self.access.proxy.get(f"/rollouts/{rollout}/steps?limit=100")
        return list(answer.json()["steps"]) if answer.status == OK else []

    async def only_step(self, rollout: str) -> dict[str, Any]:
        """Return the only step of a rollout. Raises Ended if there are none or several."""
        steps = await self.steps(rollout)
        if len(steps) != 1:
            raise Ended("wrong", f"{len(steps)} steps are recorded of one call")
        return steps[0]

    def check_flags(self, path: str, body: Mapping[str, Any], step: Mapping[str, Any]) -> None:
        """Raise Ended unless a step is exact: with its problems, and whether a known limitation of the engine explains them."""
        problems = tuple(step["fidelity"]["problems"])
        if not problems:
            return
        dialect = DIALECTS[path].name if path in DIALECTS else "chat"  # to which the others are translated
        options, live = CallOptions(traits=self.traits), step["extra"].get("streaming") == "live"
        quirks = ENGINES[self.kind].expected_quirks(dialect, body, options, live=live)
        codes = {code for quirk in quirks for code in quirk.codes}
        codes |= QUIRK_CODES if "no_token_ids" in codes else set()  # without ids there is nothing of the others either
        described = " ".join(describe_problems(problems))
        known = " ".join(quirk.what for quirk in quirks if set(quirk.codes) & set(problems))
        # A limitation with a problem of its own, such as echo, explains the others.
        if set(problems) <= codes or (codes - QUIRK_CODES) & set(problems):
            raise Ended("flagged", known or described, problems)
        raise Ended("unexpected", described, problems)

    async def _check_ids(self, shape: Shape, step: Mapping[str, Any]) -> None:
        """Raise Ended if the engine returns other ids for the same request, where its text is the same."""
        kind = self.kind
        if shape.treatment != "compared" or shape.draws or kind not in ASKING or shape.path not in DIALECTS:
            return
        if shape.name not in self._ids:
            self._ids[shape.name] = await self._asked(shape, kind)
        expected = self._ids[shape.name]
        actual = {choice["index"]: choice["ids"] for choice in step["choices"]}
        # If it returns others again, it samples other tokens each time.
        if expected not in (None, actual) and expected == await self._asked(shape, kind):
            raise Ended("wrong", f"recorded ids {short(actual)}, the engine alone returns {short(expected)}")

    async def _asked(self, shape: Shape, kind: str) -> dict[int, list[int]] | None:
        answer = await self.access.engine.post(shape.path, self.body_of(shape, stream=False) | ASKING[kind])
        return sampled_ids(kind, answer.json()) if answer.status == OK else None

    async def check_scores(self, rollout: str) -> None:
        """Let the engine score what a rollout exports. Raises Ended if it contradicts."""
        scorer, mode, scores = self.scorer, self.logprobs_mode, self.certificate.scores
        if scorer is None or mode not in {"raw_logprobs", "processed_logprobs", "after_temperature_logprobs"}:
            return
        answer = await self.access.proxy.get(f"/rollouts/{rollout}/export?format=sequences")
        rows = answer.json()["rows"] if answer.status == OK else []
        options = AuditOptions(self.tolerance, mode, at_once=1)  # type: ignore[arg-type]  # checked above
        for result in await audit_rows(_each(rows), scorer, options, AuditLog(None), lambda _result: None):
            if result.mean is not None and result.max is not None:
                scores.add(result.count, result.mean, result.max)
            if result.verdict == NOT_SCORED:
                scores.reason = result.note
            elif result.mean is not None and self._is_wrong(result):
                first = result.first or {}
                place = f"{first.get('position')}, recorded {first.get('recorded')}, scored {first.get('scored')}"
                raise Ended("wrong", f"scored again, the row is {result.verdict}: {result.note}; first at {place}")

    def _is_wrong(self, result: Result) -> bool:
        if result.verdict == "other weights":
            limit = self.tolerance
            return (result.mean or 0) >= _SMALL * limit or (result.max or 0) >= _SMALL_ALONE * limit
        return not result.is_well


async def _each(rows: list[Any]) -> AsyncIterator[Any]:
    for row in rows:
        yield row


def served(answer: Answer) -> Answer:
    """Return a response. Raises Ended if it is an error: the engine does not serve the call."""
    if answer.status != OK:
        raise Ended("not served", f"the engine returns {answer.status}: {answer.message}")
    return answer


def _same_error(alone: Answer, shown: Answer) -> Cell:
    """Compare two errors; a stream may contain its error in an event."""
    if alone.status == OK and b"error" not in alone.body:
        return Cell("not served", f"the engine accepts it ({alone.status})")
    if (alone.status, alone.content_type, _unnamed(alone)) == (shown.status, shown.content_type, _unnamed(shown)):
        return Cell("ok")
    why = f"the engine alone: {alone.status} {alone.message}; TokenTape: {shown.status} {shown.message}"
    return Cell("differs", why)


def _unnamed(answer: Answer) -> Any:
    """Return an error byte for byte, or the contents of a stream, without its time and name."""
    try:
        return answer.body if answer.status != OK else merged(payloads(answer.content_type, answer.body))
    except ValueError:
        return answer.body


async def make_suite(access: Access, wanted: str | None, tolerance: float) -> Suite:
    """Return a suite of the engine, once it is identified. Raises OSError or ValueError."""
    model = await _model(access, wanted)
    shown = await _detected(access)
    traits = Traits(shown["kind"], shown["version"], has_parser=shown["parser"])
    words = {word: token for word in WORDS if (token := await _token(access, traits.kind, model, word)) is not None}
    has_seeds, tokens_per_s = await _has_seeds(access, model)
    today = datetime.now(UTC).date().isoformat()
    certificate = Certificate(traits.kind, traits.version or "of unknown version", model, version("tokentape"), today)
    certificate.facts = {"seeds": has_seeds, "parser": shown["parser"], "streams": shown["streams"]}
    scorer = None
    try:
        scorer = replace(await find_scorer(access.engine.score, traits.kind, None), model=model)
    except (NotScored, OSError, TypeError) as error:  # TypeError: a list of models that is none
        certificate.scores.reason = str(error)
    mode = shown["logprobs_mode"]
    return Suite(access, certificate, traits, model, mode, words, has_seeds, tokens_per_s, scorer, tolerance)


async def _model(access: Access, wanted: str | None) -> str:
    """Return the model to certify. Raises ValueError."""
    answer = await access.engine.get("/v1/models")
    if answer.status in {401, FORBIDDEN}:
        raise ValueError(f"the engine requires another API key ({answer.status}); pass it with --api-key")
    names = model_names(answer.json())
    if wanted is not None or names:
        return wanted or names[0]
    raise ValueError(
        f"the engine lists no models (GET /v1/models returned {answer.status}); use its base URL, or pass --model"
    )


async def _detected(access: Access) -> dict[str, Any]:
    """Return the engine as TokenTape shows it, once it is detected. Raises OSError."""
    shown: dict[str, Any] = {"kind": "auto", "last_fault": None}
    for _ in range(_DETECTIONS):  # a loaded engine may not answer the probes of the first ones in time
        if shown["kind"] == "auto":
            (shown,) = (await access.proxy.get("/engines")).json()["engines"]
    if shown["kind"] == "auto":
        raise OSError(f"the engine was not detected: {shown['last_fault'] or 'it does not answer the probes'}")
    return shown


async def _token(access: Access, kind: str, model: str, word: str) -> int | None:
    """Return the id of a special token, None if the model has none for this text."""
    if kind not in _TOKENIZERS:
        return None
    body = {"model": model, "prompt": word, "content": word, "add_special_tokens": False, "parse_special": True}
    try:
        answer = await access.engine.post(_TOKENIZERS[kind], body)
    except Unanswered:
        return None
    found = answer.json()
    tokens = found.get("tokens") if isinstance(found, dict) else None
    return tokens[0] if isinstance(tokens, list) and len(tokens) == 1 and type(tokens[0]) is int else None


async def _has_seeds(access: Access, model: str) -> tuple[bool, float]:
    """Return whether two sampled replies with one seed are equal, and the tokens per second of the second one."""
    body = {"model": model, "messages": QUESTION, "seed": SEED, "temperature": 1, "max_tokens": _SAMPLED}
    first = _message(await access.engine.post(CHAT, body))
    start = monotonic()
    second = _message(await access.engine.post(CHAT, body))
    return first == second, _SAMPLED / max(monotonic() - start, 0.001)


def _message(answer: Answer) -> Any:
    if answer.status != OK:
        return None
    try:
        (response,) = payloads(answer.content_type, answer.body)
        return response["choices"][0]["message"]
    except (ValueError, KeyError, IndexError, TypeError):
        return None
