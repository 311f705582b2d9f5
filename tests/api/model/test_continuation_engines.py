"""Continuation at engines with faults: ids that are changed, ignored or rejected, and tokenizers that fail."""

import asyncio
from base64 import b64decode

import pytest
from aiohttp import web
from tests.support.continued_calls import CHAT, DETOKENIZE, TOKENIZE, continuations, continuations_made, served, tapped

from proxy.simulator.engine import experts_as_int32
from proxy.trajectory.facts import RolloutFacts
from proxy.trajectory.sequence import Options, sequences

KV = "kv_transfer_params"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_other_ids_than_were_sent_flag_the_step(store, stream):
    """The step has the ids that the engine returned, and the endpoint gets no more ids."""
    async with served(store) as proxy:
        agent = proxy.agent("r1", stream=stream)
        await agent.turns(2)
        proxy.engine.options.faults.prompt_ids = "changed"
        await agent.turn()
        (sent,) = (body[KV]["prompt_token_ids"] for body in proxy.engine.bodies()[-1:])
        proxy.engine.options.faults.prompt_ids = None
        await agent.turns(2)
        await proxy.check_unchanged(agent)
        steps, counts = await proxy.steps("r1"), await proxy.counts()

    assert continuations(steps) == [None, "sent", "sent", "returned_ids", "returned_ids"]
    assert [step.exact for step in steps] == [True, True, False, True, True]
    assert "other_prompt" in steps[2].problems
    assert [*sent[:-1], (sent[-1] + 1) % 256] == list(steps[2].prompts[0])
    assert counts == {"continued": 2, "refused:returned_ids": 2}


@pytest.mark.parametrize(
    ("changed", "outcomes"),
    [((0, 1, 2), ["sent", "sent", "sent", "returned_ids", "returned_ids"]), ((1, 2, 3), ["sent"] * 5)],
    ids=["three rollouts", "three, after one got its ids"],
)
async def test_other_ids_end_the_continuation_of_others_if_three_rollouts_got_them_and_none_its_own(
    store, changed, outcomes
):
    async with served(store) as proxy:
        agents = [proxy.agent(f"r{number}") for number in range(5)]
        for agent in agents:
            await agent.turn()
        found = []
        for number, agent in enumerate(agents):
            proxy.engine.options.faults.prompt_ids = "changed" if number in changed else None
            await agent.turn()
            found.append(continuations(await proxy.steps(f"r{number}"))[-1])

    assert outcomes == found


@pytest.mark.parametrize("field", ["image_url", "video_url", "audio_url", "input_audio", "image_embeds", "file"])
async def test_a_text_part_with_the_field_of_a_medium_is_not_continued(store, field):
    """Also if it is null: vLLM ignores prompt ids then. No step is flagged, and other rollouts are continued."""
    async with served(store) as proxy:
        dumping, other = proxy.agent("r1"), proxy.agent("r2")
        await dumping.turn()
        await other.turn()
        text = dumping.messages[0]["content"]
        dumping.messages.append({"role": "user", "content": [{"type": "text", "text": text, field: None}]})
        await dumping.call()
        await other.turn()
        steps, others = await proxy.steps("r1"), await proxy.steps("r2")

    assert continuations(steps) == [None, "content"]
    assert continuations(others) == [None, "sent"]
    assert [step.exact for step in steps] == [True, True]


async def test_ids_that_are_ignored_flag_the_step(store):
    """The engine renders the messages instead; that prompt is recorded."""
    async with served(store) as proxy:
        agent = proxy.agent("r1")
        await agent.turn()
        proxy.engine.options.faults.prompt_ids = "ignored"
        await agent.turns(2)
        steps = await proxy.steps("r1")
        rendered = (
            await proxy.http.post(proxy.engine.url + TOKENIZE, json={"messages": steps[1].body["messages"]})
        ).json()
        rendered = (await rendered)["tokens"]

    assert continuations(steps) == [None, "sent", "returned_ids"]
    assert rendered == list(steps[1].prompts[0])
    assert list(steps[1].problems) == ["other_prompt"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("status", [400, 404, 422])
async def test_a_call_is_sent_again_as_it_came_if_its_ids_are_rejected(store, stream, status):
    """The agent sees a usual response, the step is exact, and the endpoint gets no more ids until it is detected again."""
    async with served(store) as proxy:
        agent = proxy.agent("r1", stream=stream)
        await agent.turn()

        async def reject(body):
            return web.json_response({"error": {"message": "no ids"}}, status=status) if KV in body else None

        proxy.engine.faults[CHAT] = reject
        await agent.turn()
        await proxy.check_unchanged(agent)
        await agent.turn()
        await proxy.check_unchanged(agent)
        steps, counts = await proxy.steps("r1"), await proxy.counts()

    assert continuations(steps) == [None, "refused_ids", "refused_ids"]
    assert [step.exact for step in steps] == [True] * 3
    assert [KV in body for body in proxy.engine.bodies()[:3]] == [False, True, False]
    assert sum(KV in body for body in proxy.engine.bodies()) == 1
    assert counts["refused:refused_ids"] == 2


async def test_a_call_that_is_rejected_both_ways_does_not_mark_the_endpoint(store):
    """The ids were not the reason; the agent sees the engine's error."""
    async with served(store) as proxy:
        agent = proxy.agent("r1")
        await agent.turn()
        broken = agent.branch()
        broken.fields = {"temperature": -1}
        broken.messages.append({"role": "user", "content": "More?"})
        response = await broken.call()
        await agent.turn()
        found = continuations(await proxy.steps("r1"))

    assert broken.statuses == [400]
    assert "temperature" in response["error"]["message"]
    assert found == [None, "refused_ids", "sent"]


async def test_an_endpoint_that_rejected_ids_gets_them_again_after_its_detection(store):
    """An engine that is restarted may accept them; a lost connection leads to a detection."""
    async with served(store) as proxy:
        agent = proxy.agent("r1")
        await agent.turn()
        proxy.engine.options.faults.prompt_ids = "rejected"
        await agent.turn()
        proxy.engine.options.faults.prompt_ids = None

        proxy.engine.disconnects = True
        agent.messages.append({"role": "user", "content": "More?"})
        await agent.call()
        proxy.engine.disconnects = False
        agent.messages.pop()
        await agent.turn()
        await agent.turn()
        found = continuations(await proxy.steps("r1"))

    assert [None, "refused_ids", *found[2:-1], "sent"] == found
    assert agent.statuses[2] == 502


async def test_ids_out_of_vocabulary_cause_no_error(store):
    """A tokenizer endpoint that returns them costs one rejected request; the call is sent again as it came."""
    async with served(store) as proxy:
        agent = proxy.agent("r1", fields={"temperature": 0})
        await agent.turn()
        (step,) = await proxy.steps("r1")
        recorded = [*step.prompts[0], *step.choices[0].ids]
        proxy.engine.answers(TOKENIZE, {"tokens": [*recorded, 10**9], "count": 1, "max_model_len": 32768})
        await agent.turn()
        await proxy.check_unchanged(agent)
        steps = await proxy.steps("r1")

    assert continuations(steps) == [None, "refused_ids"]
    assert [step.exact for step in steps] == [True, True]


async def test_a_tokenizer_that_hangs_delays_a_call_by_the_timeout_at_most(store, monkeypatch):
    """The call is sent unchanged, and its reason is counted; without the timeout, it would not end."""
    made = continuations_made(monkeypatch)
    async with served(store, sections={"continuation": {"timeout_s": 0.2}}) as proxy:
        agent = proxy.agent("r1")
        await agent.turn()
        proxy.engine.options.faults.tokenize = "hangs"
        loop = asyncio.get_running_loop()
        started = loop.time()
        await agent.turn()
        elapsed = loop.time() - started
        await proxy.check_unchanged(agent)
        proxy.engine.options.faults.tokenize = None
        made[0]._timeout_s = 50
        await agent.turn()
        steps, counts = await proxy.steps("r1"), await proxy.counts()

    assert elapsed >= 0.2
    assert continuations(steps) == [None, "timeout", "sent"]
    assert all(step.exact for step in steps)
    assert counts["refused:timeout"] == 1


async def test_an_engine_that_hangs_three_times_in_a_row_is_not_asked_for_a_minute(store, caplog):
    """Calls of every rollout are sent unchanged at once."""
    async with served(store, sections={"continuation": {"timeout_s": 0.2}}) as proxy:
        agent, other = proxy.agent("r1"), proxy.agent("r2")
        await agent.turn()
        await other.turn()
        proxy.engine.options.faults.tokenize = "hangs"
        await agent.turns(3)
        asked = len(proxy.engine.bodies(TOKENIZE))
        proxy.engine.options.faults.tokenize = None
        await agent.turn()
        await other.turn()
        counts = await proxy.counts()

    assert asked == len(proxy.engine.bodies(TOKENIZE))
    assert counts["refused:timeout"] == 5
    assert "did not render 3 calls in a row" in caplog.text


@pytest.mark.parametrize("path", [TOKENIZE, DETOKENIZE])
@pytest.mark.parametrize("status", [401, 404, 500])
async def test_a_tokenizer_that_fails_sends_the_call_unchanged(store, path, status):
    """After 404 the endpoint has no such route, and gets no more such requests."""
    async with served(store, noncanonical_rate=1.0) as proxy:
        agent = proxy.agent("r1")
        await agent.turn()
        proxy.engine.answers(path, {"detail": "no"}, status=status)
        await agent.turn()
        await proxy.check_unchanged(agent)
        await agent.turn()
        renderings = len(proxy.engine.raw(TOKENIZE))
        steps, counts = await proxy.steps("r1"), await proxy.counts()

    reason = "unsupported" if status == 404 else "tokenize"
    assert continuations(steps) == [None, reason, reason]
    assert all(step.exact for step in steps)
    assert counts == {f"refused:{reason}": 2}
    assert (1 if path == DETOKENIZE and status == 404 else 2) == renderings  # after 404 without a model's name one more


GARBAGE = [None, [], "x", {}, {"tokens": None}, {"tokens": "abc"}, {"tokens": [1.5]}, {"tokens": [[1]]}, {"tokens": [-1]},
           {"tokens": [2**40]}, {"tokens": []}, {"tokens": [1]}, {"tokens": [7] * 500, "max_model_len": "x"},
           {"prompt": None}, {"prompt": 5}, {"prompt": "other"}, {"prompt": ""}]  # fmt: skip


@pytest.mark.parametrize("path", [TOKENIZE, DETOKENIZE])
@pytest.mark.parametrize("mode", ["faithful", "append"])
async def test_garbage_of_a_tokenizer_causes_no_error_and_no_wrong_prompt(store, path, mode):
    """Of wrong types, of other conversations, or empty: no call fails, and what is sent ends as the rendering does."""
    async with served(store, noncanonical_rate=1.0, sections={"continuation": {"mode": mode}}) as proxy:
        first = proxy.agent("r1")
        await first.turn()
        for garbage in GARBAGE:
            proxy.engine.answers(path, garbage)
            agent = first.branch()
            await agent.turn()
            if KV not in proxy.engine.bodies()[-1]:
                await proxy.check_unchanged(agent)
        proxy.engine.faults.clear()
        await proxy.check_bridges("r1")
        steps, counts = await proxy.steps("r1"), await proxy.counts()

    assert all(step.exact for step in steps)
    assert {"history", "sent", "tokenize", "close", "content_stripped"} >= {*continuations(steps)} - {None}
    assert len(GARBAGE) == counts.total()


async def test_sglang_gets_ids_once_a_rendering_was_equal_to_a_prompt(store):
    """Until then calls are sent unchanged; its streams and its completions too are recorded exactly."""
    async with served(store, shape="sglang") as proxy:
        for stream in (False, True):
            agent = proxy.agent(f"r{stream}", stream=stream)
            await agent.turns(4)
            rows, found = await proxy.rows(f"r{stream}"), continuations(await proxy.steps(f"r{stream}"))
            assert found == [None, "sent", "sent", "sent"]
            assert len(rows) == 1

    assert ["input_ids" in body for body in proxy.engine.bodies()] == [False, True, True, True] * 2


async def test_sglang_gets_no_ids_if_its_rendering_differs(store):
    """The routes are known from reading only, so that they are checked first."""
    async with served(store, shape="sglang") as proxy:
        agent = proxy.agent("r1")
        await agent.turn()
        proxy.engine.answers("/v1/tokenize", {"tokens": [1, 2, 3], "count": 3, "max_model_len": 100})
        await agent.turn()
        await proxy.check_unchanged(agent)
        del proxy.engine.faults["/v1/tokenize"]
        await agent.turn()
        steps, counts = await proxy.steps("r1"), await proxy.counts()

    assert continuations(steps) == [None, "unverified", "sent"]
    assert counts["refused:unverified"] == 1


async def test_an_engine_with_another_rendering_does_not_render_each_turn(store):
    """After three turns not for a rollout; after three rollouts not for the others, unless its rendering was equal for one."""
    async with served(store, shape="sglang") as proxy:
        proxy.engine.answers("/v1/tokenize", {"tokens": [1, 2, 3], "count": 3, "max_model_len": 100})
        asked = []
        for number in range(4):
            await proxy.agent(f"r{number}").turns(6)
            asked.append(len(proxy.engine.raw("/v1/tokenize")))
        steps, counts = await proxy.steps("r3"), await proxy.counts()

    assert asked == [3, 6, 9, 9]
    assert continuations(steps) == [None, *["unverified"] * 5]
    assert counts == {"refused:unverified": 20}


async def test_a_rejection_after_a_failover_is_sent_again_to_the_same_endpoint(store):
    """The second endpoint rejects ids: it gets the call as it came, and no third one is needed."""
    async with tapped() as dead, tapped() as rejecting:
        endpoints = [{"url": dead.url, "name": "dead"}, {"url": rejecting.url, "name": "rejecting"}]
        sections = {"engines": {"endpoints": endpoints, "eject_after": 1000}}
        async with served(store, engine=rejecting, sections=sections) as proxy:
            agents = []
            while not dead.bodies():  # until the first endpoint of a rollout is this one
                agents.append(proxy.agent(f"r{len(agents)}"))
                await agents[-1].turn()
            rejecting.options.faults.prompt_ids = "rejected"
            dead.answers(CHAT, {"error": {"message": "loading"}}, status=503)
            for agent in agents:
                await agent.turn()
            steps = [step for agent in agents for step in (await proxy.steps(agent.rollout))]

    assert [200, 200] * len(agents) == [status for agent in agents for status in agent.statuses]
    assert {found for found in continuations(steps) if found} == {"refused_ids"}
    assert all(step.exact for step in steps)
    assert KV in dead.bodies()[1]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_prompt_ids_are_sent_in_the_field_of_a_vllm_that_has_one(store, stream):
    """Its `/openapi.json` names the field."""
    async with served(store, has_prompt_field=True) as proxy:
        agent = proxy.agent("r1", stream=stream)
        await agent.turns(3)
        steps, bodies = await proxy.steps("r1"), proxy.engine.bodies()

    assert continuations(steps) == [None, "sent", "sent"]
    assert all(step.exact for step in steps)
    assert [None, list(steps[1].prompts[0])] == [body.get("prompt_token_ids") for body in bodies[:2]]
    assert not any(KV in body for body in bodies)


@pytest.mark.parametrize("mode", ["append", "off"])
async def test_the_experts_of_every_token_of_a_conversation_are_in_its_row_once(store, mode):
    """A continued call requests those from the last sampled token on, which no earlier response has."""
    sections = {"record": {"routed_experts": True}, "continuation": {"mode": mode}}
    async with served(store, shape="sglang", routed_experts=True, noncanonical_rate=0.0, sections=sections) as proxy:
        agent = proxy.agent("r1")
        await agent.turns(4)
        steps, bodies = await proxy.steps("r1"), proxy.engine.bodies()

    assert [step.problems for step in steps] == [()] * 4
    kept = [(step.extra.get("continuation") or {}).get("kept") for step in steps]
    assert [None if count is None else count - 1 for count in kept] == [
        body.get("routed_experts_start_len") for body in bodies
    ]
    for row in sequences(steps, RolloutFacts("r1", None, "completed"), Options()).each():
        whole = b64decode(experts_as_int32(row.token_ids))
        assert whole == row.experts.raw
        assert len(row.token_ids) - 1 == row.experts.count
