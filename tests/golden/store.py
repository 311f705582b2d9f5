"""Every key of a store as JSON: read from one server, written to another, and unpacked for comparison.

A dump maps each key, without the store's prefix, to its type and content. Bytes that are not UTF-8 are `{"base64": …}`.
Unlike the payloads of Redis' `DUMP`, it is independent of the server's version.
"""

import re
import struct
from base64 import b64decode, b64encode
from typing import Any

import orjson
import redis
import zstandard

_UNKEPT = {
    "beats",
    "processes",
    "processes-ends",
    "processes-counts",
    "role",
    "turn",
    "repair",
}  # what processes do at the moment
_INDEXES = {"free", "leased", "notes", "compared"}  # of queues, which are read from their streams
_TEXTS = ("head", "request", "sent", "response")
_HEADER = 11  # of a record: magic, schema, checksum
_LONGEST_MS = 7 * 86_400_000  # of a lease
_NEVER_MS = 4e12


def dump_store(client: redis.Redis, prefix: str) -> dict[str, Any]:
    """Read all keys of a store."""
    found = {}
    for key in sorted(client.scan_iter(match=f"{prefix}*", count=1000)):
        name = key.decode().removeprefix(prefix)
        if not {*name.split(":")[2:3]} & {*_UNKEPT, *_INDEXES}:
            found[name] = _read(client, key)
    return found


def load_store(client: redis.Redis, prefix: str, dump: dict[str, Any]) -> None:
    """Write all keys of a dump under another prefix."""
    for name, entry in dump.items():
        key = (prefix + name).encode()
        match entry["type"]:
            case "hash":
                client.hset(key, mapping={_bytes(field): _bytes(value) for field, value in entry["fields"]})
            case "list":
                client.rpush(key, *map(_bytes, entry["items"]))
            case "zset":
                is_expiry = name.endswith(":expiry")  # what was a week ahead when it was recorded
                client.zadd(key, {_bytes(m): _NEVER_MS if is_expiry else score for m, score in entry["members"]})
            case "stream":
                for entry_id, fields in entry["entries"]:
                    client.xadd(key, dict(fields), id=entry_id)
                client.xgroup_create(key, "holders", "0", mkstream=True)
                client.xreadgroup("holders", "-", {key: ">"})
                for entry_id, holder in entry["pending"]:
                    client.xclaim(key, "holders", holder, 0, [entry_id], idle=_LONGEST_MS, justid=True)


def readable(dump: dict[str, Any]) -> dict[str, Any]:
    """Return a dump with records and blocks unpacked, without what differs between two runs of a session."""
    return {name: _deterministic(name, entry) for name, entry in dump.items() if not name.endswith(":expiry")}


def read_record(record: bytes) -> dict[str, Any]:
    """Return what a record contains: its schema, its four JSON texts, and its arrays in base64."""
    payload = zstandard.decompress(record[_HEADER:])
    texts, position = {}, 16
    for name, length in zip(_TEXTS, struct.unpack("<4I", payload[:16]), strict=True):
        texts[name] = payload[position : position + length].decode()
        position += length
    return {"schema": record[2], **texts, "arrays": b64encode(payload[position:]).decode()}


def read_block(block: bytes) -> dict[str, Any]:
    """Return what a block contains: the name of the block before it, and its piece."""
    piece = zstandard.decompress(block[17:]) if block[16] else block[17:]
    return {"before": block[:16].hex(), "piece": _text(piece)}


def records_of(dump: dict[str, Any]) -> dict[str, tuple[list[bytes], dict[bytes, bytes]]]:
    """Return the records and the blocks of each rollout, by the end of its keys."""
    found = {}
    for name, entry in dump.items():
        space, bucket, kind, rollout = (name.split(":", 3) + [""] * 3)[:4]
        if kind == "records":
            blocks = dump.get(f"{space}:{bucket}:blocks:{rollout}", {"fields": []})
            fields = {_bytes(block): _bytes(value) for block, value in blocks["fields"]}
            found[rollout] = ([_bytes(item) for item in entry["items"]], fields)
    return found


def _read(client: redis.Redis, key: bytes) -> dict[str, Any]:
    kind = client.type(key).decode()
    match kind:
        case "hash":
            fields = sorted(client.hgetall(key).items())
            return {"type": kind, "fields": [[_text(field), _text(value)] for field, value in fields]}
        case "list":
            return {"type": kind, "items": [_text(item) for item in client.lrange(key, 0, -1)]}
        case "zset":
            members = client.zrange(key, 0, -1, withscores=True)
            return {"type": kind, "members": [[_text(member), score] for member, score in members]}
        case "stream":
            entries = [
                [entry_id.decode(), [[_text(field), _text(value)] for field, value in fields.items()]]
                for entry_id, fields in client.xrange(key)
            ]
            pending = client.xpending_range(key, "holders", "-", "+", 1000)
            held = [[message["message_id"].decode(), message["consumer"].decode()] for message in pending]
            return {"type": kind, "entries": entries, "pending": held}
    raise AssertionError(f"{key!r} is a {kind}, which TokenTape never stores")


def _deterministic(name: str, entry: dict[str, Any]) -> dict[str, Any]:
    kind = name.split(":")[2] if name.count(":") > 1 else ""
    match kind:
        case "rollout":
            fields = {field: value for field, value in entry["fields"] if field not in {"birth", "held"}}
            if "f:held" in fields:  # by a batch: each group's id in the queue's stream, from the server's clock
                fields["f:held"] = re.sub(r"\d{13}-\d+", "…", fields["f:held"])
            return {"fields": fields}
        case "records":
            return {"records": [_without_port(read_record(_bytes(item))) for item in entry["items"]]}
        case "blocks":
            return {"blocks": {_bytes(block).hex(): read_block(_bytes(value)) for block, value in entry["fields"]}}
        case "listing":
            return {"members": [member for member, _ in entry["members"]]}
        case "timers":  # of a rollout and its incarnation
            return {"members": [[member.split()[0], score] for member, score in entry["members"]]}
        case "queue":
            return {"groups": [fields for _, fields in entry["entries"]]}
    return entry


def _without_port(record: dict[str, Any]) -> dict[str, Any]:
    """A record without the reason of its end, which is a sentence for people, and without the engine's port."""
    head = orjson.loads(record["head"])
    head["reason"] = head["reason"] and "…"
    head["engine"]["url"] = "…"
    return {**record, "head": orjson.dumps(head).decode()}


def _text(value: bytes) -> Any:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return {"base64": b64encode(value).decode()}


def _bytes(value: Any) -> bytes:
    return b64decode(value["base64"]) if isinstance(value, dict) else value.encode()
