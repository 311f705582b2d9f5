"""The finish of a rollout: its status, reward, drift count and group."""

from proxy.api.context import Parts
from proxy.api.control.schemas import FinishRollout
from proxy.errors import Conflict
from proxy.rollouts.completion import member_finished
from proxy.rollouts.drift_totals import complete_drift, settle_drift
from proxy.rollouts.rollout import Rollout, no_rollout, read_rollout, write_fields
from storage.errors import FieldsChanged


async def finish(parts: Parts, rollout: Rollout, said: FinishRollout) -> Rollout:
    """Finish a rollout, or find it finished so. Raises Conflict, or NotFound if it was deleted meanwhile."""
    name = rollout.rollout_id
    while not rollout.is_finished:
        fields = write_fields(
            {
                "status": said.status,
                "finished_ms": parts.clock.now_ms(),
                "reward": said.reward,
                "metadata": said.metadata,
            }
        )
        expect = write_fields({"status": rollout.status}) if rollout.status != "open" else {"status": None}
        try:
            stored = await parts.store.update_if(name, fields, expect=expect, now_ms=parts.clock.now_ms())
        except FieldsChanged as changed:
            rollout = read_rollout(changed.rollout)  # somebody was quicker: look again
            continue
        if stored is None:
            raise no_rollout(name)
        rollout = read_rollout(stored)
        await after_finish(parts, rollout)
        return rollout
    if rollout.status != said.status:
        raise Conflict(f"the rollout {name!r} is {rollout.status} already, not {said.status}", param="status")
    if said.reward not in (None, rollout.reward):
        raise Conflict(f"the rollout {name!r} was finished with another reward; PATCH changes rewards", param="reward")
    await after_finish(parts, rollout, again=True)
    return rollout


async def after_finish(parts: Parts, rollout: Rollout, *, again: bool = False) -> None:
    """Do what follows from the finish of a rollout: its drift is counted, and its group may be complete.

    `again`: it was finished before, by a process that may have died before all of that was done.
    """
    if again:
        complete_drift(parts, rollout)
    else:
        settle_drift(parts, rollout.rollout_id)
    await member_finished(parts, rollout)
