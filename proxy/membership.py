"""Who belongs to a group: rollouts that join one, and members that are finished.

Holds the marks' writing, for both APIs. When a group is complete, and what follows from it, is the control API's.
"""

from proxy.clock import Clock
from proxy.errors import Conflict
from proxy.groups import FINISHED_MARK, MEMBER_MARK, Group, read_group
from storage.errors import RolloutDeleted
from storage.store import Store
from storage.types import StoredEntity


async def join(store: Store, clock: Clock, rollout: StoredEntity, group_id: str) -> None:
    """Make a rollout a member of its group, which comes into being by it.

    Raises Conflict for a group that was opened with all its rollouts, if this is none of them: one that was just made is
    unmade. Raises StorageError.
    """
    while True:
        group = read_group(await store.groups.open(group_id, {}, now_ms=clock.now_ms()))
        if group.size is not None:
            if rollout.name in group.members:
                return
            if rollout.created:
                await store.delete(rollout.name)
            raise Conflict(
                f"the group {group_id!r} was opened with its {group.size} rollouts, and {rollout.name!r} is none of them; "
                "use theirs, or another group",
                param="group_id",
            )
        try:
            marks = {MEMBER_MARK + rollout.name: b""}
            await store.groups.mark(group_id, group.incarnation, marks, now_ms=clock.now_ms())
        except RolloutDeleted:
            continue  # deleted meanwhile: it comes into being again
        return


async def mark_finished(store: Store, clock: Clock, group: Group, *rollout_ids: str) -> None:
    """Note that members are finished; a group that is gone needs no note."""
    try:
        marks = {FINISHED_MARK + rollout_id: b"" for rollout_id in rollout_ids}
        await store.groups.mark(group.group_id, group.incarnation, marks, now_ms=clock.now_ms())
    except RolloutDeleted:
        return


async def find_group(store: Store, group_id: str) -> Group | None:
    """The group of this id with all its members, or None."""
    stored = await store.groups.get(group_id)
    return None if stored is None else read_group(stored, await store.groups.marks(group_id))
