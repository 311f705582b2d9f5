"""Groups of agents with unmodified OpenAI clients, which follow their plans, and a record of what each of them saw."""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any, Self

import httpx2
import openai
from openai import AsyncOpenAI
from tests.system.faults.training.plan import ASKED, AgentPlan, GroupPlan, agent_plan, reward_of
from tests.system.faults.training.trainer import is_temporary

from tokentape import AsyncClient, ClientError

CALL_TIMEOUT_S = 15.0
CONNECTIONS = httpx2.Limits(max_connections=400, max_keepalive_connections=40)
PASSING = {429, 502, 503, 504}  # statuses that a killed process or an unreachable store causes


class Closed(Exception):
    """The rollout accepts no more calls."""


@dataclass
class Attempt:
    """What an agent did in one rollout: replies that it received to the end, with step IDs, and when it first sent calls."""

    rollout_id: str
    group_id: str
    behavior: str
    is_rewarded: bool = False
    is_finished: bool = False
    delivered: list[tuple[str, str]] = field(default_factory=list)  # policy and step ID
    sent_at: dict[str, float] = field(default_factory=dict)  # by step ID


class Agents:
    """Plays groups against the replicas at `urls`. `attempts` has each rollout that was played."""

    def __init__(self, urls: list[str]) -> None:
        self._urls = urls
        self._stack = AsyncExitStack()
        self._open_streams: list[Any] = []
        self.attempts: dict[str, Attempt] = {}
        self.counts: Counter[str] = Counter()

    async def __aenter__(self) -> Self:
        http = httpx2.AsyncClient(limits=CONNECTIONS, timeout=CALL_TIMEOUT_S)
        self._openai = await self._stack.enter_async_context(
            AsyncOpenAI(api_key="per rollout", base_url="http://x", http_client=http)
        )
        self._clients = [await self._stack.enter_async_context(AsyncClient(url, attempts=1)) for url in self._urls]
        return self

    async def __aexit__(self, *error: object) -> None:
        for stream in self._open_streams:
            with suppress(openai.APIError, httpx2.HTTPError):
                await stream.close()
        await self._stack.aclose()

    async def insist(self, dice: Random, send: Callable[[AsyncClient], Awaitable[Any]]) -> Any:
        """Send a request of the control API to any replica until one responds; what was lost is sent again."""
        while True:
            try:
                return await send(dice.choice(self._clients))
            except ClientError as error:
                if not is_temporary(error):
                    raise
                self.counts["control retries"] += 1
                await asyncio.sleep(0.1)

    async def play(self, plan: GroupPlan) -> None:
        """Open a group and play its rollouts, each with those that replace it."""
        dice = Random(plan.group_id)
        options = {"over_sample": plan.over_sample, "replace": plan.replace, "deadline_s": plan.deadline_s}
        group = await self.insist(
            dice,
            lambda client: client.open_group(
                8, group_id=plan.group_id, idle_s=plan.idle_s, start_s=plan.idle_s, **options
            ),
        )
        async with asyncio.TaskGroup() as running:
            for rollout, agent in zip(group["rollouts"], plan.agents, strict=True):
                running.create_task(self._play_member(plan.group_id, rollout, agent))

    async def _play_member(self, group_id: str, rollout: dict[str, Any] | None, plan: AgentPlan) -> None:
        while rollout is not None:
            attempt = self.attempts[rollout["rollout_id"]] = Attempt(rollout["rollout_id"], group_id, plan.behavior)
            self.counts[plan.behavior] += 1
            agent = Agent(self, plan, attempt, rollout["api_key"])
            try:
                rollout = await agent.run()
            except Closed:
                self.counts["closed"] += 1
                rollout = None
                if plan.seed % 2:  # it was finished by its deadline or as surplus, and still gets its reward
                    await agent.reward()
            plan = agent_plan(Random(plan.seed), "steady")

    def client_at(self, dice: Random, rollout_id: str, key: str) -> AsyncOpenAI:
        """Return OpenAI's client with the base URL of a rollout at any replica."""
        return self._openai.with_options(base_url=f"{dice.choice(self._urls)}/rollouts/{rollout_id}/v1", api_key=key)

    def keep_open(self, stream: Any) -> None:
        self._open_streams.append(stream)


class Agent:
    """One agent in one rollout. It talks to the planner and to the solver, each in a conversation of its own."""

    def __init__(self, agents: Agents, plan: AgentPlan, attempt: Attempt, key: str) -> None:
        self._agents, self._plan, self._attempt, self._key = agents, plan, attempt, key
        self._dice = Random(plan.seed)
        self._calls = 0
        self._talks: dict[str, list[dict[str, str]]] = {
            policy: [{"role": "system", "content": f"You are the {policy}."}] for policy in ASKED
        }

    async def run(self) -> dict[str, Any] | None:
        """Play the plan; return the rollout that replaces this one, if there is one. Raises Closed."""
        plan, heard = self._plan, f"Solve task {self._dice.randrange(1000)}."
        if plan.behavior == "never_calls":
            return None
        for turn in range(plan.turns):
            deviates = turn == plan.deviates_at
            if deviates and plan.behavior == "dies_between_calls":
                return None
            if deviates and plan.behavior in ("dies_in_a_call", "hangs_with_an_open_stream"):
                await self._leave_in_a_stream("solver" if plan.seed % 3 else "planner", heard)
                return None
            heard = await self.ask("planner", heard, loses=deviates and plan.behavior == "loses_an_answer")
            heard = await self.ask("solver", heard)
            if self._dice.random() < 0.3:
                await self.ask("judge", heard)
        return await self._finish(heard)

    async def _finish(self, heard: str) -> dict[str, Any] | None:
        behavior = self._plan.behavior
        if behavior == "fails":
            return (await self._end("failed", None)).get("replaced_by")
        if behavior == "rewards_late":
            await self._end("completed", None)
            await asyncio.sleep(self._dice.random() * 2)
            await self.reward()
            return None
        if behavior == "finishes_in_a_call":
            call = asyncio.create_task(self.ask("solver", heard))
            await asyncio.sleep(self._dice.random() / 20)
            try:
                await self._end("completed", self._reward())
            finally:
                with suppress(Closed):
                    await call
            return None
        if behavior == "finishes_twice":
            await asyncio.gather(*(self._end("completed", self._reward()) for _ in range(2)))
            with suppress(Closed):
                await self._end("failed", None)
                raise AssertionError(f"{self._attempt.rollout_id} is finished with two statuses")
        await self._end("completed", self._reward())
        return None

    async def _end(self, status: str, reward: float | None) -> dict[str, Any]:
        name = self._attempt.rollout_id
        try:
            finished = await self._agents.insist(
                self._dice, lambda client: client.finish_rollout(name, status, reward=reward)
            )
        except ClientError as error:
            if error.status == 409:
                raise Closed from None
            raise
        self._attempt.is_finished = True
        return finished

    async def reward(self) -> None:
        """Set the reward. A claim of the group may have frozen the rewards before."""
        name, reward = self._attempt.rollout_id, self._reward()
        try:
            await self._agents.insist(self._dice, lambda client: client.patch_rollout(name, reward=reward))
        except ClientError as error:
            if error.status != 409:
                raise
            self._agents.counts["rewards after the claim"] += 1

    def _reward(self) -> float:
        self._attempt.is_rewarded = True
        return reward_of(self._attempt.group_id, self._attempt.rollout_id)

    async def ask(self, policy: str, text: str, *, loses: bool = False) -> str:
        """Continue the conversation with a policy; return the reply. `loses`: the first answer is lost. Raises Closed."""
        self._calls += 1
        talk = [*self._talks[policy], {"role": "user", "content": text}]
        headers = {"X-Request-Id": f"{self._attempt.rollout_id}/{policy}/{self._calls}"}
        if loses or self._dice.random() < 0.1:
            headers["Idempotency-Key"] = f"{policy}-{self._calls}"
        began = time.time()
        body = {"model": ASKED[policy], "messages": talk, "max_tokens": 12 + 4 * self._dice.randrange(3)}
        send = self._stream if self._dice.random() < 0.4 else self._send
        while True:
            sending = send(body, headers)
            try:
                if loses:
                    loses = False
                    async with asyncio.timeout(self._dice.random() / 8):
                        await sending  # the answer may arrive, and is ignored
                    self._agents.counts["answers ignored"] += 1
                    continue
                step_id, reply = await sending
                break
            except TimeoutError:
                self._agents.counts["answers lost"] += 1
            except openai.APIStatusError as error:
                self._check(error)
                await asyncio.sleep(0.1)
            except (openai.APIConnectionError, openai.APIError, httpx2.HTTPError):
                self._agents.counts["calls broken"] += 1
                await asyncio.sleep(0.1)
        self._attempt.delivered.append((policy, step_id))
        self._attempt.sent_at[step_id] = began
        self._talks[policy] = [*talk, {"role": "assistant", "content": reply}]
        self._agents.counts["calls"] += 1
        return reply

    def _check(self, error: openai.APIStatusError) -> None:
        """Raise Closed for a finished rollout, and the error if no fault causes it."""
        if error.status_code == 409:
            raise Closed from None
        if error.status_code not in PASSING:
            raise error
        self._agents.counts[f"status {error.status_code}"] += 1

    def _create(self) -> Callable[..., Awaitable[Any]]:
        client = self._agents.client_at(self._dice, self._attempt.rollout_id, self._key)
        return client.chat.completions.with_raw_response.create

    async def _send(self, body: dict[str, Any], headers: dict[str, str]) -> tuple[str, str]:
        """Send one call to any replica; return the step ID and the reply."""
        response = await self._create()(**body, extra_headers=headers)
        return response.headers["X-Step-Id"], response.parse().choices[0].message.content or ""

    async def _stream(self, body: dict[str, Any], headers: dict[str, str]) -> tuple[str, str]:
        """Send one streamed call to any replica; return the step ID and the reply."""
        response = await self._create()(**body, extra_headers=headers, stream=True)
        parts, finish = [], None
        async for chunk in response.parse():
            if chunk.choices:
                parts.append(chunk.choices[0].delta.content or "")
                finish = chunk.choices[0].finish_reason or finish
        assert finish is not None, f"{self._attempt.rollout_id}: a stream ended properly without a finish reason"
        return response.headers["X-Step-Id"], "".join(parts)

    async def _leave_in_a_stream(self, policy: str, text: str) -> None:
        """Read a part of a stream, and close the connection, or keep it open and read no more."""
        talk = [*self._talks[policy], {"role": "user", "content": text}]
        client = self._agents.client_at(self._dice, self._attempt.rollout_id, self._key)
        headers = {"X-Request-Id": f"{self._attempt.rollout_id}/{policy}/left"}
        try:
            stream = await client.chat.completions.create(
                model=ASKED[policy], messages=talk, stream=True, max_tokens=24, extra_headers=headers
            )
            for _ in range(self._dice.randrange(4)):
                await anext(stream, None)
        except openai.APIStatusError as error:
            self._check(error)
            return
        except (openai.APIError, httpx2.HTTPError):
            return
        if self._plan.behavior == "dies_in_a_call":
            await stream.close()
        else:
            self._agents.keep_open(stream)
