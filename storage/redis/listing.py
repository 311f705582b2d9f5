"""The listing of names: pages merged from the listings of all buckets, with a cursor."""

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Final

from storage.redis import scripts
from storage.redis.keys import AGE_DIGITS, BUCKETS, bucket_keys, decoded_name
from storage.redis.scripts import RunScript
from storage.types import Page

_CURSOR: Final = re.compile(rf"[0-9]{{{AGE_DIGITS}}}[A-Za-z0-9_.~%-]+|!(?:[0-9a-f]{{2}})*")
_RAW: Final = "!"  # before the hex digits of a damaged member, which is no name and still has its place in the order
_NAMES_PAGE: Final = 1000


class RedisListing:
    """All names of a store, newest first. `run` does not wait for durability."""

    def __init__(self, run: RunScript, prefix: str) -> None:
        self._run = run
        self._prefix = prefix

    async def page(self, cursor: str | None, limit: int, since_ms: int | None) -> Page:
        """Return one page. Raises `ValueError` for an invalid cursor."""
        if cursor is not None and not _CURSOR.fullmatch(cursor):
            raise ValueError(
                f"{cursor!r} is not a cursor of this listing; use the cursor of the previous page unchanged"
            )
        newest = b"(" + _member(cursor) if cursor else b"+"
        oldest = "-" if since_ms is None else f"[{max(0, since_ms):0{AGE_DIGITS}}"
        limit = max(1, limit)
        keys = (bucket_keys(self._prefix, bucket) for bucket in BUCKETS)
        parts = await asyncio.gather(*(self._run(scripts.LIST, pair, (newest, oldest, limit + 1)) for pair in keys))
        merged = sorted((member for part in parts for member in part), reverse=True)
        names = (decoded_name(member[AGE_DIGITS:]) for member in merged[:limit])
        return Page(tuple(filter(None, names)), _cursor(merged[limit - 1]) if len(merged) > limit else None)

    async def names(self) -> AsyncIterator[str]:
        """Iterate over all names in constant memory."""
        page = await self.page(None, _NAMES_PAGE, None)
        while True:
            for name in page.names:
                yield name
            if page.cursor is None:
                return
            page = await self.page(page.cursor, _NAMES_PAGE, None)


def _cursor(member: bytes) -> str:
    text = member.decode("latin-1")
    return text if not text.startswith(_RAW) and _CURSOR.fullmatch(text) else _RAW + member.hex()


def _member(cursor: str) -> bytes:
    return bytes.fromhex(cursor[1:]) if cursor.startswith(_RAW) else cursor.encode()
