"""Exact continuation with a real vLLM: the rows of linear rollouts, their scores, and the engine's prefix cache."""

import asyncio
import re

import aiohttp
import pytest

from .calls import CALL, TOOL
from .test_conversation import TOLERANCE, check_rows, differences, rescored
from .through import through_proxy

ROLLOUTS, TURNS = 5, 6
MAX_TOKENS = 80  # more than a tool call has characters: one that is cut has no message that shows what was sampled
# It ends most turns before the limit, and never with 4087, an end token that the template does not write (`other_stop`).
MESSAGE_END = {"4089": 8.0, "4087": -100.0}
PLAIN = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + (m.content or '') }}"
    '{% for c in m.tool_calls or [] %}{{ \'<tool_call>\n{"name": "\' + c.function.name + \'", "arguments": \' }}'
    "{{ c.function.arguments | tojson }}{{ '}\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEMPLATES = {"keeps": {"chat_template": PLAIN}, "strips": {}}


async def reply(agent, messages, *, seed, stream, extra):
    """Return the message of one call as an agent sends it back: without reasoning, with formatted arguments."""
    body = {"model": "tiny", "messages": messages, "seed": seed, "max_tokens": MAX_TOKENS, "temperature": 1.5}
    body |= {"logit_bias": MESSAGE_END, "tools": [TOOL]}
    extra = {"chat_template_kwargs": {"enable_thinking": False}} | extra
    if not stream:
        message = (await agent.chat.completions.create(**body, extra_body=extra)).choices[0].message
        calls = [(call.id, call.function.name, call.function.arguments) for call in message.tool_calls or []]
        return _message(message.content, calls)
    content, calls = "", {}
    async for chunk in await agent.chat.completions.create(**body, extra_body=extra, stream=True):
        delta = chunk.choices[0].delta
        content += delta.content or ""
        for call in delta.tool_calls or []:
            name, function, arguments = calls.get(call.index, ("", "", ""))
            more = call.function
            calls[call.index] = (name or call.id, function or more.name, arguments + (more.arguments or ""))
    return _message(content, list(calls.values()))


def _message(content, calls):
    functions = [
        {"id": name, "type": "function", "function": {"name": function, "arguments": arguments.replace(" ", "")}}
        for name, function, arguments in calls
    ]
    return {"role": "assistant", "content": content or None} | ({"tool_calls": functions} if functions else {})


async def converse(proxy, rollout, *, template, stream, tools, number):
    """Run one linear rollout: a chat, or a loop of tool calls and results with two questions."""
    async with proxy.agent(rollout) as agent:
        messages = [{"role": "user", "content": f"Question {number}."}]
        for turn in range(TURNS):
            calls = tools and turn % 3 != 2
            extra = TEMPLATES[template] | ({"structured_outputs": {"regex": CALL}} if calls else {})
            answer = await reply(agent, messages, seed=100 * number + turn, stream=stream, extra=extra)
            messages.append(answer)
            if answer.get("tool_calls"):
                name = answer["tool_calls"][0]["id"]
                messages.append({"role": "tool", "tool_call_id": name, "content": str(turn)})
            else:
                messages.append({"role": "user", "content": f"Turn {turn}."})


async def run(proxy, mode, *, template, stream, tools):
    """Run the rollouts; return their steps, rows and drift."""
    steps, rows, drift = [], [], []
    async with proxy.agent("first") as agent:  # its end shows the stop token, which `tool_calls` does not prove
        messages = [{"role": "user", "content": "Hello."}]
        messages.append(await reply(agent, messages, seed=1, stream=False, extra={}))
        messages.append(
            {"role": "user", "content": "Go on."}
        )  # the second call does not wait until the first turn is added
        await reply(agent, messages, seed=2, stream=False, extra={})
    for number in range(ROLLOUTS):
        name = f"r{number}"
        async with proxy.http.post(
            f"{proxy.url}/rollouts", json={"rollout_id": name, "continuation": mode}
        ) as response:
            assert 201 == response.status
        await converse(proxy, name, template=template, stream=stream, tools=tools, number=number)
        steps.append(await proxy.steps(name))
        rows.append(await proxy.rows(name))
        drift += (await proxy.get(f"/rollouts/{name}/tree"))["drift"]
        check_rows(steps[-1], rows[-1])
    return steps, rows, drift


def reasons(steps):
    """Return why the steps were not continued, without the first steps."""
    return [step["extra"]["continuation"].get("reason") for rollout in steps for step in rollout[1:]]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("tools", [False, True], ids=["chat", "tools"])
@pytest.mark.parametrize("template", TEMPLATES)
async def test_a_linear_rollout_is_one_sequence_in_append(vllm, direct, tmp_path, template, stream, tools):
    """Each prompt begins with what was sampled, even if the template drops a part of it, and scores are those of sampling."""
    async with through_proxy(vllm.url, tmp_path) as proxy:
        steps, rows, drift = await run(proxy, "append", template=template, stream=stream, tools=tools)

    assert [] == drift, [step["extra"].get("continuation") for rollout in steps for step in rollout]
    assert [1] * ROLLOUTS == [len(sequences) for sequences in rows]
    assert all(step["fidelity"]["exact"] for rollout in steps for step in rollout)
    worst = max([max(differences(row, await rescored(direct, row))) for (row,) in rows]) if not tools else 0
    assert worst < TOLERANCE  # the scores of forced tool calls are those after the grammar


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_template_that_keeps_turns_gives_one_sequence_in_faithful(vllm, tmp_path, stream):
    """Text that the tokenizer would split differently, and tool calls that the agent formats differently, do not fork."""
    async with through_proxy(vllm.url, tmp_path) as proxy:
        _, chats, _ = await run(proxy, "faithful", template="keeps", stream=stream, tools=False)
    async with through_proxy(vllm.url, tmp_path / "tools") as proxy:
        _, loops, _ = await run(proxy, "faithful", template="keeps", stream=stream, tools=True)

    assert [1] * 2 * ROLLOUTS == [len(sequences) for sequences in chats + loops]


async def test_a_template_that_strips_turns_forks_in_faithful_with_that_reason(vllm, tmp_path):
    """The step that was sent unchanged has the reason."""
    async with through_proxy(vllm.url, tmp_path) as proxy:
        steps, rows, _ = await run(proxy, "faithful", template="strips", stream=False, tools=False)

    assert all(len(sequences) > 1 for sequences in rows)
    assert {"history"} == set(reasons(steps))


async def test_without_continuation_most_turns_fork(vllm, tmp_path):
    """The tests above can fail: the same rollouts drift if the engine renders each call."""
    async with through_proxy(vllm.url, tmp_path) as proxy:
        _, rows, drift = await run(proxy, "off", template="keeps", stream=False, tools=False)

    assert sum(map(len, rows)) > 2 * ROLLOUTS
    assert len(drift) > ROLLOUTS


async def block_size(vllm) -> int:
    """Return the number of tokens of a block of the prefix cache."""
    async with aiohttp.ClientSession() as session, session.get(f"{vllm.url}/metrics") as response:
        return int(re.search(r'cache_config_info{.*block_size="(\d+)"', await response.text())[1])


async def test_a_continued_turn_hits_the_prefix_cache_for_what_was_recorded(vllm, tmp_path, metric):
    """vLLM's own counter: the hits cover the earlier prompt and completion in whole blocks, also where the template strips."""
    hits, block = {}, await block_size(vllm)
    for mode in ("off", "append"):
        async with through_proxy(vllm.url, tmp_path / mode) as proxy:
            before = await metric("vllm:prefix_cache_hits_total")
            steps, _, _ = await run(proxy, mode, template="strips", stream=False, tools=False)
            hits[mode] = await metric("vllm:prefix_cache_hits_total") - before
    kept = [step["extra"]["continuation"]["kept"] for rollout in steps for step in rollout[1:]]

    # The keys and values of the last sampled token are computed only once it is part of a prompt.
    assert hits["append"] >= sum((count - 1) // block * block for count in kept) > 0
    assert hits["append"] > hits["off"]


async def test_rollouts_are_continued_concurrently(vllm, tmp_path):
    """Two calls that continue the same turn at once both begin with its ids."""
    async with through_proxy(vllm.url, tmp_path) as proxy, proxy.agent("r") as agent:
        question = [{"role": "user", "content": "Hello."}]
        extra = TEMPLATES["keeps"]
        first = await reply(agent, question, seed=1, stream=False, extra=extra)
        nexts = [[*question, first, {"role": "user", "content": text}] for text in ("One.", "Two.")]
        await asyncio.gather(*(reply(agent, messages, seed=2, stream=False, extra=extra) for messages in nexts))
        steps = await proxy.steps("r")

    full = steps[0]["prompt_ids"] + steps[0]["choices"][0]["ids"]
    assert all(step["prompt_ids"][: len(full)] == full for step in steps[1:])
