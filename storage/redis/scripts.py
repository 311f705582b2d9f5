"""The Lua scripts: what must happen on the server at once or not at all.

Each file in `lua/` says why it needs to be a script. Where a file says nothing else, a script gets the seven keys of
`RolloutKeys.all()` and begins with the arguments: encoded name, now_ms, ttl_s (0: none). Scripts use declared keys only, so
that every server and proxy of the Redis protocol takes them.

The queue is a stream for each bucket, read by one consumer group. Which entry is whose, and since when, is the consumer
group's own list of pending entries, so that claiming, and claiming from one that fell silent, are the server's. An entry is
pending from the start: for the consumer `-`, which is nobody, and idle for longer than any lease. A lease of less than the
longest is taken by being idle for the rest already (`XCLAIM … IDLE`): so whoever may take an entry need not know whose lease
it was, and the server's clock alone decides. Scripts of the queue, but for `QUEUE_AVAILABLE`, get the seven keys of the
group, then the stream.
"""

from collections.abc import Awaitable, Sequence
from hashlib import sha1
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias

Command: TypeAlias = tuple[bytes | str | int, ...]

_LUA: Final = Path(__file__).with_name("lua")


class Script:
    """A script and its hash, by which a server that saw it once knows it."""

    __slots__ = ("_sha", "_text")

    def __init__(self, text: str) -> None:
        self._text = text
        self._sha = sha1(text.encode(), usedforsecurity=False).hexdigest()

    def call(self, keys: Sequence[bytes], arguments: Sequence[bytes | str | int]) -> Command:
        """Run it, if the server knows it; else it answers NOSCRIPT."""
        return ("EVALSHA", self._sha, len(keys), *keys, *arguments)

    def teach(self, command: Command) -> Command:
        """The same call with the whole text, which the server remembers."""
        return ("EVAL", self._text, *command[2:])


class Run(Protocol):
    """How a script is run: with its keys and arguments, on the server of the first key, and a write durably."""

    def __call__(self, script: Script, keys: Sequence[bytes], arguments: Sequence[bytes | str | int]) -> Awaitable[Any]:
        """The script's reply."""
        ...


def _load(*names: str) -> Script:
    """The script made of these files, the last of which uses the functions of the others."""
    return Script("".join(map(_code, names)))


def _code(name: str) -> str:
    """The code of a file: no lines of comment, and the same bytes on every system, as its hash is its name."""
    lines = (_LUA / f"{name}.lua").read_text("utf-8").splitlines()
    return "\n" + "".join(f"{line}\n" for line in lines if not line.startswith("--"))


_TOUCH: Final = ("prune", "touch")
_FIELDS: Final = (*_TOUCH, "fields")

OPEN: Final = _load(*_TOUCH, "reservations", "open")
OPEN_GROUP: Final = _load("prune", "open_group")
UPDATE_IF: Final = _load(*_FIELDS, "update_if")
APPEND: Final = _load(*_TOUCH, "reservations", "was_deleted", "append")
MARK: Final = _load(*_TOUCH, "was_deleted", "mark")
RENEW: Final = _load(*_TOUCH, "renew")
DELETE: Final = _load(*_TOUCH, "delete")
FIND: Final = _load("find")
LIST: Final = _load("prune", "list")
EXTEND_RESERVATION: Final = _load("prune", "reservations", "extend_reservation")

ANNOUNCE: Final = _load("announce")
ANNOUNCEMENTS: Final = _load("announcements")
HEARTBEAT: Final = _load("heartbeat")

ENQUEUE: Final = _load(*_FIELDS, "queue_pending", "queue_offer")
QUEUE_MOVE: Final = _load(*_FIELDS, "queue_pending", "queue_move")
QUEUE_AVAILABLE: Final = _load("queue_pending", "queue_free")
