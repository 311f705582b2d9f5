"""The assertions after a run, read from the store."""

from collections import Counter
from itertools import chain

import orjson
from tests.system.faults.engine import sampled

from proxy.rollouts.rollout import read_rollout
from proxy.trajectory.blocks import BlockReader
from proxy.trajectory.codec import decode
from storage import open_store
from storage.redis.keys import Bucket


async def judge(store_url: str, ended: dict[str, str], logged: set[str]) -> dict[str, int]:
    """Assert that no step is lost, doubled, half-written or without an owner; return the counts."""
    store = await open_store(store_url)
    seen: Counter[str] = Counter()
    statuses: Counter[str] = Counter()
    owned = {store.layout.constants, *chain.from_iterable(map(_keys_of, _buckets(store)))}
    try:
        async for name in store.names():
            owned |= {*store.layout.rollout(name).all}
            rollout = read_rollout(await store.get(name))
            records = await store.read(name, 0, 100_000)
            reader = BlockReader(await store.blocks(name))
            steps = [decode(record, reader, index) for index, record in enumerate(records)]
            assert len(steps) == rollout.counts.get("steps", 0), f"{name}: a count without its step, or a step without"
            for step in steps:
                uid, mode, _ = step.request["messages"][-1]["content"].split()
                seen[uid] += 1
                statuses[step.status] += 1
                _equals_the_engines_log(step, uid, ended, logged)
                assert step.exact or mode != "whole" or uid not in ended, f"{uid}: {step.problems}"
        (server,) = await store._servers.all()
        keys = set((await server.execute(b"", [("KEYS", "*")]))[0])
    finally:
        await store.close()
    assert not (lost := ended.keys() - seen.keys()), f"their clients saw the end, but they are not stored: {lost}"
    assert not (twice := [uid for uid, count in seen.items() if count > 1]), f"stored twice: {twice}"
    assert not (orphans := keys - owned), f"keys without an owner: {orphans}"
    return {"ended": len(ended), **statuses}


def _buckets(store) -> list[Bucket]:
    return [bucket for each in (store, store.groups, store.batches) for bucket in each.layout.buckets]


def _keys_of(bucket: Bucket) -> set[bytes]:
    """Return the keys of a bucket that belong to no single rollout."""
    own = {value for value in vars(bucket).values() if isinstance(value, bytes)}
    return own | {*bucket.cache, *bucket.processes, *bucket.queue_index(), bucket.queue()}


def _equals_the_engines_log(step, uid: str, ended: dict[str, str], logged: set[str]) -> None:
    ids, logprobs = sampled(uid)
    if uid in ended:
        assert ended[uid] == step.step_id, f"{uid}: its client got another step ID"
        assert step.status == "complete", f"{uid}: {step.status}, but its client saw the end"
    if step.status == "error":
        return
    got = step.choices[0].ids.tolist() if step.choices else []
    assert uid in logged or not got, f"{uid}: recorded, but never sampled"
    if step.status == "complete" and step.exact:
        assert (got, step.choices[0].logprobs.tolist()) == (ids, logprobs), f"{uid}: not what the engine sampled"
    else:
        sampled_ids = iter(ids)  # garbled events are skipped: the recorded ids are a subsequence
        assert all(token in sampled_ids for token in got), (
            f"{uid}: {orjson.dumps(got)} is no subsequence of the sampled ids"
        )
