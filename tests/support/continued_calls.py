"""Rollouts over HTTP with a chat template: a simulated engine that records its requests, a proxy, and agents."""

import json
import re
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson
from aiohttp import web
from tests.support.chat_templates import template
from tests.support.fakes import settings_for
from tests.support.listening import listening
from tests.support.stored import stored_steps

from proxy.rollouts.prompt_continuation import PromptContinuation
from proxy.server.listener import running
from proxy.simulator.options import Options
from proxy.simulator.server import make_engine
from proxy.trajectory.step import Step

CHAT, COMPLETIONS, TOKENIZE, DETOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks a word up.",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string"}, "limit": {"type": "integer"}},
            "required": ["word", "limit"],
        },
    },
}
_COUNT = re.compile(r'^tokentape_continuations_total\{reason="(\w+)",result="(\w+)"\} ([0-9.]+)$', re.MULTILINE)

Fault = Callable[[dict[str, Any]], Awaitable[web.StreamResponse | None]]


class TappedEngine:
    """A simulated engine. `requests`: the path and the body of each POST. `faults`: by path, responses in place of its own.
    `disconnects`: the engine closes the connections of requests.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self.url = ""
        self.requests: list[tuple[str, bytes]] = []
        self.faults: dict[str, Fault] = {}
        self.disconnects = False

    def bodies(self, path: str = CHAT) -> list[dict[str, Any]]:
        """Return the bodies of all requests to a path."""
        return [orjson.loads(text) for name, text in self.requests if name == path]

    def raw(self, path: str = CHAT) -> list[bytes]:
        """Return the bytes of all requests to a path."""
        return [text for name, text in self.requests if name == path]

    def answers(self, path: str, value: Any, *, status: int = 200) -> None:
        """Respond to requests to a path with this JSON."""

        async def respond(body: dict[str, Any]) -> web.StreamResponse:
            return web.json_response(value, status=status)

        self.faults[path] = respond

    @web.middleware
    async def tap(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Record a request, and respond with a fault if its path has one."""
        if request.method == "POST":
            text = await request.read()
            self.requests.append((request.path, text))
            if self.disconnects:
                request.transport.close()
            fault = self.faults.get(request.path)
            if fault is not None and (response := await fault(orjson.loads(text))) is not None:
                return response
        return await handler(request)


@asynccontextmanager
async def tapped(**options: Any) -> AsyncIterator[TappedEngine]:
    """Start a simulated engine; `template` is the name of a template of TRL."""
    if name := options.pop("template", None):
        used = template(name)
        options = {"template": used.source, "eos": used.stops[0], "call_eos": used.call_stop, **options}
    engine = TappedEngine(Options(**{"noncanonical_rate": 0.3, "seed": 1, **options}))
    app = make_engine(engine.options)
    app.middlewares.insert(0, engine.tap)
    async with listening(app) as engine.url:
        yield engine


def continuations_made(monkeypatch: Any) -> list[PromptContinuation]:
    """Return a list to which proxies that start from now on add their prompt continuation, to change timeouts."""
    made: list[PromptContinuation] = []

    class Added(PromptContinuation):
        def __init__(self, *positional: Any, **named: Any) -> None:
            super().__init__(*positional, **named)
            made.append(self)

    monkeypatch.setattr("proxy.server.app.PromptContinuation", Added)
    return made


class Served:
    """A proxy in front of a tapped engine."""

    def __init__(self, url: str, http: aiohttp.ClientSession, engine: TappedEngine, store: Any, proxy: Any) -> None:
        self.url, self.http, self.engine, self.store, self.proxy = url, http, engine, store, proxy

    async def get(self, path: str) -> Any:
        """Return JSON of the control API."""
        async with self.http.get(self.url + path) as response:
            assert response.status == 200, await response.text()
            return await response.json()

    async def send(self, path: str, body: Any, *, method: str = "POST", **headers: str) -> tuple[int, Any]:
        """Send a body; return the status, and the response's JSON or text."""
        data = body if isinstance(body, bytes) else orjson.dumps(body)
        headers = {
            "Content-Type": "application/json",
            **{name.replace("_", "-"): text for name, text in headers.items()},
        }
        async with self.http.request(method, self.url + path, data=data, headers=headers) as response:
            text = await response.read()
            return response.status, orjson.loads(text) if response.content_type == "application/json" else text.decode()

    async def open(self, rollout: str, **fields: Any) -> None:
        """Create a rollout."""
        status, response = await self.send("/rollouts", {"rollout_id": rollout, **fields})
        assert status == 201, response

    async def counts(self) -> Counter[str]:
        """Return the number of calls by result, and by reason where there is one."""
        async with self.http.get(self.url + "/metrics") as response:
            found = _COUNT.findall(await response.text())
        counts = Counter[str]()
        for reason, result, count in found:
            counts[result if reason == "none" else f"{result}:{reason}"] += int(float(count))
        return +counts

    async def rows(self, rollout: str) -> list[dict[str, Any]]:
        """Return the exported sequences of a rollout, after a check of each."""
        rows = (await self.get(f"/rollouts/{rollout}/export?format=sequences"))["rows"]
        check_rows(await self.steps(rollout), rows)
        return rows

    async def steps(self, rollout: str) -> list[Step]:
        """Return the stored steps of a rollout, after a check of each continued one."""
        steps = await stored_steps(self.store, rollout)
        check_steps(steps)
        return steps

    async def check_bridges(self, rollout: str) -> None:
        """Assert that each prompt that was sent as ids ends as the engine renders the messages of its call."""
        for step in await self.steps(rollout):
            bridge = (step.extra.get("continuation") or {}).get("bridge")
            if bridge is None or not step.exact:
                continue
            fields = {
                name: step.body[name] for name in ("messages", "tools", "chat_template_kwargs") if name in step.body
            }
            async with self.http.post(self.engine.url + TOKENIZE, json=fields) as response:
                rendered = (await response.json())["tokens"]
            assert list(step.prompts[0])[-bridge:] == rendered[-bridge:]

    async def check_unchanged(self, agent: "Agent", path: str = CHAT) -> None:
        """Assert that the agent's last call was sent as it is without continuation, byte for byte but for SGLang's `rid`."""
        sent = self.engine.raw(path)[-1]
        await self.send(f"/rollouts/unchanged{path}", agent.body_sent, X_Rollout_Continuation="off")
        assert without_rid(sent) == without_rid(self.engine.raw(path)[-1])

    def agent(self, rollout: str, **options: Any) -> "Agent":
        """Return an agent of a rollout."""
        return Agent(self, rollout, **options)


@asynccontextmanager
async def served(
    store: Any, *, engine: TappedEngine | None = None, sections: Any = None, **options: Any
) -> AsyncIterator[Served]:
    """Start a proxy in front of an engine, by default of a new one with these options."""
    if engine is None:
        async with tapped(**options) as engine, served(store, engine=engine, sections=sections) as found:
            yield found
        return
    settings = settings_for(engine.url, **sections or {})
    async with aiohttp.ClientSession() as http, running(settings, store) as proxy:
        yield Served(proxy.url, http, engine, store, proxy)


def without_rid(body: bytes) -> bytes:
    """Return a body without the ID that each call to SGLang has."""
    return re.sub(rb',"rid":"[0-9a-f]{32}"', b"", body)


@dataclass(eq=False)
class Agent:
    """An agent: it drops reasoning and formats tool arguments in its own way.

    Its calls have the `fields` in their bodies, and the `headers`.
    """

    served: Served
    rollout: str
    stream: bool = False
    tools: bool = False
    fields: dict[str, Any] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    messages: list[dict[str, Any]] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)
    body_sent: dict[str, Any] = field(default_factory=dict)

    @property
    def path(self) -> str:
        """The path of its calls."""
        return f"/rollouts/{self.rollout}{CHAT}"

    def branch(self) -> "Agent":
        """Return an agent with the same history."""
        return Agent(
            self.served,
            self.rollout,
            self.stream,
            self.tools,
            dict(self.fields),
            dict(self.headers),
            deepcopy(self.messages),
        )

    def body(self) -> dict[str, Any]:
        """Return the body of its next call."""
        body = {"model": "simulated", "messages": self.messages, "max_tokens": 200, **self.fields}
        return body | ({"tools": [TOOL]} if self.tools else {}) | ({"stream": True} if self.stream else {})

    async def call(self) -> dict[str, Any]:
        """Make a call; return the whole response, or the choices of a stream."""
        self.body_sent = deepcopy(self.body())
        status, response = await self.served.send(self.path, self.body_sent, **self.headers)
        self.statuses.append(status)
        return assembled(response) if isinstance(response, str) else response

    async def turn(self, text: str = "Go on.") -> dict[str, Any]:
        """Add a user's message, or the results of the calls in the last message, make a call and keep its message."""
        calls = self.messages[-1].get("tool_calls") if self.messages else None
        if calls:
            self.messages += [
                {"role": "tool", "tool_call_id": call["id"], "content": f"result {text}"} for call in calls
            ]
        else:
            self.messages.append({"role": "user", "content": text})
        response = await self.call()
        assert self.statuses[-1] == 200, response
        self.keep(response["choices"][0]["message"])
        return response

    def keep(self, message: dict[str, Any]) -> None:
        """Add a reply to the history."""
        kept: dict[str, Any] = {"role": "assistant", "content": message.get("content") or ""}
        if message.get("tool_calls"):
            kept["tool_calls"] = [_rewritten(call) for call in message["tool_calls"]]
        self.messages.append(kept)

    async def turns(self, count: int) -> None:
        """Make this many turns."""
        for number in range(count):
            await self.turn(f"Question {number}?")


def _rewritten(call: dict[str, Any]) -> dict[str, Any]:
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    with suppress(ValueError):  # a turn may be cut within a call
        arguments = json.dumps(json.loads(arguments), separators=(" ,", " :"))
    return {"id": call["id"], "type": "function", "function": {"name": name, "arguments": arguments}}


def assembled(stream: str) -> dict[str, Any]:
    """Return the choices of a stream."""
    messages: dict[int, dict[str, Any]] = {}
    finishes: dict[int, str] = {}
    for line in stream.splitlines():
        if not line.startswith("data: {"):
            continue
        for choice in orjson.loads(line[6:]).get("choices", []):
            message = messages.setdefault(choice["index"], {"role": "assistant", "content": ""})
            delta = choice.get("delta") or {}
            message["content"] += delta.get("content") or ""
            if delta.get("reasoning"):
                message["reasoning"] = message.get("reasoning", "") + delta["reasoning"]
            for part in delta.get("tool_calls") or []:
                calls = message.setdefault("tool_calls", [])
                if part["index"] >= len(calls):
                    calls.append({"id": part["id"], "type": "function", "function": {"name": "", "arguments": ""}})
                for name, text in part["function"].items():
                    calls[part["index"]]["function"][name] += text or ""
            if choice.get("finish_reason"):
                finishes[choice["index"]] = choice["finish_reason"]
    choices = [
        {"index": index, "message": messages[index], "finish_reason": finishes[index]} for index in sorted(finishes)
    ]
    return {"choices": choices}


def continuations(steps: list[Step]) -> list[str | None]:
    """Return for each step: `sent` if its prompt was sent as ids, else the reason why it was not; None for a first call."""
    found = [step.extra.get("continuation") for step in steps]
    return [None if facts is None else "sent" if "kept" in facts else facts["reason"] for facts in found]


def check_steps(steps: list[Step]) -> None:
    """Assert that each prompt that was sent as ids begins with the ids of the step that it continues."""
    known = {step.step_id: step for step in steps}
    for step in steps:
        facts = step.extra.get("continuation") or {}
        if "kept" not in facts or not step.exact:
            continue
        earlier = known[facts["step_id"]]
        (choice,) = [choice for choice in earlier.choices if choice.index == facts["choice"]]
        recorded = array("i", earlier.prompts[0]) + choice.ids
        assert facts["kept"] == len(recorded)
        assert facts["bridge"] == len(step.prompts[0]) - len(recorded)
        assert recorded == array("i", step.prompts[0])[: len(recorded)]
        assert earlier.exact


def check_rows(steps: list[Step], rows: list[dict[str, Any]]) -> None:
    """Assert that the ids of rows are the recorded ones and that each sampled token of an exact step is trained once."""
    recorded = {(step.step_id, choice.index): (step, choice) for step in steps if step.exact for choice in step.choices}
    trained = Counter[tuple[str, int]]()
    for row in rows:
        assert len(row["token_ids"]) == len(row["mask"]) == len(row["logprobs"])
        for span in row["spans"]:
            name, part = (span["step_id"], span["choice"]), slice(span["start"], span["end"])
            step, choice = recorded[name]
            assert list(step.prompts[choice.prompt]) == row["token_ids"][: span["start"]]
            assert choice.ids.tolist() == row["token_ids"][part]
            assert set(row["mask"][part]) <= {int(span["owned"])}
            trained[name] += span["owned"]
        assert sum(row["mask"]) == sum(span["end"] - span["start"] for span in row["spans"] if span["owned"])
    assert dict.fromkeys(recorded, 1) == dict(trained)
