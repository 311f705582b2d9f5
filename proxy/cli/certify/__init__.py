"""`tokentape certify`: whether training on what an engine returns is safe, shape by shape.

shapes         the requests, literally; the tests with real engines use them too
access         requests to the engine alone and through a temporary proxy, with limits
comparing      [pure] what two responses have in common
suite          one shape: the responses compared, the step verified, its tokens scored again
conversations  what takes several requests: continuation, agents that leave, the mode of logprobs, admin routes
certificate    [pure] the results, their JSON, and the line for a bug report
printing       the table
"""

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from http.client import OK, UNAUTHORIZED
from importlib.metadata import version
from logging import NullHandler
from time import monotonic
from typing import Any, Final

from rich.console import Console

from proxy.cli.certify.access import Access, Answer, Unanswered, access_to
from proxy.cli.certify.certificate import Cell, Certificate, print_certificate
from proxy.cli.certify.comparing import payloads
from proxy.cli.certify.conversations import (
    ADMIN,
    aborted,
    continued,
    left,
    logprobs_mode,
    new_version,
    paused,
    reports_versions,
)
from proxy.cli.certify.shapes import CHAT, QUESTION, SEED, SHAPES, WORDS
from proxy.cli.certify.suite import Gone, Suite
from proxy.cli.check.engines import is_tokentape
from proxy.cli.console import certify_bar, print_error, print_json
from proxy.cli.runner import Exit
from proxy.config.settings import Settings
from proxy.protocols.engines.base import Traits
from proxy.rollouts.scoring.requests import NotScored, find_scorer
from proxy.telemetry.logs import LOG

Test = tuple[str, str, bool, Callable[[], Awaitable[Cell]]]  # topic, name, whether streamed, and what runs it


@dataclass(frozen=True, slots=True)
class Request:
    """The options of the command."""

    url: str
    settings: Settings
    model: str | None = None
    api_key: str | None = field(default=None, repr=False)
    admin: bool = False
    tolerance: float = 0.01
    limit_s: float = 180
    as_json: bool = False


async def certify(request: Request, out: Console, notes: Console) -> Exit:
    """Run the suite, print its results, and return the exit code. Raises OSError or ValueError if it cannot start."""
    LOG.addHandler(NullHandler())  # the table has what its messages report
    if await is_tokentape(request.url.rstrip("/").removesuffix("/v1"), request.settings):
        raise ValueError(f"{request.url} is a TokenTape proxy, not an engine; use the URL of the engine")
    async with access_to(request.settings, request.url, request.api_key, request.limit_s) as access:
        certificate = await run_suite(access, request, notes)
    if request.as_json:
        print_json(certificate.to_json())
    else:
        print_certificate(certificate, out)
    if certificate.ended:
        print_error(f"the run is incomplete: {certificate.ended}")
        return Exit.FAILED
    if certificate.is_safe:
        return Exit.DONE
    return Exit.FOUND if certificate.faults else Exit.UNTRAINABLE


async def run_suite(access: Access, request: Request, notes: Console) -> Certificate:
    """Return the results. Raises OSError or ValueError if the engine cannot be identified."""
    suite = await make_suite(access, request.model, request.tolerance)
    certificate, tests = suite.certificate, list(_tests(suite, admin=request.admin))
    with certify_bar(notes, len(tests)) as advance:
        for topic, name, stream, run in tests:
            advance(f"{name}, {'streamed' if stream else 'whole'}")
            certificate.add(topic, name, await _one(suite, run), stream=stream)
    return certificate


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


async def _one(suite: Suite, run: Callable[[], Awaitable[Cell]]) -> Cell:
    """Run a test and return its result, or "not run" if the engine no longer responds or the time limit is reached."""
    certificate = suite.certificate
    if not certificate.ended and suite.access.engine.is_over:
        certificate.ended = "the time limit was reached; repeat with a higher --time-limit-s"
    if certificate.ended:
        return Cell("not run")
    try:
        return await run()
    except Gone as error:
        certificate.ended = str(error)
        return Cell("failed", str(error))
    except Unanswered as error:
        try:
            await suite.is_gone(error)
        except Gone as gone:
            certificate.ended = str(gone)
        return Cell("failed", str(error))
    except TimeoutError:
        return Cell("failed", "TokenTape stored no step in time")
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        return Cell("failed", f"a response or a step lacks what it must have: {error!r}")


def _tests(suite: Suite, *, admin: bool) -> Iterator[Test]:
    kind = suite.kind
    for shape in SHAPES:
        if shape.is_for(kind):
            for stream in shape.modes:
                yield shape.topic, shape.name, stream, partial(suite.run, shape, stream=stream)
    yield "logprobs", "mode", False, partial(logprobs_mode, suite)
    for mode in ("faithful", "append"):
        for tools in (False, True):
            for stream in (False, True):
                run = partial(continued, suite, mode, tools=tools, stream=stream)
                yield f"continuation, {mode}", "tool loop" if tools else "chat", stream, run
    yield "weights", "versions of tokens", False, partial(reports_versions, suite)
    with_admin = admin and kind in ADMIN
    if with_admin:
        yield "weights", "new version within a call", True, partial(new_version, suite)
    yield "interruptions", "the agent leaves", True, partial(left, suite)
    if with_admin:
        yield "interruptions", "pause and resume", True, partial(paused, suite)
        yield "interruptions", "abort", True, partial(aborted, suite)


async def _model(access: Access, wanted: str | None) -> str:
    """Return the model to certify. Raises ValueError."""
    answer = await access.engine.get("/v1/models")
    if answer.status in {UNAUTHORIZED, 403}:
        raise ValueError(f"the engine requires another API key ({answer.status}); pass it with --api-key")
    listed = answer.json()
    entries = listed.get("data") if isinstance(listed, dict) else None
    found = [entry.get("id") for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
    names = [name for name in found if isinstance(name, str)]
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


_DETECTIONS: Final = 5
_SAMPLED: Final = 16
_TOKENIZERS: Final = {"vllm": "/tokenize", "sglang": "/v1/tokenize", "llamacpp": "/tokenize"}


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
    first = _text(await access.engine.post(CHAT, body))
    start = monotonic()
    second = _text(await access.engine.post(CHAT, body))
    return first == second, _SAMPLED / max(monotonic() - start, 0.001)


def _text(answer: Answer) -> Any:
    if answer.status != OK:
        return None
    try:
        (response,) = payloads(answer.content_type, answer.body)
        return response["choices"][0]["message"]
    except (ValueError, KeyError, IndexError, TypeError):
        return None
