"""The generator of large stores."""

import asyncio
import re

import redis
from tests.support.stored import TIMEOUT_S, stored_rollout, stored_steps

from benchmarks.fill import MEMBERS, Share, fill
from proxy.rollouts.group import find_group


def shape_of(server, prefix: str, name: str) -> dict[bytes, object]:
    """Return the keys with a name, as its own or in a value: without bucket and names; the fields of its hash."""
    found: dict[bytes, object] = {}
    for key in server.scan_iter(f"{prefix}*"):
        kind, of, owner = (
            re.fullmatch(rb"([^{]+\{[^}]+\}:[^:]+)(:?)(.*)", key).groups() if b"{" in key else (key, b"", b"")
        )
        kind, type_of = re.sub(rb"\{.+\}", b"", kind) + of, server.type(key)
        if owner == name.encode():
            found[kind] = set(server.hkeys(key)) if kind.endswith(b":rollout:") else type_of
        elif name.encode() in repr(READS[type_of](server, key)).encode():
            found[kind + b"of another"] = type_of
    return found


READS = {
    b"zset": lambda server, key: server.zrange(key, 0, -1),
    b"stream": lambda server, key: server.xrange(key),
    b"hash": lambda server, key: server.hgetall(key),
    b"list": lambda server, key: server.lrange(key, 0, -1),
    b"string": lambda server, key: server.get(key),
}


async def recorded(proxy, store) -> tuple[str, str]:
    """Record a rollout and a group over HTTP; return the names of the rollout and of a member once they are settled."""
    await proxy.put("/policy", {"version": 3})
    await proxy.chat("alone")
    await proxy.finish("alone", reward=0.5)
    members = await proxy.group("recorded-group", 0.1, 0.2)
    async with asyncio.timeout(TIMEOUT_S):
        for name in ("alone", *members):
            while (await stored_rollout(store, name)).drift is None:
                await asyncio.sleep(0.005)
    return "alone", members[0]


async def test_generated_rollouts_have_the_keys_and_fields_of_recorded_ones(proxy, store, server):
    """What is measured with a generated store then holds for a recorded one."""
    url, prefix = f"unix:{server.socket}", store.layout.prefix
    rollout, member = await recorded(proxy, store)
    await fill(Share(url, prefix, range(40), range(1)))
    generated_member = (await find_group(store, "group-000000")).members[0]
    completed = [
        name for n in range(40) if (await stored_rollout(store, name := f"rollout-{n:07}")).status == "completed"
    ]

    with redis.Redis(unix_socket_path=str(server.socket)) as client:
        for ours, theirs in ((completed[0], rollout), (generated_member, member), ("group-000000", "recorded-group")):
            assert shape_of(client, prefix, theirs) == shape_of(client, prefix, ours)


async def test_generated_steps_are_exact_and_the_groups_can_be_claimed(proxy, store, server):
    """A claim renders the generated members; nothing is refused or flagged."""
    await fill(Share(f"unix:{server.socket}", store.layout.prefix, range(3), range(2)))
    [step] = await stored_steps(store, "rollout-0000001")
    batch = await proxy.claim(groups=2, format="sequences")

    assert step.trainable
    assert sorted(group["group_id"] for group in batch["groups"]) == ["group-000000", "group-000001"]
    assert len(batch["groups"][0]["rows"]) == MEMBERS


def test_parts_of_several_processes_are_disjoint_and_complete():
    """Two processes write each number once, also those of a store that has some already."""
    parts = Share("", "", range(5, 12), range(3)).parts(2)

    assert sorted(number for part in parts for number in part.rollouts) == list(range(5, 12))
    assert sorted(number for part in parts for number in part.groups) == [0, 1, 2]
