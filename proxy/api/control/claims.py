"""The route by which a consumer claims complete groups: their selection, lease and rendering.

A claim is for one policy, and considers the groups in its queue. Each group is leased, refused or dropped, with the reason.
The rewards of a group are frozen before they are read, so that they are the same in the batch, afterwards, and in batches of
other policies. If a claim is interrupted, its groups are released and its freeze is undone.

An exact claim never waits with leased groups, so that two claims cannot wait for each other: it examines groups one by one,
and once enough are available it leases as many as it needs before it renders them, or releases them all.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import compress, islice
from math import inf
from operator import not_
from typing import Final

import orjson
from aiohttp import web

from proxy.api.context import CONTEXT, Context
from proxy.api.control.batches import UNHELD, held_fields, release, take_over, watch_of
from proxy.api.control.export_query import ExportQuery, export_query
from proxy.api.control.group_rows import REWARD_PENDING, Reason, check_members, read_group_rows, why_pending
from proxy.api.control.outcomes import Earned, Outcome, earned_by, estimate, observe_claimed
from proxy.api.control.schemas import ClaimBatch
from proxy.api.failures import CLIENT_CLOSED_REQUEST
from proxy.api.requests import body_from
from proxy.clock import new_id
from proxy.errors import Conflict, Damaged
from proxy.export.base import MissingReward
from proxy.rollouts.group import (
    Claims,
    Group,
    PolicyState,
    counted,
    find_group,
    freeze,
    members_of,
    read_group,
    read_note,
    state_fields,
    supersede,
    unfreeze,
    write_batch,
)
from proxy.rollouts.policy import NOTHING, Announced, Policy, read_announced
from proxy.rollouts.rollout import ClaimId, Rollout, left_out
from proxy.rollouts.steps import aside
from proxy.telemetry.logs import LOG
from proxy.trajectory.advantages import BATCH
from proxy.trajectory.facts import number_of
from proxy.trajectory.json_bytes import to_json_bytes
from proxy.trajectory.ratios import RatioWarning, Recorded, ratio_warnings
from proxy.trajectory.step import DEFAULT_POLICY
from proxy.upstream.concurrency import run_all
from storage.errors import StorageError, StoreUnreachable
from storage.types import ClaimedGroup, QueueCounts, QueuedGroup

_POLL_INTERVAL_S: Final = 1.0  # without a notification: leases expire, and rewards are set
_AGAIN_S: Final = 0.2  # between two polls at least, if there are many notifications
_LEASE_PARTS: Final = 3  # a lease is extended after this part of it
_PAGE: Final = 1000  # entries that are read at once, the longest waiting ones first
_MAX_CONSIDERED: Final = 16_000
_EXAMINE_INTERVAL_S: Final = 2.0  # between two examinations of groups that were refused without a reward
_ROLLOUTS_OF_A_STEP: Final = 32  # recording the metrics of this many takes as long as one step in `aside`
_LATER: Final = "later_epoch"  # the store may have lost its announcement: such a group is never dropped
_NO_COUNTS: Final = QueueCounts(0, 0, 0)
_UNKNOWN: Final = -1  # a policy version that is not a number counts as older than any


@dataclass(slots=True)
class Held:
    """A leased group."""

    claimed: ClaimedGroup  # as it was when it was leased
    members: tuple[str, ...] = ()  # the claim froze their rewards, or `freezing` does
    freezing: asyncio.Task[list[Rollout]] | None = None
    earlier: Mapping[str, Claims] = field(
        default_factory=dict
    )  # by member, where a claim of the policy froze it before
    rendered: bytes = b""  # its JSON
    outcomes: Sequence[Outcome] = ()  # of its rollouts, if the advantages of the batch depend on them
    recorded: Counter[Recorded] = field(default_factory=Counter)  # its trained tokens, by how they were recorded
    earned: Earned | None = None  # None if there were earlier claims
    delivery: int = 1  # how many batches of the policy had the group, with this one
    previous_consumer: str | None = None  # of the last of them
    undone: Mapping[str, bytes | None] = field(default_factory=dict)  # fields with which a release undoes the delivery

    @property
    def waiting(self) -> QueuedGroup:
        """Its entry in the queue."""
        return self.claimed.queued

    def delivered_to(self, consumer: str) -> dict[str, bytes | None]:
        """Return the fields of the group in a batch of this consumer, and note how to undo them."""
        policy, before = self.waiting.queue, self.delivery - 1
        self.undone = state_fields(policy, delivery=before or None, delivered_to=self.previous_consumer)
        return state_fields(policy, delivery=self.delivery, delivered_to=consumer)


@dataclass(slots=True)
class Claim:
    """The state of one claim."""

    batch_id: str
    body: ClaimBatch
    query: ExportQuery
    policy: Policy
    takes_earlier_epochs: bool = False
    announced: Announced = NOTHING
    counts: QueueCounts = _NO_COUNTS  # of other groups than those that it leased or dropped
    held: list[Held] = field(default_factory=list)  # the groups that it leased
    dropped: dict[str, Reason] = field(default_factory=dict)
    refused: dict[str, Reason] = field(default_factory=dict)
    examined: set[str] = field(default_factory=set)  # groups that an exact claim has rendered once and released
    examined_at: float = -inf
    unreachable: StoreUnreachable | None = None  # why groups in a part of the store cannot be leased

    @property
    def missing(self) -> int:
        """How many more groups are requested."""
        return self.body.groups - len(self.held)

    @property
    def at_once(self) -> int:
        """How many groups are leased before they are rendered, and rendered at the same time."""
        return 1 if self.query.rescoring is None else 8  # scoring takes long

    def note(self, counts: QueueCounts) -> None:
        """Note how many groups there are besides those that it leased."""
        self.counts = counts._replace(claimed=max(0, counts.claimed - len(self.held)))

    def warnings(self) -> list[RatioWarning]:
        """Return the warnings of the tokens that the batch trains."""
        counts: Counter[Recorded] = Counter()
        for held in self.held:
            counts.update(held.recorded)
        return ratio_warnings(counts, self.announced.epoch)

    @property
    def id(self) -> ClaimId:
        """What the rewards that it freezes have of it."""
        return ClaimId(self.policy.name, self.batch_id)


async def claim_batch(request: web.Request) -> web.Response:
    """`POST /batches/claim`: lease up to `groups` complete groups, or exactly as many; wait up to `wait_s` for them."""
    context = request.app[CONTEXT]
    body = await body_from(request, ClaimBatch)
    policy = context.policies.claimed(body.policy)
    query = replace(export_query(context, body), policy=policy.name)
    query = await query.begin(context)  # first, so that no group is leased if the engines that score it are unreachable
    by_default = "drop" if body.max_staleness is not None else context.settings.groups.earlier_epochs
    claim = Claim(new_id(context.clock), body, query, policy, (body.earlier_epochs or by_default) == "take")
    started = context.clock.monotonic()
    deadline = started + body.wait_s
    try:
        async with _leases_kept(context, claim):
            await _fill_in_time(request, context, claim, deadline)
            lease_ms = await _record(context, claim)
    except BaseException:
        await undo(context, claim, claim.held)
        raise
    for reason in claim.refused.values():
        context.metrics.refused_groups.labels(policy.name, reason.code).inc()
    if _is_disconnected(request):
        await undo(context, claim, claim.held)
        return web.Response(status=CLIENT_CLOSED_REQUEST)
    # The batch is never undone from here on: the rewards depend on it instead of earlier claims of the policy.
    with suppress(StorageError, Damaged):  # the earlier ones remain, until the next claim
        for held in claim.held:
            for name, known in held.earlier.items():
                await supersede(context.store, context.clock, name, known, claim.id)
    context.metrics.claim_wait_seconds.labels(policy.name).observe(context.clock.monotonic() - started)
    await observe(context, claim)
    warnings = claim.warnings()
    for warning in warnings:
        context.metrics.ratio_warning_tokens.labels(policy.name, warning.code).inc(warning.tokens)
    shown = {"policy": policy.name} if context.policies.has_named else {}
    return web.Response(body=_batch_json(claim, shown, lease_ms, warnings), content_type="application/json")


async def _fill_in_time(request: web.Request, context: Context, claim: Claim, deadline: float) -> None:
    """Look for groups until one is leased, the deadline is over, or the client has disconnected.

    It looks again once it is notified of a group. The interval between two looks is random, so that exact claims that compete
    for groups do not do so again at the same time. It is not shorter than a look, which takes long if thousands of groups are
    refused.
    """
    async with AsyncExitStack() as stack:
        arrived: asyncio.Event | None = None
        while True:
            began = context.clock.monotonic()
            await fill(context, claim)
            remaining_s = deadline - (ended := context.clock.monotonic())
            if claim.held or _is_disconnected(request):
                return
            if remaining_s <= 0:
                if claim.unreachable is not None:
                    raise claim.unreachable
                return
            if arrived is None:
                arrived = await stack.enter_async_context(context.store.queue.arrivals(claim.policy.name))
            random_s = _AGAIN_S * (0.75 + context.clock.entropy(1)[0] / 512)
            with suppress(TimeoutError):
                async with asyncio.timeout(min(_POLL_INTERVAL_S, remaining_s)):
                    await arrived.wait()
            arrived.clear()
            again_s = began + max(random_s, ended - began) - context.clock.monotonic()
            await asyncio.sleep(min(again_s, deadline - context.clock.monotonic()))


@asynccontextmanager
async def _leases_kept(context: Context, claim: Claim) -> AsyncIterator[None]:
    """Extend the leases of the claim's groups in the background, if they are scored: that can take longer than a lease."""
    if claim.query.rescoring is None:
        yield
        return
    keeping = asyncio.get_running_loop().create_task(_keep_leases(context, claim))
    try:
        yield
    finally:
        keeping.cancel()
        await asyncio.wait([keeping])


async def _keep_leases(context: Context, claim: Claim) -> None:
    lease_ms = claim.body.lease_ms
    while True:
        await asyncio.sleep(lease_ms / 1000 / _LEASE_PARTS)
        now_ms = context.clock.now_ms()
        fields = held_fields(claim.id, claim.body.consumer, now_ms + lease_ms)
        held = {held.waiting: fields for held in claim.held}
        with suppress(StorageError):  # `_record` finds groups with expired leases
            await context.store.queue.extend(held, claim.batch_id, lease_ms=lease_ms, now_ms=now_ms)


def _is_disconnected(request: web.Request) -> bool:
    return request.transport is None or request.transport.is_closing()


async def _record(context: Context, claim: Claim) -> int | None:
    """Store the groups of the batch under its ID; return when its lease ends, in unix milliseconds.

    The lease starts now, after rendering. Groups that another consumer claimed meanwhile are not part of the batch; an exact
    claim then has no batch.
    """
    body, lease_ms, is_whole = claim.body, claim.body.lease_ms, True
    heartbeat_ms = None if body.heartbeat_s is None else max(1, round(body.heartbeat_s * 1000))
    while True:
        await normalize(context, claim)
        now_ms = context.clock.now_ms()
        fields = held_fields(claim.id, claim.body.consumer, now_ms + lease_ms)
        delivered = {held.waiting: fields | held.delivered_to(claim.body.consumer) for held in claim.held}
        has = await context.store.queue.extend(
            delivered,
            claim.batch_id,
            lease_ms=lease_ms,
            now_ms=now_ms,
            watch=watch_of(body.consumer, body.instance, heartbeat_ms),
        )
        if all(has):
            break
        await undo(context, claim, list(compress(claim.held, map(not_, has))))
        claim.held = list(compress(claim.held, has))  # advantages over the batch change without the lost groups
        is_whole = False
    if claim.body.exact and claim.missing:
        await put_back(context, claim)
    if not is_whole:
        claim.note(await context.store.queue.counts(claim.policy.name))
    if not claim.held:
        return None
    entries = [held.waiting for held in claim.held]
    batch = write_batch(body.consumer, claim.policy.name, entries, instance=body.instance, heartbeat_ms=heartbeat_ms)
    await context.store.batches.open(claim.batch_id, batch, now_ms=now_ms, is_new=True)
    return now_ms + lease_ms


def _batch_json(
    claim: Claim, shown: Mapping[str, str], lease_ms: int | None, warnings: Sequence[RatioWarning]
) -> bytes:
    """Return the batch as JSON, around groups that are JSON already. `waiting` counts groups that are not in the batch."""
    without = {"dropped": claim.dropped, "refused": claim.refused}
    fields = {
        "batch_id": claim.batch_id if claim.held else None,
        "consumer": claim.body.consumer,
        "format": claim.body.format,
        **shown,
        "policy_version": claim.announced.version,
        "policy_epoch": claim.announced.epoch,
        "lease_ms": lease_ms,
        "waiting": {"available": claim.counts.available, "claimed": claim.counts.claimed},
        **{
            kind: [{"group_id": group, "code": reason.code, "why": reason.why} for group, reason in found.items()]
            for kind, found in without.items()
        },
        "reasons": {kind: Counter(reason.code for reason in found.values()) for kind, found in without.items()},
        **({"warnings": warnings} if warnings else {}),
    }
    return orjson.dumps(fields)[:-1] + b',"groups":[' + b",".join(held.rendered for held in claim.held) + b"]}"


async def fill(context: Context, claim: Claim) -> None:
    """Lease waiting groups in the order of the claim, until it is full or none is left; an exact claim is full or empty.

    A claim with an instance first takes over the batches of those that missed a heartbeat.
    """
    consumer, instance = claim.body.consumer, claim.body.instance
    watched = None if instance is None else consumer
    now, skip, claim.unreachable = context.clock.monotonic(), 0, None
    refused = set(claim.refused)  # groups that are not considered again, unless
    if now - claim.examined_at >= _EXAMINE_INTERVAL_S:  # rewards may have been set since then
        claim.examined_at = now
        refused = {it for it, why in claim.refused.items() if why.code not in (MissingReward.code, REWARD_PENDING)}
    found: list[QueuedGroup] = []
    is_last = False
    while claim.missing and not is_last:
        state = await context.store.queue.read(claim.policy.name, skip=skip, limit=_PAGE, consumer=watched)
        watched = None
        if state.overdue and instance is not None:
            await take_over(context, consumer, instance, claim.policy.name, state.overdue)
            continue
        claim.announced = read_announced(state.announcements, claim.policy.name)
        claim.note(state.counts)
        gone = len(claim.held) + len(claim.dropped)
        found += [entry for entry in state.groups if entry.group not in refused]
        skip += len(state.groups)
        is_last = len(state.groups) < _PAGE or skip >= _MAX_CONSIDERED
        if is_last or len(found) >= claim.body.groups:
            await _choose(context, claim, sorted(found, key=lambda entry: _rank(entry, claim.body.order)))
            gone = len(claim.held) + len(claim.dropped) - gone
            claim.counts = claim.counts._replace(available=max(0, claim.counts.available - gone))
            skip -= gone  # these are not read again
            found.clear()


async def _choose(context: Context, claim: Claim, found: Sequence[QueuedGroup]) -> None:
    """Lease as many of these groups as the claim misses, if they are enough for an exact claim."""
    entries = iter(found)
    if not claim.body.exact:
        while claim.missing and await _take(context, claim, entries, min(claim.missing, claim.at_once)):
            pass
    elif len(found) >= claim.body.groups:
        while claim.missing and await _take(context, claim, entries, claim.missing):
            pass
        if claim.missing:
            await put_back(context, claim)
    else:
        new = iter([entry for entry in entries if entry.group not in claim.examined])
        while await _take(context, claim, new, 1):
            await put_back(context, claim)


async def put_back(context: Context, claim: Claim) -> None:
    """Release all groups of a claim."""
    claim.examined |= {held.waiting.group for held in claim.held}
    await undo(context, claim, claim.held)
    claim.held.clear()


async def undo(context: Context, claim: Claim, held: Iterable[Held]) -> None:
    """Release groups that were not returned to the client, and undo their freeze. Finishes even if it is cancelled."""

    async def undone() -> None:
        for group in held:
            try:
                await _unfreeze(context, claim, group)
                await release(context, claim.batch_id, group.waiting, group.undone)
            except (StorageError, Damaged) as error:  # the group is available again when its lease expires
                fields = {"group_id": group.waiting.group, "why": str(error)}
                LOG.error(
                    "Claimed group not released; it stays leased until its lease expires", extra={"fields": fields}
                )

    await asyncio.shield(context.recorder.tasks.start(undone()))


def _rank(waiting: QueuedGroup, order: str) -> tuple[int, int]:
    """Return the sort key of a group. Groups of equal rank stay in queue order."""
    note = read_note(waiting.note)
    number = number_of(note.oldest)
    version = _UNKNOWN if number is None else number
    return (note.epoch, version) if order == "oldest" else (-note.epoch, -version)


async def _take(context: Context, claim: Claim, entries: Iterator[QueuedGroup], count: int) -> bool:
    """Lease up to `count` groups, then render them; return whether any were leased."""
    leased: list[Held] = []
    for waiting in entries:
        if await _lease(context, claim, waiting):
            leased.append(claim.held[-1])
            if len(leased) == count:
                break
    render = [partial(_render, context, claim, held) for held in leased]
    for held, is_rendered in zip(leased, await run_all(render, at_once=claim.at_once), strict=True):
        if not is_rendered:
            claim.held.remove(held)
    return bool(leased)


async def _lease(context: Context, claim: Claim, waiting: QueuedGroup) -> bool:
    """Lease one group, unless it is too stale or incomplete and remains in the queue; return whether the claim has it now."""
    kept = why_stale(claim, waiting)
    if kept is None:
        kept = await _why_incomplete(context, claim, waiting)
    elif claim.body.stale != "keep" and kept.code != _LATER:
        kept = None  # `_render` drops it
    if kept is not None:
        claim.refused[waiting.group] = kept
        return False
    lease_ms, now_ms = claim.body.lease_ms, context.clock.now_ms()
    fields = held_fields(claim.id, claim.body.consumer, now_ms + lease_ms)
    try:
        found = await context.store.queue.claim(waiting, claim.batch_id, fields, lease_ms=lease_ms, now_ms=now_ms)
    except StoreUnreachable as error:
        claim.unreachable = error
        return False
    if found is None:
        return False  # claimed by another consumer, or deleted
    claim.held.append(Held(found))
    return True


async def _why_incomplete(context: Context, claim: Claim, waiting: QueuedGroup) -> Reason | None:
    """Return why a claim waits for a group: a member lacks something with members=all, or a reward may be set late.

    It is not leased and its rewards are not frozen for this: a missing one may be set at any time.
    """
    reward_s = claim.body.reward_s
    if reward_s is None:  # by default, if the claim does not choose the members that count
        reward_s = context.settings.groups.reward_s if claim.body.members is None else 0
    if claim.body.members != "all" and (not reward_s or read_note(waiting.note).rewarded):
        return None
    try:
        group = await find_group(context.store, waiting.group)
        if group is None:
            return None
        group, rollouts = counted(group, await members_of(context.store, group))
        check_members(claim.query, group, rollouts, claim.body)
    except Conflict as error:
        return Reason(error.reason, error.message)
    left_s = reward_s - (context.clock.now_ms() - group.queued_ms(claim.policy.name)) / 1000
    return why_pending(rollouts, left_s) if left_s > 0 else None


async def _render(context: Context, claim: Claim, held: Held, outcomes: Sequence[Outcome] | None = None) -> bool:
    """Render a leased group; return False if it was refused, dropped or deleted.

    With `outcomes`, it was rendered before, and is rendered again with these rollouts and their advantages.
    """
    name, dropped, held.rendered = held.waiting.group, why_stale(claim, held.waiting), b""
    try:
        group = None
        if dropped is None:  # it is read again with `outcomes`: it may have been deleted meanwhile
            known = read_group(held.claimed.group, held.claimed.marks)
            group = known if outcomes is None else await find_group(context.store, name)
        if group is not None:
            group, rollouts = counted(group, await _freeze(context, claim, held, group))
            if outcomes is None:
                held.earned = None if held.earlier else earned_by(rollouts)
                state = group.states.get(claim.policy.name) or PolicyState("complete")
                held.delivery, held.previous_consumer = 1 + state.delivery, state.delivered_to
            else:
                names = {outcome.rollout.rollout_id for outcome in outcomes}
                rollouts = [rollout for rollout in rollouts if rollout.rollout_id in names]
            dropped = await _write(context, claim, held, group, rollouts, outcomes)
        elif held.members:  # deleted since it was rendered
            await undo(context, claim, [held])
    except Conflict as error:
        if isinstance(error, Damaged):
            left_out([error], context.metrics)
        claim.refused[name] = Reason(error.reason, error.message)
        await undo(context, claim, [held])
        return False
    claim.refused.pop(name, None)
    if dropped is not None:
        await _drop(context, claim, held, dropped)
    return bool(held.rendered)


async def _freeze(context: Context, claim: Claim, held: Held, group: Group) -> list[Rollout]:
    """Freeze the rewards of a group's rollouts; return those that exist, as they are since then."""
    held.members = group.members
    freezing = freeze(context.store, context.clock, group.members, claim.id)
    held.freezing = context.recorder.tasks.start(freezing)  # it ends before it is undone
    found = await asyncio.shield(held.freezing)
    held.freezing = None
    held.earlier = {
        rollout.rollout_id: rollout.claims
        for rollout in found
        if any(other.policy == claim.policy.name and other != claim.id for other in rollout.claims)
    }
    return found


def why_stale(claim: Claim, waiting: QueuedGroup) -> Reason | None:
    """Return why a group is too old for the claim; None if it is not, or has no tokens. A group of unknown age is too old.

    Its staleness is that within the announced epoch: a token ahead of the announced version is fresh.
    """
    max_staleness, now = claim.body.max_staleness, claim.announced.epoch
    note = read_note(waiting.note)
    if note.empty:
        return None
    oldest, epoch = note.oldest, note.epoch
    if epoch < now and not claim.takes_earlier_epochs:
        why = f"its oldest token is of epoch {epoch} of the policy, and epoch {now} has begun"
        return Reason("earlier_epoch", why)
    if max_staleness is None:
        return None
    if note.max_staleness is not None:
        max_staleness = note.max_staleness
    if epoch > now:
        why = f"its oldest token is of epoch {epoch} of the policy, and the announced one is {now}"
        return Reason(_LATER, why)
    behind = claim.announced.staleness(oldest, epoch)
    if behind is None:
        path = "/policy" if claim.policy.name == DEFAULT_POLICY else f"/policies/{claim.policy.name}"
        why = f"the policy version of its tokens or the announced one (PUT {path}) is not a number"
        return Reason("unknown_version", why)
    if behind <= max_staleness:
        return None
    return Reason("stale", f"its oldest token is {behind} policy versions behind; max_staleness is {max_staleness}")


async def observe(context: Context, claim: Claim) -> None:
    """Count the groups that are returned to the client, and the rewards of those that no other claim returned before."""
    policy = claim.policy.name
    context.metrics.group_events.labels(policy, "claimed").inc(len(claim.held))
    context.metrics.redelivered_groups.labels(policy).inc(sum(held.delivery > 1 for held in claim.held))
    first = [(held.earned, read_note(held.waiting.note)) for held in claim.held if held.earned is not None]

    def observe_first() -> None:
        for earned, note in first:
            observe_claimed(context.metrics, policy, earned, note.oldest, note.epoch, claim.announced)

    await aside(sum(len(earned.tokens) for earned, _ in first) // _ROLLOUTS_OF_A_STEP, observe_first)


async def normalize(context: Context, claim: Claim) -> None:
    """Render the leased groups again, if their advantages are normalized over the whole batch.

    A group that cannot be rendered any more, for example because it was deleted, is released and is not part of the batch.
    """
    while claim.query.asked.advantage == BATCH and claim.held:
        known = iter(await estimate([outcome for held in claim.held for outcome in held.outcomes], BATCH))
        rendered = [await _render(context, claim, held, list(islice(known, len(held.outcomes)))) for held in claim.held]
        claim.held = list(compress(claim.held, rendered))
        if all(rendered):
            return


async def _write(
    context: Context,
    claim: Claim,
    held: Held,
    group: Group,
    rollouts: Sequence[Rollout],
    outcomes: Sequence[Outcome] | None,
) -> Reason | None:
    """Write the JSON of a group after its rewards are frozen; return why the group is dropped, or None. Raises Conflict."""
    query, note = claim.query, read_note(held.waiting.note)
    gathered = await read_group_rows(context, query, group, rollouts, claim.body, whole=True, outcomes=outcomes)
    if gathered.reason is not None:
        return gathered.reason
    held.recorded = gathered.recorded
    held.outcomes = gathered.outcomes if query.asked.advantage == BATCH else ()
    whole = await gathered.whole(query)
    described = {
        "group_id": group.group_id,
        "policy_version": note.oldest,
        "policy_epoch": note.epoch,
        "staleness": claim.announced.staleness(note.oldest, note.epoch),
        "complete_ms": group.complete_ms,
        "delivery": held.delivery,
        "previous_consumer": held.previous_consumer,
        "metadata": group.metadata,
        **group.requeues(claim.policy.name),
        **gathered.described(query),
        "late": {rollout.rollout_id: late for rollout in rollouts if (late := rollout.counts.get("late", 0))},
    }
    held.rendered = await aside(gathered.count, lambda: to_json_bytes({**described, "data": whole}))
    return None


async def _unfreeze(context: Context, claim: Claim, held: Held) -> None:
    """Undo the freeze of a group's rewards, once it has ended."""
    if held.freezing is not None:
        await asyncio.wait([held.freezing])
    for name in held.members:
        await unfreeze(context.store, context.clock, name, claim.id)


async def _drop(context: Context, claim: Claim, held: Held, reason: Reason) -> None:
    """Remove a group from the queue. It can still be read, exported and requeued.

    Its rewards are frozen until it is dropped, so that the response to a later change can have a warning.
    """
    policy, unheld = claim.policy.name, dict.fromkeys(UNHELD)
    fields = state_fields(policy, status="dropped", why=reason.why, code=reason.code, **unheld)
    if await context.store.queue.remove(held.waiting, claim.batch_id, fields, now_ms=context.clock.now_ms()):
        claim.dropped[held.waiting.group] = reason
        context.metrics.group_events.labels(policy, "dropped").inc()
        context.metrics.dropped_groups.labels(policy, reason.code).inc()
    await _unfreeze(context, claim, held)
