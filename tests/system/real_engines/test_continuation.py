"""Exact continuation with a real engine: the rows of linear rollouts, their scores, and the engine's prefix cache."""

import asyncio
import re

import aiohttp
import pytest

from .calls import CALL, TOOL, forced
from .test_conversation import DIGITS, check_rows
from .test_exactness import TOLERANCE, differences
from .through import through_proxy

ROLLOUTS, TURNS = 5, 6
MAX_TOKENS = 80  # more than a tool call has characters: one that is cut has no message that shows what was sampled
# It ends most turns before the limit, and never with 4087, an end token that the template does not write (`other_stop`);
# and 4094, <think>, would make the rest of a turn reasoning, which this agent does not send back.
MESSAGE_END = {"4089": 8.0, "4087": -100.0, "4094": -100.0}
PLAIN = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + (m.content or '') }}"
    '{% for c in m.tool_calls or [] %}{{ \'<tool_call>\n{"name": "\' + c.function.name + \'", "arguments": \' }}'
    "{{ c.function.arguments | tojson }}{{ '}\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
THINKING_OFF = {"chat_template_kwargs": {"enable_thinking": False}}
KEEPING = {
    "vllm": THINKING_OFF | {"chat_template": PLAIN},
    "sglang": {"chat_template_kwargs": {"enable_thinking": False, "chat_template": PLAIN}},
}
ENDS = THINKING_OFF | DIGITS  # a turn that is never cut by max_tokens


def fields_of(engine, template):
    """Return the fields of a call with a template that keeps earlier turns, or with the model's, which strips them."""
    return KEEPING[engine.kind] if template == "keeps" else THINKING_OFF


async def reply(agent, messages, *, seed, stream, extra):
    """Return the message of one call as an agent sends it back: without reasoning, with formatted arguments."""
    body = {"model": "tiny", "messages": messages, "seed": seed, "max_tokens": MAX_TOKENS, "temperature": 1.5}
    body |= {"logit_bias": MESSAGE_END, "tools": [TOOL]}
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


async def converse(proxy, rollout, *, extra, stream, tools, number):
    """Run one linear rollout: a chat, or a loop of tool calls and results with two questions."""
    async with proxy.agent(rollout) as agent:
        messages = [{"role": "user", "content": f"Question {number}."}]
        for turn in range(TURNS):
            calls = tools and turn % 3 != 2
            more = extra | (forced(CALL) if calls else {})
            answer = await reply(agent, messages, seed=100 * number + turn, stream=stream, extra=more)
            messages.append(answer)
            if answer.get("tool_calls"):
                name = answer["tool_calls"][0]["id"]
                messages.append({"role": "tool", "tool_call_id": name, "content": str(turn)})
            else:
                messages.append({"role": "user", "content": f"Turn {turn}."})


async def run(proxy, mode, *, extra, stream, tools):
    """Run the rollouts; return their steps, rows and drift."""
    steps, rows, drift = [], [], []
    async with proxy.agent("first") as agent:  # its end shows the stop token, which `tool_calls` does not prove
        messages = [{"role": "user", "content": "Hello."}]
        messages.append(await reply(agent, messages, seed=1, stream=False, extra=ENDS))
        # The second call does not wait until the first turn is added.
        messages.append({"role": "user", "content": "Go on."})
        await reply(agent, messages, seed=2, stream=False, extra=ENDS)
    for number in range(ROLLOUTS):
        name = f"r{number}"
        async with proxy.http.post(
            f"{proxy.url}/rollouts", json={"rollout_id": name, "continuation": mode}
        ) as response:
            assert response.status == 201
        await converse(proxy, name, extra=extra, stream=stream, tools=tools, number=number)
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
@pytest.mark.parametrize("template", ["keeps", "strips"])
async def test_a_linear_rollout_is_one_sequence_in_append(engine, tmp_path, template, stream, tools):
    """Each prompt begins with what was sampled, even if the template drops a part of it; scores equal the sampled logprobs."""
    async with through_proxy(engine.url, tmp_path) as proxy:
        steps, rows, drift = await run(proxy, "append", extra=fields_of(engine, template), stream=stream, tools=tools)

    assert drift == [], [step["extra"].get("continuation") for rollout in steps for step in rollout]
    assert [len(sequences) for sequences in rows] == [1] * ROLLOUTS
    assert all(step["fidelity"]["exact"] for rollout in steps for step in rollout)
    # The scores of forced tool calls are those after the grammar.
    assert tools or max([max(await differences(engine, row), default=0) for (row,) in rows]) < TOLERANCE


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_template_that_keeps_turns_gives_one_sequence_in_faithful(engine, tmp_path, stream):
    """Text that the tokenizer would split differently, and tool calls that the agent formats differently, do not fork."""
    async with through_proxy(engine.url, tmp_path) as proxy:
        _, chats, _ = await run(proxy, "faithful", extra=fields_of(engine, "keeps"), stream=stream, tools=False)
    async with through_proxy(engine.url, tmp_path / "tools") as proxy:
        _, loops, _ = await run(proxy, "faithful", extra=fields_of(engine, "keeps"), stream=stream, tools=True)

    assert [len(sequences) for sequences in chats + loops] == [1] * 2 * ROLLOUTS


async def test_a_template_that_strips_turns_forks_in_faithful_with_that_reason(engine, tmp_path):
    """The step that was sent unchanged has the reason."""
    async with through_proxy(engine.url, tmp_path) as proxy:
        steps, rows, _ = await run(proxy, "faithful", extra=fields_of(engine, "strips"), stream=False, tools=False)

    assert all(len(sequences) > 1 for sequences in rows)
    assert set(reasons(steps)) == {"history"}


async def test_without_continuation_most_turns_fork(engine, tmp_path):
    """The tests above can fail: the same rollouts drift if the engine renders each call."""
    async with through_proxy(engine.url, tmp_path) as proxy:
        _, rows, drift = await run(proxy, "off", extra=fields_of(engine, "keeps"), stream=False, tools=False)

    assert sum(map(len, rows)) > 2 * ROLLOUTS
    assert len(drift) > ROLLOUTS


async def block_size(engine) -> int:
    """Return the number of tokens of a block of the prefix cache; SGLang's radix cache has none."""
    async with aiohttp.ClientSession() as session, session.get(f"{engine.url}/metrics") as response:
        found = re.search(r'cache_config_info{.*block_size="(\d+)"', await response.text())
    return int(found[1]) if found else 1


async def test_a_continued_turn_hits_the_prefix_cache_for_what_was_recorded(engine, tmp_path):
    """The engine's counter: hits cover the earlier prompt and completion in whole blocks, also where the template strips."""
    hits, block = {}, await block_size(engine)
    for mode in ("off", "append"):
        async with through_proxy(engine.url, tmp_path / mode) as proxy:
            before = await engine.metric("cached")
            steps, _, _ = await run(proxy, mode, extra=fields_of(engine, "strips"), stream=False, tools=False)
            hits[mode] = await engine.metric("cached") - before
    kept = [step["extra"]["continuation"]["kept"] for rollout in steps for step in rollout[1:]]

    # The keys and values of the last sampled token are computed only once it is part of a prompt.
    assert hits["append"] >= sum((count - 1) // block * block for count in kept) > 0
    assert hits["append"] > hits["off"]


async def test_the_end_of_a_turn_is_read_from_its_text(sglang, tmp_path):
    """Special tokens are in the text of ids, so that a boundary needs less than two renderings, not four or five."""
    async with through_proxy(sglang.url, tmp_path) as proxy:
        before = await sglang.metric("renderings")
        steps, _, _ = await run(proxy, "append", extra=fields_of(sglang, "keeps"), stream=False, tools=True)
        renderings = await sglang.metric("renderings") - before

    assert 0 < renderings < 2 * sum(len(rollout) - 1 for rollout in steps)


async def test_rollouts_are_continued_concurrently(engine, tmp_path):
    """Two calls that continue the same turn at once both begin with its ids."""
    async with through_proxy(engine.url, tmp_path) as proxy, proxy.agent("r") as agent:
        question = [{"role": "user", "content": "Hello."}]
        extra = fields_of(engine, "keeps")
        first = await reply(agent, question, seed=1, stream=False, extra=extra | DIGITS)
        nexts = [[*question, first, {"role": "user", "content": text}] for text in ("One.", "Two.")]
        await asyncio.gather(*(reply(agent, messages, seed=2, stream=False, extra=extra) for messages in nexts))
        steps = await proxy.steps("r")

    full = steps[0]["prompt_ids"] + steps[0]["choices"][0]["ids"]
    assert all(step["prompt_ids"][: len(full)] == full for step in steps[1:])
