"""What a process needs of its machine: addresses that are free, files that it may open, a folder that it may write to.

Holds the looking at each. A port is tried by binding it for a moment.
"""

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import aiohttp
import orjson

from proxy.cli.check.finding import Finding
from proxy.config.addresses import is_loopback, split_listen
from proxy.config.settings import Settings

_FILES_OF_A_CALL: Final = 2  # the agent's connection, and ours to its engine
_OTHER_FILES: Final = 128  # the program's own, and connections to the control API
_MANY_CALLS: Final = 1000  # where the configuration does not say how many calls there may be
_READY_WITHIN_S: Final = 2


def check_listening(settings: Settings, *, runs: bool) -> list[Finding]:
    """Each address, the files, and the spool. `runs`: a proxy of this configuration does already."""
    found = [_address("listen", settings.listen, runs=runs)]
    if settings.control.listen is not None:
        found.append(_address("control.listen", settings.control.listen, runs=runs))
    found += check_files(settings)
    found += check_spool(settings)
    return found


async def proxy_runs(settings: Settings) -> bool:
    """Whether a proxy of our kind answers where this configuration would: its control API says so, the other needs a key."""
    host, port = split_listen(settings.control.listen or settings.listen)
    near = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - an address to compare with
    scheme = "http" if settings.listen_tls.cert_file is None else "https"
    return port != 0 and await _is_ours(f"{scheme}://{f'[{near}]' if ':' in near else near}:{port}")


def _address(name: str, listen: str, *, runs: bool) -> Finding:
    host, port = split_listen(listen)
    who = "this machine alone reaches it" if is_loopback(host) else "other machines reach it"
    if port == 0:
        return Finding(name, "ok", f"{listen}: any free port; {who}")
    fault = _bound(host, port)
    if fault is None:
        return Finding(name, "ok", f"{listen} is free; {who}")
    if runs:
        return Finding(
            name, "note", f"{listen} is taken: a TokenTape proxy runs there", "nothing, if that is the one you mean"
        )
    mend = f"another program has the port, or the address is none of this machine's: choose another address ({name})"
    return Finding(name, "fault", f"{listen} cannot be listened on: {fault}", mend)


def _bound(host: str, port: int) -> str | None:
    """What the system says against listening there; None if nothing."""
    try:
        kind, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(kind, socket.SOCK_STREAM) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind(address)
            tried.listen(1)
    except OSError as error:
        return str(error.strerror or error)
    return None


async def _is_ours(url: str) -> bool:
    timeout = aiohttp.ClientTimeout(total=_READY_WITHIN_S)
    try:
        async with aiohttp.ClientSession(timeout=timeout) as http, http.get(f"{url}/ready", ssl=False) as answer:
            told = await answer.json()
    except (aiohttp.ClientError, TimeoutError, ValueError):
        return False
    return isinstance(told, dict) and {"status", "store", "engines"} <= told.keys()


def check_files(settings: Settings) -> Iterator[Finding]:
    """Whether as many files may be open as calls need that are in flight at once."""
    try:
        import resource  # noqa: PLC0415 - not there on Windows
    except ImportError:
        return
    bounds = [endpoint.max_in_flight for endpoint in settings.engines.endpoints]
    known = [bound for bound in bounds if bound is not None]
    is_bounded = bool(bounds) and len(known) == len(bounds)
    calls, waiting = (sum(known), settings.engines.max_queued) if is_bounded else (_MANY_CALLS, 0)
    needed = calls * _FILES_OF_A_CALL + waiting + settings.store.max_connections + _OTHER_FILES
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY or limit >= needed:
        yield Finding("open files", "ok", f"{limit} may be open, enough for {calls + waiting} calls at once")
        return
    of = "max_in_flight and max_queued allow" if is_bounded else "a busy proxy has"
    mend = f"ulimit -n {needed} (LimitNOFILE= in a systemd unit; this shell's hard limit is {hard})"
    yield Finding(
        "open files", "note", f"{limit} may be open, and {calls + waiting} calls, which {of}, need about {needed}", mend
    )


def check_spool(settings: Settings) -> Iterator[Finding]:
    """Whether the journal for a store that is away can be written."""
    if settings.store.on_failure != "spool":
        return
    path = settings.store.spool_path
    there = next(parent for parent in path.absolute().parents if parent.exists())
    fault = _against(path, there)
    if fault is None:
        yield Finding("spool", "ok", f"{path} can be written")
    else:
        mend = "let this user write there, or set store.spool_path to a folder on a disk that lasts"
        yield Finding("spool", "fault", f"{path} cannot be written: {fault}", mend)


def _against(path: Path, there: Path) -> str | None:
    if path.is_dir():
        return "it is a folder, and must be a file"
    if not there.is_dir():
        return f"{there} is no folder"
    if path.exists() and not os.access(path, os.R_OK | os.W_OK):
        return "this user may not write it"
    return None if os.access(there, os.W_OK | os.X_OK) else f"this user may not write to {there}"


_WITHIN_S = 3


async def find_engine(url: str) -> str | None:
    """A base URL like this one where somebody lists models; None if there is none."""
    parts = urlsplit(url)
    schemes = (parts.scheme, "https" if parts.scheme == "http" else "http")
    tried = [f"{scheme}://{parts.netloc}{path}" for scheme in schemes for path in dict.fromkeys((parts.path, ""))]
    async with _session() as http:
        for other in tried[1:]:
            listed = await _asked(http, f"{other}/v1/models")
            if isinstance(listed.get("data"), list):
                return other
    return None


async def is_tokentape(url: str, settings: Settings) -> bool:
    """Whether a proxy of our kind answers there, or would once this configuration runs."""
    here = [split_listen(listen) for listen in (settings.listen, settings.control.listen) if listen]
    parts = urlsplit(url)
    if any(parts.port == port and parts.hostname in {host, "localhost", "127.0.0.1"} for host, port in here):
        return True
    async with _session() as http:
        described = (await _asked(http, f"{url}/openapi.json")).get("info")
    return isinstance(described, dict) and described.get("title") == "TokenTape"


def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_WITHIN_S))


async def _asked(http: aiohttp.ClientSession, url: str) -> dict[str, object]:
    """The JSON object that it answers; an empty one for anything else."""
    try:
        async with http.get(url, ssl=False, allow_redirects=False) as answer:
            told = orjson.loads(await answer.read()) if answer.status == 200 else {}
    except (aiohttp.ClientError, TimeoutError, ValueError):
        return {}
    return told if isinstance(told, dict) else {}
