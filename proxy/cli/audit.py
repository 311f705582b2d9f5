"""`tokentape audit`: rows, an engine, and what the one says of the other.

Holds the command's connections, its progress bar and its output. The audit itself is in `run`.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterable
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import orjson
from rich.console import Console
from rich.table import Table
from rich.text import Text

from proxy.cli.console import audit_bar, new_table, print_json, print_table, visible
from proxy.cli.export import ExportRequest, reads
from proxy.rollouts.audit.report import NOT_SCORED, NOTHING, TOO_LONG, Result, is_well, summary
from proxy.rollouts.audit.runner import AuditLog, AuditOptions, audit_rows
from proxy.rollouts.audit.sample import LogprobsMode
from proxy.rollouts.audit.scoring import NotScored, Send, find_scorer

_COLUMNS = ("rollout", "branch", "verdict", "tokens", "left out", "telling", "mean", "max", "first beyond", "note")
_NUMBERS = frozenset({"branch", "tokens", "left out", "telling", "mean", "max"})
_COLOURS = {"aligned": "green", TOO_LONG: "yellow", NOT_SCORED: "yellow", NOTHING: "yellow"}


def table(results: Iterable[Result]) -> Table:
    """One line a sequence."""
    made = new_table((name, name in _NUMBERS, False) for name in _COLUMNS)
    for result in results:
        made.add_row(
            Text(visible(result.rollout_id)),
            str(result.branch),
            Text(result.verdict, _COLOURS.get(result.verdict, "red")),
            str(result.count),
            str(result.left_out),
            str(result.telling),
            _number(result.mean),
            _number(result.max),
            Text(_first(result.first)),
            Text(visible(result.note)),
        )
    return made


def _first(first: dict[str, Any] | None) -> str:
    if first is None:
        return ""
    before, after = (" ".join(map(str, first[side])) for side in ("before", "after"))
    values = f"{_number(first['recorded'])} recorded, {_number(first['scored'])} scored"
    return f"{first['place']}: … {before} [{first['id']}] {after} … {values}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


async def rows_of_file(path: Path, wanted: ExportRequest) -> AsyncGenerator[Any, None]:
    """The wanted rows of a file that `tokentape export` wrote. Raises OSError, or ValueError naming the line."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip() and _is_wanted(row := _row(line, f"{path}, line {number}"), wanted):
                yield row


async def rows_of_proxy(session: aiohttp.ClientSession, url: str, wanted: ExportRequest) -> AsyncGenerator[Any, None]:
    """The wanted rows of a running proxy. Raises OSError if it refuses, ValueError if it answers no rows."""
    for path in wanted.paths():
        where = url.rstrip("/") + path
        rest = b""
        async for read in reads(session, where):
            *lines, rest = (rest + read).split(b"\n")
            for line in lines:
                if line.strip():
                    yield _row(line, where)
        if rest.strip():
            yield _row(rest, where)


def _row(line: bytes, where: str) -> Any:
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON ({error}); give rows of `tokentape export`") from error


def _is_wanted(row: Any, wanted: ExportRequest) -> bool:
    if not isinstance(row, dict):
        return True  # what it lacks is told with its verdict
    named = not wanted.rollouts or row.get("rollout_id") in wanted.rollouts
    return named and (wanted.group is None or row.get("group_id") == wanted.group)


_CONNECT_S = 10


@dataclass(frozen=True, slots=True)
class ServerAddress:
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

    source: ServerAddress | Path
    wanted: ExportRequest
    engine: ServerAddress
    kind: str | None
    model: str | None
    tolerance: float
    logprobs_mode: LogprobsMode | None
    concurrency: int
    journal: Path | None
    as_json: bool

    def terms_for(self, kind: str) -> AuditOptions:
        """The terms, with what an engine's logprobs are of where nobody said it."""
        usual: LogprobsMode = "after_temperature_logprobs" if kind == "sglang" else "raw_logprobs"
        return AuditOptions(self.tolerance, self.logprobs_mode or usual, self.concurrency)


async def audit(request: Request, out: Console, notes: Console) -> bool:
    """Audit, print, and say whether all is well (`is_well`). Raises OSError or ValueError with a sentence."""
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(request.engine.session())
        try:
            scorer = await find_scorer(sender(session, request.engine.url), request.kind, request.model)
        except NotScored as why:
            raise ValueError(f"{request.engine.url}: {why}") from why
        journal = AuditLog(request.journal)
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
