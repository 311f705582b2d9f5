"""A rollout as rows of a file, in pages; a version that is not current is refused."""

from io import BytesIO

import pytest
from tests.support.archives import finished

from proxy.rollouts.archive.tables import ArchiveWriter, read_rows
from proxy.rollouts.archive.writing import RolloutChanged, write_rollout


@pytest.mark.parametrize("steps", [0, 1, 199, 200, 201, 400])
async def test_every_step_is_a_row(store, steps):
    """A rollout without steps has one."""
    await finished(store, "a", steps=steps)
    file = BytesIO()
    writer = ArchiveWriter(file)
    await write_rollout(store, writer, "a", 2000, set())
    writer.close()

    assert (list(range(steps)) or [None]) == [row["index"] for row in read_rows(file, ["index"])]


async def test_a_version_that_is_not_current_is_refused(store):
    """Also if it changes while its pages are read, or if it is deleted."""
    await finished(store, "a", steps=250)
    read = store._store.read

    async def changing(*args):
        await store.update_if("a", {"reward": b"1"}, expect={}, now_ms=3000)
        return await read(*args)

    for touched_ms in (1999, 2000):
        store.read = changing
        with pytest.raises(RolloutChanged):
            await write_rollout(store, ArchiveWriter(BytesIO()), "a", touched_ms, set())
    await store.delete("a")
    with pytest.raises(RolloutChanged):
        await write_rollout(store, ArchiveWriter(BytesIO()), "a", 3000, set())
