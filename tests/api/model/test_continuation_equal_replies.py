"""Calls after several recorded replies that are equal in part: the one that the agent sends back is continued, or none."""

from collections import Counter

import pytest
from tests.support.continued_calls import continuations, served

from proxy.rollouts.rollout import UNDELIVERED_MARK
from proxy.simulator.script import Conversation, Script, ScriptedCall, Turn

LOOK = ScriptedCall("look_up", {"word": "lake", "limit": 1})
DELETE, KEEP = Turn(think="DELETE the file.", call=[LOOK]), Turn(think="KEEP the file.", call=[LOOK])


async def replied(proxy, conversation, *turns, agents=(None, None)):
    """Make a call for each turn, all with the same messages; return an agent and its reply for each."""
    found = []
    for turn, name in zip(turns, agents, strict=True):
        conversation.turns[0] = turn
        agent = proxy.agent("r1", tools=True, headers={} if name is None else {"X-Agent-Name": name})
        agent.messages = [{"role": "user", "content": "Which?"}]
        response = await agent.call()
        found.append((agent, response["choices"][0]["message"]))
    conversation.turns[1:] = [Turn(say="Done.")]
    return found


def sent_back(message, *kept, call_id=None):
    """Return a reply as an agent sends it back, with these fields of it and another call id."""
    calls = [{**call, "id": call_id or call["id"]} for call in message["tool_calls"]]
    return {"role": "assistant", "content": "", "tool_calls": calls, **{name: message[name] for name in kept}}


async def answer(agent, message):
    """Send a reply back with the result of its call."""
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "one"}
    agent.messages += [message, result]
    await agent.call()


@pytest.fixture
def conversation():
    return Conversation([Turn(say="Hi.")])


@pytest.fixture
async def proxy(store, conversation):
    async with served(store, template="qwen3", script=Script([conversation])) as proxy:
        yield proxy


@pytest.mark.parametrize("mode", ["faithful", "append"])
async def test_reasoning_and_call_ids_that_are_sent_back_choose_the_reply(proxy, conversation, mode):
    """Replies with the same calls: not the youngest is continued, but the one that came back."""
    replies = await replied(proxy, conversation, DELETE, KEEP)
    for agent, message in replies:
        agent.headers["X-Rollout-Continuation"] = mode
        await answer(agent.branch(), sent_back(message))
        await answer(agent.branch(), sent_back(message, "reasoning", call_id="own"))
    steps = await proxy.steps("r1")

    first, second, *later = steps
    expected = [first.step_id, first.step_id, second.step_id, second.step_id]
    assert [step.extra["continuation"]["step_id"] for step in later] == expected
    assert continuations(later) == ["sent"] * 4


@pytest.mark.parametrize("mode", ["faithful", "append"])
async def test_a_reply_that_nothing_distinguishes_is_not_continued(proxy, conversation, mode):
    """The call is sent as it came, and the reason is counted."""
    (agent, message), _ = await replied(proxy, conversation, DELETE, KEEP)
    agent.headers["X-Rollout-Continuation"] = mode
    await answer(agent, sent_back(message, call_id="own"))
    steps, counts = await proxy.steps("r1"), await proxy.counts()
    await proxy.check_unchanged(agent)

    assert continuations(steps)[2:] == ["ambiguous"]
    assert Counter({"refused:ambiguous": 1}) == counts


async def test_reasoning_that_the_agent_changed_belongs_to_no_reply(proxy, conversation):
    (agent, message), _ = await replied(proxy, conversation, DELETE, KEEP)
    await answer(agent, {**sent_back(message, call_id="own"), "reasoning": "BURN the file."})

    assert continuations(await proxy.steps("r1"))[2:] == ["edited"]


async def test_each_agent_continues_its_own_reply(proxy, conversation):
    """Named by X-Agent-Name, with call ids of its own and without reasoning."""
    replies = await replied(proxy, conversation, DELETE, KEEP, agents=("a", "b"))
    for agent, message in replies:
        await answer(agent, sent_back(message, call_id="call_1"))
    first, second, *later = await proxy.steps("r1")

    assert [first.step_id, second.step_id] == [step.extra["continuation"]["step_id"] for step in later]


async def test_a_retry_continues_the_same_reply(proxy, conversation):
    """The first attempt repeats the call id, the second one does not."""
    (agent, message), _ = await replied(proxy, conversation, DELETE, KEEP)
    await answer(agent, sent_back(message))
    agent.messages[1] = sent_back(message, call_id="own")
    await agent.call()
    steps = await proxy.steps("r1")

    assert [steps[0].step_id] * 2 == [step.extra["continuation"]["step_id"] for step in steps[2:]]


@pytest.mark.parametrize("undelivered", [0, 1])
async def test_a_reply_that_no_client_received_is_not_continued(proxy, conversation, undelivered):
    """It may be marked after another process has read it."""
    replies = await replied(proxy, conversation, DELETE, KEEP)
    steps = await proxy.steps("r1")
    stored = await proxy.store.get("r1")
    mark = {UNDELIVERED_MARK + steps[undelivered].step_id: b"1"}
    await proxy.store.mark("r1", stored.incarnation, mark, now_ms=1)
    agent, message = replies[0]
    await answer(agent, sent_back(message, call_id="own"))
    last = (await proxy.steps("r1"))[-1]

    assert steps[1 - undelivered].step_id == last.extra["continuation"]["step_id"]


@pytest.mark.parametrize("by_id", [False, True], ids=["items", "previous_response_id"])
async def test_the_response_that_a_client_names_is_continued(proxy, conversation, by_id):
    """Responses with the same text: the id of the response or of its items distinguishes them."""
    path, first, responses = "/rollouts/r1/v1/responses", [{"role": "user", "content": "Which?"}], []
    for thought in ("DELETE", "KEEP"):
        conversation.turns[0] = Turn(think=thought, say="Done.")
        responses.append((await proxy.send(path, {"model": "simulated", "input": first}))[1])
    conversation.turns[1:] = [Turn(say="Good.")]
    for response in responses:
        messages = [item for item in response["output"] if item["type"] == "message"]
        more = {"previous_response_id": response["id"]} if by_id else {}
        items = [{"role": "user", "content": "And then?"}]
        status, _ = await proxy.send(
            path, {"model": "simulated", "input": items if by_id else [*first, *messages, *items], **more}
        )
        assert status == 200
    one, other, *later = await proxy.steps("r1")

    assert [one.step_id, other.step_id] == [step.extra["continuation"]["step_id"] for step in later]
