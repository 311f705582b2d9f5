"""`tokentape certify`: whether training on what an engine returns is safe, shape by shape.

shapes         the requests, literally; the tests with real engines use them too
access         requests to the engine alone and through a temporary proxy, with limits
comparing      [pure] what two responses have in common
suite          one shape: the responses compared, the step verified, its tokens scored again
conversations  what takes several requests: continuation, agents that leave, the mode of logprobs, admin routes
certificate    [pure] the results, their JSON, the table, and the line for a bug report
"""

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from logging import NullHandler

from rich.console import Console

from proxy.cli.certify.access import Access, access_to
from proxy.cli.certify.certificate import Cell, Certificate, print_certificate
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
from proxy.cli.certify.shapes import SHAPES
from proxy.cli.certify.suite import Gone, Suite, make_suite
from proxy.cli.check import is_tokentape
from proxy.cli.console import certify_bar, print_error, print_json
from proxy.cli.runner import Exit
from proxy.config.settings import Settings
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
            if not certificate.ended and access.engine.is_over:
                certificate.ended = "the time limit was reached; repeat with a higher --time-limit-s"
            try:
                cell = Cell("not run") if certificate.ended else await suite.result(run())
            except Gone as error:
                certificate.ended = str(error)
                cell = Cell("failed", str(error))
            certificate.add(topic, name, cell, stream=stream)
    return certificate


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
