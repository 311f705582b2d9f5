"""The listing of a store: its names, newest first, or those with a value of an indexed field.

Each bucket has a listing and an index. A page asks each bucket for its expected share, and again where that was not enough.

Processes of 0.1.0 write no index, so an index is used only while it is known to be complete: each member of the listing has an
entry, and no repair is due. One is due if these numbers differ in a bucket, and while a process of 0.1.0 sends heartbeats: it
may finish rollouts. `repair` corrects the entries of all rollouts, and again ten minutes later, until nothing was wrong.
"""

import re
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Final

from storage.redis import scripts
from storage.redis.cluster import Servers
from storage.redis.connections import checked, pairs
from storage.redis.keys import AGE_DIGITS, Bucket, Layout, decoded_name
from storage.redis.scripts import RunEach, Script, whole
from storage.types import Page

_CURSOR: Final = re.compile(rf"[0-9]{{{AGE_DIGITS}}}[A-Za-z0-9_.~%-]+|!(?:[0-9a-f]{{2}})*")
_RAW: Final = "!"  # before the hex digits of a damaged member, which is no name and still has its place in the order
_NAMES_PAGE: Final = 1000
_SPARE: Final = 4  # members of a bucket beyond its share of a page
_LONGEST_VALUE: Final = 200  # bytes; index.lua contains the same number
_REPAIR_PAGE: Final = 100  # rollouts, whose entries one script corrects
_REPAIR_AGAIN_MS: Final = 600_000


class Listing:
    """The names of a store. `run_each` does not wait for durability; `variants` are the scripts that use the index."""

    def __init__(
        self,
        servers: Servers,
        run_each: RunEach,
        variants: Mapping[Script, Script],
        layout: Layout,
        indexed: Mapping[str, bytes],
    ) -> None:
        self._servers = servers
        self._run_each = run_each
        self._variants = variants
        self._layout = layout
        self._indexed = indexed
        self._complete = f"f:{next(iter(indexed), '')}=".encode()  # each rollout has an entry of this field

    async def page(
        self, cursor: str | None, limit: int, since_ms: int | None = None, until_ms: int | None = None
    ) -> Page:
        """Return a page of names that were created from `since_ms` to `until_ms`. Raises `ValueError` for an invalid cursor.

        Paging is stable under concurrent writes: rollouts that exist throughout are listed exactly once.
        """
        found = await self._page_from(b"", cursor, limit, since_ms, until_ms)
        assert found is not None
        return found

    async def page_of(
        self, field: str, value: bytes, cursor: str | None, limit: int, since_ms: int | None, until_ms: int | None
    ) -> Page | None:
        """Return a page of names with a value of an indexed field; None if the index may be incomplete.

        The entries may be older than the rollouts: check each one.
        """
        if field not in self._indexed or await self._is_repair_due():
            return None
        prefix = f"f:{field}=".encode() + value[:_LONGEST_VALUE].replace(b"\0", b" ") + b"\0"
        return await self._page_from(prefix, cursor, limit, since_ms, until_ms)

    async def page_among(
        self, names: Sequence[str], cursor: str | None, limit: int, since_ms: int | None, until_ms: int | None
    ) -> Page:
        """Return a page of these names. Raises `ValueError` for an invalid cursor."""
        newest, oldest = _bounds(b"", cursor, since_ms, until_ms)
        all_keys = [self._layout.rollout(name) for name in names]
        requests = [(keys.rollout, [("HGET", keys.rollout, "created_ms")]) for keys in all_keys]
        found = whole(await self._servers.execute_all(requests)) if requests else ()
        members = []
        for keys, replies in zip(all_keys, found, strict=True):
            if (created_ms := checked(replies[0])) is not None:
                members.append(created_ms.rjust(AGE_DIGITS, b"0") + keys.encoded)
        members = [
            it for it in sorted(members, reverse=True) if oldest[1:] <= it and (newest == b"+" or it < newest[1:])
        ]
        return _page(members, limit)

    def cursor(self, rollout: str, created_ms: int) -> str:
        """Return the cursor of the page that follows this rollout."""
        return _cursor(_age(created_ms) + self._layout.rollout(rollout).encoded)

    async def _page_from(
        self, prefix: bytes, cursor: str | None, limit: int, since_ms: int | None, until_ms: int | None
    ) -> Page | None:
        newest, oldest = _bounds(prefix, cursor, since_ms, until_ms)
        limit = max(1, limit)
        members: list[bytes] = []
        starts = dict.fromkeys(self._layout.buckets, newest)
        share = min(limit + 1, -(-(limit + 1) // len(starts)) + _SPARE)
        while starts:
            replies = await self._ask(starts, oldest, share, is_index=bool(prefix))
            if replies is None:
                return None
            ends = {}
            for bucket, part in zip(starts, replies, strict=True):
                members += [member[len(prefix) :] for member in part]
                if len(part) == share:
                    ends[bucket] = part[-1][len(prefix) :]
            members.sort(reverse=True)
            last = members[limit] if len(members) > limit else b""
            starts = {bucket: b"(" + prefix + end for bucket, end in ends.items() if end > last}
            share = min(limit + 1, 4 * share)
        return _page(members, limit)

    async def _ask(
        self, starts: Mapping[Bucket, bytes], oldest: bytes, limit: int, *, is_index: bool
    ) -> Sequence[list[bytes]] | None:
        """Return the members of each bucket; None if the index of one lacks entries."""
        more = (self._complete,) if is_index else ()
        script = self._variants[scripts.LIST]
        calls = [
            (script, (bucket.listing, bucket.expiry, bucket.indexes), (newest, oldest, limit, *more))
            for bucket, newest in starts.items()
        ]
        replies: Sequence[Any] = whole(await self._run_each(calls))
        if not is_index:
            return replies
        return [found for found, _ in replies] if all(is_complete for _, is_complete in replies) else None

    async def names(self) -> AsyncIterator[str]:
        """Iterate over all names in constant memory."""
        page = await self.page(None, _NAMES_PAGE)
        while True:
            for name in page.names:
                yield name
            if page.cursor is None:
                return
            page = await self.page(page.cursor, _NAMES_PAGE)

    async def _is_repair_due(self) -> bool:
        key = self._layout.buckets[0].repair
        (exists,) = await self._servers.execute(key, [("EXISTS", key)], shared=True)
        return bool(checked(exists))

    async def look_for_repairs(self) -> None:
        """Have the index repaired if it lacks entries or a process of 0.1.0 runs. One process does this from time to time."""
        key, heartbeats = self._layout.buckets[0].repair, self._layout.buckets[0].heartbeats
        (names,) = await self._servers.execute(heartbeats, [("HKEYS", heartbeats)])
        if any(
            not name.startswith(b"~") for name in checked(names)
        ):  # what it writes from now on is found by one more repair
            commands = [("HSETNX", key, "due_ms", 0), ("HINCRBY", key, "wrong", 1)]
        elif await self._lacks_entries(self._layout.buckets):
            commands = [("HSETNX", key, "due_ms", 0)]
        else:
            return
        for reply in await self._servers.execute(key, commands):
            checked(reply)

    async def _lacks_entries(self, buckets: Sequence[Bucket]) -> bool:
        calls = [(scripts.INDEX_MISSING, (bucket.listing, bucket.indexes), (self._complete,)) for bucket in buckets]
        return any(whole(await self._run_each(calls)))

    async def repair(self, now_ms: int) -> bool:
        """Correct the entries of the next rollouts, if a repair is due; return whether it is.

        A bucket's listing is read from its oldest member, then its entries, if there are some of deleted rollouts.
        """
        key = self._layout.buckets[0].repair
        (reply,) = await self._servers.execute(key, [("HGETALL", key)])
        state = dict(pairs(checked(reply)))
        if not state or now_ms < int(state[b"due_ms"]):
            return False
        number, wrong, cursor = int(state.get(b"bucket", 0)), int(state.get(b"wrong", 0)), state.get(b"cursor", b"l")
        bucket = self._layout.buckets[number]
        is_listing, after = cursor[:1] == b"l", cursor[1:]
        source = bucket.listing if is_listing else bucket.indexes
        oldest = b"(" + after if after else b"-" if is_listing else b"[" + self._complete
        newest = b"+" if is_listing else b"(" + self._complete + b"\xff"
        page = ("ZRANGE", source, oldest, newest, "BYLEX", "LIMIT", 0, _REPAIR_PAGE)
        found: list[bytes] = checked((await self._servers.execute(source, [page]))[0])
        members = found if is_listing else [entry.rpartition(b"\0")[2] for entry in found]
        keys = [f"{bucket.prefix}rollout:".encode() + member[AGE_DIGITS:] for member in members]
        if members:
            call = self._variants[scripts.INDEX_REPAIR], (*keys, bucket.listing, bucket.indexes), members
            (corrected,) = whole(await self._run_each([call]))
            wrong += corrected
        if len(found) == _REPAIR_PAGE:
            cursor = cursor[:1] + found[-1]
        elif is_listing and await self._lacks_entries([bucket]):
            cursor = b"i"
        else:
            number, cursor = number + 1, b"l"
        due_ms = 0
        if number == len(self._layout.buckets):
            number, due_ms = 0, now_ms + _REPAIR_AGAIN_MS
        if due_ms and not wrong:
            (reply,) = await self._servers.execute(key, [("DEL", key)])
        else:
            fields = ("due_ms", due_ms, "bucket", number, "wrong", 0 if due_ms else wrong, "cursor", cursor)
            (reply,) = await self._servers.execute(key, [("HSET", key, *fields)])
        checked(reply)
        return True


def _bounds(prefix: bytes, cursor: str | None, since_ms: int | None, until_ms: int | None) -> tuple[bytes, bytes]:
    """Return the newest and the oldest member, or entry with this prefix, as ZRANGE BYLEX requires."""
    if cursor is not None and not _CURSOR.fullmatch(cursor):
        raise ValueError(f"{cursor!r} is not a cursor of this listing; use the cursor of the previous page unchanged")
    newest = b"(" + prefix + (_member(cursor) if cursor else b"\xff") if cursor or prefix else b"+"
    if until_ms is not None:
        after = b"(" + prefix + _age(until_ms + 1)
        newest = after if newest == b"+" else min(newest, after)
    return newest, b"[" + prefix + _age(since_ms or 0) if prefix or since_ms is not None else b"-"


def _age(time_ms: int) -> bytes:
    return b"%0*d" % (AGE_DIGITS, min(max(0, time_ms), 10**AGE_DIGITS - 1))


def _page(members: Sequence[bytes], limit: int) -> Page:
    names = (decoded_name(member[AGE_DIGITS:]) for member in members[:limit])
    return Page(tuple(filter(None, names)), _cursor(members[limit - 1]) if len(members) > limit else None)


def _cursor(member: bytes) -> str:
    text = member.decode("latin-1")
    return text if not text.startswith(_RAW) and _CURSOR.fullmatch(text) else _RAW + member.hex()


def _member(cursor: str) -> bytes:
    return bytes.fromhex(cursor[1:]) if cursor.startswith(_RAW) else cursor.encode()
