"""JSON from a running proxy's control API.

Holds the asking and the reading of pages. Connections, and the proxy of our own for a store, are `download`'s.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Final
from urllib.parse import quote, urlencode

import aiohttp
import orjson

from proxy.cli.export import Refused, reads
from proxy.cli.render.step import texts_of

_MOST_TEXTS: Final = 2000  # tokens whose texts are told at once


class ControlClient:
    """The control API at a URL."""

    __slots__ = ("session", "url")

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self.session = session
        self.url = url.rstrip("/")

    async def get(self, path: str, **query: Any) -> Any:
        """The JSON that it answers. Raises OSError with a sentence if it refuses or cannot be reached."""
        where = self.url + path + _query(query)
        text = b"".join([read async for read in reads(self.session, where)])
        try:
            return orjson.loads(text)
        except orjson.JSONDecodeError as error:
            raise OSError(f"{where} answered no JSON: is it a proxy's control API?") from error

    async def listed(self, noun: str, limit: int, **filters: Any) -> tuple[list[dict[str, Any]], str | None]:
        """Up to so many rollouts or groups that pass the filters, and the cursor of what follows, if anything does."""
        found: list[dict[str, Any]] = []
        cursor: str | None = None
        while True:
            page = await self.get(f"/{noun}", limit=min(limit - len(found), 1000), cursor=cursor, **filters)
            found += page[noun]
            cursor = page["cursor"]
            if cursor is None or len(found) >= limit:
                return found, cursor

    async def steps(self, rollout_id: str, start: int = 0) -> AsyncIterator[dict[str, Any]]:
        """The steps of a rollout in the order of storing, from this index on."""
        after: int | None = start - 1 if start else None
        while True:
            page = await self.get(f"{path_of(rollout_id)}/steps", after=after, limit=100)
            for step in page["steps"]:
                yield step
            after = page["after"]
            if after is None:
                return

    async def texts(self, steps: Sequence[Mapping[str, Any]]) -> dict[tuple[str, int], list[str | None]]:
        """The texts of sampled tokens that the steps' answers do not tell, as far as the proxy can find them out."""
        found: dict[tuple[str, int], list[str | None]] = {}
        for step in steps:
            where = f"{path_of(step['rollout_id'])}/steps/{quote(step['step_id'], safe='')}/texts"
            prompts = step.get("prompts") or [step["prompt_ids"] or []]
            for at, choice in enumerate(step["choices"]):
                if texts_of(step, at) is not None:
                    continue
                told: list[str | None] = []
                begun = (
                    len(prompts[choice["prompt"]]) if choice["prompt"] < len(prompts) else 0
                )  # a row is its prompt first
                while len(told) < len(choice["ids"]):
                    try:
                        page = await self.get(where, choice=choice["index"], start=begun + len(told), limit=_MOST_TEXTS)
                    except Refused:
                        return found  # a proxy that is older, or a rollout that was deleted meanwhile: ids it is
                    told += page["texts"] or [None] * len(choice["ids"])
                found[step["step_id"], at] = told
        return found


def path_of(rollout_id: str) -> str:
    """The path of a rollout on the control API."""
    return f"/rollouts/{quote(rollout_id, safe='')}"


def _query(query: Mapping[str, Any]) -> str:
    said = {name: value for name, value in query.items() if value is not None}
    return f"?{urlencode(said)}" if said else ""
