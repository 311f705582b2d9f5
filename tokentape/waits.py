"""What the waits of the clients log, and the errors with which they end."""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from time import monotonic
from typing import Any, Final

from tokentape.transport import ClientError

LOG: Final = logging.getLogger("tokentape.client")
LOG_EVERY_S: Final = 30.0
MAX_WAIT_S: Final = 7200.0  # longer than groups with the default limits take to start, and to be idle
WAIT_TIMEOUT: Final = "wait_timeout"
MAX_NAMED: Final = 3  # open groups of a message
OPEN_PAGE: Final = 100  # open groups that are looked at


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


def what_batches_wait_for(
    claimed: Mapping[str, Any], groups: int, options: Mapping[str, Any], open_groups: Sequence[Mapping[str, Any]] | None
) -> str:
    """Describe what is missing for a batch: the groups that the last claim saw, and those that are still open."""
    policy = f" of policy {options['policy']!r}" if options.get("policy") else ""
    wanted = f"{groups} complete groups at once" if options.get("exact") and groups > 1 else "a complete group"
    waiting, refused = claimed.get("waiting", {}), claimed.get("refused", [])
    parts = [f"{waiting.get('available', 0)} available", f"{waiting.get('claimed', 0)} claimed by others"]
    if refused:
        codes = Counter(group.get("code", "refused") for group in refused)
        counted = ", ".join(f"{code} ({count})" for code, count in codes.items())
        parts.append(f"refused: {counted}, such as {refused[0]['group_id']!r}: {refused[0]['why']}")
    if open_groups is not None:
        parts.append(_describe_open(open_groups))
    return f"{wanted}{policy}: {'; '.join(parts)}"


def _describe_open(groups: Sequence[Mapping[str, Any]]) -> str:
    """Describe open groups, of which the newest are first; the oldest are named."""
    if not groups:
        return "no group is open"
    named = [
        f"{group['group_id']!r} with {group['finished']} of {group['members']} rollouts finished"
        for group in list(groups)[: -MAX_NAMED - 1 : -1]
    ]
    count = f"{len(groups)} or more" if len(groups) >= OPEN_PAGE else str(len(groups))
    return f"{count} open: {', '.join(named)}{', …' if len(groups) > MAX_NAMED else ''}"
