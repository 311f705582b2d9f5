"""The finish of a rollout: its status, reward, drift count and group."""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from proxy.clock import Clock
from proxy.errors import Conflict, Damaged, NotFound, ProxyError
from proxy.rollouts.completion import FAILED, GroupCompletion, read_members
from proxy.rollouts.drift import DriftReporter
from proxy.rollouts.group import Group, find_group
from proxy.rollouts.rollout import DEADLINE, SURPLUS, Rollout, no_rollout, read_rollout, write_fields
from proxy.rollouts.stored_fields import left_out
from proxy.telemetry.logs import LOG
from storage.errors import FieldsChanged, StorageError
from storage.store import Store
from storage.types import StoredEntity, Timer

_SETTLE_AGAIN_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Finisher:
    """Finish rollouts, each once, across processes."""

    store: Store
    clock: Clock
    drift: DriftReporter
    completion: GroupCompletion

    async def finish(
        self,
        rollout: Rollout,
        status: str,
        *,
        reward: float | None = None,
        metadata: Mapping[str, Any] | None = None,
        reason: str | None = None,
        touched_ms: int | None = None,
    ) -> Rollout:
        """Finish a rollout, or return it if it is finished with the same status and reward.

        `reason` is stored if TokenTape finishes the rollout itself. If `touched_ms` is given and the rollout was touched since,
        it is returned unfinished.

        Raises:
            Conflict: The rollout is finished with another status or reward.
            NotFound: The rollout was deleted meanwhile.
        """
        name = rollout.rollout_id
        while not rollout.is_finished:
            now_ms = self.clock.now_ms()
            values = {"status": status, "finished_ms": now_ms, "reward": reward, "metadata": metadata, "reason": reason}
            fields = write_fields(values)
            expect = write_fields({"status": rollout.status}) if rollout.status != "open" else {"status": None}
            try:
                stored = await self.store.update_if(name, fields, expect=expect, now_ms=now_ms, touched_ms=touched_ms)
            except FieldsChanged as changed:
                rollout = read_rollout(changed.rollout)  # another process changed it: decide again
                if touched_ms not in (None, rollout.touched_ms) and not rollout.is_finished:
                    return rollout
                continue
            if stored is None:
                raise no_rollout(name)
            rollout = read_rollout(stored)
            if reason == DEADLINE:
                self.completion.metrics.deadline_rollouts.inc()
            await self.after_finish(rollout)
            return rollout
        if rollout.status != status:
            raise Conflict(f"Rollout {name!r} already has status {rollout.status!r}.", param="status")
        if reward not in (None, rollout.reward):
            raise Conflict(
                f"Rollout {name!r} already has reward {rollout.reward}. Use PATCH to change it.", param="reward"
            )
        await self.after_finish(rollout, again=True)
        return rollout

    async def rewarded(self, rollout: Rollout) -> None:
        """Finish the members that an over-sampled group does not need, once enough of its finished members have a reward."""
        if rollout.is_over_sampled and rollout.is_finished and rollout.group_id is not None:
            try:
                await self.finish_surplus(rollout.group_id)
            except Damaged as damage:  # the reward is stored all the same
                left_out([damage], self.completion.metrics)

    async def replacement(self, rollout: Rollout) -> StoredEntity | None:
        """Return the rollout that was opened in place of a failed one, if there is one and its group can be read."""
        if rollout.group_id is None or rollout.status not in FAILED:
            return None
        try:
            group = await find_group(self.store, rollout.group_id)
        except Damaged:
            return None
        name = None if group is None else group.replaced.get(rollout.rollout_id)
        return None if name is None else await self.store.get(name)

    async def finish_surplus(self, group_id: str) -> None:
        """Finish the open members of an over-sampled group if `size` of the others have a reward."""
        group = await find_group(self.store, group_id)
        if group is None or not group.is_open or not group.over_sample or group.size is None:
            return
        members, _ = await read_members(self.store, group, self.completion.metrics)
        rollouts = [rollout for rollout in members if rollout.rollout_id not in group.replaced]
        if sum(rollout.is_finished and rollout.reward is not None for rollout in rollouts) < group.size:
            return
        for rollout in rollouts:
            if not rollout.is_finished:
                with suppress(Conflict, NotFound):  # finished, deleted or damaged at this moment
                    await self.finish(rollout, "aborted", reason=SURPLUS)

    async def settle(self, group: Group) -> None:
        """Complete what a crash left of the finishes of an open group's members."""
        await self.completion.settle(group)
        if group.over_sample:
            await self.finish_surplus(group.group_id)

    async def settle_all(self) -> None:
        """Settle every group that is open because a process died; from the start again if the store fails meanwhile."""
        while True:
            try:
                async for group_id in self.store.groups.names():
                    await self._settle_named(group_id)
            except StorageError as error:
                LOG.error("Groups not checked for completion", extra={"fields": {"why": str(error)}})
                await asyncio.sleep(_SETTLE_AGAIN_S)
            else:
                return

    async def _settle_named(self, group_id: str) -> None:
        try:
            group = await find_group(self.store, group_id)
            if group is not None and group.is_open and group.size is not None:
                await self.settle(group)
        except ProxyError as error:  # of this group only
            LOG.error("Group not checked for completion", extra={"fields": {"group_id": group_id, "why": str(error)}})

    async def after_finish(self, rollout: Rollout, *, again: bool = False) -> None:
        """Count the drift of a finished rollout, complete its group if it was the last one, and remove its timer.

        `again`: the rollout was finished before, by a process that may have died before it did this.
        """
        if again:
            self.drift.complete(rollout)
        else:
            self.drift.settle(rollout.rollout_id)
        try:
            group = await self.completion.member_finished(rollout)
            if group is not None and rollout.is_over_sampled and rollout.reason != SURPLUS:
                await self.finish_surplus(group.group_id)
        except Damaged as damage:  # the rollout is finished all the same
            left_out([damage], self.completion.metrics)
        if (rollout.deadline_s, rollout.idle_s, rollout.start_s) != (None, None, None):
            with suppress(StorageError):  # it expires, and is removed then
                await self.store.timers.remove(Timer(rollout.rollout_id, rollout.incarnation))
