"""The golden session: requests of agents and of a trainer, in stages that share one store, and the responses.

Each stage runs a proxy before a tape engine. The clock advances between two requests only, and entropy is deterministic:
two runs differ in ports and in the incarnations of rollouts, and in nothing else.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from hashlib import blake2b
from typing import Any

import aiohttp
import orjson
from fakes import proxying
from golden_engine import TapeEngine, tape_engine

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/inference/v1/generate"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
PROXY, ENGINE = "http://proxy", "http://engine"  # replace URLs with a free port
_UNKEPT = {"date", "server", "connection", "transfer-encoding", "content-length", "keep-alive"}
TIMEOUT_S = 50
HELD_BACK = 3  # events that the proxy may have read and not shown

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}, "days": {"type": "integer"}},
            "required": ["city", "days"],
        },
    },
}
LIMITED = {"rollout_id": "limited", "limits": {"max_steps": 1, "max_tokens": 500}}
ENVIRONMENT = {"env_name": "math", "env_example_id": "e7"}
SYSTEM = {"role": "system", "content": "You are a helpful assistant. " * 40}  # long enough for blocks of its own


class SteppedClock:
    """A clock that only `tick` advances, and entropy that is a counter within a tick."""

    def __init__(self, start: float = 1_800_000_000.0) -> None:
        self._seconds = start
        self._counts: dict[int, int] = {}

    def tick(self) -> None:
        """Advance by 1.25 s."""
        self._seconds += 1.25
        self._counts = {}

    def now(self) -> float:
        return self._seconds

    def now_ms(self) -> int:
        return int(self._seconds * 1000)

    def monotonic(self) -> float:
        return self._seconds

    def entropy(self, count: int) -> bytes:
        number = self._counts[count] = self._counts.get(count, 0) + 1
        seed = f"{self._seconds} {count} {number}".encode()
        return b"".join(blake2b(seed + bytes([block])).digest() for block in range(count // 64 + 1))[:count]


class Stage:
    """A proxy in front of an engine: `call` sends a request and records its response in `calls`."""

    def __init__(
        self,
        name: str,
        http: aiohttp.ClientSession,
        served: Any,
        engine: TapeEngine,
        clock: SteppedClock,
        *,
        hides_keys: bool,
    ) -> None:
        self.name, self.engine = name, engine
        self._hides_keys = hides_keys
        self.calls: list[dict[str, Any]] = []
        self._http, self._served, self._clock = http, served, clock

    async def call(self, method: str, path: str, body: Any = None, **headers: str) -> dict[str, Any]:
        """Send a request and return its recorded response. `headers`: X_Rollout_Id for X-Rollout-Id."""
        self._clock.tick()
        named = {"Content-Type": "application/json"} if body is not None else {}
        named |= {name.replace("_", "-"): value for name, value in headers.items()}
        sent = orjson.dumps(body) if body is not None else None
        before = len(self.engine.bodies)
        text, is_cut = b"", False
        async with self._http.request(method, self._served.url + path, data=sent, headers=named) as response:
            status, came = response.status, response.headers
            try:
                async for part in response.content.iter_any():
                    text += part
            except aiohttp.ClientPayloadError:
                is_cut = True
        pairs = ((name.lower(), value) for name, value in came.items())
        kept = sorted([name, self._masked(value)] for name, value in pairs if name not in _UNKEPT)
        found = {"call": f"{method} {path}", "status": status, "headers": kept, **({"cut": True} if is_cut else {})}
        if status >= 400 and text.decode() not in self.engine.bodies[before:]:
            found["body"] = "(an error of the proxy's)"  # its texts are not golden
        else:
            found["body"] = self._shown(text.decode()) if _is_text(came["Content-Type"]) else text
        self.calls.append(found)
        return found

    async def get(self, path: str, **headers: str) -> dict[str, Any]:
        return await self.call("GET", path, **headers)

    async def post(self, path: str, body: Any = None, **headers: str) -> Any:
        """Send a request and return the JSON of the response, or None."""
        found = await self.call("POST", path, {} if body is None else body, **headers)
        return orjson.loads(found["body"]) if found.get("body", "")[:1] in ("{", "[") else None

    async def finish(self, rollout: str, **body: Any) -> None:
        """Finish a rollout, and wait until its drift is counted."""
        await self.post(f"/rollouts/{rollout}/finish", body)
        await self.until(f"/rollouts/{rollout}", lambda found: found["drift"] is not None)

    async def leave(self, path: str, body: Any, *, events: int) -> None:
        """Start a stream that stops after `events` events, read most of them, and disconnect."""
        self._clock.tick()
        self.engine.hold_after = events
        read = b""
        async with asyncio.timeout(TIMEOUT_S):
            sending = self._http.post(self._served.url + path, json=body)
            async with sending as response:
                while read.count(b"\n\n") < events - HELD_BACK:
                    part = await response.content.readany()
                    assert part, read
                    read += part
        shown = self._masked(b"\n\n".join(read.split(b"\n\n")[: events - HELD_BACK]).decode())
        self.calls.append({"call": f"POST {path}", "status": "left", "body": shown})

    async def late(self, path: str, body: Any, meanwhile: Awaitable[Any]) -> None:
        """Send a request, and await `meanwhile` before the engine responds."""
        self.engine.gate.clear()
        self.engine.reached.clear()
        async with asyncio.timeout(TIMEOUT_S), asyncio.TaskGroup() as group:
            call = group.create_task(self.post(path, body))
            await self.engine.reached.wait()
            await meanwhile
            self.engine.gate.set()
            await call

    async def until(self, path: str, holds: Callable[[Any], bool]) -> None:
        """Poll until a condition holds: background writes have ended then. The polls are not recorded."""
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                async with self._http.get(self._served.url + path) as response:
                    if holds(orjson.loads(await response.read())):
                        return
                await asyncio.sleep(0.01)

    def _shown(self, text: str) -> str:
        """Mask a body. Minted keys depend on the incarnation of a rollout, random in a new store."""
        return re.sub(r'(?<="api_key":"tt-)[^"]+', "…", self._masked(text)) if self._hides_keys else self._masked(text)

    def _masked(self, text: str) -> str:
        return mask(text.replace(self._served.url, PROXY).replace(self.engine.url, ENGINE))


def mask(text: str) -> str:
    """Replace sentences for people, which may change: reasons in reports, steps and headers, and errors within a stream."""
    text = re.sub(r'"why":\s*(?:"(?:[^"\\]|\\.)*"|\[(?:"(?:[^"\\]|\\.)*",?)+\])', _without_sentences, text)
    text = re.sub(r'^(data: \{"error":).*$', r"\1…", text, flags=re.MULTILINE)
    return re.sub(r"^(\d+); .*$", r"\1; …", text) if "\n" not in text else text


def _without_sentences(why: re.Match[str]) -> str:
    """Replace the reason, or each of the reasons."""
    name, _, reasons = why[0].partition(":")
    return f"{name}:" + re.sub(r'"(?:[^"\\]|\\.)*"', '"…"', reasons.lstrip())


def _is_text(content_type: str) -> bool:
    return content_type.startswith(("application/json", "text/", "application/x-ndjson"))


@asynccontextmanager
async def staging(
    store: Any, clock: SteppedClock, tape: list, source: Any = None, **settings: Any
) -> AsyncIterator[Stage]:
    """Run a proxy over this store before a tape engine; `name` is the endpoint's.

    The golden files were recorded without continuation, which is off.
    """
    settings.setdefault("continuation", {"mode": "off"})
    name, hides_keys = settings.pop("name"), settings.pop("hides_keys", True)
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(tape_engine(tape, source))
        http = await stack.enter_async_context(aiohttp.ClientSession())
        endpoint = {"url": engine.url, "name": name, **settings.pop("endpoint", {})}
        engines = {"endpoints": [endpoint]}
        served = await stack.enter_async_context(proxying(None, store, clock=clock, engines=engines, **settings))
        yield Stage(name, http, served, engine, clock, hides_keys=hides_keys)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def reply(text: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def chat(*messages: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "policy", "messages": list(messages), "seed": 1, "max_tokens": 24, **fields}


async def turns(stage: Stage, rollout: str, first: list, count: int, **fields: Any) -> list[dict[str, Any]]:
    """Hold a conversation of `count` turns, and repeat each turn streamed in another rollout; return the messages."""
    messages = list(first)
    for turn in range(count):
        messages.append(user(f"This is turn {turn}."))
        found = await stage.post(f"/rollouts/{rollout}{CHAT}", chat(*messages, **{"seed": turn, **fields}))
        messages.append(reply(found["choices"][0]["message"]["content"]))
        await stage.post(f"/rollouts/{rollout}-streamed{CHAT}", chat(*messages[:-1], stream=True, **fields))
    return messages


async def chats(stage: Stage) -> None:
    """Send chats: whole and streamed, with and without token options, several choices, branches, retries."""
    terms = {
        "metadata": {"task": 7, "split": "train"},
        "sampling": {"default": {"temperature": 0.7}, "cap": {"top_p": 0.9}},
    }
    await stage.call("PUT", "/policy", {"version": 3})
    await stage.post("/rollouts", {"rollout_id": "chat", **terms})
    messages = await turns(stage, "chat", [SYSTEM], 3)
    await stage.call("PUT", "/policy", {"version": 4})
    await stage.post(f"/rollouts/chat{CHAT}", chat(*messages[:3], user("Another way.")))
    await stage.post(f"/rollouts/chat{CHAT}", chat(*messages[:3], user("A third."), stream=True, temperature=1.1))
    await turns(stage, "chat%2Fother%20system", [{"role": "system", "content": "Be brief."}], 2, top_p=0.8, top_k=20)
    options = (
        {}, {"logprobs": True}, {"logprobs": True, "top_logprobs": 2}, {"return_token_ids": True},
        {"logprobs": True, "return_token_ids": True, "n": 2}, {"n": 3, "temperature": 1.3}, {"stop": ["e"]},
        {"max_tokens": 1}, {"response_format": {"type": "json_object"}}, {"logit_bias": {"40": 2}}, {"min_tokens": 4},
        {"stream_options": {"include_usage": True}}, {"max_completion_tokens": 5, "user": "someone", "store": True},
    )  # fmt: skip
    for number, fields in enumerate(options):
        body = chat(user(f"Options {number}."), **fields)
        if "stream_options" not in fields:
            await stage.post(f"/rollouts/options{CHAT}", body)
        await stage.post(f"/rollouts/options-streamed{CHAT}", body | {"stream": True})
    await stage.post(CHAT, chat(user("By a header.")), X_Rollout_Id="by-header", X_Rollout_Group="by-header-group")
    await stage.post(CHAT, chat(user("By a key.")), Authorization="Bearer rollout:by-key")
    await stage.post(f"/sessions/by-session{CHAT}", chat(user("By a session.")))
    await stage.post(f"/rollouts/ids{CHAT}", chat(user("Ids."), n=2), X_Reply_Ids="choices")
    await stage.call("PATCH", "/rollouts/chat", {"reward": 0.75, "advantages": -0.5, "metadata": ENVIRONMENT})
    for stream in (False, True):
        key = {"Idempotency_Key": f"turn-{stream}"}
        for _ in range(2):
            await stage.post(f"/rollouts/keyed{CHAT}", chat(user("Once."), stream=stream), **key)
    await stage.post(f"/rollouts/keyed{CHAT}", chat(user("Twice.")), Idempotency_Key="turn-False")
    for count in ("0", "1"):
        await stage.post(f"/rollouts/retried{CHAT}", chat(user("Again.")), X_Stainless_Retry_Count=count)


async def drift(stage: Stage) -> None:
    """Send a history that differs from what was sampled: whitespace, another text, a truncated reply."""
    first = [user("Tell me a story of the sea.")]
    changes = (str.strip, str.upper, lambda text: text[: len(text) // 2], lambda text: f" {text} ")
    for number, change in enumerate(changes):
        rollout = f"drift-{number}"
        found = await stage.post(f"/rollouts/{rollout}{CHAT}", chat(*first, seed=number + 3))
        text = change(found["choices"][0]["message"]["content"] or "")
        messages = [*first, reply(text), user("Go on.")]
        await stage.post(f"/rollouts/{rollout}{CHAT}", chat(*messages))
        await stage.finish(rollout, status="completed", reward=0.5)
        await stage.get(f"/rollouts/{rollout}/tree")


async def tools(stage: Stage) -> None:
    """Tool calls: forced, streamed and whole, and their results in the next turn."""
    for stream in (False, True):
        rollout = f"tools-{stream}"
        messages = [SYSTEM, user("What is the weather in Oslo?")]
        fields = {"tools": [WEATHER], "max_tokens": 200}
        for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}, "auto", "none"):
            await stage.post(f"/rollouts/{rollout}{CHAT}", chat(*messages, tool_choice=choice, stream=stream, **fields))
        found = await stage.post(
            f"/rollouts/{rollout}{CHAT}", chat(*messages, tool_choice="required", seed=5, **fields)
        )
        called = found["choices"][0]["message"]
        ids = [call["id"] for call in called.get("tool_calls") or []]
        results = [{"role": "tool", "tool_call_id": call_id, "content": "4"} for call_id in ids]
        messages += [{name: value for name, value in called.items() if value is not None}, *results]
        await stage.post(f"/rollouts/{rollout}{CHAT}", chat(*messages, stream=stream, **fields))


async def completions(stage: Stage) -> None:
    """Completions of texts and of ids, echoed, several, streamed; Atropos' two shapes of /generate."""
    options = (
        {}, {"logprobs": 1}, {"n": 2}, {"echo": True}, {"prompt": [40, 41, 42]}, {"prompt": ["One", "Two"]},
        {"prompt": [[40, 41], [42]], "return_token_ids": True}, {"stop": ["a"], "logprobs": 0}, {"suffix": "end"},
    )  # fmt: skip
    for number, fields in enumerate(options):
        body = {"model": "policy", "prompt": f"Once {number}", "max_tokens": 12, "seed": number, **fields}
        for stream in (False, True):
            await stage.post(f"/rollouts/completions{COMPLETIONS}", {**body, "stream": stream})
    text = "The sea is wide and the ship is small."
    for _ in range(3):  # each prompt continues the previous one
        found = await stage.post(f"/rollouts/growing{COMPLETIONS}", {"prompt": text, "max_tokens": 9, "seed": 2})
        text += found["choices"][0]["text"] + " And then"
    vllm = {"prompt": {"prompt_token_ids": [40, 41, 42]}, "logprobs": 0, "max_tokens": 8, "n": 2, "seed": 1}
    sampling = {"max_new_tokens": 8, "sampling_seed": 1}
    sglang = {"input_ids": [40, 41, 42], "sampling_params": sampling, "return_logprob": True}
    await stage.post("/rollouts/atropos/generate", vllm)
    await stage.post("/rollouts/atropos/generate", sglang)
    flat = {"rollout_id": "osmosis", "model": "default", "messages": [user("Hello!")], "max_tokens": 16, "seed": 1}
    await stage.post(COMPLETIONS, {**flat, "response_mask": None})
    result = {"rollout_id": "osmosis", "status": "COMPLETED", "finish_reason": "stop", "reward": 1.0}
    await stage.post("/v1/rollout/completed", result)
    await stage.until("/rollouts/osmosis", lambda found: found["drift"] is not None)


async def generated(stage: Stage) -> None:
    """Tokens in, tokens out."""
    for number, fields in enumerate(({}, {"logprobs": 1}, {"n": 2}, {"stop_token_ids": [7]})):
        params = {"max_tokens": 10, "seed": number, **fields}
        for stream in (False, True):
            body = {"token_ids": [40, 41, 42, 43], "sampling_params": params, "stream": stream}
            await stage.post(f"/rollouts/generated{GENERATE}", body)
    ids = [40 + number % 50 for number in range(300)]  # longer than one block of ids
    for _ in range(2):
        body = {"token_ids": ids, "sampling_params": {"max_tokens": 8, "seed": 1}}
        found = await stage.post(f"/rollouts/generated{GENERATE}", body)
        ids = [*ids, *found["choices"][0]["token_ids"], 44]


async def messages(stage: Stage) -> None:
    """Anthropic's Messages: whole, streamed, with tools and their results, with system prompts; token counts."""
    tool = {"name": "get_weather", "description": "Weather.", "input_schema": WEATHER["function"]["parameters"]}
    for stream in (False, True):
        rollout = f"messages-{stream}"
        body = {"model": "claude-x", "max_tokens": 30, "messages": [user("Hello!")], "stream": stream}
        await stage.post(f"/rollouts/{rollout}{MESSAGES}", body)
        more = {"system": "Be kind.", "stop_sequences": ["e"], "temperature": 0.5}
        await stage.post(f"/rollouts/{rollout}{MESSAGES}", body | more)
        forced = {"tools": [tool], "tool_choice": {"type": "any"}, "max_tokens": 200}
        found = await stage.call("POST", f"/rollouts/{rollout}{MESSAGES}", body | forced)
        if not stream:
            content = orjson.loads(found["body"])["content"]
            used = [part["id"] for part in content if part["type"] == "tool_use"]
            results = [{"type": "tool_result", "tool_use_id": name, "content": "4"} for name in used]
            history = [user("Hello!"), reply(content), {"role": "user", "content": results}]
            await stage.post(f"/rollouts/{rollout}{MESSAGES}", body | forced | {"messages": history})
    counted = {"model": "claude-x", "messages": [user("Hello!")]}
    await stage.post("/v1/messages/count_tokens", counted)


async def responses(stage: Stage) -> None:
    """OpenAI's Responses: whole, streamed, with tools, going on from an earlier one; read and hidden."""
    tool = {"type": "function", **WEATHER["function"], "strict": False}
    for stream in (False, True):
        rollout = f"responses-{stream}"
        body = {"model": "gpt-x", "input": "Hello!", "max_output_tokens": 30, "stream": stream}
        found = await stage.call("POST", f"/rollouts/{rollout}{RESPONSES}", body)
        forced = {"tools": [tool], "tool_choice": "required", "max_output_tokens": 200}
        called = await stage.call("POST", f"/rollouts/{rollout}{RESPONSES}", body | forced)
        if not stream:
            first, second = (orjson.loads(response["body"]) for response in (found, called))
            more = {"input": "Go on.", "previous_response_id": first["id"], "instructions": "Be brief."}
            await stage.post(RESPONSES, body | more)
            outputs = [
                {"type": "function_call_output", "call_id": item["call_id"], "output": "4"}
                for item in second["output"]
                if item["type"] == "function_call"
            ]
            await stage.post(RESPONSES, body | forced | {"previous_response_id": second["id"], "input": outputs})
            await stage.get(f"{RESPONSES}/{first['id']}")
            await stage.get(f"{RESPONSES}/{first['id']}/input_items")
            await stage.call("DELETE", f"{RESPONSES}/{first['id']}")
            await stage.get(f"{RESPONSES}/{first['id']}")


async def failures(stage: Stage) -> None:
    """Errors of the engine and ours, a stream that breaks off, a client that leaves, a late step, limits."""
    await stage.post(f"/rollouts/failed{CHAT}", chat(user("Hot."), temperature=-1))
    await stage.post(f"/rollouts/failed{CHAT}", chat(user("Hot."), temperature=-1, stream=True))
    await stage.post(f"/rollouts/failed{CHAT}", {"model": "policy"})
    await stage.post(f"/rollouts/failed{MESSAGES}", {"model": "x", "max_tokens": 5, "messages": [], "temperature": -1})
    await stage.post(f"/rollouts/failed{COMPLETIONS}", {"prompt": "x", "max_tokens": 10**6})
    await stage.post("/v1/nothing", {})
    await stage.get("/rollouts/nobody")
    await stage.post("/rollouts", {"rollout_id": "chat", "metadata": {"other": 1}})
    stage.engine.cut_after = 5
    await stage.post(f"/rollouts/broken{CHAT}", chat(user("A long story."), stream=True))
    await stage.leave(f"/rollouts/left{CHAT}", chat(user("A long story."), stream=True, seed=9), events=6)
    await stage.until("/rollouts/left", lambda rollout: rollout["counts"].get("steps") == 1)
    await stage.post(f"/rollouts/late{CHAT}", chat(user("In time.")))
    finishing = stage.finish("late", status="truncated", reward=0.25, metadata={"cause": "time"})
    await stage.late(f"/rollouts/late{CHAT}", chat(user("Too late.")), finishing)
    await stage.post(f"/rollouts/late{CHAT}", chat(user("Much too late.")))
    await stage.post("/rollouts", LIMITED)
    for _ in range(2):
        await stage.post(f"/rollouts/limited{CHAT}", chat(user("Once.")))


async def groups(stage: Stage) -> None:
    """Groups with rewards, rewards of steps and of tokens, advantages; batches that are claimed, acknowledged, released."""
    for group in ("g0", "g1", "g2", "g3"):
        terms = {"metadata": {"task": group, **ENVIRONMENT}}
        opened = await stage.post(
            "/groups", {"group_id": group, "size": 3, "rollout": terms, "metadata": {"kind": "test"}}
        )
        members = [rollout["rollout_id"] for rollout in opened["rollouts"]]
        for number, member in enumerate(members):
            first = user(f"A question of {group}.")
            found = await stage.call("POST", f"/rollouts/{member}{CHAT}", chat(first, seed=number))
            text = orjson.loads(found["body"])["choices"][0]["message"]["content"]
            step = dict(found["headers"])["x-step-id"]
            if number:
                history = [first, reply(text), user("Go on.")]
                await stage.post(f"/rollouts/{member}{CHAT}", chat(*history, stream=number == 2))
            metadata = {"n": number, **ENVIRONMENT}
            await stage.call("PATCH", f"/rollouts/{member}", {"step_rewards": {step: number / 2}, "metadata": metadata})
            advantage = {"advantages": number - 1.0} if group != "g1" else {}
            await stage.call("PATCH", f"/rollouts/{member}", {"reward": number / 4, **advantage})
            if group != "g3" or number:
                await stage.finish(member, status=("completed", "failed", "truncated")[number])
            await stage.get(f"/rollouts/{member}")
        await stage.get(f"/groups/{group}")
    await stage.get("/groups")
    claim = {"consumer": "trainer", "lease_s": 3600}
    claimed = await stage.post("/batches/claim", {**claim, "format": "trl", "advantage": "grpo"})
    await stage.post(f"/batches/{claimed['batch_id']}/ack", {})
    claimed = await stage.post("/batches/claim", {**claim, "format": "sequences", "members": "rewarded"})
    await stage.post(f"/batches/{claimed['batch_id']}/release", {})
    found = await stage.call("POST", f"/rollouts/per-token{CHAT}", chat(user("Per token."), return_token_ids=True))
    step = dict(found["headers"])["x-step-id"]
    count = len(orjson.loads(found["body"])["choices"][0]["token_ids"])
    numbers = [number / 8 for number in range(count)]
    await stage.call("PATCH", "/rollouts/per-token", {"step_rewards": {step: numbers}, "metadata": ENVIRONMENT})
    await stage.finish("per-token", status="completed", reward=-1.5)


async def sessions(stage: Stage) -> None:
    """Sessions, as Atropos' proxy has them."""
    for tree in (False, True):
        opened = await stage.post("/sessions/create", {"track_tree": tree})
        base = f"/{opened['uuid']}"
        first = [user("Hello!")]
        found = await stage.post(f"{base}{CHAT}", {"messages": first, "max_tokens": 12, "temperature": 1.0, "n": 2})
        text = found["choices"][0]["message"]["content"]
        await stage.post(f"{base}{CHAT}", {"messages": [*first, reply(text), user("More.")], "max_tokens": 12})
        await stage.get(f"{base}/nodes")
    await stage.get("/sessions")


async def extras(stage: Stage) -> None:
    """Routed experts and sampling masks, and the labels of weights that change."""
    for number in range(2):
        for stream in (False, True):
            body = {"token_ids": [40, 41, 42], "sampling_params": {"max_tokens": 6, "seed": number}, "stream": stream}
            await stage.post(f"/rollouts/extras{GENERATE}", body)
    ids = [40, 41, 42]
    for _ in range(3):
        params = {"max_tokens": 6, "seed": 1, "temperature": 0.9}
        found = await stage.post(f"/rollouts/extra-turns{GENERATE}", {"token_ids": ids, "sampling_params": params})
        ids = [*ids, *found["choices"][0]["token_ids"], 44]
    await stage.call("PATCH", "/rollouts/extra-turns", {"advantages": 0.5, "metadata": ENVIRONMENT})
    for rollout in ("extras", "extra-turns"):
        await stage.finish(rollout, status="completed", reward=1)


async def sglang(stage: Stage) -> None:
    """The same of an engine of SGLang's shapes."""
    await turns(stage, stage.name, [SYSTEM], 2)
    await tools_of_sglang(stage)
    options = ({"logprobs": True}, {"n": 2}, {"return_meta_info": True}, {"return_routed_experts": True})
    for number, fields in enumerate(options):
        body = chat(user(f"Options {number}."), **fields)
        for stream in (False, True):
            await stage.post(f"/rollouts/{stage.name}-options{CHAT}", body | {"stream": stream})
    for prompt in ("Once", [40, 41, 42]):
        for stream in (False, True):
            body = {"prompt": prompt, "max_tokens": 8, "seed": 1, "stream": stream, "logprobs": 1}
            await stage.post(f"/rollouts/{stage.name}-completions{COMPLETIONS}", body)
    for stream in (False, True):
        body = {"model": "x", "max_tokens": 12, "messages": [user("Hi")], "stream": stream}
        await stage.post(f"/rollouts/{stage.name}-messages{MESSAGES}", body)
        body = {"model": "x", "max_output_tokens": 12, "input": "Hi", "stream": stream}
        await stage.post(f"/rollouts/{stage.name}-responses{RESPONSES}", body)
    signals = {"reward": 0.75, "advantages": -0.5, "metadata": ENVIRONMENT}
    await stage.call("PATCH", f"/rollouts/{stage.name}", signals)
    vllm = {"prompt": {"prompt_token_ids": [40, 41, 42]}, "logprobs": 0, "max_tokens": 8, "seed": 1}
    await stage.post(f"/rollouts/{stage.name}-atropos/generate", vllm)
    await stage.post(f"/rollouts/{stage.name}-options{CHAT}", chat(user("Hot."), temperature=-1))


async def tools_of_sglang(stage: Stage) -> None:
    """A forced call of a tool, whole and streamed."""
    for stream in (False, True):
        fields = {"tools": [WEATHER], "max_tokens": 200, "tool_choice": "required", "stream": stream}
        await stage.post(f"/rollouts/{stage.name}-tools{CHAT}", chat(user("The weather?"), **fields))


async def play_cases(stage: Stage, cases: list[dict[str, Any]]) -> None:
    """Requests that were recorded from clients of real engines."""
    for case in cases:
        await stage.call("POST", f"/rollouts/{case['rollout']}{case['path']}", case["body"])


SIMULATED = (chats, drift, tools, completions, generated, messages, responses, failures, groups)
LIVE = {"record": {"streaming": "live"}}

# name -> scenes and settings of the proxy; the stages without scenes play cases recorded from real engines.
STAGES: dict[str, tuple[tuple[Callable[[Stage], Awaitable[None]], ...], dict[str, Any]]] = {
    "vllm": (SIMULATED, {}),
    "extras": ((extras,), {"record": {"logprobs": "sampled"}}),
    "sessions": ((sessions,), {"atropos": {"enabled": True}}),
    "sglang": ((sglang,), {}),
    "sglang-no-parser": ((sglang,), {}),
    "real-vllm": ((), LIVE),
    "real-sglang": ((), LIVE),
    "real-llamacpp": ((), LIVE),
}


async def play(store: Any, tapes: dict[str, Any], sources: dict[str, Any] | None = None) -> dict[str, Any]:
    """Play all stages over one store; return for each its calls, and what its engine received."""
    clock, played = SteppedClock(), {}
    for name, (scenes, settings) in STAGES.items():
        tape = tapes[name]
        source = sources[name] if sources else None
        async with staging(store, clock, tape["exchanges"], source, name=name, **settings) as stage:
            for scene in scenes:
                await scene(stage)
            await play_cases(stage, tape.get("cases", []))
        received, lookups = stage.engine.received, sorted(stage.engine.lookups)
        played[name] = {"calls": stage.calls, "received": received, "lookups": lookups}
    return played
