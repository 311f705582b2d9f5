"""Linear rollouts over HTTP in mode `append`, with every original chat template of TRL."""

from collections import Counter

import pytest
from tests.support.chat_templates import originals
from tests.support.continued_calls import continuations, served

APPEND = {"continuation": {"mode": "append"}}
THINKING = {"chat_template_kwargs": {"enable_thinking": True}}
TURNS = 5

# vLLM passes the arguments of earlier calls to templates as objects, which these templates add to a text.
TEXT_ARGUMENTS = ("deepseekv3",)


@pytest.mark.parametrize("template", originals(), ids=lambda template: template.name)
async def test_a_linear_rollout_is_one_sequence(store, template):
    """With and without tools and reasoning, streamed and not; the agent formats arguments again and drops reasoning.

    No bridge is wrong and each sampled token is trained once.
    """
    has_tools = template.call_stop is not None and template.name not in TEXT_ARGUMENTS
    kinds = [
        (tools, thinking, stream)
        for tools in ([False, True] if has_tools else [False])
        for thinking in (False, True)
        for stream in (False, True)
    ]
    async with served(store, template=template.name, sections=APPEND) as proxy:
        found = [await _rollout(proxy, *kind) for kind in kinds]

    assert [(1, {"sent": TURNS - 1})] * len(kinds) == found


async def _rollout(proxy, tools, thinking, stream):
    """Run a rollout; return its number of sequences and how its turns were sent."""
    fields = THINKING if thinking else {}
    agent = proxy.agent(f"{tools}-{thinking}-{stream}", tools=tools, stream=stream, fields=fields)
    await agent.turns(TURNS)
    await proxy.check_bridges(agent.rollout)
    reasons = Counter(continuations(await proxy.steps(agent.rollout))[1:])
    return len(await proxy.rows(agent.rollout)), reasons
