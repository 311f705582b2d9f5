"""Rollout servers by Osmosis' protocols (71b6d83; f47b00f~1) on a real socket, and a proxy that is configured with one.

The mask has the length that they compute: the rendered messages, minus the previous call and its sample.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import aiohttp
import orjson
from aiohttp import web
from tests.support.fakes import settings_for
from tests.support.listening import listening

from proxy.server.listener import running
from proxy.simulator.template import render
from proxy.simulator.tokenizer import load_tokenizer

ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
QUESTION = [{"role": "user", "content": "What is 2 and 3?"}]
_CATEGORIES = {429: "rate_limited"}


class RolloutServer:
    """A server that runs rollouts: `/rollout` to their end, `/v1/rollout/init` to their start."""

    def __init__(self, http: aiohttp.ClientSession) -> None:
        self.http = http
        self.url = ""
        self.requests: list[dict] = []
        self.headers: list[dict[str, str]] = []
        self.masks: list[list[int] | None] = []
        self.responses: list[dict] = []
        self.over = asyncio.Event()
        self.wrong_by = 0
        self.is_slow = False  # to answer an init: the first call is made long before
        self.tools = [ADD]
        self.status = 200
        self.response_body: Any = None
        self.raw: bytes | None = None
        self.release: asyncio.Event | None = None
        self.tasks: list[asyncio.Task] = []

    async def rollout(self, request: web.Request) -> web.Response:
        body = await self._note(request)
        if self.release is not None:
            await self.release.wait()
        if self.raw is not None:
            return web.Response(body=self.raw)
        if self.status != 200 or self.response_body is not None:
            return web.json_response(
                self.response_body, status=self.status, headers={"Location": f"{self.url}/elsewhere"}
            )
        return web.json_response(await self.run(body))

    async def elsewhere(self, request: web.Request) -> web.Response:
        """Redirect, which a server of the allow-list may not do."""
        return web.json_response({"rollout_id": "r1", "status": "COMPLETED"})

    async def init(self, request: web.Request) -> web.Response:
        body = await self._note(request)
        if self.status != 200:
            return web.json_response({"error": "no"}, status=self.status)
        self.tasks.append(
            asyncio.create_task(self.chat(body))
        )  # as in the reference: its first call may precede this response
        if self.is_slow:
            await asyncio.wait(self.tasks, timeout=0.3)
        return web.json_response({"rollout_id": body["rollout_id"], "tools": self.tools}, status=202)

    async def _note(self, request: web.Request) -> dict:
        self.requests.append(await request.json())
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        return self.requests[-1]

    async def run(self, body: dict) -> dict:
        """Run the synchronous loop; the response is the RolloutResponse."""
        messages, sampled, before = [dict(message) for message in body["messages"]], 0, None
        for calls in range(1, body.get("max_turns", 10) + 1):
            length = rendered_length(messages)
            mask = None if before is None else [0] * (length - before + self.wrong_by) or None
            self.masks.append(mask)
            status, response = await self._complete(body, messages, mask)
            if status != 200:
                category = _CATEGORIES.get(status, "trainer_server_error" if status >= 500 else "trainer_client_error")
                fields = {"error_category": category, "http_status": status}
                return self._result(body, "ERROR", messages, error_message="failed", extra_fields=fields)
            self.responses.append(response)
            before = length + len(response["token_ids"])
            sampled += len(response["token_ids"])
            metrics = {"num_llm_calls": calls}
            if sampled >= body["max_tokens_total"]:
                return self._result(body, "COMPLETED", messages, finish_reason="max_tokens", metrics=metrics)
            message = response["choices"][0]["message"]
            messages.append(message)
            if not message.get("tool_calls"):
                return self._result(body, "COMPLETED", messages, finish_reason="stop", metrics=metrics)
            messages += [{"role": "tool", "content": "5", "tool_call_id": call["id"]} for call in message["tool_calls"]]
        return self._result(body, "COMPLETED", messages, finish_reason="max_turns", metrics=metrics)

    async def _complete(self, request: dict, messages: list[dict], mask: list[int] | None) -> tuple[int, dict]:
        """Make a CompletionsRequest; absent fields of its messages are null."""
        nulls = {"tool_calls": None, "tool_call_id": None}
        body = {
            "model": "default",
            "messages": [{**nulls, **message} for message in messages],
            "rollout_id": request["rollout_id"],
            "temperature": 1.0,
            "top_p": 1.0,
            "max_tokens": 64,
            "stop": None,
            "logprobs": True,
            "response_mask": mask,
        }
        headers = {"Authorization": f"Bearer {request['callback_api_key']}"} if request.get("callback_api_key") else {}
        return await post(self.http, request["server_url"] + "/v1/completions", body, headers)

    async def chat(self, request: dict) -> None:
        """Run the asynchronous loop of one call, without null fields and without tools."""
        headers = {"Authorization": f"Bearer {request['api_key']}"}
        body = {
            "model": "default",
            "messages": request["messages"],
            "rollout_id": request["rollout_id"],
            "logprobs": True,
        }
        _, response = await post(self.http, request["server_url"] + "/v1/chat/completions", body, headers)
        self.responses.append(response)
        result = self._result(request, "COMPLETED", request["messages"], finish_reason="stop", reward=0.5)
        self.over.result = await post(self.http, request["server_url"] + "/v1/rollout/completed", result, headers)
        self.over.set()

    def _result(self, body: dict, status: str, messages: list[dict], **fields) -> dict:
        return {"rollout_id": body["rollout_id"], "status": status, "final_messages": messages, **fields}


def rendered_length(messages: list[dict]) -> int:
    """Return the length of the prompt of these messages, without tools."""
    return len(load_tokenizer().encode(render(messages)))


async def post(http: aiohttp.ClientSession, url: str, body: Any, headers=None) -> tuple[int, Any]:
    """Return status and JSON of a response."""
    async with http.post(url, json=body, headers=headers) as response:
        return response.status, orjson.loads(await response.read())


@asynccontextmanager
async def rollout_server() -> AsyncIterator[RolloutServer]:
    """Start a rollout server."""
    async with aiohttp.ClientSession() as http:
        server = RolloutServer(http)
        app = web.Application()
        app.add_routes([web.post("/rollout", server.rollout), web.post("/v1/rollout/init", server.init)])
        app.add_routes([web.route("*", "/elsewhere", server.elsewhere)])
        async with listening(app) as server.url:
            try:
                yield server
            finally:
                for task in server.tasks:
                    task.cancel()


@asynccontextmanager
async def dispatching(engine_url: str, store, server: RolloutServer, **sections) -> AsyncIterator[SimpleNamespace]:
    """Start a proxy with this server configured as `calculator`; yield `url`, `get` and `post` (status and
    JSON), and `rows` of the rollout `r1`.
    """
    osmosis = {"servers": {"calculator": {"url": server.url, "api_key": "server-key"}}, **sections.pop("osmosis", {})}
    settings = settings_for(engine_url, osmosis=osmosis, **sections)
    async with aiohttp.ClientSession() as http, running(settings, store) as served:

        async def get(path: str, headers=None):
            async with http.get(served.url + path, headers=headers) as response:
                return response.status, orjson.loads(await response.read())

        async def send(path: str, body=None, headers=None):
            return await post(http, served.url + path, body, headers)

        async def rows(format_name: str, headers=None):
            status, exported = await get(f"/rollouts/r1/export?format={format_name}&container=json", headers)
            assert status == 200, exported
            return exported["rows"]

        yield SimpleNamespace(url=served.url, control_url=served.control_url, http=http, get=get, post=send, rows=rows)
