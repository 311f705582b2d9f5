"""Every HTTP reader of recorded data: none may return 500, regardless of what an engine or an agent sent."""

from contextlib import suppress
from random import Random
from typing import Any

import aiohttp
import orjson

from proxy.cli.audit import ServerAddress, rows_of_proxy
from proxy.cli.export import ExportRequest
from proxy.export import FORMATS
from proxy.export.containers import CONTAINERS
from proxy.rollouts.scoring.verdict import name_of, of_row
from tokentape.transport import ClientError

ADVANTAGES = ("none", "given", "grpo", "rloo", "dr_grpo", "vine")
BY_TURN = [name for name, form in FORMATS.items() if form.advantage_place in ("turn", "token")]
PENALTY = "&overlong=penalize&max_len=48&overlong_buffer=32"
LENGTHS = "&prompt_length=64&response_length=64"


class Failed(AssertionError):
    """A response that no reader may get."""


class Readers:
    """The readers of a proxy."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self.http, self.url = http, url

    async def request(self, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        """Send a request; return status and body.

        Raises:
            Failed: the status is 500 or more.
        """
        try:
            async with self.http.request(method, self.url + path, json=body) as response:
                text = await response.read()
        except aiohttp.ClientError as error:
            raise Failed(f"{method} {path} {body or ''} broke off: {error!r}") from error
        if response.status >= 500:
            raise Failed(f"{method} {path} {body or ''} is {response.status}: {text[:500]!r}")
        return response.status, text

    async def steps(self, rollout: str) -> list[dict]:
        """Return the steps of a rollout."""
        status, text = await self.request("GET", f"/rollouts/{rollout}/steps")
        return orjson.loads(text)["steps"] if status == 200 else []

    async def rollout(self, rollout: str, random: Random) -> None:
        """Read a rollout through every route, its rows in some formats and containers."""
        for path in ("", "/steps?limit=1", "/tree", "/tree?texts=true", "/branches", "/values?any_version=true"):
            await self.request("GET", f"/rollouts/{rollout}{path}")
        for include in ("exact", "flagged"):
            await self.request("GET", f"/rollouts/{rollout}/export?include={include}&{self.drawn(random)}")

    async def all_formats(self, rollout: str) -> None:
        """Read a rollout in every format and container."""
        for form in FORMATS:
            for container in CONTAINERS:
                query = f"format={form}&container={container}&include=flagged{LENGTHS}"
                await self.request("GET", f"/rollouts/{rollout}/export?{query}")

    async def group(self, group: str, random: Random) -> None:
        """Read a group."""
        await self.request("GET", f"/groups/{group}")
        query = f"{self.drawn(random)}&advantage={random.choice(ADVANTAGES)}"
        await self.request("GET", f"/groups/{group}/export?{query}")
        by_turn = f"format={random.choice(BY_TURN)}&advantage={random.choice(('step', 'grpo', 'rloo'))}&discount=0.9"
        await self.request("GET", f"/groups/{group}/export?{by_turn}&include=flagged{random.choice(('', PENALTY))}")

    async def lists(self, random: Random) -> None:
        """Read everything: the lists, the export of the whole store, and what an audit reads."""
        for path in ("/rollouts", "/groups", f"/export?report=true&include=flagged&limit=50&{self.drawn(random)}"):
            await self.request("GET", path)
        export_request = ExportRequest("sequences", (), None, "flagged", "ndjson", (("limit", "50"),))
        try:
            async for row in rows_of_proxy(ServerAddress(self.url, None), export_request):
                name_of(row)
                with suppress(ValueError):
                    of_row(row)
        except (OSError, ClientError) as error:
            raise Failed(f"an audit cannot read the rows: {error}") from error

    async def claim(self, random: Random) -> dict:
        """Claim complete groups and acknowledge them."""
        claim = {"consumer": "c", "groups": 3, "format": random.choice(tuple(FORMATS)),
                  "include": random.choice(("exact", "flagged")),
                  "advantage": random.choice((*ADVANTAGES, "reinforce_pp")),
                  "prompt_length": 64, "response_length": 64}  # fmt: skip
        _, text = await self.request("POST", "/batches/claim", claim)
        claimed = orjson.loads(text)
        if claimed.get("batch_id"):
            verb = random.choice(("ack", "release"))
            await self.request("POST", f"/batches/{claimed['batch_id']}/{verb}", {})
        return claimed

    def drawn(self, random: Random) -> str:
        penalty = random.choice(("", "", PENALTY))
        return f"format={random.choice(tuple(FORMATS))}&container={random.choice(tuple(CONTAINERS))}{LENGTHS}{penalty}"
