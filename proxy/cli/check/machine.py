"""Checks of this machine: listen addresses, open files, the journal, API keys, and the store."""

import errno
import os
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import aiohttp
import orjson

from proxy.api.api_keys import MINTED_PREFIX, read_minted
from proxy.cli.runner import Exit
from proxy.clock import Clock
from proxy.config.addresses import is_loopback, split_listen, without_secrets
from proxy.config.sections import StoreSettings
from proxy.config.settings import Settings
from proxy.server.app import store_options
from proxy.upstream.http_client import failure_text
from storage import open_store
from storage.errors import StorageError

Grade = Literal["ok", "note", "fault"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check: its subject, its grade, what was found (`seen`), and how to fix it (`fix`).

    A fault prevents or loses recorded steps, or allows unintended access. A note is a warning. A `check` exits
    with `exit_code` if all its faults have the same one.
    """

    subject: str
    grade: Grade
    seen: str
    fix: str = ""
    exit_code: Exit = Exit.FOUND


FILES_PER_CALL: Final = 2  # the agent's connection and the one to the engine
OTHER_FILES: Final = 128  # the process itself, and connections to the control API
DEFAULT_CALLS: Final = 1000  # concurrent calls if the configuration has no limit
REQUEST_TIMEOUT_S: Final = 3


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
    if port == 0:
        return False
    async with session() as http:
        url = f"{scheme}://{f'[{local}]' if ':' in local else local}:{port}/ready"
        return {"status", "store", "engines"} <= (await get_object(http, url, any_status=True)).keys()


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


def session() -> aiohttp.ClientSession:
    """Return an HTTP session for requests of a check."""
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S))


async def get_object(http: aiohttp.ClientSession, url: str, *, any_status: bool = False) -> dict[str, object]:
    """Return the JSON object of a 200 response, or with `any_status` of any response; {} for anything else."""
    try:
        async with http.get(url, ssl=False, allow_redirects=False) as response:
            body = orjson.loads(await response.read()) if any_status or response.status == 200 else {}
    except (aiohttp.ClientError, TimeoutError, ValueError):
        return {}
    return body if isinstance(body, dict) else {}


MIN_LENGTH: Final = 16  # characters; 64 bits if they are random hexadecimal digits
MIN_DISTINCT: Final = 6  # characters
_COMMON: Final = (
    "changeme",
    "change-me",
    "secret",
    "password",
    "example",
    "your-key",
    "your_key",
    "test-key",
    "a-key",
    "12345",
)
_GENERATE: Final = 'generate one with python3 -c "import secrets; print(secrets.token_urlsafe(32))"'


def check_keys(settings: Settings) -> Iterator[Finding]:
    """Check the keys of both APIs."""
    agents = [key.get_secret_value() for key in settings.agents.api_keys]
    control = [key.get_secret_value() for key in settings.control.api_keys]
    listens = {"agents": settings.listen, "control": settings.control.listen or settings.listen}
    if settings.insecure:
        yield from _missing({"agents": agents, "control": control}, listens)
    if agents and not control and is_loopback(split_listen(listens["control"])[0]):
        seen = (
            f"the control API at {listens['control']} requires no key, and agents have keys (control.api_keys is empty)"
        )
        fix = "set control.api_keys: an agent on this machine could set its reward, and read and delete all rollouts"
        yield Finding("keys", "note", seen, fix)
    if set(agents) & set(control):
        fix = "use separate keys for the control API; with this one, every agent can read and delete all rollouts"
        yield Finding("keys", "fault", "a key is in both agents.api_keys and control.api_keys", fix)
    for section, keys in (("agents", agents), ("control", control)):
        is_public = not is_loopback(split_listen(listens[section])[0])
        yield from _section(section, keys, is_public=is_public)


def _missing(keys: dict[str, list[str]], listens: dict[str, str]) -> Iterator[Finding]:
    """Check for APIs without keys that other machines can reach. Only `--insecure` allows them."""
    bare = [
        section
        for section, configured in keys.items()
        if not configured and not is_loopback(split_listen(listens[section])[0])
    ]
    if bare:
        names = " and ".join(f"{section}.api_keys" for section in bare)
        seen = f"{listens[bare[0]]} requires no key: {names} {'are' if len(bare) > 1 else 'is'} empty"
        yield Finding("keys", "note", seen, f"set {names}, or restrict network access")


def _section(section: str, keys: Sequence[str], *, is_public: bool) -> Iterator[Finding]:
    for index, key in enumerate(keys):
        name = f"{section}.api_keys[{index}]"
        if key in keys[:index]:
            fix = "remove the duplicate, so that removing the key revokes it"
            yield Finding("keys", "note", f"{name} is a duplicate", fix)
        elif read_minted(key) is not None:
            seen = f"{name} has the prefix of rollout keys ({MINTED_PREFIX}…) and is treated as one"
            yield Finding("keys", "fault", seen, f"use a key that does not start with {MINTED_PREFIX}")
        elif _is_weak(key):
            seen = f"{name} is weak: it is short, repetitive or common"
            yield Finding("keys", "fault" if is_public else "note", seen, _GENERATE)


def _is_weak(key: str) -> bool:
    has_common = len(key) < 2 * MIN_LENGTH and any(word in key.lower() for word in _COMMON)
    return len(key) < MIN_LENGTH or len(set(key)) < MIN_DISTINCT or has_common


MAX_CLOCK_DIFFERENCE_S: Final = 5  # HTTP dates have whole seconds, and a response takes time


def check_clock(subject: str, theirs: float, ours: float) -> Iterator[Finding]:
    """Compare two clocks, in unix seconds."""
    ahead = theirs - ours
    if abs(ahead) > MAX_CLOCK_DIFFERENCE_S:
        direction = "ahead of" if ahead > 0 else "behind"
        seen = f"its clock is {abs(ahead):.0f} s {direction} ours, so timestamps and lease expiry cannot be compared"
        yield Finding(subject, "note", seen, "synchronize both clocks with NTP (timedatectl set-ntp true, or chrony)")


_EMBEDDED: Final = "embedded:"
_IN_USE: Final = "is in use by process"  # in the message of storage.embedded.server


async def check_store(settings: StoreSettings, clock: Clock, *, runs: bool = False) -> AsyncIterator[Finding]:
    """Check the store. `runs`: a proxy with this configuration is already running."""
    subject = f"store {without_secrets(settings.url)}"
    try:
        with _url_without_traces(settings.url) as url:
            store = await open_store(url, store_options(settings))
            try:
                ours = clock.now()
                facts, warnings = await store.info(), await store.warnings()
            finally:
                await store.close()
        if url != settings.url:
            facts["servers"] = "not created yet"
    except (StorageError, ValueError, OSError) as error:
        if runs and _IN_USE in str(error):
            fix = "no action is needed if that is the running proxy; GET /ready reports its state"
            yield Finding(subject, "note", str(error), fix)
            return
        yield Finding(subject, "fault", failure_text(error), _store_fix(settings.url, str(error)))
        return
    for finding in check_clock(subject, float(facts.pop("clock_s")), ours):
        yield finding
    for warning in warnings:
        yield Finding(subject, "fault" if warning.can_lose_data else "note", warning.problem, warning.fix)
    if not any(warning.can_lose_data for warning in warnings):
        yield Finding(subject, "ok", ", ".join(f"{name} {value}" for name, value in facts.items()))


@contextmanager
def _url_without_traces(url: str) -> Iterator[str]:
    """Yield the URL; for an embedded store that does not exist yet, the URL of a temporary one beside it.

    A start creates the store; a check only finds out whether a start can. Raises OSError if the folder cannot be created.
    """
    path = Path(url.removeprefix(_EMBEDDED)).expanduser()
    if not url.startswith(_EMBEDDED) or os.path.lexists(path):
        yield url
        return
    parent = next(parent for parent in path.absolute().parents if parent.exists())
    with tempfile.TemporaryDirectory(prefix=".tokentape-check-", dir=parent, ignore_cleanup_errors=True) as folder:
        yield f"{_EMBEDDED}{folder}/{path.name}"


def _store_fix(url: str, seen: str) -> str:
    if seen.startswith("durability"):
        return "change the server configuration, or choose a lower store.durability (see docs/reliability.md)"
    if url.startswith(_EMBEDDED) and _IN_USE not in seen:
        return "choose a path that this user can create and write to (store.url)"
    if url.startswith(_EMBEDDED):
        return "only one process can open an embedded store: stop the other one, or choose another path (store.url)"
    if "auth" in seen.lower() or "NOPERM" in seen or "WRONGPASS" in seen:
        return "set store.username and store.password (TOKENTAPE_STORE__PASSWORD)"
    return "check that the server is running and reachable from here; see store.* in docs/settings.md"
