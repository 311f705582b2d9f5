"""Batches of complete groups, claimed one after the other, with leases that are extended while the trainer works."""

import re
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import suppress
from time import monotonic
from types import TracebackType
from typing import Any, Final, Self

from tokentape.transport import LOG, MAX_WAIT_S, ClientError, Wait
from tokentape.types import ClaimedGroup

LONG_POLL_S: Final = 30.0
HEARTBEATS_PER_LEASE: Final = 3  # two can fail before the lease expires
MAX_HEARTBEAT_S: Final = 20.0  # if two are due, another instance of the consumer takes the batch over
LOST_STATUSES: Final = (404, 409)
LEASE_LOST: Final = "lease_lost"
GROUPS_REFUSED: Final = "groups_refused"
REWARD_PENDING: Final = "reward_pending"  # the reason ends by itself
LASTING: Final = frozenset({"forked", "format"})  # reasons that do not change while the rollouts do not
MAX_NAMED: Final = 3  # open groups of a message
OPEN_PAGE: Final = 100  # open groups that are looked at
_NAMES_AND_NUMBERS: Final = re.compile(r"'[^']*'|\d+")


class Batch:
    """Claimed groups. `async with` acknowledges the batch at its end, and releases it after an exception.

    `claimed` is the whole response to the claim and `groups` its groups (`tokentape.types.ClaimedGroup`): `data` is the
    group in the claimed format, and `rows[i]` describes row i of it: rollout, steps, reward, advantage.

    A heartbeat extends the lease. Once it finds that the lease of any group is lost in spite of it, because another consumer
    has the group or no extension succeeded within the lease, `is_lost` is true, and `check`, `groups` and `ack` raise.
    """

    def __init__(
        self, client: Any, claimed: dict[str, Any], lease_s: float, options: Mapping[str, Any] | None = None
    ) -> None:
        self.claimed = claimed
        self.options = options or {}  # of the claim
        self.batch_id: str = claimed["batch_id"]
        self._client = client
        self._lease_s = lease_s
        self._extended_at = monotonic()
        self._why_lost: str | None = None
        self._is_ended = False
        self._heartbeat = client.transport.heartbeat(self._extend_lease, heartbeat_interval(lease_s))

    @property
    def groups(self) -> list[ClaimedGroup]:
        """The groups. Raises ClientError as `check` does."""
        self.check()
        groups: list[ClaimedGroup] = self.claimed["groups"]
        return groups

    @property
    def is_lost(self) -> bool:
        """Whether the heartbeat has found that the lease is lost."""
        return self._why_lost is not None

    def check(self) -> None:
        """Raise ClientError (409, `lease_lost`) if the heartbeat has found that the lease is lost. Sends no request.

        Call it before each change of the weights.
        """
        if self._why_lost is not None:
            raise ClientError(self._why_lost, status=409, type="conflict", code=LEASE_LOST)

    async def ack(self, *, delete: bool | None = None) -> None:
        """Acknowledge the batch; `delete` deletes its rollouts. Raises ClientError (404 or 409) if a group is lost."""
        await self._end()
        result = await self._client.ack_batch(self.batch_id, delete=delete)
        if result["lost"]:
            raise ClientError(
                f"The lease of batch {self.batch_id!r} expired and another consumer claimed "
                f"{', '.join(result['lost'])}; its other groups are acknowledged.",
                status=409,
                type="conflict",
                code=LEASE_LOST,
            )

    async def release(self) -> None:
        """Release the batch: other consumers can claim its groups."""
        await self._end()
        await self._client.release_batch(self.batch_id)

    async def __aenter__(self) -> Self:
        await self._heartbeat.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._is_ended:
            return
        if error is None:
            await self.ack()
            return
        with suppress(ClientError):  # the first error matters more, and the lease expires
            await self.release()

    async def _end(self) -> None:
        self._is_ended = True
        await self._heartbeat.stop()

    async def _extend_lease(self) -> bool:
        """Extend the lease; return whether the batch still has it."""
        began = monotonic()
        try:
            result = await self._client.extend_batch(self.batch_id, lease_s=self._lease_s)
        except ClientError as error:
            is_over = error.status in LOST_STATUSES or began - self._extended_at >= self._lease_s
            why = error.message if is_over else None  # any other error can be over at the next heartbeat
        else:
            self._extended_at = began
            lost = ", ".join(result["lost"])
            why = f"The lease of batch {self.batch_id!r} expired and another consumer claimed {lost}." if lost else None
        if why is not None and not self._is_ended:
            self._why_lost = why
            LOG.warning("batch %s is lost: %s", self.batch_id, why)
        return why is None


def heartbeat_interval(lease_s: float) -> float:
    """Return the interval of a batch's heartbeat in seconds."""
    return min(lease_s / HEARTBEATS_PER_LEASE, MAX_HEARTBEAT_S)


class Stall:
    """Detects that every complete group is refused, so that a loop over batches would wait without an end."""

    def __init__(self, stall_s: float | None) -> None:
        self._stall_s = stall_s
        self._since: float | None = None

    def limit(self, poll_s: float) -> float:
        """Return for how long the next claim waits: not longer than until an error is due."""
        if self._stall_s is None or self._since is None:
            return poll_s
        return min(poll_s, max(0.0, self._since + self._stall_s - monotonic()))

    def check(self, claimed: dict[str, Any]) -> None:
        """Raise ClientError if a claim refused every group, for reasons that last, or like all claims for `stall_s`."""
        refused = claimed.get("refused", [])
        available = claimed.get("waiting", {}).get("available", 0)
        codes = [group.get("code", "refused") for group in refused]
        is_all = claimed["batch_id"] is None and refused and available <= len(refused) and REWARD_PENDING not in codes
        if self._stall_s is None or not is_all:
            self._since = None
            return
        now = monotonic()
        self._since = now if self._since is None else self._since
        if set(codes) <= LASTING or now - self._since >= self._stall_s:
            counted = ", ".join(f"{code} ({codes.count(code)})" for code in dict.fromkeys(codes))
            first = refused[0]
            raise ClientError(
                f"All {len(refused)} complete groups are refused: {counted}. Group {first['group_id']!r}: {first['why']}",
                type="conflict",
                code=GROUPS_REFUSED,
            )


async def claim_batches(
    client: Any,
    *,
    consumer: str,
    groups: int,
    wait_s: float | None,
    lease_s: float,
    stall_s: float | None,
    **options: Any,
) -> AsyncGenerator[Batch, None]:
    """Claim one batch after the other; see `ControlApi.batches`."""
    logged: set[str] = set()
    stall = Stall(stall_s)
    wait: Wait | None = None  # for the next batch
    while True:
        wait = Wait(MAX_WAIT_S if wait_s is None else wait_s) if wait is None else wait
        poll_s = round(min(LONG_POLL_S, wait.until_log_s, wait.left_s), 3)
        claimed = await client.claim_batch(
            consumer=consumer,
            groups=groups,
            wait_s=stall.limit(poll_s),
            lease_s=lease_s,
            heartbeat_s=heartbeat_interval(lease_s),
            **options,
        )
        _log_excluded(claimed, logged)
        stall.check(claimed)
        if claimed["batch_id"] is not None:
            async with Batch(client, claimed, lease_s, options) as batch:
                yield batch
            wait = None
        elif not wait.left_s or not wait.until_log_s:
            if wait_s is not None and not wait.left_s:
                return
            open_groups = None
            with suppress(ClientError):
                open_groups = (await client.send("GET", "/groups", status="open", limit=OPEN_PAGE))["groups"]
            what = what_batches_wait_for(claimed, groups, options, open_groups)
            if not wait.left_s:
                raise wait.error(what)
            wait.log(what)


def _log_excluded(claimed: dict[str, Any], logged: set[str]) -> None:
    """Log why groups were refused or dropped: each reason once, ignoring its ids and numbers."""
    for outcome in ("refused", "dropped"):
        for group in claimed.get(outcome, ()):
            reason = f"{outcome}: {without_numbers(group['why'])}"
            if reason not in logged:
                logged.add(reason)
                LOG.warning("group %s is %s: %s", group["group_id"], outcome, group["why"])


def without_numbers(why: str) -> str:
    """Return a reason without its ids and numbers, by which equal reasons are logged once."""
    return _NAMES_AND_NUMBERS.sub("", why)


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
    """Describe open groups, newest first; the oldest are named."""
    if not groups:
        return "no group is open"
    named = [
        f"{group['group_id']!r} with {group['finished']} of {group['members']} rollouts finished"
        for group in list(groups)[: -MAX_NAMED - 1 : -1]
    ]
    count = f"{len(groups)} or more" if len(groups) >= OPEN_PAGE else str(len(groups))
    return f"{count} open: {', '.join(named)}{', …' if len(groups) > MAX_NAMED else ''}"
