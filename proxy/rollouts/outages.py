"""Outages of the store: its health, and the journal of steps on disk meanwhile.

The store counts as unreachable after a failed command, and as reachable after a successful write: a store that is full or
read-only still replies to PING.

The journal is one file of frames, locked by its process. A frame is `TTJ2`, its length (u32), a checksum of 16 bytes, and the
entry as MessagePack.

Rule 1: an entry is on disk (fsync) when `write` returns.
Rule 2: entries of a rollout are replayed in the order in which they were written; different rollouts concurrently, because
        entries are also written concurrently meanwhile. The file is truncated only after the last entry: an entry that is
        replayed twice after a failure is stored once, because the store knows steps by name.
Rule 3: damaged frames are skipped and counted. An incomplete last frame was never acknowledged and is cut off.
"""

import asyncio
import os
import sys
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Final

import msgspec

from proxy.telemetry.logs import LOG
from proxy.telemetry.metrics import Metrics
from proxy.upstream.concurrency import BackgroundWork
from storage.errors import StorageError, StoreUnreachable
from storage.redis.store import Store
from storage.types import StepWrite

_INTERVALS_S: Final = (0.05, 0.1, 0.2, 0.5, 1.0)  # between probes; the last one repeats
_PROBE_TIMEOUT_S: Final = 2.0
PROBE: Final = "probe"  # a constant of the store: only the first write of it changes the store
_MAGIC: Final = b"TTJ2"
_CHECKSUM_BYTES: Final = 16
_REPLAY_BATCH: Final = 64  # entries in memory during a replay
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
            os.ftruncate(self._file, self._end)
        except BaseException:
            os.close(self._file)
            raise

    def __repr__(self) -> str:
        return f"<Journal {self._path}, {self.pending} entries>"

    @property
    def pending(self) -> int:
        """The number of entries that are not in the store yet."""
        return len(self._frames)

    async def write(self, entry: StepWrite) -> None:
        """Append an entry; it is on disk when this returns. Raises OSError on failure; then nothing was appended.

        It must not be cancelled, because the writing thread would continue. The recorder runs it in a task.
        """
        frame = pack(entry)
        async with self._lock:
            await asyncio.to_thread(self._append, frame)
            self._frames.append((self._end, len(frame)))
            self._end += len(frame)

    async def replay(self, append: Callable[[StepWrite], Awaitable[None]]) -> None:
        """Pass every entry to `append`, including those written meanwhile, and truncate the file after the last.

        Raises what `append` raises; entries that were not appended stay.
        """
        while self._frames:
            frames = tuple(islice(self._frames, _REPLAY_BATCH))
            rollouts: defaultdict[str, list[tuple[int, StepWrite]]] = defaultdict(list)
            done: set[int] = set()
            for offset, entry in await asyncio.to_thread(self._entries, frames):
                if entry is None:
                    self.damaged += 1
                    done.add(offset)
                else:
                    rollouts[entry.rollout].append((offset, entry))

            async def in_order(entries: list[tuple[int, StepWrite]], done: set[int] = done) -> None:
                for offset, entry in entries:
                    await append(entry)
                    done.add(offset)

            outcomes = await asyncio.gather(*map(in_order, rollouts.values()), return_exceptions=True)
            async with self._lock:
                while self._frames and self._frames[0][0] in done:
                    self._frames.popleft()
                if not self._frames:
                    self._end = 0
                    os.ftruncate(self._file, 0)
            for outcome in outcomes:
                if outcome is not None:
                    raise outcome

    def close(self) -> None:
        """Close the file; the next process that opens it replays its entries."""
        os.close(self._file)

    def _entries(self, frames: Iterable[tuple[int, int]]) -> list[tuple[int, StepWrite | None]]:
        """Return the offset and the entry of each frame; None for a damaged one."""
        read: list[tuple[int, StepWrite | None]] = []
        for offset, length in frames:
            try:
                read.append((offset, unpack(os.pread(self._file, length, offset))))
            except ValueError as error:
                LOG.error("Step in journal %s lost: %s", self._path, error)
                read.append((offset, None))
        return read

    def _append(self, frame: bytes) -> None:
        try:
            written = 0
            while written < len(frame):
                written += os.pwrite(self._file, frame[written:], self._end + written)
            os.fsync(self._file)
        except OSError:
            os.ftruncate(self._file, self._end)
            raise

    def _read_frames(self) -> tuple[deque[tuple[int, int]], int]:
        """Return the complete frames of the file, and the end of the last one."""
        text = self._path.read_bytes()
        frames = deque(_whole_frames(text))
        if not frames and not text.startswith(_MAGIC[: len(text)]):
            raise OSError(f"{self._path} is not a journal of this version: set a different store.spool_path")
        end = frames[-1][0] + frames[-1][1] if frames else 0
        gaps = end - sum(length for _, length in frames)
        if gaps:
            self.damaged = 1
            LOG.error("Journal %s is damaged: %d unreadable bytes between entries are skipped", self._path, gaps)
        if frames:
            LOG.warning("Journal %s has %d steps that are not in the store yet", self._path, len(frames))
        return frames, end


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
    """Whether the store is reachable. `back` is awaited after each recovery; it may fail, which continues the probes."""

    def __init__(self, store: Store, metrics: Metrics, back: Callable[[], Awaitable[None]]) -> None:
        self._store = store
        self._metrics = metrics
        self._back = back
        self.unreachable: str | None = None  # the reason, or None while the store is reachable

    def __repr__(self) -> str:
        return f"<StoreHealth {self.unreachable or 'reachable'}>"

    def check(self) -> None:
        """Raise StoreUnreachable while the store is known to be unreachable."""
        if self.unreachable is not None:
            raise StoreUnreachable(self.unreachable)

    def failed(self, error: StorageError) -> None:
        """Handle a failed command: if the store is unreachable, start probing it."""
        if isinstance(error, StoreUnreachable) and self.unreachable is None:
            LOG.error("Store unreachable: %s", error)
            self.unreachable = str(error)
            self._metrics.store_up.set(0)
            self.probe()

    def probe(self) -> None:
        """Probe the store until it is reachable and `back` has succeeded."""
        if self._task is None or self._task.done():  # it also ends by an unexpected error of `back`
            self.start()

    async def _run(self) -> None:
        probes = 0
        while True:
            try:
                async with asyncio.timeout(_PROBE_TIMEOUT_S):
                    await self._store.ping()
                    await self._store.set_once(PROBE, b"1")
                if self.unreachable is not None:
                    LOG.info("Store reachable again")
                self.unreachable = None
                self._metrics.store_up.set(1)
                await self._back()
            except (StorageError, OSError) as error:
                self.unreachable = str(error) or f"the store timed out after {_PROBE_TIMEOUT_S:g} s"
                self._metrics.store_up.set(0)
            else:
                return
            await asyncio.sleep(_INTERVALS_S[min(probes, len(_INTERVALS_S) - 1)])
            probes += 1
