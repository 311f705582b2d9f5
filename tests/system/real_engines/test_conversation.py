"""Conversations of an unmodified agent: the tree and the sequences."""

import pytest

from .calls import CALL, QUESTION, TOOL, forced
from .through import through_proxy

# Each digit is a token, so text preserves them; the second EOS would not come back from text.
DIGITS = forced("[0-9]{4}")
NO_SECOND_END = {"4087": -100}


def kwargs(*, preserve: bool) -> dict:
    """Return the template arguments; with `preserve`, the template keeps earlier turns as they were sampled."""
    return {"chat_template_kwargs": {"enable_thinking": False, "preserve_thinking": preserve}}


async def say(agent, messages, *, stream, preserve, **more):
    """Make one call of the agent; return the message that it appends."""
    body = {
        "model": "tiny",
        "messages": messages,
        "seed": 11,
        "max_tokens": 60,
        "logit_bias": NO_SECOND_END,
        "tools": [TOOL],
    }
    extra = kwargs(preserve=preserve) | more
    if not stream:
        reply = await agent.chat.completions.create(**body, extra_body=extra)
        return reply.choices[0].message.model_dump(exclude_none=True)
    content, calls = "", {}
    async for chunk in await agent.chat.completions.create(**body, extra_body=extra, stream=True):
        delta = chunk.choices[0].delta
        content += delta.content or ""
        for call in delta.tool_calls or []:
            kept = calls.setdefault(
                call.index, {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
            )
            kept["id"] = call.id or kept["id"]
            kept["function"]["name"] += call.function.name or ""
            kept["function"]["arguments"] += call.function.arguments or ""
    return {"role": "assistant", "content": content} | ({"tool_calls": list(calls.values())} if calls else {})


async def converse(proxy, rollout, *, stream, preserve):
    """Run three turns: a tool call, an answer to its result, and an answer to a further question."""
    async with proxy.agent(rollout) as agent:
        messages = list(QUESTION)
        called = await say(agent, messages, stream=stream, preserve=preserve, **forced(CALL))
        (call,) = called["tool_calls"]
        messages += [called, {"role": "tool", "tool_call_id": call["id"], "content": "124"}]
        messages.append(await say(agent, messages, stream=stream, preserve=preserve, **DIGITS))
        messages.append({"role": "user", "content": "And then?"})
        await say(agent, messages, stream=stream, preserve=preserve, **DIGITS)
    return await proxy.steps(rollout), await proxy.rows(rollout), await proxy.get(f"/rollouts/{rollout}/tree")


def check_rows(steps, rows):
    """Assert that row ids are the recorded ones and that each sampled token is trained once."""
    recorded = {(step["step_id"], choice["index"]): (step, choice) for step in steps for choice in step["choices"]}
    trained = dict.fromkeys(recorded, 0)
    for row in rows:
        assert len(row["token_ids"]) == len(row["mask"]) == len(row["logprobs"])
        for span in row["spans"]:
            name = (span["step_id"], span["choice"])
            step, choice = recorded[name]
            part = slice(span["start"], span["end"])
            assert step["prompt_ids"] == row["token_ids"][: span["start"]]
            assert choice["ids"] == row["token_ids"][part]
            assert set(row["mask"][part]) == {int(span["owned"])}
            if span["owned"]:
                trained[name] += 1
                assert choice["logprobs"] == row["logprobs"][part]
        assert sum(row["mask"]) == sum(span["end"] - span["start"] for span in row["spans"] if span["owned"])
    assert set(trained.values()) == {1}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_template_that_keeps_turns_gives_one_sequence_or_reported_drift(engine, tmp_path, stream):
    """Steps join where ids extend each other; where a forced call is tokenized differently, the fork is drift."""
    async with through_proxy(engine.url, tmp_path) as proxy:
        steps, rows, tree = await converse(proxy, "r1", stream=stream, preserve=True)

    assert len(steps) == 3
    assert all(step["fidelity"]["exact"] for step in steps)
    check_rows(steps, rows)
    parents = [node["parent"] for node in tree["nodes"]]
    assert parents[2] == 1  # digits come back as they were sampled: the third turn extends the second
    assert len(rows) == 1 + len(tree["drift"]) == parents.count(None)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_template_that_strips_turns_forks_and_rows_have_only_recorded_ids(engine, tmp_path, stream):
    """Every fork is reported as drift."""
    async with through_proxy(engine.url, tmp_path) as proxy:
        steps, rows, tree = await converse(proxy, "r1", stream=stream, preserve=False)

    check_rows(steps, rows)
    assert len(rows) > 1
    drift = tree["drift"][0]
    by_id = {step["step_id"]: step for step in steps}
    earlier, later = by_id[drift["earlier_step_id"]], by_id[drift["step_id"]]
    full = earlier["prompt_ids"] + earlier["choices"][0]["ids"]
    assert full[: drift["index"]] == later["prompt_ids"][: drift["index"]]
    assert full[drift["index"]] != later["prompt_ids"][drift["index"]]
