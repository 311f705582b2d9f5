"""The finish of a rollout: its status, reward, drift count and group."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from proxy.clock import Clock
from proxy.errors import Conflict
from proxy.rollouts.completion import GroupCompletion
from proxy.rollouts.drift_totals import DriftTotals
from proxy.rollouts.rollout import Rollout, no_rollout, read_rollout, write_fields
from storage.errors import FieldsChanged
from storage.store import Store


@dataclass(frozen=True, slots=True)
class Finisher:
    """Finish rollouts, each once, across processes."""

    store: Store
    clock: Clock
    drift_totals: DriftTotals
    completion: GroupCompletion

    async def finish(
        self, rollout: Rollout, status: str, *, reward: float | None = None, metadata: Mapping[str, Any] | None = None
    ) -> Rollout:
        """Finish a rollout, or return it if it is finished with the same status and reward.

        Raises:
            Conflict: The rollout is finished with another status or reward.
            NotFound: The rollout was deleted meanwhile.
        """
        name = rollout.rollout_id
        while not rollout.is_finished:
            fields = write_fields(
                {"status": status, "finished_ms": self.clock.now_ms(), "reward": reward, "metadata": metadata}
            )
            expect = write_fields({"status": rollout.status}) if rollout.status != "open" else {"status": None}
            try:
                stored = await self.store.update_if(name, fields, expect=expect, now_ms=self.clock.now_ms())
            except FieldsChanged as changed:
                rollout = read_rollout(changed.rollout)  # another process changed it: decide again
                continue
            if stored is None:
                raise no_rollout(name)
            rollout = read_rollout(stored)
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

    async def after_finish(self, rollout: Rollout, *, again: bool = False) -> None:
        """Count the drift of a finished rollout, and complete its group if it was the last one.

        `again`: the rollout was finished before, by a process that may have died before it did this.
        """
        if again:
            self.drift_totals.complete(rollout)
        else:
            self.drift_totals.settle(rollout.rollout_id)
        await self.completion.member_finished(rollout)
