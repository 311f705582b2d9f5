"""Outages of the store: the health of its servers, and the journal of steps on disk meanwhile.

A server counts as unreachable after a failed command, and as reachable after a successful write: a server that is full or
read-only still replies to PING. A rollout depends only on the server that has it.

The journal is one file of frames, locked by its process. A frame is `TTJ2`, its length (u32), a checksum of 16 bytes, and the
entry as MessagePack.

Rule 1: an entry is on disk (fsync) when `write` returns.
Rule 2: entries of a rollout are replayed in the order in which they were written; different rollouts concurrently, because
        entries are also written concurrently meanwhile, and only while their server is reachable. The file is truncated only
        after the last entry: an entry that is replayed twice after a failure is stored once, because the store knows steps by
        name.
Rule 3: damaged frames are skipped and counted. An incomplete last frame was never acknowledged and is cut off.
"""

import asyncio
import os
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from hashlib import blake2b
from itertools import chain, repeat
from pathlib import Path
from typing import Final

import msgspec

from proxy.telemetry.logs import LOG
from proxy.telemetry.metrics import Metrics
from proxy.upstream.concurrency import BackgroundWork
from storage.errors import StorageError, StoreUnreachable
from storage.redis.store import Store
from storage.types import StepWrite

_INTERVALS_S: Final = (0.05, 0.1, 0.2, 0.5)  # between probes; the last one repeats
_PROBE_TIMEOUT_S: Final = 2.0
_MAGIC: Final = b"TTJ2"
_CHECKSUM_BYTES: Final = 16
_REPLAYED_AT_ONCE: Final = 64  # rollouts, each with one entry in memory
_HEAD_BYTES: Final = len(_MAGIC) + 4 + _CHECKSUM_BYTES
_DECODER: Final = msgspec.msgpack.Decoder(StepWrite)


class Journal:
    """A journal at `path`, locked by this process. Raises OSError if it cannot be opened or another process has it."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._lock = asyncio.Lock()
        self.damaged = 0
        try:
            _lock(self._file, path)
            self._frames, self._end = self._read_frames()
            self.pending = sum(map(len, self._frames.values()))  # entries that are not in the store yet
            os.ftruncate(self._file, self._end)
        except BaseException:
            os.close(self._file)
            raise

    def __repr__(self) -> str:
        return f"<Journal {self._path}, {self.pending} entries>"

    def __contains__(self, rollout: str) -> bool:
        return rollout in self._frames

    async def write(self, entry: StepWrite) -> None:
        """Append an entry; it is on disk when this returns. Raises OSError on failure; then nothing was appended.

        It must not be cancelled, because the writing thread would continue. The recorder runs it in a task.
        """
        frame = pack(entry)
        async with self._lock:
            await asyncio.to_thread(self._append, frame)
            self._frames.setdefault(entry.rollout, deque()).append((self._end, len(frame)))
            self._end += len(frame)
            self.pending += 1

    async def replay(
        self, append: Callable[[StepWrite], Awaitable[None]], is_reachable: Callable[[str], bool] = lambda _: True
    ) -> None:
        """Pass every entry of reachable rollouts to `append`, including those written meanwhile.

        Raises an error of `append`, after the other rollouts; entries that were not appended stay.
        """
        while rollouts := [rollout for rollout in self._frames if is_reachable(rollout)]:
            remaining, errors = iter(rollouts), list[BaseException]()  # of all tasks
            works = (self._replay_each(remaining, append, errors) for _ in range(_REPLAYED_AT_ONCE))
            errors += filter(None, await asyncio.gather(*works, return_exceptions=True))
            async with self._lock:
                if not self._frames:
                    self._end = 0
                    os.ftruncate(self._file, 0)
            if errors:
                raise errors[0]

    async def _replay_each(
        self, rollouts: Iterator[str], append: Callable[[StepWrite], Awaitable[None]], errors: list[BaseException]
    ) -> None:
        for rollout in rollouts:
            frames = self._frames[rollout]
            try:
                while frames:
                    entry = await asyncio.to_thread(self._entry, *frames[0])
                    if entry is None:
                        self.damaged += 1
                    else:
                        await append(entry)
                    frames.popleft()
                    self.pending -= 1
                del self._frames[rollout]
            except StorageError as error:
                errors.append(error)

    def close(self) -> None:
        """Close the file; the next process that opens it replays its entries."""
        os.close(self._file)

    def _entry(self, offset: int, length: int) -> StepWrite | None:
        """Return the entry of a frame; None for a damaged one."""
        try:
            return unpack(os.pread(self._file, length, offset))
        except ValueError as error:
            LOG.error("Step in journal %s lost: %s", self._path, error)
            return None

    def _append(self, frame: bytes) -> None:
        try:
            written = 0
            while written < len(frame):
                written += os.pwrite(self._file, frame[written:], self._end + written)
            os.fsync(self._file)
        except OSError:
            os.ftruncate(self._file, self._end)
            raise

    def _read_frames(self) -> tuple[dict[str, deque[tuple[int, int]]], int]:
        """Return the complete frames of the file by rollout, and the end of the last one."""
        text = self._path.read_bytes()
        frames = list(_whole_frames(text))
        if not frames and not text.startswith(_MAGIC[: len(text)]):
            raise OSError(f"{self._path} is not a journal of this version: set a different store.spool_path")
        end = frames[-1][0] + frames[-1][1] if frames else 0
        gaps = end - sum(length for _, length in frames)
        if gaps:
            self.damaged = 1
            LOG.error("Journal %s is damaged: %d unreadable bytes between entries are skipped", self._path, gaps)
        if frames:
            LOG.warning("Journal %s has %d steps that are not in the store yet", self._path, len(frames))
        rollouts: dict[str, deque[tuple[int, int]]] = {}
        for offset, length in frames:
            rollouts.setdefault(_rollout(text[offset + _HEAD_BYTES : offset + length]), deque()).append(
                (offset, length)
            )
        return rollouts, end


def pack(entry: StepWrite) -> bytes:
    """Return an entry as a frame."""
    body = msgspec.msgpack.encode(entry)
    return b"".join((_MAGIC, len(body).to_bytes(4, "little"), _checksum(body), body))


def unpack(frame: bytes) -> StepWrite:
    """Return the entry of a frame; fields that it lacks have their defaults. Raises ValueError for a damaged frame."""
    body = frame[_HEAD_BYTES:]
    if _checksum(body) != frame[_HEAD_BYTES - _CHECKSUM_BYTES : _HEAD_BYTES]:
        raise ValueError("checksum mismatch")
    return _DECODER.decode(body)


class _Head(msgspec.Struct):
    rollout: str


_HEADS: Final = msgspec.msgpack.Decoder(_Head)


def _rollout(body: bytes) -> str:
    """Return the rollout of an entry; nothing for one of another shape, which `unpack` refuses."""
    try:
        return _HEADS.decode(body).rollout
    except msgspec.MsgspecError:
        return ""


def _whole_frames(text: bytes) -> Iterator[tuple[int, int]]:
    """Yield offset and length of each complete frame; bytes between frames are damage."""
    offset = text.find(_MAGIC)
    while offset >= 0:
        length = _HEAD_BYTES + int.from_bytes(text[offset + 4 : offset + 8], "little")
        frame = text[offset : offset + length]
        if len(frame) == length and _checksum(frame[_HEAD_BYTES:]) == frame[8:_HEAD_BYTES]:
            yield offset, length
            offset = text.find(_MAGIC, offset + length)
        else:
            offset = text.find(_MAGIC, offset + 1)


def _checksum(body: bytes) -> bytes:
    return blake2b(body, digest_size=_CHECKSUM_BYTES).digest()


def _lock(file: int, path: Path) -> None:
    """Lock the file; the kernel releases the lock when the process ends."""
    if sys.platform == "win32":
        return
    import fcntl  # noqa: PLC0415 - Windows has none

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise OSError(f"Journal {path} is used by another process; set a different store.spool_path") from None


class StoreHealth(BackgroundWork):
    """Which servers of the store are unreachable. `back` is awaited after each recovery; it may fail, and is repeated then."""

    def __init__(self, store: Store, metrics: Metrics, back: Callable[[], Awaitable[None]]) -> None:
        self._store = store
        self._servers = metrics.store_server_up
        self._back = back
        self.unreachable: dict[str, str] = {}  # the reason, by address
        metrics.store_up.set_function(self._measured)

    def __repr__(self) -> str:
        return f"<StoreHealth {self.unreachable or 'reachable'}>"

    def reason(self, rollout: str) -> str | None:
        """Return why the server of a rollout is unreachable, if it is known to be."""
        return self.unreachable.get(self._store.server_of(rollout)) if self.unreachable else None

    def check(self, rollout: str) -> None:
        """Raise StoreUnreachable while the server of this rollout is known to be unreachable."""
        if (reason := self.reason(rollout)) is not None:
            raise StoreUnreachable(reason)

    def failed(self, error: Exception) -> None:
        """Handle a failed command: if a server is unreachable, start probing it."""
        if isinstance(error, StoreUnreachable) and error.server is not None and error.server not in self.unreachable:
            LOG.error("Store unreachable: %s", error)
            self.unreachable[error.server] = str(error)
            self.probe()

    def probe(self) -> None:
        """Probe the unreachable servers until all are reachable and `back` has succeeded."""
        if self._task is None or self._task.done():  # it also ends by an unexpected error of `back`
            self.start()

    def _measured(self) -> float:
        """Set the gauge of each server, before it is read, and return that of all: a failover changes the servers."""
        self._servers.clear()
        for server in self._store.servers | self.unreachable.keys():
            self._servers.labels(server).set(server not in self.unreachable)
        return not self.unreachable

    async def _run(self) -> None:
        intervals, last_error = chain(_INTERVALS_S, repeat(_INTERVALS_S[-1])), ""
        while True:
            await asyncio.gather(*map(self._probe, tuple(self.unreachable)))
            try:
                await self._back()
            except (StorageError, OSError) as error:
                if str(error) != last_error:
                    LOG.error("Journal not replayed yet: %s", error)
                last_error = str(error)
                self.failed(error)
            else:
                if not self.unreachable:
                    return
            await asyncio.sleep(next(intervals))

    async def _probe(self, server: str) -> None:
        try:
            async with asyncio.timeout(_PROBE_TIMEOUT_S):
                await self._store.probe(server)
        except (StorageError, OSError) as error:
            self.unreachable[server] = str(error) or self.unreachable[server]  # a timeout has no text
        else:
            LOG.info("Store at %s reachable again, or replaced by another server", server)
            del self.unreachable[server]
