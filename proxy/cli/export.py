"""`tokentape export`: downloads rows from the control API and reports skipped steps and rollouts."""

import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import BinaryIO
from urllib.parse import quote, urlencode

import aiohttp
import orjson

from proxy.cli.console import ExportProgress, export_bar, notes, print_json, print_note
from proxy.config.sections import ListenTlsSettings
from proxy.config.settings import Settings
from proxy.server.listener import running
from proxy.upstream.failure_text import failure_text

MAX_ERROR_CHARACTERS = 500  # of an error body that is not the control API's JSON


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
            return [f"/rollouts/{quote(name, safe='')}/export?{urlencode(query)}" for name in self.rollouts]
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


class Refused(OSError):
    """A response of the proxy with a status other than 200."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def _no_progress(count: int, done: int) -> None:
    pass


async def download(
    url: str | None,
    settings: Settings | None,
    request: ExportRequest,
    out: Path | None,
    *,
    api_key: str | None,
    advance: ExportProgress = _no_progress,
) -> Report:
    """Write the rows to a file or to standard output. `advance` is called with received bytes and completed paths.

    The file is replaced only after the download is complete.

    Raises:
        OSError: A request failed, or its status is not 200 (`Refused`).
    """
    async with connected(url, settings, api_key) as (session, base_url):
        if out is None:
            return await _write(session, base_url, request, sys.stdout.buffer, advance)
        part = out.with_name(f"{out.name}.part")
        with part.open("wb") as file:
            report = await _write(session, base_url, request, file, advance)
        part.replace(out)
        return report


@asynccontextmanager
async def connected(
    url: str | None, settings: Settings | None, api_key: str | None
) -> AsyncIterator[tuple[aiohttp.ClientSession, str]]:
    """Yield an HTTP session and the base URL of the control API. With settings, run a proxy on their store meanwhile."""
    async with AsyncExitStack() as stack:
        if settings is not None:
            plain = settings.model_copy(update={"listen_tls": ListenTlsSettings()})  # only this process calls it
            served = await stack.enter_async_context(running(plain))
            url, api_key = served.control_url, _first_key(settings)
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
        session = await stack.enter_async_context(aiohttp.ClientSession(headers=headers, timeout=timeout))
        yield session, str(url).rstrip("/")


async def _write(
    session: aiohttp.ClientSession, url: str, request: ExportRequest, file: BinaryIO, advance: ExportProgress
) -> Report:
    report = Report(rows=0 if request.container == "ndjson" else None)

    def on_headers(headers: Mapping[str, str]) -> None:
        if (skipped := headers.get("X-Export-Skipped")) is not None:
            report.skipped.append(skipped)

    for path in request.paths(reported=True):
        body = iter_bytes(session, url + path, on_headers)
        async for chunk in _rows(body, report.skipped) if request.supports_report else body:
            file.write(chunk)
            report.bytes += len(chunk)
            if report.rows is not None:
                report.rows += chunk.count(b"\n")
            advance(len(chunk), 0)
        advance(0, 1)
    file.flush()
    return report


async def _rows(body: AsyncIterator[bytes], skipped: list[str]) -> AsyncIterator[bytes]:
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


async def iter_bytes(
    session: aiohttp.ClientSession, url: str, on_headers: Callable[[Mapping[str, str]], None] | None = None
) -> AsyncIterator[bytes]:
    """Yield the body of a GET response as it arrives; call `on_headers` first.

    Raises:
        OSError: The request failed, or the status is not 200 (`Refused`).
    """
    try:
        async with session.get(url) as response:
            if response.status != 200:
                message = error_message(await response.read())
                raise Refused(f"{url} returned {response.status}: {message}", response.status)
            if on_headers is not None:
                on_headers(response.headers)
            async for chunk in response.content.iter_any():
                yield chunk
    except aiohttp.ClientError as error:
        raise OSError(f"request to {url} failed: {failure_text(error)}") from error


def error_message(body: bytes) -> str:
    """Return the message of a control API error, or the start of any other body."""
    try:
        return str(orjson.loads(body)["error"]["message"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return body.decode("utf-8", "replace").strip()[:MAX_ERROR_CHARACTERS]


def _first_key(settings: Settings) -> str | None:
    keys = settings.control.api_keys
    return keys[0].get_secret_value() if keys else None


MAX_SKIPPED = 10  # printed reasons


async def export_to(
    url: str | None,
    settings: Settings | None,
    request: ExportRequest,
    out: Path | None,
    *,
    api_key: str | None,
    as_json: bool,
) -> None:
    """Write the rows and print what was skipped; with `as_json`, print a report. Raises OSError if a request fails."""
    is_mixed = out is None and sys.stdout.isatty()  # no progress bar between rows on a terminal
    with export_bar(notes(quiet=is_mixed), len(request.rollouts)) as advance:
        report = await download(url, settings, request, out, api_key=api_key, advance=advance)
    for reason in report.skipped[:MAX_SKIPPED]:
        print_note(f"skipped: {reason}", "yellow")
    if (more := len(report.skipped) - MAX_SKIPPED) > 0:
        print_note(f"skipped: {more} more; use --json with --out to list all", "yellow")
    if as_json:
        print_json({"out": str(out), "format": request.format, "container": request.container, **asdict(report)})
