"""Contents of the page in its tests: recorded through a proxy, or by the recorder if large or flagged.

Rollouts of each kind that the page distinguishes, and one with hostile texts everywhere.
"""

import random
from array import array
from dataclasses import dataclass
from datetime import UTC, datetime
from urllib.parse import quote

import aiohttp
from openai import AsyncOpenAI
from prometheus_client import CollectorRegistry
from tests.support.forests import make_choice, make_step

from proxy.clock import SystemClock
from proxy.rollouts.recorder import Recorder
from proxy.rollouts.rollout import LiveRollout, read_rollout
from proxy.telemetry.metrics import make_metrics
from proxy.trajectory.step import EngineFacts, Span, Step, Timing

ENGINE = EngineFacts("fake", "vllm", "0.32.0", "http://engine")
BEGAN = datetime.now(tz=UTC).timestamp() - 60
STEPS = 5_000
TOKENS = 200_000

ALERT = "<img src=x onerror=\"alert('img')\"><script>alert('script')</script>"
HOSTILE_ID = "\"'><img src=x onerror=alert(1)>/..%2f?#\u202egnp.exe"
HOSTILE = (
    ALERT,
    "javascript:alert('link')",
    "</script><svg onload=alert(2)>",
    "\u202egnp.exe\u202c and \u2066isolated\u2069, a NUL \x00 and an escape \x1b[31m, a tag \U000e0041",
    "{{constructor.constructor('alert(3)')()}}",
)
LONG_WORD = "w" * 1_000_000
TOOL = {"id": "c1", "type": "function", "function": {"name": f"javascript:alert(4){ALERT}", "arguments": ALERT}}

ITEMS = {"instructions": "Be brief.", "input": [{"type": "input_text", "text": "Hello?"}], "tools": [{"name": "f"}]}
AS_CHAT = {
    "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello?"}],
    "tools": [TOOL],
}


@dataclass
class Contents:
    """A proxy to fill: agents' calls, the control API, and stored steps."""

    url: str
    store: object
    http: aiohttp.ClientSession

    def __post_init__(self) -> None:
        self.recorder = Recorder(self.store, make_metrics(CollectorRegistry()), SystemClock())
        self.random = random.Random(6)

    async def control(self, method: str, path: str, body: object = None) -> dict:
        async with self.http.request(method, self.url + path, json=body) as response:
            assert response.status < 300, await response.text()
            return await response.json()

    async def turns(self, base_url: str, count: int, **fields) -> None:
        """Make the calls of a conversation."""
        prompts = (
            "What is 17 times 23?",
            "Say it in other words.",
            "And its square root?",
            "Thank you. Once more, shortly.",
        )
        messages = [{"role": "system", "content": "You reckon, and answer in a sentence."}]
        async with AsyncOpenAI(base_url=base_url, api_key="none") as client:
            for turn in range(count):
                messages.append({"role": "user", "content": prompts[turn % len(prompts)]})
                reply = await client.chat.completions.create(
                    model="policy", messages=messages, seed=turn + len(base_url), **{"max_tokens": 60, **fields}
                )
                messages.append({"role": "assistant", "content": reply.choices[0].message.content})

    async def rollout(self, name: str, turns: int, reward: float | None = None, **fields) -> None:
        """Record a rollout of one conversation, finished if it has a reward."""
        opened = await self.control("POST", "/rollouts", {"rollout_id": name, "metadata": {"task": "arithmetic"}})
        await self.turns(opened["base_url"], turns, **fields)
        if reward is not None:
            await self.finish(name, reward)

    async def finish(self, name: str, reward: float | None = None) -> None:
        await self.control(
            "POST", f"/rollouts/{quote(name, safe='')}/finish", {"status": "completed", "reward": reward}
        )

    async def group(self, name: str, size: int, version: int) -> None:
        """Record a group at a policy version, with rewards that grow with it."""
        await self.control("PUT", "/policy", {"version": version})
        opened = await self.control("POST", "/groups", {"group_id": name, "size": size})
        for member in opened["rollouts"]:
            await self.turns(member["base_url"], self.random.randint(1, 3))
            await self.finish(member["rollout_id"], round(min(1, max(0, self.random.gauss(0.2 * version, 0.15))), 3))

    async def made(self, rollout_id: str, steps: list[Step], **terms) -> None:
        """Store steps."""
        await self.control("POST", "/rollouts", {"rollout_id": rollout_id, **terms})
        live = LiveRollout(read_rollout(await self.store.get(rollout_id)))
        for step in steps:
            await self.recorder.record(step, live, body_bytes=10_000, work_bytes=10_000)

    def step(self, rollout_id: str, at: int, prompt: list[int], sampled: list[int], **facts) -> Step:
        """Return a step at an offset in time, with logprobs as models have them: most near zero, some far below."""
        logprobs = array("f", [-min(18.0, self.random.expovariate(1.6) ** 2) for _ in sampled])
        began = BEGAN + at * 0.8
        fields = {
            "rollout_id": rollout_id,
            "engine": ENGINE,
            "timing": Timing(began, began, began + 0.1, began + 0.1 + len(sampled) / 70, began + 2),
            "policy_version": "4",
            "request": {"messages": [{"role": "user", "content": f"turn {at}"}]},
            "response": {"choices": [{"index": 0, "message": {"role": "assistant", "content": f"Reply {at}."}}]},
            **facts,
        }
        spans = fields.pop("spans", (Span(0, len(sampled), fields["policy_version"]),))
        return make_step(
            f"{rollout_id[:8]}-{at}", prompt, make_choice(0, sampled, logprobs=logprobs, spans=spans), **fields
        )

    def ids(self, count: int) -> list[int]:
        return [self.random.randrange(300, 900) for _ in range(count)]


async def small(contents: Contents) -> None:
    """Record a conversation, one with drift, groups at several versions, flagged and hostile steps."""
    await contents.rollout("conversation", 4, reward=1.0, logprobs=True, temperature=1.0)
    await hostile(contents)
    await drifting(contents)
    for version in (1, 2, 3, 4):
        await contents.group(f"math-{version}", 4, version)
    await flagged(contents)


async def drifting(contents: Contents) -> None:
    """Record drift: the template strips the reasoning of an earlier turn."""
    opened = await contents.control("POST", "/rollouts", {"rollout_id": "drifting"})
    thinking = {"chat_template_kwargs": {"enable_thinking": True}}
    await contents.turns(opened["base_url"], 3, extra_body=thinking, max_tokens=80)
    await contents.finish("drifting", 0.5)


async def flagged(contents: Contents) -> None:
    """Record a tree with two branches, a flagged step, one sampled by two versions, and one that failed.

    The first branch was continued by token ids; the second one was not.
    """
    start, reply = contents.ids(30), contents.ids(20)
    whole, two = [*start, *reply], (Span(0, 10, "4"), Span(10, 24, "5"))
    earlier = {"step_id": "branchin-0", "choice": 0}
    continued = {"continuation": {**earlier, "kept": len(whole), "bridge": 6}}
    forked = {"continuation": {**earlier, "reason": "history"}}
    failed = make_step(
        "branching-4",
        [],
        status="error",
        rollout_id="branching",
        engine=ENGINE,
        reason="the engine returned 400",
        response={"status": 400, "body": f"bad {ALERT}"},
        timing=Timing(BEGAN + 4, BEGAN + 4, BEGAN + 4.2, BEGAN + 4.2),
        request=AS_CHAT,
    )
    steps = [
        contents.step("branching", 0, start, reply, request=AS_CHAT),
        contents.step(
            "branching",
            1,
            [*whole, *contents.ids(6)],
            contents.ids(40),
            request=ITEMS,
            sent={"set": AS_CHAT},
            extra=continued,
        ),
        contents.step(
            "branching", 2, [*whole, *contents.ids(9)], contents.ids(24), spans=two, extra=forked, request=AS_CHAT
        ),
        contents.step("branching", 3, contents.ids(12), contents.ids(16), problems=("echo",), request=AS_CHAT),
        failed,
    ]
    await contents.made("branching", steps)


async def hostile(contents: Contents) -> None:
    """Record a rollout in which every string of a client or engine is an attack."""
    messages = [{"role": ALERT, "name": ALERT, "content": text} for text in HOSTILE]
    messages.append({"role": "assistant", "content": None, "tool_calls": [TOOL]})
    messages.append(
        {"role": "tool", "tool_call_id": ALERT, "content": [{"type": "text", "text": ALERT}, {"type": ALERT}, 7]}
    )
    messages.append({"role": "user", "content": LONG_WORD})
    words = [*HOSTILE, "\u202e", "\x00", LONG_WORD, "end"]
    entries = [{"token": word, "bytes": list(word.encode()[:1_000_000]), "logprob": -0.5} for word in words]
    reply = {"role": "assistant", "content": ALERT, "reasoning_content": ALERT, "tool_calls": [TOOL]}
    response = {"choices": [{"index": 0, "message": reply, "finish_reason": ALERT, "logprobs": {"content": entries}}]}
    step = contents.step(
        HOSTILE_ID, 0, contents.ids(5), contents.ids(len(words)), request={"messages": messages, "tools": [TOOL]},
        response=response, policy_version=ALERT, model_served=ALERT, reason=ALERT, problems=("echo",),
    )  # fmt: skip
    await contents.made(HOSTILE_ID, [step], group_id=f"group {ALERT}", metadata={ALERT: ALERT}, model=ALERT)


async def large(contents: Contents) -> None:
    """Record a rollout of 5,000 steps in fifty branches of a hundred turns, and a step of 200,000 tokens."""
    start, reply = contents.ids(20), contents.ids(10)
    steps = [contents.step("many", 0, start, reply)]
    while len(steps) < STEPS:
        whole = [*start, *reply, 300 + len(steps) % 600]
        for _ in range(min(100, STEPS - len(steps))):
            sampled = contents.ids(12)
            steps.append(contents.step("many", len(steps), [*whole, *contents.ids(4)], sampled))
            whole = [*steps[-1].prompts[0], *sampled]
    await contents.made("many", steps)
    half = TOKENS // 2
    spans = (Span(0, 1000, "4"), Span(1000, half, "5"))
    await contents.made("long", [contents.step("long", 0, contents.ids(half), contents.ids(half), spans=spans)])
