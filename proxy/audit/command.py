"""`tokentape audit`: rows, an engine, and what the one says of the other.

Holds the command's connections, its progress bar and its output. The audit itself is in `run`.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console

from proxy.audit.recorded import LogprobsMode
from proxy.audit.report import Result, is_well, summary, table
from proxy.audit.run import Journal, Terms, audit_rows
from proxy.audit.scoring import NotScored, Send, find_scorer
from proxy.audit.source import rows_of_file, rows_of_proxy
from proxy.download import Wanted
from proxy.terminal.consoles import print_json, print_table
from proxy.terminal.progress import audit_bar

_CONNECT_S = 10


@dataclass(frozen=True, slots=True)
class Place:
    """A server and the key that it wants."""

    url: str
    api_key: str | None = field(default=None, repr=False)

    def session(self) -> aiohttp.ClientSession:
        """A session that shows the key. Scoring may take minutes, so only connecting has a limit."""
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S)
        return aiohttp.ClientSession(headers=headers, timeout=timeout)


@dataclass(frozen=True, slots=True)
class Request:
    """What the command line asked for. `source`: a running proxy, or a file of rows."""

    source: Place | Path
    wanted: Wanted
    engine: Place
    kind: str | None
    model: str | None
    tolerance: float
    logprobs_mode: LogprobsMode | None
    concurrency: int
    journal: Path | None
    as_json: bool

    def terms_for(self, kind: str) -> Terms:
        """The terms, with what an engine's logprobs are of where nobody said it."""
        usual: LogprobsMode = "after_temperature_logprobs" if kind == "sglang" else "raw_logprobs"
        return Terms(self.tolerance, self.logprobs_mode or usual, self.concurrency)


async def audit(request: Request, out: Console, notes: Console) -> bool:
    """Audit, print, and say whether all is well (`is_well`). Raises OSError or ValueError with a sentence."""
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(request.engine.session())
        try:
            scorer = await find_scorer(sender(session, request.engine.url), request.kind, request.model)
        except NotScored as why:
            raise ValueError(f"{request.engine.url}: {why}") from why
        journal = Journal(request.journal)
        stack.callback(journal.close)
        rows = await stack.enter_async_context(aclosing(await _rows(request, stack)))
        seen = stack.enter_context(audit_bar(notes, await asyncio.to_thread(_count, request)))
        terms = request.terms_for(scorer.kind)
        results = await audit_rows(rows, scorer, terms, journal, lambda result: seen(result.is_aligned))
    _print(results, out, notes, as_json=request.as_json)
    return is_well(results)


def sender(session: aiohttp.ClientSession, url: str) -> Send:
    """What asks the engine at this URL. Its failures become OSError with a sentence."""
    root = url.rstrip("/").removesuffix("/v1")

    async def send(method: str, path: str, body: Any) -> tuple[int, bytes]:
        try:
            async with session.request(method, root + path, json=body) as answer:
                return answer.status, await answer.read()
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise OSError(f"the engine at {root} cannot be asked: {str(error) or type(error).__name__}") from error

    return send


async def _rows(request: Request, stack: AsyncExitStack) -> AsyncGenerator[Any, None]:
    if isinstance(request.source, Path):
        return rows_of_file(request.source, request.wanted)
    session = await stack.enter_async_context(request.source.session())
    return rows_of_proxy(session, request.source.url, request.wanted)


def _count(request: Request) -> int | None:
    """How many sequences there are, where that can be known: in a file of which all are wanted."""
    if not isinstance(request.source, Path) or request.wanted.rollouts or request.wanted.group is not None:
        return None
    with request.source.open("rb") as file:
        return sum(bool(line.strip()) for line in file)


def _print(results: list[Result], out: Console, notes: Console, *, as_json: bool) -> None:
    told = summary(results)
    if as_json:
        print_json(told)
        return
    if not results:
        notes.print("there was no sequence to audit")
        return
    print_table(out, table(results))
    verdicts = ", ".join(f"{count} {verdict}" for verdict, count in told["verdicts"].items())
    notes.print(
        f"{len(results)} sequences, {told['tokens']} tokens compared, {told['left_out']} left out: {verdicts}",
        soft_wrap=True,
    )
