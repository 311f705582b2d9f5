"""What `update_policy` of both clients checks and raises."""

import logging
from collections.abc import Mapping
from inspect import isawaitable, iscoroutine
from typing import Any, Final, Literal

from tokentape.transport import NOT_VALID, ClientError

LOG: Final = logging.getLogger("tokentape.client")
InFlight = Literal["drain", "abort", "continue"]
MAX_VERSION: Final = 256  # characters
_DIGITS: Final = 18
NOT_DRAINED: Final = "not_drained"
NOT_FOUND: Final = 404
STILL_PAUSED: Final = "Calls are still paused; POST {path} ends the pause."
NOT_ANNOUNCED: Final = (
    "The update was made and its version was not announced: calls stay paused until put_policy(version) and resume()."
)


def check_update(version: object, in_flight: str) -> None:
    """Raise ClientError unless the version can be announced after the update, and the choice for calls in flight exists."""
    is_version = isinstance(version, int) or (isinstance(version, str) and 1 <= len(version) <= MAX_VERSION)
    if not is_version or isinstance(version, bool):
        raise _not_valid("version", f"must be an integer or a string of 1 to {MAX_VERSION} characters, not {version!r}")
    if in_flight not in ("drain", "abort", "continue"):
        raise _not_valid("in_flight", f"must be 'drain', 'abort' or 'continue', not {in_flight!r}")


def check_follows(announced: Mapping[str, Any], version: str | int, run: str | None) -> None:
    """Raise ClientError if the proxy would refuse to announce the version after the update."""
    known, number = _number(announced.get("highest", announced["version"])), _number(version)
    if known is not None and number is not None and number < known and run in (None, announced.get("run")):
        raise ClientError(
            f"Version {version} is lower than {known}, which was announced; nothing was updated. If the run continues from an "
            "earlier version, use another run= than before, or put_policy(version, new_epoch=True) first.",
            type="conflict_error",
            code="lower_version",
            param="version",
        )


def logged(announced: dict[str, Any]) -> dict[str, Any]:
    """Return the response to an announcement, and log its warning if it has one."""
    if "warning" in announced:
        LOG.warning("%s", announced["warning"])
    return announced


def check_drained(paused: Mapping[str, Any], drain_s: float) -> None:
    """Raise ClientError if calls are in flight after a pause that drains."""
    if not paused["drained"]:
        raise ClientError(
            f"{paused['in_flight']} calls are in flight after {drain_s:g} s, or another client paused or resumed calls; "
            "nothing was updated. Use a larger drain_s, or in_flight='abort' or 'continue'.",
            type="conflict_error",
            code=NOT_DRAINED,
        )


async def afinished(result: object) -> None:
    """Await the result of an asynchronous callback."""
    if isawaitable(result):
        await result


def finished(result: object) -> None:
    """Raise TypeError if the callback of the blocking client is asynchronous: its update would not be made."""
    if iscoroutine(result):
        result.close()
    if isawaitable(result):
        raise TypeError("Client.update_policy requires a blocking function; use AsyncClient for an asynchronous one.")


def _number(version: str | int | None) -> int | None:
    """Return a version as a number; None unless it is a decimal number of at most 18 digits."""
    text = str(version)
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _DIGITS else None


def _not_valid(name: str, problem: str) -> ClientError:
    return ClientError(f"{name}: {problem}", type="invalid_request_error", code=NOT_VALID, param=name)
