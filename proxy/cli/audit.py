"""`tokentape audit`: reads rows from a file or a proxy, has an engine score them, and prints the verdicts."""

import asyncio
from collections.abc import AsyncGenerator, Iterable
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import aiohttp
import orjson
from rich.console import Console
from rich.table import Table
from rich.text import Text

from proxy.cli.console import audit_bar, new_table, print_json, print_table, visible
from proxy.cli.control import CONNECT_TIMEOUT_S, Control
from proxy.cli.export import ExportRequest
from proxy.errors import failure_text
from proxy.protocols.engines import ENGINES
from proxy.rollouts.scoring.audit import (
    NOT_SCORED,
    NOTHING,
    TOO_LONG,
    AuditLog,
    AuditOptions,
    Result,
    audit_rows,
    is_well,
    summary,
)
from proxy.rollouts.scoring.requests import NotScored, Send, find_scorer
from proxy.rollouts.scoring.verdict import LogprobsMode

_COLUMNS = {  # whether they are numbers
    "rollout": False, "branch": True, "verdict": False, "tokens": True, "skipped": True, "informative": True, "mean": True,
    "max": True, "first difference": False, "note": False,
}  # fmt: skip
_COLORS = {"aligned": "green", TOO_LONG: "yellow", NOT_SCORED: "yellow", NOTHING: "yellow"}


def table(results: Iterable[Result]) -> Table:
    """Return a table with one row per sequence."""
    made = new_table((name, is_number, False) for name, is_number in _COLUMNS.items())
    for result in results:
        made.add_row(
            Text(visible(result.rollout_id)),
            str(result.branch),
            Text(result.verdict, _COLORS.get(result.verdict, "red")),
            str(result.count),
            str(result.skipped),
            str(result.informative),
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
    values = f"recorded {_number(first['recorded'])}, scored {_number(first['scored'])}"
    return f"{first['position']}: … {before} [{first['id']}] {after} … {values}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


async def rows_of_file(path: Path, export: ExportRequest) -> AsyncGenerator[Any, None]:
    """Yield the selected rows of an ndjson file. Raises OSError, or ValueError with the line number."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = orjson.loads(line)
            except orjson.JSONDecodeError as error:
                place = f"{path}, line {number}: not JSON ({error})"
                raise ValueError(f"{place}; use rows written by `tokentape export`") from error
            if _is_selected(row, export):
                yield row


async def rows_of_proxy(source: "ServerAddress", export: ExportRequest) -> AsyncGenerator[Any, None]:
    """Yield the selected rows of a running proxy. Raises OSError or ClientError."""
    for path in export.paths():
        async with aclosing(Control(source.url, source.api_key).rows(path)) as rows:
            async for row in rows:
                yield row


def _is_selected(row: Any, export: ExportRequest) -> bool:
    if not isinstance(row, dict):
        return True  # its verdict reports the missing fields
    is_named = not export.rollouts or row.get("rollout_id") in export.rollouts
    return is_named and (export.group is None or row.get("group_id") == export.group)


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """The URL of a server and its API key."""

    url: str
    api_key: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Request:
    """The options of the command. `source` is a running proxy or a file of rows."""

    source: ServerAddress | Path
    export: ExportRequest
    engine: ServerAddress
    kind: str | None
    model: str | None
    tolerance: float
    logprobs_mode: LogprobsMode | None
    concurrency: int | None
    journal: Path | None
    as_json: bool
    policy_version: str | None = None  # of the engine's weights, if it reports none


async def audit(request: Request, out: Console, notes: Console) -> bool:
    """Audit the rows, print the results, and return `is_well`. Raises OSError or ValueError."""
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(new_session(request.engine.api_key))
        try:
            scorer = await find_scorer(sender(session, request.engine.url), request.kind, request.model)
        except NotScored as error:
            raise ValueError(f"{request.engine.url}: {error}") from error
        journal = AuditLog(request.journal)
        stack.callback(journal.close)
        if isinstance(request.source, Path):
            source = rows_of_file(request.source, request.export)
        else:
            source = rows_of_proxy(request.source, request.export)
        rows = await stack.enter_async_context(aclosing(source))
        advance = stack.enter_context(audit_bar(notes, await asyncio.to_thread(_count, request)))
        mode = request.logprobs_mode or cast("LogprobsMode", ENGINES[scorer.kind].logprobs_mode)
        concurrency = request.concurrency or (1 if scorer.has_adapters else 4)
        options = AuditOptions(request.tolerance, mode, concurrency, request.policy_version)
        results = await audit_rows(rows, scorer, options, journal, lambda result: advance(result.is_aligned))
    _print(results, out, notes, as_json=request.as_json)
    return is_well(results)


def new_session(api_key: str | None) -> aiohttp.ClientSession:
    """Return an HTTP session that sends the key. Scoring may take minutes: only connecting has a timeout."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
    return aiohttp.ClientSession(headers=headers, timeout=timeout)


def sender(session: aiohttp.ClientSession, url: str) -> Send:
    """Return a function that sends requests to the engine at this URL and raises OSError if one fails."""
    root = url.rstrip("/").removesuffix("/v1")

    async def send(method: str, path: str, body: Any) -> tuple[int, bytes]:
        try:
            async with session.request(method, root + path, json=body) as response:
                return response.status, await response.read()
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise OSError(f"request to the engine at {root} failed: {failure_text(error)}") from error

    return send


def _count(request: Request) -> int | None:
    """Return the number of sequences, or None unless all rows of a file are selected."""
    if not isinstance(request.source, Path) or request.export.rollouts or request.export.group is not None:
        return None
    with request.source.open("rb") as file:
        return sum(bool(line.strip()) for line in file)


def _print(results: list[Result], out: Console, notes: Console, *, as_json: bool) -> None:
    totals = summary(results)
    if as_json:
        print_json(totals)
    elif not results:
        notes.print("no sequence to audit")
    else:
        print_table(out, table(results))
        verdicts = ", ".join(f"{count} {verdict}" for verdict, count in totals["verdicts"].items())
        compared = f"{totals['tokens']} tokens compared, {totals['skipped']} skipped"
        notes.print(f"{len(results)} sequences, {compared}: {verdicts}", soft_wrap=True)
