"""Checks listen addresses (by binding them), the open file limit and the journal; finds engines at similar URLs."""

import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import aiohttp
import orjson

from proxy.cli.check.finding import Finding
from proxy.cli.exit_codes import Exit
from proxy.config.addresses import is_loopback, split_listen
from proxy.config.settings import Settings
from proxy.upstream.failure_text import failure_text

FILES_PER_CALL: Final = 2  # the agent's connection and the one to the engine
OTHER_FILES: Final = 128  # the process itself, and connections to the control API
DEFAULT_CALLS: Final = 1000  # concurrent calls if the configuration has no limit
READY_TIMEOUT_S: Final = 2
ENGINE_TIMEOUT_S: Final = 3


def check_listening(settings: Settings, *, runs: bool) -> list[Finding]:
    """Check the addresses, the open file limit and the journal. `runs`: a proxy with this configuration is running."""
    found = [_address("listen", settings.listen, runs=runs)]
    if settings.control.listen is not None:
        found.append(_address("control.listen", settings.control.listen, runs=runs))
    found += check_files(settings)
    found += check_spool(settings)
    return found


async def proxy_runs(settings: Settings) -> bool:
    """Return whether a TokenTape control API responds at the configured address; /ready requires no key."""
    host, port = split_listen(settings.control.listen or settings.listen)
    local = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - for comparison only
    scheme = "http" if settings.listen_tls.cert_file is None else "https"
    return port != 0 and await _is_ours(f"{scheme}://{f'[{local}]' if ':' in local else local}:{port}")


def _address(name: str, listen: str, *, runs: bool) -> Finding:
    host, port = split_listen(listen)
    scope = "reachable from this machine only" if is_loopback(host) else "reachable from other machines"
    if port == 0:
        return Finding(name, "ok", f"{listen}: any free port; {scope}")
    error = _bind_error(host, port)
    if error is None:
        return Finding(name, "ok", f"{listen} is free; {scope}")
    if runs:
        fix = "no action is needed if it is the expected proxy"
        return Finding(name, "note", f"{listen} is in use by a running TokenTape proxy", fix)
    fix = f"stop the program that uses the port, or choose another address of this machine ({name})"
    code = Exit.ADDRESS_IN_USE if error.errno == errno.EADDRINUSE else Exit.FOUND
    return Finding(name, "fault", f"cannot listen on {listen}: {failure_text(error)}", fix, code)


def _bind_error(host: str, port: int) -> OSError | None:
    try:
        kind, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(kind, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except OSError as error:
        return error
    return None


async def _is_ours(url: str) -> bool:
    timeout = aiohttp.ClientTimeout(total=READY_TIMEOUT_S)
    try:
        async with aiohttp.ClientSession(timeout=timeout) as http, http.get(f"{url}/ready", ssl=False) as response:
            body = await response.json()
    except (aiohttp.ClientError, TimeoutError, ValueError):
        return False
    return isinstance(body, dict) and {"status", "store", "engines"} <= body.keys()


def check_files(settings: Settings) -> Iterator[Finding]:
    """Check that the open file limit is sufficient for the maximum number of concurrent calls."""
    try:
        import resource  # noqa: PLC0415 - not available on Windows
    except ImportError:
        return
    limits = [endpoint.max_in_flight for endpoint in settings.engines.endpoints]
    known = [limit for limit in limits if limit is not None]
    is_limited = bool(limits) and len(known) == len(limits)
    calls, queued = (sum(known), settings.engines.max_queued) if is_limited else (DEFAULT_CALLS, 0)
    needed = calls * FILES_PER_CALL + queued + settings.store.max_connections + OTHER_FILES
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY or limit >= needed:
        yield Finding("open files", "ok", f"the limit of {limit} is sufficient for {calls + queued} concurrent calls")
        return
    source = "allowed by max_in_flight and max_queued" if is_limited else "typical of a busy proxy"
    seen = f"the limit is {limit}; {calls + queued} concurrent calls ({source}) need about {needed}"
    fix = f"run ulimit -n {needed}, or set LimitNOFILE= in the systemd unit; the hard limit of this shell is {hard}"
    yield Finding("open files", "note", seen, fix)


def check_spool(settings: Settings) -> Iterator[Finding]:
    """Check that the journal for steps during a store outage can be written."""
    if settings.store.on_failure != "spool":
        return
    path = settings.store.spool_path
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    error = _write_error(path, folder)
    if error is None:
        yield Finding("spool", "ok", f"{path} is writable")
    else:
        fix = "grant this user write access, or set store.spool_path to a file on a persistent disk"
        yield Finding("spool", "fault", f"cannot write {path}: {error}", fix)


def _write_error(path: Path, folder: Path) -> str | None:
    if path.is_dir():
        return "it is a folder and must be a file"
    if not folder.is_dir():
        return f"{folder} is not a folder"
    if path.exists() and not os.access(path, os.R_OK | os.W_OK):
        return "permission denied"
    return None if os.access(folder, os.W_OK | os.X_OK) else f"permission denied on {folder}"


async def find_engine(url: str) -> str | None:
    """Return a similar base URL (other scheme, no path) that lists models, or None."""
    parts = urlsplit(url)
    schemes = (parts.scheme, "https" if parts.scheme == "http" else "http")
    candidates = [f"{scheme}://{parts.netloc}{path}" for scheme in schemes for path in dict.fromkeys((parts.path, ""))]
    async with _session() as http:
        for candidate in candidates[1:]:
            listed = await _get_object(http, f"{candidate}/v1/models")
            if isinstance(listed.get("data"), list):
                return candidate
    return None


async def is_tokentape(url: str, settings: Settings) -> bool:
    """Return whether the URL is a TokenTape proxy: this configuration's own address, or a running one."""
    own = [split_listen(listen) for listen in (settings.listen, settings.control.listen) if listen]
    parts = urlsplit(url)
    if any(parts.port == port and parts.hostname in {host, "localhost", "127.0.0.1"} for host, port in own):
        return True
    async with _session() as http:
        info = (await _get_object(http, f"{url}/openapi.json")).get("info")
    return isinstance(info, dict) and info.get("title") == "TokenTape"


def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ENGINE_TIMEOUT_S))


async def _get_object(http: aiohttp.ClientSession, url: str) -> dict[str, object]:
    """Return the JSON object of a 200 response; {} for any other response."""
    try:
        async with http.get(url, ssl=False, allow_redirects=False) as response:
            body = orjson.loads(await response.read()) if response.status == 200 else {}
    except (aiohttp.ClientError, TimeoutError, ValueError):
        return {}
    return body if isinstance(body, dict) else {}
