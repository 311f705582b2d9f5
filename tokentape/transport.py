"""Requests, errors, the retry policy and waits; a Transport sends the requests."""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from inspect import isawaitable
from time import monotonic
from typing import Any, Final

LOG: Final = logging.getLogger("tokentape.client")
LOG_EVERY_S: Final = 30.0
MAX_WAIT_S: Final = 7200.0  # longer than groups with the default limits take to start, and to be idle
WAIT_TIMEOUT: Final = "wait_timeout"
RETRIED_STATUSES: Final = (429, 503)
ROLLOUT_LIMIT: Final = "rollout_limit"  # the type of a 429 that no retry can pass
MAX_RETRY_DELAY_S: Final = 60.0
MAX_ERROR_CHARACTERS: Final = 500

Beat = Callable[[], Coroutine[Any, Any, bool]]


@dataclass(frozen=True, slots=True)
class Request:
    """One request. `wait_s` is how long the proxy itself may wait before it starts to respond."""

    method: str
    path: str
    body: Mapping[str, Any] | None = None
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    wait_s: float = 0.0


class TaskHeartbeat:
    """Calls `beat` every `interval_s` in a task, until it returns False or the heartbeat is stopped."""

    def __init__(self, beat: Beat, interval_s: float) -> None:
        self.beat = beat
        self.interval_s = interval_s
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the task."""
        self._task = asyncio.create_task(self._run())  # noqa: TID251 - referenced here, cancelled in stop

    async def stop(self) -> None:
        """Cancel the task."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        is_held = True
        while is_held:
            await asyncio.sleep(self.interval_s)
            is_held = await self.beat()


class Transport:
    """How a client sends requests and waits: with asyncio. One that blocks overrides each method, and suspends no coroutine."""

    def parts(self, request: Request) -> AsyncGenerator[bytes, None]:
        """Send a request, and yield the body of its response as it arrives. Raises ClientError."""
        raise NotImplementedError

    async def sleep(self, seconds: float) -> None:
        """Wait."""
        await asyncio.sleep(seconds)

    def heartbeat(self, beat: Beat, interval_s: float) -> TaskHeartbeat:
        """Return a heartbeat that was not started."""
        return TaskHeartbeat(beat, interval_s)

    async def finished(self, result: object) -> None:
        """Wait for the result of a user's callback, if it is asynchronous."""
        if isawaitable(result):
            await result

    async def close(self) -> None:
        """Close the connections."""


class ClientError(Exception):
    """The proxy returned an error, or the connection failed (`type` is `connection_error`), or the request was not sent.

    `status` is None if there is no response. `code` is `unreachable` if no connection was made, and `connection_lost` if
    the connection failed later. A request is not sent if a reward or an advantage in it is not finite or not within the
    range of float32 (`code` is `unprocessable_request`).
    """

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        type: str = "connection_error",  # noqa: A002 - the name of the field in the error body
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message if status is None else f"{status} {code or type}: {message}")
        self.message = message
        self.status = status
        self.type = type
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s

    @property
    def may_pass(self) -> bool:
        """Whether the same request may succeed later: the connection failed, or the status is 429 or 500 and above."""
        return self.status is None or self.status == 429 or self.status >= 500


def authorization(api_key: str | None) -> dict[str, str]:
    """Return the header of a key. Raises ValueError, which does not show it, for a key that no header can have."""
    if api_key and not (api_key.isascii() and api_key.isprintable()):
        raise ValueError("the API key has a line break, or another character that HTTP headers cannot have")
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def require(package: str, *, user: str, requirement: str) -> None:
    """Raise ImportError with the command that installs an optional package, unless it can be imported."""
    try:
        import_module(package)
    except ImportError as error:
        raise ImportError(f"{user} requires {package}: pip install '{requirement}'", name=package) from error


def error_from_response(status: int, headers: Mapping[str, str], content: bytes) -> ClientError:
    """Return the error of a response; the message of one that is not TokenTape's is its text."""
    try:
        error = json.loads(content)["error"]  # noqa: TID251 - the client requires httpx2 only
        message, kind = str(error["message"]), str(error.get("type"))
    except (ValueError, KeyError, TypeError, AttributeError):
        text = content.decode("utf-8", "replace")[:MAX_ERROR_CHARACTERS]
        error, message, kind = {}, text or "the response has no body", "http_error"
    code = error.get("code")
    return ClientError(
        message,
        status=status,
        type=kind,
        code=None if code is None else str(code),
        param=error.get("param"),
        retry_after_s=_seconds(headers.get("Retry-After")),
    )


def retry_delay(error: ClientError, attempt: int, max_attempts: int) -> float | None:
    """Return the seconds to wait after this attempt (the first is 1), or None if the request is not retried.

    429, 503 and a connection that could not be made are retried: nothing was carried out. The delay is `Retry-After`, or
    0.25 s doubled with each attempt. A `Retry-After` beyond a minute is not waited for. A limit of the rollout (429,
    `rollout_limit`) stays reached.
    """
    unreachable = error.status is None and error.code == "unreachable"
    retriable = unreachable or (error.status in RETRIED_STATUSES and error.type != ROLLOUT_LIMIT)
    if attempt >= max_attempts or not retriable:
        return None
    delay = 0.25 * 2 ** (attempt - 1) if error.retry_after_s is None else error.retry_after_s
    return delay if delay <= MAX_RETRY_DELAY_S else None


class Wait:
    """One wait. It logs what it waits for every `LOG_EVERY_S`, and ends after `limit_s`."""

    def __init__(self, limit_s: float) -> None:
        self._began = self._logged = monotonic()
        self._limit_s = limit_s

    @property
    def seconds(self) -> float:
        """How long it lasts."""
        return monotonic() - self._began

    @property
    def left_s(self) -> float:
        """How long until its end; 0 or more."""
        return max(0.0, self._limit_s - self.seconds)

    @property
    def until_log_s(self) -> float:
        """How long until the next log; 0 or more."""
        return max(0.0, self._logged + LOG_EVERY_S - monotonic())

    def log(self, what: str) -> None:
        """Log what it waits for."""
        self._logged = monotonic()
        LOG.warning("waiting for %s, for %.0f s now", what, self.seconds)

    def error(self, what: str) -> ClientError:
        """Return the error with which it ends after the default limit."""
        return ClientError(
            f"Waited {self.seconds:.0f} s for {what}. Set wait_s for another limit; math.inf is none.",
            type="timeout_error",
            code=WAIT_TIMEOUT,
        )


class LineBuffer:
    """Cuts a response into lines at line feeds only; JSON may have other line separators, such as U+2028, in strings."""

    def __init__(self) -> None:
        self._pending: list[bytes] = []

    def feed(self, received: bytes) -> list[bytes]:
        """Return the lines that are complete now."""
        first, *others = received.split(b"\n")
        self._pending.append(first)
        if not others:
            return []
        line, self._pending = b"".join(self._pending), [others.pop()]
        return [line, *others]

    def rest(self) -> bytes:
        """Return what follows the last line feed."""
        return b"".join(self._pending)


def parse_json(text: bytes, url: str) -> Any:
    """Parse a response or one line of it. Raises ClientError (`not_json`)."""
    try:
        return json.loads(text)  # noqa: TID251 - the client requires httpx2 only
    except ValueError as error:
        message = f"{url} did not return JSON; check that it is the control API of a proxy"
        raise ClientError(message, type="http_error", code="not_json") from error


def _seconds(text: str | None) -> float | None:
    """Return a `Retry-After` in seconds; None for a date."""
    try:
        return None if text is None else max(0.0, float(text))
    except ValueError:
        return None
