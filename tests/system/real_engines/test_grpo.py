"""A small loop in GRPO's shape with a real engine, from opening groups to acknowledging batches."""

from asyncio import Semaphore

from tests.support.grpo_loop import check_taken, run_grpo_loop

from tokentape import AsyncClient

from .calls import CALL, QUESTION, forced
from .test_conversation import DIGITS, say
from .through import through_proxy


async def test_two_consumers_take_four_groups_of_four_once_each(engine, tmp_path):
    """Agents of one to three turns call a tool in the first; two formats; nothing is left over, nothing twice.

    The engine rewrites some sampled calls, so such rollouts fork; both formats can represent that.
    """
    at_once = Semaphore(8)

    async def converse(agent, turns):
        messages = list(QUESTION)
        for turn in range(turns):
            regex = forced(CALL) if turn == 0 else DIGITS
            async with at_once:
                reply = await say(agent, messages, stream=turn % 2 == 1, preserve=True, **regex)
            messages.append(reply)
            calls = reply.get("tool_calls", [])
            messages += [{"role": "tool", "tool_call_id": call["id"], "content": "124"} for call in calls]
            if turn > 0:
                messages.append({"role": "user", "content": "And then?"})

    async with through_proxy(engine.url, tmp_path) as proxy, AsyncClient(proxy.url) as client:
        taken = await run_grpo_loop(client, converse, "training_examples", "tinker")
        await check_taken(client, taken)
        turns = [
            (await client.rollout(rollout))["counts"]["steps"]
            for groups in taken.values()
            for group in groups
            for rollout in group["rollouts"]
        ]

    assert turns == [1, 2, 3, 1] * 4
