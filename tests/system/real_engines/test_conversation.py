"""Conversations of an unmodified agent: the tree, the sequences, and their scores by the engine."""

import asyncio

import pytest

from .calls import CALL, QUESTION, TOOL
from .through import through_proxy

# Each digit is a token, so text preserves them; the second EOS would not come back from text.
DIGITS = {"structured_outputs": {"regex": "[0-9]{4}"}}
NO_SECOND_END = {"4087": -100}
TOLERANCE = 1e-4


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
        called = await say(agent, messages, stream=stream, preserve=preserve, structured_outputs={"regex": CALL})
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
async def test_a_template_that_keeps_turns_gives_one_sequence_or_reported_drift(vllm, tmp_path, stream):
    """Steps join where ids extend each other; where a forced call is tokenized differently, the fork is drift."""
    async with through_proxy(vllm.url, tmp_path) as proxy:
        steps, rows, tree = await converse(proxy, "r1", stream=stream, preserve=True)

    assert 3 == len(steps)
    assert all(step["fidelity"]["exact"] for step in steps)
    check_rows(steps, rows)
    parents = [node["parent"] for node in tree["nodes"]]
    assert 1 == parents[2]  # digits come back as they were sampled: the third turn extends the second
    assert len(rows) == 1 + len(tree["drift"]) == parents.count(None)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_template_that_strips_turns_forks_and_rows_have_only_recorded_ids(vllm, tmp_path, stream):
    """Every fork is reported as drift."""
    async with through_proxy(vllm.url, tmp_path) as proxy:
        steps, rows, tree = await converse(proxy, "r1", stream=stream, preserve=False)

    check_rows(steps, rows)
    assert len(rows) > 1
    drift = tree["drift"][0]
    by_id = {step["step_id"]: step for step in steps}
    earlier, later = by_id[drift["earlier_step_id"]], by_id[drift["step_id"]]
    full = earlier["prompt_ids"] + earlier["choices"][0]["ids"]
    assert full[: drift["index"]] == later["prompt_ids"][: drift["index"]]
    assert full[drift["index"]] != later["prompt_ids"][drift["index"]]


async def rescored(direct, row) -> list[float]:
    """Return the engine's logprob of each trained token of a row, given the row's own ids as prompt."""
    ids = row["token_ids"]
    scored = await direct.completions.create(model="tiny", prompt=ids, max_tokens=1, extra_body={"prompt_logprobs": 0})
    entries = scored.choices[0].prompt_logprobs
    return [entries[index][str(ids[index])]["logprob"] for index, trained in enumerate(row["mask"]) if trained]


def differences(row, scores) -> list[float]:
    """Return how far each recorded logprob of a trained token is from the engine's."""
    kept = [logprob for logprob, trained in zip(row["logprobs"], row["mask"], strict=True) if trained]
    return [abs(recorded_logprob - other) for recorded_logprob, other in zip(kept, scores, strict=True)]


async def chatter(agent, *, stream, preserve):
    """Run three turns of free text: unconstrained sampling, so the engine can score it again."""
    messages = []
    for turn in range(3):
        messages.append({"role": "user", "content": f"Turn {turn}."})
        messages.append(await say(agent, messages, stream=stream, preserve=preserve))


async def test_every_exported_sequence_scores_as_recorded(vllm, direct, tmp_path):
    """Ids, masks and logprobs are aligned: the engine computes the same logprobs again."""
    async with through_proxy(vllm.url, tmp_path) as proxy:
        for number, (stream, preserve) in enumerate(((True, True), (False, False))):
            async with proxy.agent(f"r{number}") as agent:
                await chatter(agent, stream=stream, preserve=preserve)
        async with proxy.agent("r2") as agent:
            await asyncio.gather(
                *(
                    agent.chat.completions.create(
                        model="tiny", messages=QUESTION, seed=seed, n=3, max_tokens=120, temperature=1.0
                    )
                    for seed in range(4)
                )
            )
            await agent.completions.create(model="tiny", prompt=["Once upon", "A"], n=2, max_tokens=60, seed=3)
        rows = [row for name in ("r0", "r1", "r2") for row in await proxy.rows(name)]

    worst, tokens = 0.0, 0
    for row in rows:
        found = differences(row, await rescored(direct, row))
        worst, tokens = max(worst, *found), tokens + len(found)
    assert tokens > 500
    assert worst < TOLERANCE, (worst, tokens)


async def test_logprobs_under_a_grammar_are_those_after_its_mask(vllm, direct, tmp_path):
    """Scoring without the grammar returns lower ones, never higher (vLLM 0.32)."""
    async with through_proxy(vllm.url, tmp_path) as proxy:
        async with proxy.agent("r1") as agent:
            await say(agent, list(QUESTION), stream=False, preserve=True, **DIGITS)
        (row,) = await proxy.rows("r1")
        (step,) = await proxy.steps("r1")
    kept = [logprob for logprob, trained in zip(row["logprobs"], row["mask"], strict=True) if trained]
    scores = await rescored(direct, row)

    assert all(score < logprob + TOLERANCE for score, logprob in zip(scores, kept, strict=True))
    assert max(differences(row, scores)) > 1
    assert DIGITS["structured_outputs"] == step["sampling"]["structured_outputs"]


async def test_scoring_detects_a_wrong_token_and_a_shifted_mask(vllm, direct, tmp_path):
    """The test above can fail: modified rows score differently."""
    async with through_proxy(vllm.url, tmp_path) as proxy:
        async with proxy.agent("r1") as agent:
            await agent.chat.completions.create(model="tiny", messages=QUESTION, seed=5, max_tokens=60)
        (row,) = await proxy.rows("r1")
    start, end = row["spans"][0]["start"], row["spans"][0]["end"]
    wrong = row["token_ids"].copy()
    wrong[start + 5] = (wrong[start + 5] + 1) % 4000
    shifted = [None, *row["logprobs"][:-1]]
    mask = [0, *row["mask"][:-1]]
    tampered = row | {"token_ids": wrong}
    moved = row | {"mask": mask, "logprobs": shifted}

    assert max(differences(row, await rescored(direct, row))) < TOLERANCE
    assert max(differences(tampered, await rescored(direct, tampered))) > 0.01
    assert max(differences(moved, await rescored(direct, moved))) > 0.01
    assert end > start
