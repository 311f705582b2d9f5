"""A small loop in GRPO's shape, from opening groups to acknowledging batches, with the Python client."""

from tests.support.fakes import settings_for
from tests.support.grpo_loop import check_taken, run_grpo_loop

from proxy.server.listener import running, simulating
from proxy.simulator.options import Options
from tokentape import AsyncClient

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


async def converse(agent, turns):
    """Send a message, maybe with a tool, and continue the conversation."""
    messages = [{"role": "user", "content": "Count to three."}]
    for _ in range(turns):
        reply = await agent.chat.completions.create(model="policy", messages=messages, tools=[TOOL], max_tokens=24)
        messages.append(reply.choices[0].message.model_dump(exclude_none=True))
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": "124"}
            for call in reply.choices[0].message.tool_calls or []
        ]
        messages += results or [{"role": "user", "content": "And then?"}]


async def test_two_consumers_take_four_groups_of_four_once_each(store):
    """Two formats, and a weight update for each group; nothing is left over or comes twice; every trained token was sampled."""
    async with (
        simulating("127.0.0.1:0", Options()) as engine,
        running(settings_for(engine), store) as served,
        AsyncClient(served.url) as client,
    ):
        await check_taken(client, await run_grpo_loop(client, converse, "trl", "tinker"))
