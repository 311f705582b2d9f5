"""The Lua scripts, for operations that must be atomic on the server.

Each file in `lua/` documents its KEYS and ARGV. By default, a script gets the seven keys of `RolloutKeys.all`, and its
arguments start with the encoded name, now_ms and ttl_s (0: no TTL). Scripts access declared keys only, as Redis Cluster and
proxies require.

A queue is a stream for each bucket with one consumer group. The group's list of pending entries (PEL) records which holder has
which entry, and since when. All entries are pending: entries without a holder belong to the consumer `-` and have been idle for
longer than any lease. A lease shorter than the maximum is an XCLAIM with IDLE set to the difference. So an entry is available
if it has been idle for the maximum lease (not its own lease), and only the server's clock is used. `ENQUEUE` and `QUEUE_MOVE`
get the seven keys of the group, then the stream (`ENQUEUE`: several streams); other queue scripts get the stream only.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from hashlib import sha1
from pathlib import Path
from typing import Any, Final, TypeAlias

from storage.errors import StorageError

Command: TypeAlias = tuple[bytes | str | int, ...]

_NO_INDEX: Final = "local HAS_INDEX, INDEXED = false, function() return {} end\n"
_LUA: Final = Path(__file__).with_name("lua")


class Script:
    """A script and the SHA1 under which a server caches it."""

    __slots__ = ("_text", "sha")  # compared by identity

    def __init__(self, text: str) -> None:
        self._text = text
        self.sha = sha1(text.encode(), usedforsecurity=False).hexdigest()

    def as_eval(self, command: Command) -> Command:
        """Return the EVAL command for an EVALSHA command. The server caches the script."""
        return ("EVAL", self._text, *command[2:])

    def indexing(self, fields: Mapping[str, bytes]) -> "Script":
        """Return the script for rollouts with an index of these fields; see index.lua."""
        if not fields:
            return self
        table = ", ".join(f"[{_lua('f:' + name)}] = {_lua(value.decode())}" for name, value in sorted(fields.items()))
        index = _NO_INDEX.replace("false", "true").replace("{}", f"{{{table}}}")
        return Script(self._text.replace(_NO_INDEX, index, 1))


def _lua(text: str) -> str:
    """Return a text as a literal of Lua."""
    return "'" + "".join(f"\\{byte:03}" for byte in text.encode()) + "'"


Arguments: TypeAlias = Sequence[bytes | str | int]
Call: TypeAlias = tuple[Script, Sequence[bytes], Arguments]  # a script, keys of one bucket, and arguments
RunScript: TypeAlias = Callable[[Script, Sequence[bytes], Arguments], Awaitable[Any]]  # returns the reply of the script
# Runs scripts, each in its bucket, with one write to each server; returns the reply, or the `StorageError`, of each.
RunEach: TypeAlias = Callable[[Sequence[Call]], Awaitable[Sequence[Any]]]


def whole(replies: Sequence[Any]) -> Sequence[Any]:
    """Return the replies of all buckets. Raises the `StorageError` of the first that has one."""
    for reply in replies:
        if isinstance(reply, StorageError):
            raise reply
    return replies


def _load(*names: str) -> Script:
    """Return the script made of these files; the last one uses the functions of the others."""
    return Script("".join([_NO_INDEX, *map(_code, names)]) if "index" in names else "".join(map(_code, names)))


def _code(name: str) -> str:
    """Return the code of a file without comment lines, and with the same newlines on all systems, for a stable SHA1."""
    lines = (_LUA / f"{name}.lua").read_text("utf-8").splitlines()
    return "\n" + "".join(f"{line}\n" for line in lines if not line.startswith("--"))


_TOUCH: Final = ("index", "prune", "touch")
_FIELDS: Final = (*_TOUCH, "fields")

OPEN: Final = _load(*_TOUCH, "reservations", "open")
OPEN_GROUP: Final = _load("index", "prune", "open_group")
UPDATE_IF: Final = _load(*_FIELDS, "update_if")
APPEND: Final = _load(*_TOUCH, "reservations", "was_deleted", "append")
MARK: Final = _load(*_TOUCH, "was_deleted", "mark")
RENEW: Final = _load(*_TOUCH, "renew")
DELETE: Final = _load(*_TOUCH, "delete")
FIND: Final = _load("find")
LIST: Final = _load("index", "prune", "list")
INDEX_REPAIR: Final = _load("index", "index_repair")
INDEX_MISSING: Final = _load("index_missing")
EXTEND_RESERVATION: Final = _load("prune", "reservations", "extend_reservation")

# The last key of these is the index. `Script.indexing` makes them use it.
WITH_INDEX: Final = (OPEN, OPEN_GROUP, UPDATE_IF, APPEND, MARK, RENEW, DELETE, LIST, INDEX_REPAIR)

ANNOUNCE: Final = _load("announce")
ANNOUNCEMENTS: Final = _load("announcements")
HEARTBEAT: Final = _load("heartbeat")
LEAD: Final = _load("lead")

CACHE_GET: Final = _load("cache_get")
CACHE_PUT: Final = _load("cache_put")

TIMERS_CLAIM: Final = _load("timers_claim")
TIMERS_MOVE: Final = _load("timers_move")
TIMERS_TURN: Final = _load("timers_turn")

ENQUEUE: Final = _load(*_FIELDS, "queue_pending", "queue_enqueue")
QUEUE_MOVE: Final = _load(*_FIELDS, "queue_pending", "queue_move")
QUEUE_READ: Final = _load("queue_read")
QUEUE_NOTE: Final = _load("queue_note")
QUEUE_INDEX: Final = _load("queue_index")
QUEUE_ENTRIES: Final = _load("queue_pending", "queue_entries")
QUEUE_WATCH: Final = _load("queue_watch")
