"""A server with the routes of batches as one consumer sees them, without a store."""

import asyncio

from aiohttp import web


class BatchServer:
    """Claims come from `ready`; `lost` are batches without their lease, `partly_lost` groups of a batch that are lost.

    `other` is the number of available groups that a claim does not consider. `requests` has each request: ("claim", body) or
    (verb, batch id, body).
    """

    def __init__(self, engine) -> None:
        self.ready: list[list[dict]] = []
        self.refused: list[dict] = []
        self.dropped: list[dict] = []
        self.warnings: list[dict] = []
        self.other = 0
        self.requests: list[tuple] = []
        self.open_groups: list[dict] | None = []
        self.lost: set[str] = set()
        self.partly_lost: list[str] = []
        self.long_polls = True
        self.extended = asyncio.Event()
        self.arrived = asyncio.Event()
        engine.respond = self.respond

    async def respond(self, request, body):
        if request.path == "/batches/claim":
            return await self.claim(body)
        if request.path == "/groups":
            if self.open_groups is None:
                return web.json_response({}, status=500)
            return web.json_response({"groups": self.open_groups, "cursor": None})
        _, _, batch, verb = request.path.split("/")
        self.requests.append((verb, batch, body))
        if batch in self.lost:
            self.extended.set()
            error = {"message": "the lease expired", "type": "conflict", "code": "lease_lost", "param": None}
            return web.json_response({"error": error}, status=409)
        if verb == "extend":
            self.extended.set()
        return web.json_response({"batch_id": batch, "lost": self.partly_lost})

    async def claim(self, body):
        self.requests.append(("claim", body))
        if not self.ready and body["wait_s"] and self.long_polls:
            await self.arrived.wait()
        waiting = {"available": len(self.refused) + self.other, "claimed": 0}
        omitted = {"refused": self.refused, "dropped": self.dropped, "waiting": waiting}
        if not self.ready:
            return web.json_response({"batch_id": None, "expires_ms": None, "groups": [], **omitted})
        batch = f"b{sum(request[0] == 'claim' for request in self.requests)}"
        return web.json_response(
            {"batch_id": batch, "expires_ms": 0, "groups": self.ready.pop(0), **omitted, "warnings": self.warnings}
        )

    def ended(self) -> list[str]:
        """The acks and releases, without claims and heartbeats."""
        return [f"{request[0]} {request[1]}" for request in self.requests if request[0] in ("ack", "release")]


def group(name: str) -> dict:
    """A group of a claim."""
    return {"group_id": name, "policy_version": None, "metadata": {}, "rollouts": [], "skipped": [], "data": []}


def refused(name: str, code: str) -> dict:
    """A refused group of a claim."""
    return {"group_id": name, "code": code, "why": f"it is {code}"}
