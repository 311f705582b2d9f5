"""What a client asks, what it is refused, and how long it waits before it asks again.

Holds plain values and decisions over them. No sockets and no waiting: `blocking` and `awaiting` do that.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

_AGAIN: Final = (429, 503)  # a limit that passes, or something away for a while
_LONGEST_PAUSE_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. `wait_s` is how long the proxy itself may take before it begins to answer."""

    method: str
    path: str
    body: Mapping[str, Any] | None = None
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    wait_s: float = 0.0


class ClientError(Exception):
    """The proxy refused a request, or was not reached (`type` `connection_error`), or the request was not sent at all.

    `status` is None without an answer. A request is not sent if a reward or advantage of it is not finite, or beyond the
    range of float32 (`code` `not_valid`).
    """

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        type: str = "connection_error",  # noqa: A002 - as the body of the error calls it
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


def refusal(status: int, headers: Mapping[str, str], text: bytes) -> ClientError:
    """The error that an answer is; one that is not of ours has its text for a message."""
    try:
        said = json.loads(text)["error"]  # noqa: TID251 - the client needs nothing but httpx2
        message, kind = str(said["message"]), str(said.get("type"))
    except (ValueError, KeyError, TypeError, AttributeError):
        said, message, kind = {}, text.decode("utf-8", "replace")[:500] or "no reason was given", "http_error"
    code = said.get("code")
    return ClientError(
        message,
        status=status,
        type=kind,
        code=None if code is None else str(code),
        param=said.get("param"),
        retry_after_s=_seconds(headers.get("Retry-After")),
    )


def pause_before_again(error: ClientError, attempt: int, attempts: int) -> float | None:
    """How many seconds to wait after this attempt (the first is 1) before the next; None: do not ask again.

    Asked again is what was not carried out: 429, 503, and a proxy that could not be connected to. By `Retry-After`, else
    0.25 s, doubled each time; a wait of more than a minute is the caller's to decide on. A rollout's own limit does not
    pass by waiting.
    """
    unreached = error.status is None and error.code == "unreachable"
    if attempt >= attempts or error.type == "rollout_limit" or not (unreached or error.status in _AGAIN):
        return None
    pause = 0.25 * 2 ** (attempt - 1) if error.retry_after_s is None else error.retry_after_s
    return pause if pause <= _LONGEST_PAUSE_S else None


def read_line(line: str) -> Any:
    """One line of NDJSON."""
    return json.loads(line)  # noqa: TID251 - the client needs nothing but httpx2


def _seconds(text: str | None) -> float | None:
    """A `Retry-After` in seconds; a date is left to the default pause."""
    try:
        return None if text is None else max(0.0, float(text))
    except ValueError:
        return None
