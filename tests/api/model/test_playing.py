"""Calls of playbacks: answered from the tape, refused, or live from the branch step on."""

import asyncio
import json
from array import array
from dataclasses import replace

import anthropic
import openai
import pytest
from tests.support.fakes import proxying
from tests.support.stored import stored_steps, wait_for_undelivered

from proxy.server.listener import simulating
from proxy.simulator.options import Options
from proxy.simulator.script import Conversation, Script, ScriptedCall, Turn
from proxy.trajectory.codec import encode
from storage.errors import StoreUnreachable
from storage.types import StepWrite

TURNS = [
    Turn(say="I look.", call=[ScriptedCall("weather", {"city": "Oslo"}), ScriptedCall("weather", {"city": "Rome"})]),
    Turn(say="It rains."),
    Turn(say="Bye."),
]
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]


class Proxies:
    """Two proxies that share a store and an engine, and the number of calls that the engine got."""

    def __init__(self, http, engine, first, second):
        self.http, self.engine, self.urls = http, engine, (first.url, second.url)

    async def open(self, status=201, **body):
        async with self.http.post(f"{self.urls[0]}/rollouts", json=body) as response:
            shown = await response.json()
            assert response.status == status, shown
            return shown

    async def show(self, rollout):
        async with self.http.get(f"{self.urls[1]}/rollouts/{rollout}") as response:
            return await response.json()

    async def chat(self, rollout, messages, at=0, headers=None, **body):
        url = f"{self.urls[at]}/rollouts/{rollout}/v1/chat/completions"
        body = {"model": "m", "messages": messages, "tools": TOOLS, **body}
        async with self.http.post(url, json=body, headers=headers or {}) as response:
            return response.status, dict(response.headers), await response.json(content_type=None)


@pytest.fixture
async def proxies(http, store):
    """Two proxies of a simulated engine."""
    script = Script([Conversation(TURNS)])
    async with (
        simulating("127.0.0.1:0", Options(script=script, image_tokens=4)) as engine,
        proxying(engine, store) as first,
        proxying(engine, store) as second,
    ):
        yield Proxies(http, engine, first, second)


async def run(proxies, rollout, *, calls=3, at=lambda number: 0, question="Weather?", **body):
    """An agent: run tools in any order, and ask on. Returns the responses, until one is no success."""
    messages, responses = [{"role": "user", "content": question}], []
    for number in range(calls):
        status, headers, shown = await proxies.chat(rollout, messages, at(number), **body)
        responses.append((status, headers.get("X-Playback"), shown))
        if status != 200:
            break
        reply = shown["choices"][0]["message"]
        messages.append(reply)
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": call["function"]["arguments"]}
            for call in reply.get("tool_calls") or []
        ]
        messages += results or [{"role": "user", "content": f"And {number}?"}]
    return responses


def replies(responses):
    return [shown["choices"][0]["message"] for _, _, shown in responses]


async def test_a_full_playback_gives_the_same_responses_without_an_engine(proxies, store):
    recorded = await run(proxies, "r1")
    await proxies.open(rollout_id="p1", playback={"of": "r1"})
    before = await proxies.show("r1")
    played = await run(proxies, "p1", at=lambda number: number % 2)
    assert [(status, how) for status, how, _ in played] == [(200, "answered")] * 3
    assert replies(played) == replies(recorded)
    sources, steps = await stored_steps(store, "r1"), await stored_steps(store, "p1")
    assert [step.step_id for step in steps] == [step.step_id for step in sources]
    for source, step in zip(sources, steps, strict=True):
        assert step.inherited == ("r1", source.step_id)
        assert [list(prompt) for prompt in step.prompts] == [list(prompt) for prompt in source.prompts]
        assert step.choices == source.choices
        assert (step.body, step.response) == (source.body, source.response)
    shown = await proxies.show("p1")
    tokens = sum(step.sampled for step in sources)
    assert shown["counts"]["sampled_tokens"] == 0
    assert shown["counts"]["steps"] == 3
    stored = await store.get("p1")
    assert (stored.counts["inherited"], stored.counts["inherited_tokens"]) == (3, tokens)
    assert (await proxies.show("r1"))["counts"] == before["counts"]


async def test_a_call_that_the_tape_does_not_have_is_refused_with_the_difference(proxies, store):
    await run(proxies, "r1")
    await proxies.open(rollout_id="p1", playback={"of": "r1"})
    status, headers, shown = await proxies.chat("p1", [{"role": "user", "content": "Snow?"}])
    assert (status, shown["error"]["code"], headers["X-Should-Retry"]) == (422, "playback_mismatch", "false")
    assert "messages[0].content: 'Snow?', recorded 'Weather?'" in shown["error"]["message"]
    status, _, shown = await proxies.chat("p1", [{"role": "user", "content": "Weather?"}], temperature=0.5)
    assert status == 422
    assert "temperature: '0.5', recorded 'null'" in shown["error"]["message"]
    assert await stored_steps(store, "p1") == []
    stored = await store.get("p1")
    mismatch = json.loads(stored.fields["mismatch"])
    assert mismatch["count"] == 2
    assert mismatch["first"]["path"] == "messages[0].content"


@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("where", ["before", "through"])
async def test_a_branch_is_live_from_its_step_on_with_the_prompt_ids_of_the_source(proxies, store, number, where):
    await run(proxies, "r1", temperature=1.0)
    sources = await stored_steps(store, "r1")
    await proxies.open(rollout_id="p1", playback={"of": "r1", where: sources[number].step_id})
    inherited = number + (where == "through")
    played = await run(proxies, "p1", temperature=1.0)
    assert [how for _, how, _ in played] == ["answered"] * inherited + [None] * (3 - inherited)
    steps = await stored_steps(store, "p1")
    assert [step.inherited is not None for step in steps] == [at < inherited for at in range(3)]
    assert not any(step.problems for step in steps)
    if inherited < 3:
        branch = steps[inherited]
        assert branch.step_id != sources[inherited].step_id
        assert [list(prompt) for prompt in branch.prompts] == [list(prompt) for prompt in sources[inherited].prompts]
        assert branch.extra["branched_from"] == {"rollout_id": "r1", "step_id": sources[inherited].step_id, "ids": True}
    assert json.loads((await store.get("p1")).fields.get("has_branched", b"false")) is (inherited < 3)


async def test_before_the_branch_step_other_calls_are_refused(proxies, store):
    await run(proxies, "r1")
    second = (await stored_steps(store, "r1"))[1].step_id
    await proxies.open(rollout_id="p1", playback={"of": "r1", "before": second})
    assert (await proxies.chat("p1", [{"role": "user", "content": "Snow?"}]))[0] == 422
    await run(proxies, "p1", calls=2)
    assert (await proxies.chat("p1", [{"role": "user", "content": "Snow?"}]))[0] == 200


async def test_each_step_is_used_once_by_equal_calls_of_two_proxies(proxies, store):
    question = [{"role": "user", "content": "Weather?"}]
    for _ in range(40):
        await proxies.chat("r1", question)
    await proxies.open(rollout_id="p1", playback={"of": "r1"})
    results = await asyncio.gather(*(proxies.chat("p1", question, number % 2) for number in range(50)))
    assert sorted(status for status, _, _ in results) == [200] * 40 + [422] * 10
    steps = await stored_steps(store, "p1")
    assert sorted(step.step_id for step in steps) == sorted(step.step_id for step in await stored_steps(store, "r1"))


async def test_a_declared_retry_gets_the_same_step_again(proxies, store):
    question = [{"role": "user", "content": "Weather?"}]
    await proxies.chat("r1", question)
    await proxies.open(rollout_id="p1", playback={"of": "r1"})
    _, first, _ = await proxies.chat("p1", question)
    for at in (0, 1):  # another process knows the used steps from the store
        _, headers, _ = await proxies.chat("p1", question, at, {"X-Stainless-Retry-Count": "1"})
        assert (headers["X-Playback"], headers["X-Step-Id"]) == ("again", first["X-Step-Id"])
    assert (await proxies.chat("p1", question))[0] == 422
    assert len(await stored_steps(store, "p1")) == 1


async def test_a_playback_of_a_deleted_source_is_never_sampled(proxies, store):
    await run(proxies, "r1")
    await proxies.open(rollout_id="p1", playback={"of": "r1", "on_mismatch": "sample"})
    await run(proxies, "p1", calls=1)
    await store.delete("r1")
    for at in (0, 1):
        status, _, shown = await proxies.chat("p1", [{"role": "user", "content": "Weather?"}], at)
        assert (status, shown["error"]["code"]) == (410, "playback_source_gone")
    assert len(await stored_steps(store, "p1")) == 1


async def test_a_message_that_differs_in_what_is_ignored_is_answered_and_branched_from(proxies, store):
    await run(proxies, "r1", question="It is Monday 3.\nWeather?")
    sources = await stored_steps(store, "r1")
    terms = {"of": "r1", "before": sources[1].step_id, "ignore": ["It is *"]}
    await proxies.open(rollout_id="p1", playback=terms)
    played = await run(proxies, "p1", question="It is Tuesday 4.\nWeather?")
    assert [status for status, _, _ in played] == [200] * 3
    steps = await stored_steps(store, "p1")
    assert steps[0].body["messages"] == sources[0].body["messages"]
    assert steps[0].request["messages"][0]["content"] == "It is Tuesday 4.\nWeather?"
    for step, source in zip(steps, sources, strict=True):
        assert [list(prompt) for prompt in step.prompts] == [list(prompt) for prompt in source.prompts]


async def test_a_stream_is_answered_as_a_stream_and_other_dialects_as_themselves(proxies, store, sdk):
    client = sdk(anthropic.AsyncAnthropic, f"{proxies.urls[0]}/rollouts/r1")
    options = {"model": "m", "max_tokens": 99, "messages": [{"role": "user", "content": "Weather?"}]}
    recorded = await client.messages.create(**options)
    await proxies.open(rollout_id="p1", playback={"of": "r1"})
    client = sdk(anthropic.AsyncAnthropic, f"{proxies.urls[1]}/rollouts/p1")
    async with client.messages.stream(**options) as events:
        played = await events.get_final_message()
    assert [block.model_dump() for block in played.content] == [block.model_dump() for block in recorded.content]
    assert (await stored_steps(store, "p1"))[0].inherited


async def test_responses_refer_to_the_steps_of_their_playback(proxies, store, sdk):
    client = sdk(openai.AsyncOpenAI, f"{proxies.urls[0]}/rollouts/r1/v1")
    first = await client.responses.create(model="m", input="Weather?")
    second = await client.responses.create(model="m", input="And?", previous_response_id=first.id)
    await proxies.open(rollout_id="p1", playback={"of": "r1"})
    client = sdk(openai.AsyncOpenAI, f"{proxies.urls[1]}/rollouts/p1/v1")
    played = await client.responses.create(model="m", input="Weather?")
    assert played.id != first.id
    assert played.output_text == first.output_text
    again = await client.responses.create(model="m", input="And?", previous_response_id=played.id)
    assert again.output_text == second.output_text
    assert all(step.inherited for step in await stored_steps(store, "p1"))


async def test_openings_with_unknown_sources_and_steps_are_refused(proxies):
    await run(proxies, "r1", calls=1)
    await proxies.open(404, playback={"of": "r2"})
    await proxies.open(404, playback={"of": "r1", "before": "none"})
    await proxies.open(422, playback={"of": "r1", "on_mismatch": "branch"})
    await proxies.open(422, playback={"of": "r1", "before": "a", "through": "b"})
    await proxies.open(422, playback={"of": "r1", "presets": ["unknown"]})
    await proxies.open(422, playback={"of": "r1", "ignore": ["*"]})


async def test_a_retry_gets_no_step_that_an_earlier_equal_call_received(proxies, store):
    question = [{"role": "user", "content": "Weather?"}]
    for _ in range(2):
        await proxies.chat("r1", question)
    first, second = [step.step_id for step in await stored_steps(store, "r1")]
    await proxies.open(rollout_id="p1", playback={"of": "r1"})
    assert (await proxies.chat("p1", question))[1]["X-Step-Id"] == first
    async with asyncio.timeout(20):
        while not read_marks_of(await store.marks("p1"), first):
            await asyncio.sleep(0.005)
    _, headers, _ = await proxies.chat(
        "p1", question, 1, {"X-Stainless-Retry-Count": "1"}
    )  # its first attempt was lost
    assert (headers["X-Playback"], headers["X-Step-Id"]) == ("answered", second)


def read_marks_of(marks, step_id):
    return f"delivered:{step_id}" in marks


async def test_a_step_whose_client_has_left_is_given_again(proxies, store):
    await run(proxies, "r1", calls=1)
    await proxies.open(rollout_id="p1", playback={"of": "r1"})
    reached, proceed = store.pauses("append")
    leaving = asyncio.create_task(run(proxies, "p1", calls=1))
    await reached.wait()
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    proceed.set()
    step_id = (await stored_steps(store, "r1"))[0].step_id
    await wait_for_undelivered(store, "p1")
    for at in (1, 0):
        _, headers, _ = await proxies.chat("p1", [{"role": "user", "content": "Weather?"}], at)
        assert (headers["X-Playback"], headers["X-Step-Id"]) == ("again", step_id)
        if at == 1:
            async with asyncio.timeout(20):
                while not read_marks_of(await store.marks("p1"), step_id):
                    await asyncio.sleep(0.005)
            break
    assert len(await stored_steps(store, "p1")) == 1


async def test_a_call_that_cannot_be_stored_uses_no_step(proxies, store):
    await run(proxies, "r1", calls=1)
    await proxies.open(rollout_id="p1", playback={"of": "r1"})
    store.failing.add("append")
    assert (await run(proxies, "p1", calls=1))[0][0] == 503
    store.failing.clear()
    async with asyncio.timeout(20):
        while (await run(proxies, "p1", calls=1))[0][0] == 503:
            await asyncio.sleep(0.01)
    assert [step.inherited is not None for step in await stored_steps(store, "p1")] == [True]


async def test_the_tape_answers_during_a_pause_and_live_calls_wait(proxies, store):
    await run(proxies, "r1")
    second = (await stored_steps(store, "r1"))[1].step_id
    await proxies.open(rollout_id="p1", playback={"of": "r1", "before": second})
    async with proxies.http.post(f"{proxies.urls[0]}/policy/pause?drain_s=1", json={}) as response:
        assert response.status == 200
    answered = await run(proxies, "p1", calls=1)
    assert answered[0][1] == "answered"
    playing = asyncio.create_task(run(proxies, "p1", calls=3))  # its first call is refused: the step is used
    assert (await playing)[0][0] == 422
    await proxies.open(rollout_id="p2", playback={"of": "r1", "before": second})
    playing = asyncio.create_task(run(proxies, "p2", calls=2))
    done, _ = await asyncio.wait([playing], timeout=0.3)
    assert not done
    async with proxies.http.post(f"{proxies.urls[0]}/policy/resume", json={}) as response:
        assert response.status == 200
    assert [how for _, how, _ in await playing] == ["answered", None]


async def test_limits_count_inherited_steps_and_only_live_tokens(proxies, store):
    await run(proxies, "r1")
    await proxies.open(rollout_id="p1", playback={"of": "r1"}, limits={"max_steps": 2, "max_tokens": 1})
    assert [status for status, _, _ in await run(proxies, "p1")] == [200, 200, 429]


async def test_an_idempotency_key_gives_the_same_step_from_any_process(proxies, store):
    await run(proxies, "r1", calls=1)
    await proxies.open(rollout_id="p1", playback={"of": "r1"})
    question, key = [{"role": "user", "content": "Weather?"}], {"Idempotency-Key": "k"}
    shown = [await proxies.chat("p1", question, at, key) for at in (0, 1, 0)]
    assert [status for status, _, _ in shown] == [200] * 3
    assert {headers["X-Step-Id"] for _, headers, _ in shown} == {(await stored_steps(store, "r1"))[0].step_id}
    assert len(await stored_steps(store, "p1")) == 1


async def test_a_call_that_the_engine_rejected_is_rejected_again(proxies, store):
    question = [{"role": "user", "content": "Weather?"}]
    status, _, recorded = await proxies.chat("r1", question, max_tokens=-1)
    assert status == 400
    await proxies.open(rollout_id="p1", playback={"of": "r1"})
    status, headers, shown = await proxies.chat("p1", question, max_tokens=-1)
    assert (status, headers["X-Playback"], shown) == (400, "answered", recorded)


async def test_several_choices_and_images_are_answered(proxies, store):
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
    question = [{"role": "user", "content": [{"type": "text", "text": "What?"}, picture]}]
    _, _, recorded = await proxies.chat("r1", question, n=3)
    await proxies.open(rollout_id="p1", playback={"of": "r1"})
    _, headers, shown = await proxies.chat("p1", question, n=3)
    assert headers["X-Playback"] == "answered"
    assert shown["choices"] == recorded["choices"]
    other = [
        {
            "role": "user",
            "content": [question[0]["content"][0], {**picture, "image_url": {"url": "data:image/png;base64,AA=="}}],
        }
    ]
    assert (await proxies.chat("p1", other, n=3))[0] == 422


async def test_a_concurrent_call_of_the_source_may_come_before_the_branch_step(proxies, store):
    """Two threads of an agent: which of them calls first is a race in every run."""
    questions = [[{"role": "user", "content": text}] for text in ("One?", "Two?")]
    for question in questions:
        await proxies.chat("r1", question)
    first = (await stored_steps(store, "r1"))[0].step_id
    await proxies.open(rollout_id="p1", playback={"of": "r1", "before": first})
    assert (await proxies.chat("p1", [{"role": "user", "content": "Three?"}]))[0] == 422
    assert (await proxies.chat("p1", questions[1]))[0] == 200
    assert (await proxies.chat("p1", questions[0]))[0] == 200
    steps = await stored_steps(store, "p1")
    assert [step.extra["branched_from"]["ids"] for step in steps] == [True, True]


async def test_a_branch_with_continuation_off_gets_the_ids_of_the_source(proxies, store):
    await run(proxies, "r1", temperature=1.0)
    sources = await stored_steps(store, "r1")
    terms = {"of": "r1", "before": sources[2].step_id}
    await proxies.open(rollout_id="p1", playback=terms, continuation="off")
    played = await run(proxies, "p1", temperature=1.0, at=lambda number: number % 2)
    assert [how for _, how, _ in played] == ["answered", "answered", None]
    branch = (await stored_steps(store, "p1"))[2]
    assert [list(prompt) for prompt in branch.prompts] == [list(prompt) for prompt in sources[2].prompts]
    assert branch.extra["branched_from"]["ids"] is True


async def test_a_branch_needs_no_cache_of_texts_and_no_known_process(http, store, proxies):
    await run(proxies, "r1", temperature=1.0)
    sources = await stored_steps(store, "r1")
    settings = {"engines": {"text_cache_bytes": 0}}
    for at, source in enumerate(sources):
        await proxies.open(rollout_id=f"p{at}", playback={"of": "r1", "before": source.step_id})
        async with proxying(proxies.engine, store, **settings) as cold:
            await run(Proxies(http, proxies.engine, cold, cold), f"p{at}", temperature=1.0)
        branch = (await stored_steps(store, f"p{at}"))[at]
        assert branch.prompts[0][:] == source.prompts[0][:]
        assert not branch.problems


async def test_the_prompt_ids_of_a_flagged_step_are_not_sent(proxies, store):
    """They may be wrong; sent as ids, they would look exact."""
    await run(proxies, "r1")
    opened = await store.open("r2", {}, now_ms=1)
    for step in await stored_steps(store, "r1"):
        wrong = array("i", [7, *step.prompts[0][:]])
        record = encode(replace(step, rollout_id="r2", prompts=(wrong,), problems=("prompt_count",)))
        write = StepWrite("r2", opened.incarnation, step.step_id, record.record, record.blocks, (), {"steps": 1})
        await store.append(write, now_ms=2)
    sources = await stored_steps(store, "r1")
    await proxies.open(rollout_id="p1", playback={"of": "r2", "before": sources[1].step_id})
    await run(proxies, "p1", calls=2)
    _, live = await stored_steps(store, "p1")
    assert live.extra["branched_from"]["ids"] is False
    assert live.prompts[0][:] == sources[1].prompts[0][:]
    assert not live.problems


async def test_another_model_gets_the_rendered_prompt_and_the_step_says_so(proxies, store):
    await run(proxies, "r1")
    second = (await stored_steps(store, "r1"))[1].step_id
    await proxies.open(rollout_id="p1", model="other", playback={"of": "r1", "before": second})
    await run(proxies, "p1", calls=2)
    steps = await stored_steps(store, "p1")
    assert (steps[1].model_served, steps[1].extra["branched_from"]["ids"]) == ("other", False)


async def test_a_playback_can_be_played_again(proxies, store):
    await run(proxies, "r1")
    second = (await stored_steps(store, "r1"))[1].step_id
    await proxies.open(rollout_id="p1", playback={"of": "r1", "before": second})
    branched = await run(proxies, "p1")
    await proxies.open(rollout_id="p2", playback={"of": "p1"})
    again = await run(proxies, "p2")
    assert replies(again) == replies(branched)
    steps = await stored_steps(store, "p2")
    assert [step.inherited.rollout_id for step in steps] == ["r1", "p1", "p1"]


async def test_an_edited_system_prompt_is_refused_where_it_differs(proxies, store):
    question = [{"role": "system", "content": "Be brief." * 200}, {"role": "user", "content": "Weather?"}]
    await proxies.chat("r1", question)
    await proxies.open(rollout_id="p1", playback={"of": "r1"})
    edited = [{"role": "system", "content": "Be brief." * 150 + "Be kind."}, question[1]]
    status, _, shown = await proxies.chat("p1", edited)
    assert status == 422
    assert "messages[0].content" in shown["error"]["message"]
    assert "brief.Be kind." in shown["error"]["message"]
    assert len(shown["error"]["message"]) < 1500


async def test_another_kind_of_engine_renders_the_branch_step(http, store, proxies):
    await run(proxies, "r1")
    second = (await stored_steps(store, "r1"))[1].step_id
    await proxies.open(rollout_id="p1", playback={"of": "r1", "before": second})
    options = Options(shape="sglang", script=Script([Conversation(TURNS)]))
    async with simulating("127.0.0.1:0", options) as engine, proxying(engine, store) as other:
        others = Proxies(http, engine, other, other)
        played = await run(others, "p1", calls=2)
    assert [how for _, how, _ in played] == ["answered", None]
    inherited, live = await stored_steps(store, "p1")
    assert (inherited.engine.kind, live.engine.kind) == ("vllm", "sglang")
    assert live.extra["branched_from"]["ids"] is False
    assert not live.problems


async def test_the_key_of_an_agent_opens_no_playback(http, store):
    settings = {"control": {"api_keys": ["secret"]}}
    async with simulating("127.0.0.1:0", Options()) as engine, proxying(engine, store, **settings) as proxy:
        async with http.post(
            f"{proxy.url}/rollouts", json={"rollout_id": "r1"}, headers={"Authorization": "Bearer secret"}
        ) as response:
            key = (await response.json())["api_key"]
        body = {"rollout_id": "p1", "playback": {"of": "r1"}}
        for route in ("/rollouts", "/groups", "/rollouts/r1/branches"):
            async with http.post(
                f"{proxy.url}{route}", json=body, headers={"Authorization": f"Bearer {key}"}
            ) as response:
                assert response.status in {401, 403}
        assert await store.get("p1") is None


async def test_a_step_that_was_stored_although_the_store_failed_is_given_again(proxies, store):
    await run(proxies, "r1", calls=1)
    await proxies.open(rollout_id="p1", playback={"of": "r1"})
    real = store.append

    async def loses_its_response(*entry, **named):
        await real(*entry, **named)
        raise StoreUnreachable("the response was lost", store.server_of("any"))

    store.append = loses_its_response
    assert (await run(proxies, "p1", calls=1))[0][0] == 503
    del store.append
    async with asyncio.timeout(20):
        while (played := await run(proxies, "p1", calls=1))[0][0] == 503:
            await asyncio.sleep(0.01)
    assert played[0][:2] == (200, "again")
    assert len(await stored_steps(store, "p1")) == 1
