"""`tokentape export`: downloads rows from the control API and reports what was skipped."""

import sys
from collections import Counter
from collections.abc import AsyncIterable, AsyncIterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import BinaryIO, Final
from urllib.parse import urlencode

import orjson

from proxy.cli.console import ExportProgress, export_bar, notes, print_json, print_note
from proxy.cli.control import Control, ControlAddress, connected
from tokentape.control_api import path_of

MAX_SKIPPED: Final = 10  # printed reasons


@dataclass(frozen=True, slots=True)
class ExportRequest:
    """What to export. `more` has further query parameters of GET /export."""

    format: str
    rollouts: tuple[str, ...]
    group: str | None
    include: str
    container: str
    more: tuple[tuple[str, str], ...] = ()

    def paths(self, *, reported: bool = False) -> list[str]:
        """Return the control API paths of the export. `reported` requests a report as the last line where supported."""
        query = {"format": self.format, "include": self.include, "container": self.container, **dict(self.more)}
        if self.rollouts:
            return [f"{path_of('rollouts', name, 'export')}?{urlencode(query)}" for name in self.rollouts]
        group = {} if self.group is None else {"group_id": self.group}
        report = {"report": "true"} if reported and self.supports_report else {}
        return [f"/export?{urlencode({**query, **group, **report})}"]

    @property
    def supports_report(self) -> bool:
        """Whether the last line can be a report of what was skipped, and why."""
        return self.container == "ndjson" and not self.rollouts and "report" not in dict(self.more)


@dataclass(slots=True)
class Report:
    """Bytes written, rows (None unless the container is ndjson), and the reasons why steps and rollouts were skipped."""

    bytes: int = 0
    rows: int | None = None
    skipped: list[str] = field(default_factory=list)


async def download(
    address: ControlAddress,
    request: ExportRequest,
    out: Path | None,
    *,
    advance: ExportProgress = lambda _count, _done: None,
) -> Report:
    """Write the rows to a file or to standard output. `advance` is called with received bytes and completed paths.

    The file is replaced only after the download is complete.

    Raises:
        OSError: A request failed (`Refused`: the proxy returned an error).
    """
    async with connected(address) as control:
        if out is None:
            return await _write(control, request, sys.stdout.buffer, advance)
        part = out.with_name(f"{out.name}.part")
        with part.open("wb") as file:
            report = await _write(control, request, file, advance)
        part.replace(out)
        return report


async def _write(control: Control, request: ExportRequest, file: BinaryIO, advance: ExportProgress) -> Report:
    report = Report(rows=0 if request.container == "ndjson" else None)
    for path in request.paths(reported=True):
        async with control.response(path) as response:
            if (skipped := response.headers.get("X-Export-Skipped")) is not None:
                report.skipped.append(skipped)
            body = response.parts()
            async for chunk in _rows(body, report.skipped) if request.supports_report else body:
                file.write(chunk)
                report.bytes += len(chunk)
                if report.rows is not None:
                    report.rows += chunk.count(b"\n")
                advance(len(chunk), 0)
        advance(0, 1)
    file.flush()
    return report


async def _rows(body: AsyncIterable[bytes], skipped: list[str]) -> AsyncIterator[bytes]:
    """Yield the body without its last line, the report; append the reasons in the report to `skipped`."""
    pending: list[bytes] = []  # parts of the last line so far, joined once: the report may have an entry per row
    async for chunk in body:
        # A line feed at the end of the received data may belong to the report, so its line stays pending.
        if pending and pending[-1].endswith(b"\n"):
            yield b"".join(pending)
            pending.clear()
        end = chunk.rfind(b"\n", 0, -1) + 1
        if end:
            yield b"".join((*pending, chunk[:end]))
            pending.clear()
        pending.append(chunk[end:])
    reasons = Counter(entry["why"] for entry in orjson.loads(b"".join(pending))["report"]["skipped"])
    skipped += [reason if count == 1 else f"{reason} ({count})" for reason, count in reasons.items()]


async def export_to(address: ControlAddress, request: ExportRequest, out: Path | None, *, as_json: bool) -> None:
    """Write the rows and print what was skipped; with `as_json`, print a report. Raises OSError if a request fails."""
    is_mixed = out is None and sys.stdout.isatty()  # no progress bar between rows on a terminal
    with export_bar(notes(quiet=is_mixed), len(request.rollouts)) as advance:
        report = await download(address, request, out, advance=advance)
    for reason in report.skipped[:MAX_SKIPPED]:
        print_note(f"skipped: {reason}", "yellow")
    if (more := len(report.skipped) - MAX_SKIPPED) > 0:
        print_note(f"skipped: {more} more; use --json with --out to list all", "yellow")
    if as_json:
        print_json({"out": str(out), "format": request.format, "container": request.container, **asdict(report)})
