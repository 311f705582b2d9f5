"""The routes of vLLM 0.32 for LoRA adapters, on a fake engine."""

import asyncio

from aiohttp import web


class LoraRoutes:
    """The adapters of an engine by name, its changes in order, and the paths and names that fail.

    `waiting`: loading waits for this event. `loads_in_place`: false before vLLM had `load_inplace`.
    """

    def __init__(self, engine, then=None) -> None:
        self.adapters: dict[str, str] = {}
        self.changes: list[tuple[str, str | None]] = []
        self.failing: set[str] = set()
        self.waiting: asyncio.Event | None = None
        self.reached = asyncio.Event()
        self.loads_in_place = True
        self._then = then
        engine.respond = self.respond

    async def respond(self, request: web.Request, body: dict) -> web.StreamResponse:
        """Answer as vLLM does."""
        if request.path == "/v1/load_lora_adapter":
            return await self._load(body["lora_name"], body["lora_path"], in_place=body["load_inplace"])
        if request.path == "/v1/unload_lora_adapter":
            return self._unload(body["lora_name"])
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": name, "root": path} for name, path in self.adapters.items()]})
        return await self._then(request, body)

    async def _load(self, name: str, path: str, *, in_place: bool) -> web.StreamResponse:
        self.reached.set()
        if self.waiting is not None:
            await self.waiting.wait()
        if path in self.failing:
            return _error(404, f"Loading lora {name} failed: No adapter found for {path}")
        if name in self.adapters and not (in_place and self.loads_in_place):
            return _error(400, f"The lora adapter '{name}' has already been loaded.")
        self.adapters[name] = path
        self.changes.append((name, path))
        return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")

    def _unload(self, name: str) -> web.StreamResponse:
        if name not in self.adapters:
            return _error(404, f"The lora adapter '{name}' cannot be found.")
        del self.adapters[name]
        self.changes.append((name, None))
        return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")


def _error(status: int, message: str) -> web.StreamResponse:
    return web.json_response({"error": {"message": message, "code": status}}, status=status)
