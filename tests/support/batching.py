"""The routes of batches as one consumer sees them, without the store behind them."""

import asyncio

from aiohttp import web


class Batching:
    """The routes of batches, as far as one consumer sees them: what is ready, and what was said of each batch."""

    def __init__(self, engine) -> None:
        self.ready: list[list[dict]] = []
        self.refused: list[dict] = []
        self.dropped: list[dict] = []
        self.said: list[tuple] = []
        self.lost: set[str] = set()
        self.partly_lost: list[str] = []
        self.patient = True
        self.extended = asyncio.Event()
        self.arrived = asyncio.Event()
        engine.answering = self.answer

    async def answer(self, request, body):
        if request.path == "/batches/claim":
            return await self.claim(body)
        _, _, batch, verb = request.path.split("/")
        self.said.append((verb, batch, body))
        if batch in self.lost:
            self.extended.set()
            error = {"message": "the lease ran out", "type": "conflict", "code": "lease_lost", "param": None}
            return web.json_response({"error": error}, status=409)
        if verb == "extend":
            self.extended.set()
        return web.json_response({"batch_id": batch, "lost": self.partly_lost})

    async def claim(self, body):
        self.said.append(("claim", body))
        if not self.ready and body["wait_s"] and self.patient:
            await self.arrived.wait()
        if not self.ready:
            return web.json_response({"batch_id": None, "expires_ms": None, "groups": [], **self.left_out()})
        groups = self.ready.pop(0)
        batch = f"b{sum(said[0] == 'claim' for said in self.said)}"
        return web.json_response({"batch_id": batch, "expires_ms": 0, "groups": groups, **self.left_out()})

    def left_out(self):
        return {"refused": self.refused, "dropped": self.dropped}

    def verbs(self) -> list[str]:
        """What was said, without the claims and the heartbeat."""
        return [f"{said[0]} {said[1]}" for said in self.said if said[0] in ("ack", "release")]


def group(name: str) -> dict:
    """A group as a claim tells it."""
    return {"group_id": name, "policy_version": None, "metadata": {}, "rollouts": [], "skipped": [], "data": []}
