"""A JSON client of the control API that reads paginated lists."""

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Final
from urllib.parse import quote, urlencode

import aiohttp
import orjson

from proxy.cli.export import Refused, error_message
from proxy.cli.render.step import recorded_texts
from proxy.upstream.failure_text import failure_text

MAX_TEXTS: Final = 2000  # token texts per request
_JSON: Final = {"Content-Type": "application/json"}


class ControlClient:
    """The control API at a URL."""

    __slots__ = ("session", "url")

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self.session = session
        self.url = url.rstrip("/")

    async def get(self, path: str, **query: Any) -> Any:
        """Return the JSON body of a GET request. Raises what `send` raises."""
        return await self.send("GET", path, **query)

    async def send(self, method: str, path: str, body: Any = None, **query: Any) -> Any:
        """Return the JSON body of the response; None if it has no body.

        Raises:
            OSError: The request failed, or the status is 300 or more (`Refused`), or the body is not JSON.
        """
        url = self.url + path + _query(query)
        data = None if body is None else orjson.dumps(body)
        try:
            async with self.session.request(method, url, data=data, headers=_JSON if data else {}) as response:
                content = await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise OSError(f"request to {url} failed: {failure_text(error)}") from error
        if response.status >= 300:
            raise Refused(f"{url} returned {response.status}: {error_message(content)}", response.status)
        try:
            return orjson.loads(content) if content else None
        except orjson.JSONDecodeError as error:
            raise OSError(f"{url} did not return JSON; check that it is the control API of a proxy") from error

    async def list_items(self, noun: str, limit: int, **filters: Any) -> tuple[list[dict[str, Any]], str | None]:
        """Return up to `limit` rollouts or groups that match the filters, and the cursor of the next page or None."""
        found: list[dict[str, Any]] = []
        cursor: str | None = None
        while True:
            page = await self.get(f"/{noun}", limit=min(limit - len(found), 1000), cursor=cursor, **filters)
            found += page[noun]
            cursor = page["cursor"]
            if cursor is None or len(found) >= limit:
                return found, cursor

    async def steps(self, rollout_id: str, start: int = 0) -> AsyncIterator[dict[str, Any]]:
        """Yield the steps of a rollout in stored order, from index `start`."""
        after: int | None = start - 1 if start else None
        while True:
            page = await self.get(f"{rollout_path(rollout_id)}/steps", after=after, limit=100)
            for step in page["steps"]:
                yield step
            after = page["after"]
            if after is None:
                return

    async def texts(self, steps: Sequence[Mapping[str, Any]]) -> dict[tuple[str, int], list[str | None]]:
        """Return the texts of completion tokens that the recorded responses lack, by step ID and position of the choice."""
        found: dict[tuple[str, int], list[str | None]] = {}
        for step in steps:
            path = f"{rollout_path(step['rollout_id'])}/steps/{quote(step['step_id'], safe='')}/texts"
            prompts = step.get("prompts") or [step["prompt_ids"] or []]
            for position, choice in enumerate(step["choices"]):
                if recorded_texts(step, position) is not None:
                    continue
                texts: list[str | None] = []
                # Offsets count from the start of the prompt.
                offset = len(prompts[choice["prompt"]]) if choice["prompt"] < len(prompts) else 0
                while len(texts) < len(choice["ids"]):
                    start = offset + len(texts)
                    try:
                        page = await self.get(path, choice=choice["index"], start=start, limit=MAX_TEXTS)
                    except Refused:
                        return found  # an older proxy, or the rollout was deleted; the caller shows ids
                    texts += page["texts"] or [None] * len(choice["ids"])
                found[step["step_id"], position] = texts
        return found


def rollout_path(rollout_id: str) -> str:
    """Return the control API path of a rollout."""
    return f"/rollouts/{quote(rollout_id, safe='')}"


def _query(query: Mapping[str, Any]) -> str:
    params = {name: value for name, value in query.items() if value is not None}
    return f"?{urlencode(params)}" if params else ""
