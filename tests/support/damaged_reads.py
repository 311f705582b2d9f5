"""Requests to every reader over a store with damaged values, and the part of the golden store that is damaged."""

import orjson
from tests.support.all_readers import ADVANTAGES, LENGTHS
from tests.support.stored_damage import OF_ENTITIES

from proxy.export import FORMATS
from proxy.export.containers import CONTAINERS

KEPT = ("chat", "per-token", "sglang", "schema-1", "extra-turns")


def small(dump):
    """Return the part of the golden store with a few rollouts, and all groups."""
    kept = {}
    for name, entry in dump.items():
        space, _, kind, entity = [*name.split(":", 3), "", ""][:4]
        if space or kind not in OF_ENTITIES or entity in KEPT or entity.startswith("g"):
            kept[name] = entry
    return kept


class Reading:
    """Requests to a proxy over a damaged store."""

    def __init__(self, stage, what) -> None:
        self.stage, self.what = stage, what

    async def __call__(self, method, path, body=None):
        found = await self.stage.call(method, path, body)
        assert found["status"] < 500, (self.what, found)
        assert not found.get("cut"), (self.what, found)
        is_json = found["status"] < 300 and dict(found["headers"])["content-type"].startswith("application/json")
        try:
            return orjson.loads(found["body"]) if is_json else {}
        except orjson.JSONDecodeError as error:  # a response of an engine may have as many levels as orjson reads
            assert str(error).startswith("depth limit exceeded"), (self.what, path, error)
            assert path.startswith("/rollouts/"), (self.what, path)
            return {}


async def read_everything(read, random):
    """Send requests to all readers of many; return the names of the rollouts and groups that are listed or named."""
    rows = f"format={random.choice(tuple(FORMATS))}{LENGTHS}&include=flagged&report=true"
    listed = await read("GET", "/rollouts?limit=1000")
    groups = await read("GET", "/groups?limit=1000")
    await read("GET", "/training")
    await read("GET", f"/search?q={random.choice(('the', 'e', 'turn'))}")
    await read("GET", f"/export?{rows}")
    await read("GET", f"/export?{rows}&container={random.choice(tuple(CONTAINERS))}")
    await read("GET", "/policy")
    await read("GET", "/engines")
    claim = {"consumer": "c", "groups": 9, "include": "flagged", "advantage": random.choice(ADVANTAGES),
             "stale": "keep", "max_staleness": random.choice((None, 1))}  # fmt: skip
    claimed = await read("POST", "/batches/claim", claim)
    if claimed.get("batch_id"):
        await read("POST", f"/batches/{claimed['batch_id']}/release", {})
    both = listed["rollouts"] + groups["groups"] + listed.get("unreadable", []) + groups.get("unreadable", [])
    return {entry.get("rollout_id") or entry["group_id"] for entry in both}


async def read_one(read, name, random):
    """Send requests to the readers of one rollout and one group."""
    rows = f"format={random.choice(tuple(FORMATS))}{LENGTHS}&include=flagged"
    for path in ("", "/steps?limit=1000", "/tree", f"/export?{rows}", "/export?format=sequences&include=flagged"):
        await read("GET", f"/rollouts/{name}{path}")
    for path in ("", f"/export?{rows}&advantage=grpo"):
        await read("GET", f"/groups/{name}{path}")
