"""Rows to audit: out of a file, or out of a running proxy.

Holds the reading of NDJSON, line by line, so that an export of any length is never in memory as a whole. What a row
holds is read in `recorded`.
"""

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from proxy.download import Wanted, reads


async def rows_of_file(path: Path, wanted: Wanted) -> AsyncGenerator[Any, None]:
    """The wanted rows of a file that `tokentape export` wrote. Raises OSError, or ValueError naming the line."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip() and _is_wanted(row := _row(line, f"{path}, line {number}"), wanted):
                yield row


async def rows_of_proxy(session: aiohttp.ClientSession, url: str, wanted: Wanted) -> AsyncGenerator[Any, None]:
    """The wanted rows of a running proxy. Raises OSError if it refuses, ValueError if it answers no rows."""
    for path in wanted.paths():
        where = url.rstrip("/") + path
        rest = b""
        async for read in reads(session, where):
            *lines, rest = (rest + read).split(b"\n")
            for line in lines:
                if line.strip():
                    yield _row(line, where)
        if rest.strip():
            yield _row(rest, where)


def _row(line: bytes, where: str) -> Any:
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON ({error}); give rows of `tokentape export`") from error


def _is_wanted(row: Any, wanted: Wanted) -> bool:
    if not isinstance(row, dict):
        return True  # what it lacks is told with its verdict
    named = not wanted.rollouts or row.get("rollout_id") in wanted.rollouts
    return named and (wanted.group is None or row.get("group_id") == wanted.group)
