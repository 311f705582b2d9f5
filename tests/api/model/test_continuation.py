"""Continuation as agents see it: chat templates, modes, and conversations that branch."""

import asyncio
from collections import Counter

import orjson
import pytest
from tests.support.continued_calls import CHAT, Agent, assembled, continuations, served

from proxy.trajectory.step import answers_of

KV = "kv_transfer_params"
THINKING = {"chat_template_kwargs": {"enable_thinking": True}}
# A sample; all templates are in tests/system/fuzz/test_continuation_templates.py. The last has no tools.
TEMPLATES = ("qwen3", "glm4moe", "llama3_1", "cohere2")


def rendered_modes(proxy):
    """Whether each call was sent by ids, in order."""
    return [KV in body for body in proxy.engine.bodies()]


@pytest.mark.parametrize("name", TEMPLATES)
async def test_a_linear_rollout_is_one_sequence_in_append_with_real_templates(store, name):
    """Streamed and not, with tools and reasoning. The agent formats arguments again and drops reasoning."""
    async with served(store, template=name, sections={"continuation": {"mode": "append"}}) as proxy:

        async def run(tools, thinking, stream):
            agent = proxy.agent(f"{tools}-{thinking}-{stream}", tools=tools, stream=stream, fields=thinking)
            await agent.turns(4)
            await proxy.check_bridges(agent.rollout)
            return len(await proxy.rows(agent.rollout)), continuations(await proxy.steps(agent.rollout))

        plans = [(False, {}, True), (False, THINKING, False)]
        plans += [(True, {}, False), (True, THINKING, True)] if name != "cohere2" else []
        results = await asyncio.gather(*(run(*plan) for plan in plans))

    assert [(1, [None, "sent", "sent", "sent"])] * len(plans) == results


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "deepseekv3"])
async def test_faithful_forks_where_the_template_drops_reasoning_with_that_reason(store, name):
    """Elsewhere the rollout is one sequence; in mode off most boundaries fork."""
    async with served(store, template=name) as proxy:
        plain, thinking = proxy.agent("plain"), proxy.agent("thinking", fields=THINKING)
        off = proxy.agent("off", headers={"X-Rollout-Continuation": "off"})
        await asyncio.gather(plain.turns(4), thinking.turns(4), off.turns(4))
        found = {agent.rollout: continuations(await proxy.steps(agent.rollout))[1:] for agent in (plain, thinking)}
        rows = {agent.rollout: len(await proxy.rows(agent.rollout)) for agent in (plain, thinking, off)}
        tree = await proxy.get("/rollouts/thinking/tree")
        steps = await proxy.steps("off")

    drops = {"qwen2_5": "reasoning_stripped", "qwen3": "reasoning_stripped", "deepseekv3": "history"}[name]
    assert (["history"] * 3 if name == "deepseekv3" else ["sent"] * 3) == found["plain"]
    assert found["thinking"] == [drops] * 3
    assert rows["thinking"] == rows["off"] == 4
    assert (4 if name == "deepseekv3" else 1) == rows["plain"]
    assert {boundary["reason"] for boundary in tree["drift"]} == {drops}
    assert continuations(steps) == [None] * 4


async def test_the_mode_of_a_call_precedes_the_rollouts_which_precedes_the_settings(store):
    """A patch changes the mode of a running rollout; null restores the mode of the settings."""
    async with served(store, sections={"continuation": {"mode": "off"}}) as proxy:
        await proxy.open("r1", continuation="append")
        agent = proxy.agent("r1")
        await agent.turns(2)
        agent.headers = {"X-Rollout-Continuation": "off"}
        await agent.turn()
        agent.headers = {}
        assert (await proxy.send("/rollouts/r1", {"continuation": "off"}, method="PATCH"))[0] == 200
        await agent.turn()
        agent.headers = {"X-Rollout-Continuation": "Faithful"}
        await agent.turn()
        agent.headers = {}
        assert (await proxy.send("/rollouts/r1", {"continuation": None}, method="PATCH"))[0] == 200
        await agent.turn()
        found = continuations(await proxy.steps("r1"))

    assert found == [None, "sent", None, None, "sent", None]


async def test_an_unknown_mode_is_an_error_of_the_client(store):
    """No step is recorded."""
    async with served(store) as proxy:
        agent = proxy.agent("r1", headers={"X-Rollout-Continuation": "always"})
        agent.messages = [{"role": "user", "content": "hi"}]
        response = await agent.call()
        by_rollout = await proxy.send("/rollouts", {"rollout_id": "r2", "continuation": "always"})
        by_patch = await proxy.send("/rollouts/r1", {"continuation": "always"}, method="PATCH")
        steps = await proxy.steps("r1")

    assert agent.statuses == [400]
    assert "off, faithful, append" in response["error"]["message"]
    assert {by_rollout[0], by_patch[0]} <= {400, 422}
    assert steps == []


async def test_calls_without_a_rollout_are_never_continued(store):
    """Each is its own rollout."""
    async with served(store) as proxy:
        messages = [{"role": "user", "content": "hi"}]
        for _ in range(3):
            status, response = await proxy.send(CHAT, {"model": "simulated", "messages": messages})
            assert status == 200
            messages += [response["choices"][0]["message"], {"role": "user", "content": "More?"}]
        counts = await proxy.counts()

    assert rendered_modes(proxy) == [False] * 3
    assert counts == {}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_the_response_of_a_continued_call_is_the_engines(store, stream):
    """A call with a rendering that begins with the recorded ids has the same response in mode off, except for ids and times."""
    async with served(store, noncanonical_rate=0.0) as proxy:
        responses = {}
        for mode in ("off", "faithful"):
            agent = proxy.agent(mode, stream=stream, headers={"X-Rollout-Continuation": mode})
            agent.fields = {"logprobs": True, "top_logprobs": 2, "temperature": 0, "stop": ["zebra"]}
            await agent.turn()
            agent.messages.append({"role": "user", "content": "More?"})
            _, responses[mode] = await proxy.send(agent.path, agent.body(), **agent.headers)
        found = continuations(await proxy.steps("faithful"))
        counts = await proxy.counts()

    def plain(response):
        text = response if isinstance(response, str) else orjson.dumps(response).decode()
        events = [orjson.loads(line.removeprefix("data: ")) for line in text.splitlines() if "{" in line]
        return [{name: value for name, value in event.items() if name not in {"id", "created"}} for event in events]

    assert found == [None, "sent"]
    assert counts == {"unchanged": 1}
    assert plain(responses["off"]) == plain(responses["faithful"])
    assert responses["off"].count("\n") == responses["faithful"].count("\n") if stream else True


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_the_choice_that_came_back_is_continued(store, stream):
    """With n > 1 each choice may be continued, also several of them."""
    async with served(store, template="qwen3") as proxy:
        agent = proxy.agent("r1", stream=stream, tools=True, fields={"n": 3})
        agent.messages = [{"role": "user", "content": "Which?"}]
        choices = (await agent.call())["choices"]
        agent.fields = {}
        for number in (2, 0, 1, 2):
            branch = agent.branch()
            branch.keep(choices[number]["message"])
            await branch.turn("More?")
        steps = await proxy.steps("r1")
        rows = await proxy.rows("r1")

    assert [step.extra["continuation"]["choice"] for step in steps[1:]] == [2, 0, 1, 2]
    assert continuations(steps)[1:] == ["sent"] * 4
    assert 3 <= len(rows) <= 4


async def test_a_retry_with_an_idempotency_key_is_replayed_and_continued_once(store):
    """Two attempts of a call have one step, which continues the earlier one; a later call continues that step."""
    async with served(store) as proxy:
        agent = proxy.agent("r1")
        await agent.turn()
        agent.headers = {"Idempotency-Key": "k1"}
        agent.messages.append({"role": "user", "content": "More?"})
        first, again = await agent.call(), await agent.call()
        agent.headers = {}
        agent.keep(again["choices"][0]["message"])
        await agent.turn()
        found = continuations(await proxy.steps("r1"))
        rows = await proxy.rows("r1")

    assert first == again
    assert found == [None, "sent", "sent"]
    assert len(rows) == 1


async def test_a_retry_of_a_call_continues_the_same_step(store):
    """Without a key the call is sampled again."""
    async with served(store) as proxy:
        agent = proxy.agent("r1")
        await agent.turn()
        branch = agent.branch()
        await agent.turn("More?")
        await branch.turn("More?")
        steps = await proxy.steps("r1")

    assert continuations(steps)[1:] == ["sent", "sent"]
    assert {steps[0].step_id} == {step.extra["continuation"]["step_id"] for step in steps[1:]}


async def test_a_rollback_continues_the_step_before_it(store):
    """The agent drops its last turns and asks otherwise."""
    async with served(store) as proxy:
        agent = proxy.agent("r1")
        await agent.turns(4)
        del agent.messages[4:]
        await agent.turn("Otherwise?")
        await agent.turn()
        steps = await proxy.steps("r1")
        rows = await proxy.rows("r1")

    assert continuations(steps) == [None, *["sent"] * 5]
    assert steps[1].step_id == steps[4].extra["continuation"]["step_id"]
    assert len(rows) == 2


async def test_agents_in_the_same_rollout_continue_their_own_conversations(store):
    """A main agent and its sub-agents call concurrently."""
    async with served(store, template="qwen3") as proxy:
        agents = [proxy.agent("r1", tools=number % 2 == 0, stream=number % 3 == 0) for number in range(5)]
        for number, agent in enumerate(agents):
            agent.messages.append({"role": "system", "content": f"You are agent {number}."})
        await asyncio.gather(*(agent.turns(4) for agent in agents))
        steps = await proxy.steps("r1")
        rows = await proxy.rows("r1")
        await proxy.check_bridges("r1")

    assert Counter(continuations(steps)) == {None: 5, "sent": 15}
    assert len(rows) == 5


async def test_the_same_conversation_is_continued_by_concurrent_calls(store):
    """Each begins with the same recorded ids."""
    async with served(store) as proxy:
        agent = proxy.agent("r1")
        await agent.turns(2)
        branches = [agent.branch() for _ in range(8)]
        await asyncio.gather(*(branch.turn("And?") for branch in branches))
        steps = await proxy.steps("r1")

    prompts = {tuple(step.prompts[0]) for step in steps[2:]}
    assert continuations(steps)[1:] == ["sent"] * 9
    assert len(prompts) == 1


async def test_a_summary_begins_another_conversation(store):
    """An agent that compacts its history forks there, and continues from the summary on."""
    async with served(store) as proxy:
        agent = proxy.agent("r1")
        await agent.turns(3)
        summary = await agent.turn("Summarize this conversation.")
        text = summary["choices"][0]["message"]["content"]
        agent.messages = [{"role": "user", "content": f"Earlier: {text}"}, {"role": "assistant", "content": "I see."}]
        await agent.turns(3)
        found = continuations(await proxy.steps("r1"))
        rows = await proxy.rows("r1")

    assert found == [None, "sent", "sent", "sent", "edited", "sent", "sent"]
    assert len(rows) == 2


async def test_rollouts_that_share_a_prefix_continue_their_own_steps(store):
    """Equal conversations in two rollouts have steps of their own."""
    async with served(store) as proxy:
        agents = [proxy.agent(name) for name in ("r1", "r2")]
        for _ in range(3):
            for agent in agents:
                await agent.turn("Same?")
        for name in ("r1", "r2"):
            steps = await proxy.steps(name)
            continued = [step.extra["continuation"]["step_id"] for step in steps[1:]]
            assert [step.step_id for step in steps[:-1]] == continued


async def test_a_turn_that_was_cut_is_continued_in_append(store):
    """A turn that ends at max_tokens has no stop token: the template's close of the turn follows it."""
    async with served(store, sections={"continuation": {"mode": "append"}}) as proxy:
        agent = proxy.agent("r1", fields={"max_tokens": 5})
        await agent.turns(4)
        steps = await proxy.steps("r1")
        rows = await proxy.rows("r1")
        await proxy.check_bridges("r1")

    assert [step.choices[0].finish_reason for step in steps] == ["length"] * 4
    assert continuations(steps) == [None, "sent", "sent", "sent"]
    assert len(rows) == 1


async def test_a_streamed_reply_is_the_recorded_one(store):
    """The agent assembles the message of the step from a continued stream."""
    async with served(store, template="qwen3") as proxy:
        agent = Agent(proxy, "r1", stream=True, fields=THINKING, headers={"X-Rollout-Continuation": "append"})
        shown = [await agent.turn(f"Question {number}?") for number in range(3)]
        steps = await proxy.steps("r1")

    for response, step in zip(shown, steps, strict=True):
        message = answers_of(step)[0]["message"]
        assert (message["content"] or "") == response["choices"][0]["message"]["content"]
        assert message["reasoning"] == response["choices"][0]["message"]["reasoning"]
    assert continuations(steps) == [None, "sent", "sent"]
    assert assembled("") == {"choices": []}
