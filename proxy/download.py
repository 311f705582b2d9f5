"""`tokentape export`: rows fetched from a proxy, or from a store, into a file.

Holds the client side of an export. A store that nobody else has open is read through a proxy of our own, on a free port: one
way of exporting, not two.
"""

import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO
from urllib.parse import quote, urlencode

import aiohttp
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

from proxy.config import ListenTlsSettings, Settings
from proxy.server import running


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to export."""

    format: str
    rollouts: tuple[str, ...]
    group: str | None
    include: str
    container: str

    def paths(self) -> list[str]:
        """The control face's paths that give it."""
        query = {"format": self.format, "include": self.include, "container": self.container}
        if self.rollouts:
            return [f"/rollouts/{quote(name, safe='')}/export?{urlencode(query)}" for name in self.rollouts]
        group = {} if self.group is None else {"group_id": self.group}
        return [f"/export?{urlencode({**query, **group})}"]


async def download(
    url: str | None, settings: Settings | None, wanted: Wanted, out: Path | None, *, api_key: str | None, notes: Console
) -> None:
    """Write the rows. Raises OSError with a sentence if the proxy refuses; a file is then not left half-written."""
    async with connected(url, settings, api_key) as (session, place):
        if out is None:
            await _write(session, place, wanted, sys.stdout.buffer, notes)
            return
        part = out.with_name(f"{out.name}.part")
        with part.open("wb") as file:
            await _write(session, place, wanted, file, notes)
        part.replace(out)


@asynccontextmanager
async def connected(
    url: str | None, settings: Settings | None, api_key: str | None
) -> AsyncIterator[tuple[aiohttp.ClientSession, str]]:
    """A session with a proxy's control face, and its URL. With settings, the proxy is one of our own, for as long."""
    async with AsyncExitStack() as stack:
        if settings is not None:
            plain = settings.model_copy(update={"listen_tls": ListenTlsSettings()})  # nobody else is to call it
            served = await stack.enter_async_context(running(plain))
            url, api_key = served.control_url, _first_key(settings)
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
        session = await stack.enter_async_context(aiohttp.ClientSession(headers=headers, timeout=timeout))
        yield session, str(url).rstrip("/")


async def _write(session: aiohttp.ClientSession, url: str, wanted: Wanted, file: BinaryIO, notes: Console) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Progress(*columns, console=notes, transient=True, disable=not notes.is_terminal) as progress:
        task = progress.add_task("exporting", total=None)
        for path in wanted.paths():
            async for read in reads(session, url + path):
                file.write(read)
                progress.advance(task, len(read))
        file.flush()


async def reads(session: aiohttp.ClientSession, url: str) -> AsyncIterator[bytes]:
    """What a proxy answers to a GET, read by read. Raises OSError with a sentence if it refuses or cannot be reached."""
    try:
        async with session.get(url) as answer:
            if answer.status != 200:
                raise OSError(f"{url} answered {answer.status}: {(await answer.text()).strip()}")
            async for read in answer.content.iter_any():
                yield read
    except aiohttp.ClientError as error:
        raise OSError(f"{url} cannot be fetched: {error}") from error


def _first_key(settings: Settings) -> str | None:
    keys = settings.control.api_keys
    return keys[0].get_secret_value() if keys else None
