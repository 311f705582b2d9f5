"""Reads of the golden store: records, trees, groups, listings, batches, and exports in every format and container."""

from base64 import b64encode
from io import BytesIO
from typing import Any

import orjson
from tests.golden.scenes import LIMITED
from tests.golden.session import Stage, SteppedClock, staging

AFTER = 1_800_100_000.0  # the session is over by then
CONTAINERS = ("ndjson", "msgpack", "parquet", "arrow")
PADDED = {"verl_dataproto": "&prompt_length=600&response_length=300"}
VARIANTS = ("max_len=150", "max_len=150&overlong=drop", "branches=last", "branches=longest")
CLAIM = {"consumer": "trainer", "groups": 2, "lease_s": 3600}


async def read_all(store: Any, tape: list, calls: list[list[Any]], source: Any = None) -> dict[str, Any]:
    """Send these requests to a proxy over a store; return the responses."""
    staged = staging(store, SteppedClock(AFTER), tape, source, name="vllm", hides_keys=False)
    async with staged as stage:
        for method, path, body in calls:
            found = await stage.call(method, path, body)
            if isinstance(found.get("body"), bytes):
                found["body"] = _rows(found["body"], dict(found["headers"])["content-type"])
        return {"calls": stage.calls}


async def calls_of(stage: Stage) -> list[list[Any]]:
    """Return the requests that read everything in the stage's store."""
    listed = orjson.loads((await stage.get("/rollouts?limit=1000"))["body"])
    described = orjson.loads((await stage.get("/openapi.json"))["body"])
    parameters = described["paths"]["/rollouts/{rollout_id}/export"]["get"]["parameters"]
    (formats,) = (parameter["schema"]["enum"] for parameter in parameters if parameter["name"] == "format")
    rollouts = [rollout["rollout_id"].replace("/", "%2F").replace(" ", "%20") for rollout in listed["rollouts"]]
    paths = ["/rollouts?limit=1000", "/rollouts?limit=5", "/rollouts?status=completed&limit=3", "/rollouts?group_id=g0"]
    paths += ["/groups", "/groups?status=complete", "/policy", "/groups/g0", "/groups/g1", "/groups/by-header-group"]
    for rollout in rollouts:
        base = f"/rollouts/{rollout}"
        paths += [base, f"{base}/steps?limit=1000", f"{base}/tree"]
        paths.append(f"{base}/export?format=sequences&include=flagged&report=true")
    for name in formats:
        rows = f"export?format={name}{PADDED.get(name, '')}"
        paths.append(f"/{rows}&include=flagged&report=true")
        paths += [f"/rollouts/chat/{rows}&{more}" for more in VARIANTS]
        paths += [f"/rollouts/{rollout}/{rows}" for rollout in ("per-token", "extra-turns", "sglang")]
        paths += [f"/groups/{group}/{rows}&advantage=grpo&report=true" for group in ("g0", "g1")]
        paths += [f"/groups/g0/{rows}&container={container}&report=true" for container in CONTAINERS]
        paths += [f"/{rows}&container={container}&limit=12&status=completed" for container in CONTAINERS]
    step = orjson.loads((await stage.get("/rollouts/chat/steps?limit=1"))["body"])["steps"][0]["step_id"]
    paths.append(f"/rollouts/chat/steps/{step}/texts?limit=20")
    paths.append(f"/rollouts/chat/steps/{step}")
    return [
        *(["GET", path, None] for path in paths),
        ["POST", "/rollouts", LIMITED],  # opened before: the response has the key that was minted then
        ["POST", "/batches/claim", CLAIM],
        ["POST", "/batches/claim", {**CLAIM, "format": "trl", "advantage": "rloo"}],
    ]


def _rows(body: bytes, content_type: str) -> str:
    """Return the rows, schema and metadata of Parquet or Arrow as JSON; the bytes of MessagePack in base64."""
    if content_type == "application/vnd.msgpack":
        return b64encode(body).decode()
    import pyarrow as pa
    from pyarrow import parquet

    is_parquet = body[:4] == b"PAR1"
    table = parquet.read_table(BytesIO(body)) if is_parquet else pa.ipc.open_stream(body).read_all()
    schema = {field.name: str(field.type) for field in table.schema}
    metadata = {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}
    return orjson.dumps({"schema": schema, "metadata": metadata, "rows": table.to_pylist()}).decode()
