"""The hand-over of connections: the supervisor accepts them, and each goes to the worker with the fewest open connections.

The kernel would distribute them by a hash (SO_REUSEPORT), less equally (docs/decisions/145).

Each worker has a socket pair (a channel) for each address. The supervisor sends a byte with the descriptor of a connection. The
worker reports when it begins and ends to accept, and each connection that closes. While no worker accepts, connections wait in
the backlog of the listening socket. A channel ends with its worker, also if that is killed.
"""

import asyncio
import socket
import ssl
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from aiohttp import web

from proxy.server.connections import Runner
from proxy.telemetry.logs import LOG
from proxy.upstream.concurrency import BackgroundTasks

# From the supervisor: a connection; no more connections follow. From a worker: it accepts; it stops; a connection was closed.
_CONNECTION: Final = b"n"
_END: Final = b"e"
_ACCEPTING: Final = b"+"
_STOPPING: Final = b"-"
_CLOSED: Final = b"c"

_PER_ITERATION: Final = 64  # connections that are accepted before other events are handled
_FULL_INTERVAL_S: Final = 0.01  # the channels of busy workers are full
_ERROR_INTERVAL_S: Final = 1.0  # as asyncio, for example without free file descriptors
_END_TIMEOUT_S: Final = 1.0
_UNACKED: Final = 24  # in struct tcp_info


@dataclass(eq=False, slots=True)
class _Worker:
    """A worker as the supervisor sees it; `turn` grows with each connection that is handed over to any worker."""

    channel: socket.socket
    is_accepting: bool = False
    open: int = 0
    turn: int = 0


class Acceptor:
    """Accepts the connections of listening sockets and hands them over. Create it in the event loop, and `close` it."""

    def __init__(self, listening: Sequence[socket.socket]) -> None:
        self._listening = listening
        self._workers: list[_Worker] = []
        self._turns = 0
        self._held: socket.socket | None = None  # accepted, while all channels are full
        self._paused: asyncio.TimerHandle | None = None
        self._is_stopping = False
        self._loop = asyncio.get_running_loop()

    @property
    def waiting(self) -> int:
        """The number of connections that no worker has yet."""
        return backlog_of(self._listening) + (self._held is not None)

    def add_worker(self) -> socket.socket:
        """Return the end of a new channel for a worker. The caller closes it once the worker has it."""
        channel, other = socket.socketpair()
        channel.settimeout(0)
        worker = _Worker(channel)
        self._workers.append(worker)
        self._loop.add_reader(channel, self._read, worker)
        return other

    def stop(self) -> None:
        """Stop listening once no worker accepts."""
        self._is_stopping = True
        self._update()

    def close(self) -> None:
        """Close all sockets."""
        if self._paused is not None:
            self._paused.cancel()
        self._stop_listening()
        for worker in self._workers:
            self._loop.remove_reader(worker.channel)
            worker.channel.close()
        self._workers = []

    def _update(self) -> None:
        """Accept connections while a worker does."""
        if self._paused is not None:
            return
        if any(worker.is_accepting for worker in self._workers):
            for listening in self._listening:
                self._loop.add_reader(listening, self._accept, listening)
        elif self._is_stopping:
            self._stop_listening()
        else:
            self._remove_readers()

    def _stop_listening(self) -> None:
        self._remove_readers()
        for listening in self._listening:
            listening.close()
        self._listening = ()
        if self._held is not None:
            self._held.close()
            self._held = None

    def _remove_readers(self) -> None:
        for listening in self._listening:
            self._loop.remove_reader(listening)

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(_PER_ITERATION):
            try:
                connection, _ = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                LOG.error("Cannot accept connections: %s", error)
                self._pause(_ERROR_INTERVAL_S)
                return
            if not self._hand_over(connection):
                self._held = connection
                self._pause(_FULL_INTERVAL_S)
                return

    def _pause(self, delay_s: float) -> None:
        self._remove_readers()
        self._paused = self._loop.call_later(delay_s, self._resume)

    def _resume(self) -> None:
        self._paused = None
        if self._held is not None:
            if self._hand_over(self._held):
                self._held = None
            elif not self._is_stopping or any(worker.is_accepting for worker in self._workers):
                self._pause(_FULL_INTERVAL_S)
        self._update()

    def _hand_over(self, connection: socket.socket) -> bool:
        """Send a connection to the worker with the fewest; of several, to the one that has waited longest for its turn."""
        accepting = (worker for worker in self._workers if worker.is_accepting)
        for worker in sorted(accepting, key=lambda worker: (worker.open, worker.turn)):
            try:
                socket.send_fds(worker.channel, [_CONNECTION], [connection.fileno()])
            except OSError:  # the channel is full, or its worker has just ended
                continue
            connection.close()
            self._turns += 1
            worker.open, worker.turn = worker.open + 1, self._turns
            return True
        return False

    def _read(self, worker: _Worker) -> None:
        try:
            reports = worker.channel.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            reports = b""
        worker.open -= reports.count(_CLOSED)
        changes = reports.translate(None, _CLOSED)
        for change in changes:
            worker.is_accepting = change == ord(_ACCEPTING)
            if not worker.is_accepting:
                with suppress(OSError):  # if the channel is full, the worker waits until its timeout
                    worker.channel.send(_END)
        if not reports:
            self._loop.remove_reader(worker.channel)
            worker.channel.close()
            self._workers.remove(worker)
        if changes or not reports:
            self._update()


def backlog_of(listening: Sequence[socket.socket]) -> int:
    """Return the number of connections in the backlogs of listening sockets; 0 if the system does not report it.

    That is `tcpi_unacked` of Linux (tcp_get_info in net/ipv4/tcp.c, 6.18).
    """
    if sys.platform != "linux":
        return 0
    infos = (each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _UNACKED + 4) for each in listening)
    return sum(int.from_bytes(info[_UNACKED:], sys.byteorder) for info in infos)


class HandedOver(web.BaseSite):
    """The connections of one address that the supervisor hands over to this worker."""

    __slots__ = ("_channel", "_ended", "_handshakes", "_listen", "_loop", "_reports")

    def __init__(self, runner: Runner, channel: socket.socket, listen: str, tls: ssl.SSLContext | None) -> None:
        super().__init__(runner, ssl_context=tls)
        channel.settimeout(0)
        self._channel = channel
        self._listen = listen
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self._handshakes = BackgroundTasks()
        self._reports = bytearray()  # not sent yet
        runner.on_connection_lost = self._count_closed

    @property
    def name(self) -> str:
        """The address."""
        return self._listen

    @property
    def waiting(self) -> int:
        """The number of connections that were handed over and not accepted yet: each is a byte in the channel."""
        import fcntl  # noqa: PLC0415 - not available on Windows, as workers
        import termios  # noqa: PLC0415

        return int.from_bytes(fcntl.ioctl(self._channel, termios.FIONREAD, bytes(4)), sys.byteorder)

    async def start(self) -> None:
        """Begin to accept."""
        await super().start()
        self._loop.add_reader(self._channel, self._receive)
        self._report(_ACCEPTING)

    async def stop(self) -> None:
        """Stop accepting, with the connections that were handed over already."""
        self._report(_STOPPING)
        with suppress(TimeoutError):
            async with asyncio.timeout(_END_TIMEOUT_S):
                await self._ended.wait()
                await self._handshakes.wait()
        self._loop.remove_reader(self._channel)
        await super().stop()

    def _receive(self) -> None:
        for _ in range(_PER_ITERATION):
            try:
                message, descriptors, _, _ = socket.recv_fds(self._channel, 1, 1)
            except BlockingIOError:
                return
            except OSError:
                message, descriptors = b"", []
            if descriptors:
                self._handshakes.start(self._open(socket.socket(fileno=descriptors[0])))
            elif message == _CONNECTION:
                LOG.error("A connection was lost because this worker has no free file descriptor")
                self._count_closed()
            else:
                self._ended.set()
                if not message:  # the supervisor ended
                    self._loop.remove_reader(self._channel)
                return

    async def _open(self, connection: socket.socket) -> None:
        """Serve a connection, after its TLS handshake if there is one."""
        connection.settimeout(0)
        assert self._runner.server is not None
        try:
            await self._loop.connect_accepted_socket(self._runner.server, connection, ssl=self._ssl_context)
        except OSError:  # closed already, or the handshake failed
            connection.close()
            self._count_closed()

    def _count_closed(self) -> None:
        self._report(_CLOSED)

    def _report(self, report: bytes) -> None:
        """Send a report, with the others of this iteration of the event loop."""
        if not self._reports:
            self._loop.call_soon(self._send)
        self._reports += report

    def _send(self) -> None:
        try:
            sent = self._channel.send(self._reports)
        except BlockingIOError:
            sent = 0
        except OSError:  # the supervisor ended
            sent = len(self._reports)
        del self._reports[:sent]
        if self._reports:
            self._loop.call_later(_FULL_INTERVAL_S, self._send)
