"""`tokentape export`: what it says while it exports, and its report.

Holds the printing. Rows are fetched by `download`, groups posted by `push`.
"""

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

from proxy.cli.console import export_bar, notes, print_json, remark
from proxy.config.sections import ListenTlsSettings
from proxy.config.settings import Settings
from proxy.server.listener import running

_MOST_TOLD = 500  # characters of a refusal in another shape than ours


@dataclass(frozen=True, slots=True)
class ExportRequest:
    """What to export. `more`: whatever else the route takes, by name."""

    format: str
    rollouts: tuple[str, ...]
    group: str | None
    include: str
    container: str
    more: tuple[tuple[str, str], ...] = ()

    def paths(self, *, reported: bool = False) -> list[str]:
        """The control API's paths that give it; `reported`: with a last line that is no row, where there can be one."""
        query = {"format": self.format, "include": self.include, "container": self.container, **dict(self.more)}
        if self.rollouts:
            return [f"/rollouts/{quote(name, safe='')}/export?{urlencode(query)}" for name in self.rollouts]
        group = {} if self.group is None else {"group_id": self.group}
        told = {"report": "true"} if reported and self.is_reported else {}
        return [f"/export?{urlencode({**query, **group, **told})}"]

    @property
    def is_reported(self) -> bool:
        """Whether a last line can say what was left out, and why."""
        return self.container == "ndjson" and not self.rollouts and "report" not in dict(self.more)


@dataclass(slots=True)
class Report:
    """How much was written: bytes, rows where the container has one a line; and what proxies said was left out."""

    bytes: int = 0
    rows: int | None = None
    skipped: list[str] = field(default_factory=list)


class Refused(OSError):
    """A proxy's answer that is not 200."""

    def __init__(self, sentence: str, status: int) -> None:
        super().__init__(sentence)
        self.status = status


Moved = Callable[[int, int], None]


def _nobody(read: int, done: int) -> None:
    """Nobody wants to know how far it is."""


async def download(
    url: str | None,
    settings: Settings | None,
    wanted: ExportRequest,
    out: Path | None,
    *,
    api_key: str | None,
    moved: Moved = _nobody,
) -> Report:
    """Write the rows. `moved` is told the bytes read, and the paths that they ended.

    Raises OSError with a sentence if the proxy refuses; a file is then not left half-written.
    """
    async with connected(url, settings, api_key) as (session, place):
        if out is None:
            return await _write(session, place, wanted, sys.stdout.buffer, moved)
        part = out.with_name(f"{out.name}.part")
        with part.open("wb") as file:
            report = await _write(session, place, wanted, file, moved)
        part.replace(out)
        return report


@asynccontextmanager
async def connected(
    url: str | None, settings: Settings | None, api_key: str | None
) -> AsyncIterator[tuple[aiohttp.ClientSession, str]]:
    """A session with a proxy's control API, and its URL. With settings, the proxy is one of our own, for as long."""
    async with AsyncExitStack() as stack:
        if settings is not None:
            plain = settings.model_copy(update={"listen_tls": ListenTlsSettings()})  # nobody else is to call it
            served = await stack.enter_async_context(running(plain))
            url, api_key = served.control_url, _first_key(settings)
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
        session = await stack.enter_async_context(aiohttp.ClientSession(headers=headers, timeout=timeout))
        yield session, str(url).rstrip("/")


async def _write(
    session: aiohttp.ClientSession, url: str, wanted: ExportRequest, file: BinaryIO, moved: Moved
) -> Report:
    report = Report(rows=0 if wanted.container == "ndjson" else None)

    def answered(headers: Mapping[str, str]) -> None:
        if (said := headers.get("X-Export-Skipped")) is not None:
            report.skipped.append(said)

    for path in wanted.paths(reported=True):
        told = reads(session, url + path, answered)
        async for read in _rows(told, report.skipped) if wanted.is_reported else told:
            file.write(read)
            report.bytes += len(read)
            if report.rows is not None:
                report.rows += read.count(b"\n")
            moved(len(read), 0)
        moved(0, 1)
    file.flush()
    return report


async def _rows(told: AsyncIterator[bytes], skipped: list[str]) -> AsyncIterator[bytes]:
    """What is told, but for its last line: that says why rollouts and steps were left out."""
    held: list[bytes] = []  # pieces of the last line so far, joined once: it may have an entry for each row
    async for read in told:
        # A line end at the very end of what has come may be that of the last line: it stays.
        if held and held[-1].endswith(b"\n"):
            yield b"".join(held)
            held.clear()
        cut = read.rfind(b"\n", 0, -1) + 1
        if cut:
            yield b"".join((*held, read[:cut]))
            held.clear()
        held.append(read[cut:])
    why = Counter(each["why"] for each in orjson.loads(b"".join(held))["report"]["skipped"])
    skipped += [each if count == 1 else f"{each} ({count})" for each, count in why.items()]


async def reads(
    session: aiohttp.ClientSession, url: str, answered: Callable[[Mapping[str, str]], None] | None = None
) -> AsyncIterator[bytes]:
    """What a proxy answers to a GET, read by read; its headers are told to `answered`.

    Raises OSError with a sentence if it refuses or cannot be reached.
    """
    try:
        async with session.get(url) as answer:
            if answer.status != 200:
                raise Refused(f"{url} answered {answer.status}: {sentence_of(await answer.read())}", answer.status)
            if answered is not None:
                answered(answer.headers)
            async for read in answer.content.iter_any():
                yield read
    except aiohttp.ClientError as error:
        raise OSError(f"{url} cannot be fetched: {error}") from error


def sentence_of(body: bytes) -> str:
    """The sentence of a refusal, as our control API shapes them; else the body as it is."""
    try:
        return str(orjson.loads(body)["error"]["message"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return body.decode("utf-8", "replace").strip()[:_MOST_TOLD]


def _first_key(settings: Settings) -> str | None:
    keys = settings.control.api_keys
    return keys[0].get_secret_value() if keys else None


_MOST_SKIPPED = 10  # sentences about what was left out, on a terminal


async def export_to(
    url: str | None,
    settings: Settings | None,
    wanted: ExportRequest,
    out: Path | None,
    *,
    api_key: str | None,
    as_json: bool,
) -> None:
    """Write the rows; say what they leave out. As JSON, say also how much there is. Raises OSError with a sentence."""
    is_mixed = out is None and sys.stdout.isatty()  # a bar among the rows would spoil both
    with export_bar(notes(quiet=is_mixed), len(wanted.rollouts)) as moved:
        report = await download(url, settings, wanted, out, api_key=api_key, moved=moved)
    for left_out in report.skipped[:_MOST_SKIPPED]:
        remark(f"left out: {left_out}", "yellow")
    if (more := len(report.skipped) - _MOST_SKIPPED) > 0:
        remark(f"left out: {more} more; --json has each, with --out", "yellow")
    if as_json:
        print_json({"out": str(out), "format": wanted.format, "container": wanted.container, **asdict(report)})
