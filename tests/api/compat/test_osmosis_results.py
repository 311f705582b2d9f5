"""Osmosis' remote rollouts through the proxy: calls, masks, and results."""

import asyncio

import pytest
from aiohttp import web
from tests.support.recorded import load
from tests.support.rollout_servers import ADD, QUESTION, dispatching, post, rollout_server
from tests.support.stored import TIMEOUT_S, stored_rollout, stored_steps, wait_for_steps

from proxy.api.api_keys import mint
from proxy.api.compat.osmosis import ticket
from proxy.rollouts.rollout import write_fields
from proxy.server.listener import simulating
from proxy.simulator.options import Options

WHOLE = load("chat_ids_lp")
FLAT = {"model": "default", "messages": QUESTION, "rollout_id": "r1", "max_tokens": 24, "response_mask": None}
CHAT = {"model": "default", "messages": QUESTION, "rollout_id": "r1", "max_tokens": 24}
DISPATCH = {"server": "calculator", "messages": QUESTION, "wait": True}


@pytest.fixture
def shape():
    return "vllm"


@pytest.fixture
async def simulator(shape):
    async with simulating("127.0.0.1:0", Options(shape=shape)) as url:
        yield url


@pytest.fixture
async def runner():
    async with rollout_server() as runner:
        yield runner


@pytest.fixture
async def proxy(simulator, store, runner):
    async with dispatching(simulator, store, runner) as proxy:
        yield proxy


async def exported(proxy):
    await proxy.http.patch(f"{proxy.url}/rollouts/r1", json={"reward": 1.0})
    return await proxy.rows("osmosis")


@pytest.mark.parametrize("shape", ["vllm", "sglang"])
async def test_os_1_a_rollout_of_an_unmodified_rollout_server_is_one_row_with_the_exact_mask(proxy, runner):
    """Two calls with a tool result between them; the claimed mask is correct."""
    await proxy.post("/rollouts", {"rollout_id": "r1", "tools": [ADD]})
    status, payload = await proxy.post("/rollouts/r1/dispatch", DISPATCH)
    (row,) = await exported(proxy)
    first, second = runner.responses
    outside = len(runner.masks[1])

    assert (status, payload["result"]["status"], payload["result"]["metrics"]["num_llm_calls"]) == (200, "COMPLETED", 2)
    assert [1] * len(first["token_ids"]) + [0] * outside + [1] * len(second["token_ids"]) == row["response_mask"]
    assert row["mask_claims"][1] == {"call": 1, "claimed": outside, "exact": outside}
    assert (await proxy.get("/rollouts/r1"))[1]["counts"]["mask_mismatches"] == 0


@pytest.mark.parametrize("rollout_id", ["job/7 {a}:\u00e9\u4e2d", "x" * 256])
async def test_os_2_the_body_names_the_rollout_with_any_characters(proxy, store, rollout_id):
    """This holds for both call shapes."""
    for path, body in (("/v1/completions", FLAT), ("/v1/chat/completions", CHAT)):
        status, _ = await proxy.post(path, body | {"rollout_id": rollout_id})
        assert status == 200

    assert len(await stored_steps(store, rollout_id)) == 2


@pytest.mark.parametrize("wrong_by", [-3, 4])
async def test_os_3_a_wrong_mask_is_reported_and_not_used(proxy, runner, store, wrong_by):
    """The call succeeds; the step and the rollout report both lengths; the row has the exact mask."""
    runner.wrong_by = wrong_by
    await proxy.post("/rollouts", {"rollout_id": "r1", "tools": [ADD]})
    await proxy.post("/rollouts/r1/dispatch", DISPATCH)
    (row,) = await exported(proxy)
    _, step = await stored_steps(store, "r1")
    claimed = len(runner.masks[1])
    exact = claimed - wrong_by

    assert step.extra["mask_mismatch"] == {"claimed": claimed, "exact": exact, "claimed_sampled": 0}
    assert row["mask_claims"][1] == {"call": 1, "claimed": claimed, "exact": exact}
    assert exact == row["response_mask"].count(0)
    assert step.exact
    assert (await proxy.get("/rollouts/r1"))[1]["counts"]["mask_mismatches"] == 1


@pytest.mark.parametrize("mask", [[2], [0, 1, -1], [True], "0", {"0": 1}, [0.0]])
async def test_os_4_a_malformed_mask_is_422_and_nothing_is_recorded(proxy, store, mask):
    status, payload = await proxy.post("/v1/completions", FLAT | {"response_mask": mask})

    assert (status, payload["error"]["param"]) == (422, "response_mask")
    assert await store.get("r1") is None


@pytest.mark.parametrize(
    ("status", "category"), [(429, "rate_limited"), (500, "trainer_server_error"), (503, "trainer_server_error")]
)
async def test_os_5_an_engine_error_fails_the_rollout_and_nothing_is_trained(store, engine, runner, status, category):
    """The caller gets the engine's status."""
    engine.answers({"error": {"message": "no"}}, status)
    async with dispatching(engine.url, store, runner) as proxy:
        await proxy.post("/rollouts", {"rollout_id": "r1"})
        _, payload = await proxy.post("/rollouts/r1/dispatch", DISPATCH)
        rows = await proxy.rows("steps")
    fields = payload["result"]["extra_fields"]

    assert (payload["status"], fields["error_category"], fields["http_status"]) == ("failed", category, status)
    assert [step.status for step in await stored_steps(store, "r1")] == ["error"]
    assert rows == []


async def test_os_5_an_engine_that_refuses_connections_is_503(store, runner):
    async with dispatching("http://127.0.0.1:1", store, runner) as proxy:
        status, _ = await proxy.post("/v1/completions", FLAT)

    assert status == 503


async def test_os_6_null_fields_of_messages_are_not_sent_to_the_engine(store, engine, runner):
    """Nulls in tool arguments remain; the step has the messages as received."""
    engine.plays(WHOLE)
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": None}}}
    messages = [
        {"role": "user", "content": "hi", "tool_calls": None, "tool_call_id": None},
        {"role": "assistant", "content": None, "tool_calls": [call], "tool_call_id": None},
    ]
    async with dispatching(engine.url, store, runner) as proxy:
        await proxy.post("/v1/completions", FLAT | {"messages": messages, "stop": None})
    (step,) = await stored_steps(store, "r1")
    (received,) = engine.requests

    sent = {**call, "function": {"name": "add", "arguments": '{"a":null}'}}
    assert received["messages"] == [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": [sent]}]
    assert not {"rollout_id", "response_mask", "stop"} & received.keys()
    assert messages == step.request["messages"]
    assert received["messages"] == step.sent["set"]["messages"]
    assert {"rollout_id", "response_mask", "stop"} <= set(step.sent["unset"])


async def test_os_7_callbacks_require_the_dispatchs_key_or_an_agents_key(store, engine, runner):
    """Without a key they are 401, with another rollout's 403; the engine does not get the key."""
    engine.plays(WHOLE)
    async with dispatching(engine.url, store, runner, **KEYS) as proxy:
        await proxy.post("/rollouts", {"rollout_id": "r1"}, BOSS)
        await proxy.post("/rollouts/r1/dispatch", DISPATCH, BOSS)
        key = runner.requests[0]["callback_api_key"]
        refused = [
            (await proxy.post(prefix + path, FLAT | {"status": "COMPLETED"}, headers))[0]
            for path in ("/v1/completions", "/v1/rollout/completed")
            for prefix, headers in (("", {}), ("/rollouts/r2", {"Authorization": f"Bearer {key}"}))
        ]
        other = {"rollout_id": "r2", "status": "COMPLETED"}
        refused.append((await proxy.post("/v1/rollout/completed", other, {"X-Api-Key": key}))[0])
        accepted, _ = await proxy.post(
            "/v1/rollout/completed", {"rollout_id": "r1", "status": "COMPLETED"}, {"X-Api-Key": key}
        )

    assert (refused, accepted) == ([401, 403, 401, 403, 403], 200)
    assert runner.headers[0]["authorization"] == "Bearer server-key"
    assert not any("authorization" in headers for headers in engine.headers)
    assert len(await stored_steps(store, "r1")) == 1


async def test_os_8_a_repeated_result_is_200_and_changes_nothing(proxy, store):
    """The rollout has the reward, status and fields of the server."""
    await proxy.post("/v1/chat/completions", CHAT)
    result = {"rollout_id": "r1", "status": "COMPLETED", "final_messages": [], "finish_reason": "stop", "reward": 0.25}
    responses = [await proxy.post("/v1/rollout/completed", result) for _ in range(2)]
    rollout = await stored_rollout(store, "r1")

    assert responses == [(200, {"status": "ok"})] * 2
    assert (rollout.status, rollout.reward, rollout.metadata["osmosis"]["finish_reason"]) == ("completed", 0.25, "stop")
    assert (await proxy.post("/v1/rollout/completed", result | {"status": "ERROR"}))[0] == 409


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_os_9_a_call_that_is_retried_after_an_error_is_trained_once(store, engine, runner, path):
    """Both attempts are recorded."""
    statuses = [500, 200]

    async def respond(request, body):
        status = statuses.pop(0)
        body = WHOLE.response if status == 200 else b'{"error": {"message": "no"}}'
        return web.Response(status=status, body=body, content_type="application/json")

    engine.respond = respond
    async with dispatching(engine.url, store, runner) as proxy:
        received = [(await proxy.post(path, FLAT))[0] for _ in range(2)]
        rows = await proxy.rows("sequences")

    assert received == [500, 200]
    assert [step.status for step in await stored_steps(store, "r1")] == ["error", "complete"]
    assert len(rows) == 1


async def test_os_9_a_call_that_is_retried_after_a_disconnect_is_trained_once(store, engine, runner):
    """The partial step remains recorded."""
    engine.hangs()
    async with dispatching(engine.url, store, runner) as proxy:
        first = asyncio.create_task(proxy.post("/v1/chat/completions", CHAT))
        await engine.reached.wait()
        first.cancel()
        await wait_for_steps(store, "r1")
        engine.plays(WHOLE)
        await proxy.post("/v1/chat/completions", CHAT)
        rows = await proxy.rows("sequences")

    assert [(step.status, step.delivered) for step in await stored_steps(store, "r1")] == [
        ("partial", False),
        ("complete", True),
    ]
    assert len(rows) == 1


async def test_os_9_an_equal_call_replays_the_complete_response(proxy, store):
    """A response may be lost after the proxy sent it. One step is recorded."""
    responses = [await proxy.post("/v1/completions", FLAT) for _ in range(2)]

    assert responses[0] == responses[1]
    assert {"token_ids", "prompt_token_ids", "logprobs"} <= responses[1][1].keys()
    assert len(await stored_steps(store, "r1")) == 1


async def test_os_9_idempotency_keys_precede_the_comparison_of_bodies(proxy, store):
    """Equal calls with two keys are two steps."""
    for key in ("a", "b", "b"):
        await proxy.post("/v1/completions", FLAT, {"Idempotency-Key": key})

    assert len(await stored_steps(store, "r1")) == 2


async def test_os_9_equal_chat_calls_of_other_rollouts_are_not_retries(proxy, store):
    """Only rollouts of Osmosis' protocols are append-only."""
    for _ in range(2):
        await proxy.post("/v1/chat/completions", CHAT)

    assert len(await stored_steps(store, "r1")) == 2


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_os_10_the_rollouts_tools_are_added_to_calls_without_tools(store, engine, runner, path):
    """The response has usage."""
    engine.plays(WHOLE)
    other = {"type": "function", "function": {"name": "other"}}
    async with dispatching(engine.url, store, runner) as proxy:
        await proxy.post("/rollouts", {"rollout_id": "r1", "tools": [ADD]})
        _, payload = await proxy.post(path, FLAT)
        await proxy.post(path, FLAT | {"tools": [other]})

    assert [body["tools"] for body in engine.requests] == [[ADD], [other]]
    assert payload["usage"]["completion_tokens"] > 0


async def test_a_flat_response_has_all_required_fields(proxy, store):
    """The call works below a prefix, and is recorded as a chat call."""
    body = {key: value for key, value in FLAT.items() if key != "rollout_id"}
    _, payload = await proxy.post("/rollouts/r1/v1/completions", body)
    (step,) = await stored_steps(store, "r1")
    (choice,) = payload["choices"]

    assert (payload["object"], payload["model"]) == ("chat.completion", "default")
    assert (type(payload["id"]), type(payload["created"])) == (str, int)
    assert (choice["index"], choice["message"]["role"], type(choice["finish_reason"])) == (0, "assistant", str)
    assert step.choices[0].ids.tolist() == payload["token_ids"]
    assert step.choices[0].logprobs.tolist() == payload["logprobs"]
    assert step.prompts[0].tolist() == payload["prompt_token_ids"]
    assert (step.dialect, step.endpoint) == ("chat", "/v1/chat/completions")
    assert (step.extra["form"], step.exact) == ("osmosis", True)


async def test_a_flat_response_has_logprobs_with_every_setting_unless_the_call_disables_them(simulator, store, runner):
    async with dispatching(simulator, store, runner, record={"logprobs": "off"}) as proxy:
        _, payload = await proxy.post("/v1/completions", FLAT)
        _, without = await proxy.post("/v1/completions", FLAT | {"logprobs": False, "seed": 2})

    assert len(payload["token_ids"]) == len(payload["logprobs"]) > 0
    assert (len(without["token_ids"]) > 0, without["logprobs"]) == (True, [])


async def test_a_flat_call_with_max_tokens_1_is_not_a_probe(store, engine, runner):
    """Forwarded as a probe it would be a completion without a prompt."""
    engine.plays(WHOLE)
    async with dispatching(engine.url, store, runner, agents={"probes": {"one_token": True}}) as proxy:
        status, _ = await proxy.post("/v1/completions", FLAT | {"max_tokens": 1})

    assert (status, len(await stored_steps(store, "r1"))) == (200, 1)


async def test_a_rollout_that_is_deleted_while_a_call_waits_for_its_tools_is_404(proxy, store):
    await proxy.post("/rollouts", {"rollout_id": "r1"})
    starting = write_fields({"osmosis": ticket("calculator", "async", "", "starting")})
    await store.update_if("r1", starting, expect={}, now_ms=1)
    reached, proceed = store.pauses("get")
    calling = asyncio.create_task(proxy.post("/v1/chat/completions", CHAT))
    await reached.wait()
    await proxy.http.delete(f"{proxy.url}/rollouts/r1")
    proceed.set()

    assert (await calling)[0] == 404


async def test_a_result_of_a_rollout_without_calls_creates_the_rollout(proxy, store):
    """The server may fail before its first call."""
    result = {"rollout_id": "r9", "status": "ERROR", "error_message": "no tools", "extra_fields": {"http_status": None}}
    status, _ = await proxy.post("/v1/rollout/completed", result)
    rollout = await stored_rollout(store, "r9")

    assert (status, rollout.status, rollout.metadata["osmosis"]["error_message"]) == (200, "failed", "no tools")


async def test_a_result_keeps_the_rollouts_metadata(proxy, store):
    await proxy.post("/rollouts", {"rollout_id": "r1", "metadata": {"task": 7}})
    await post(proxy.http, f"{proxy.url}/rollouts/r1/v1/rollout/completed", {"rollout_id": "r1", "status": "COMPLETED"})

    assert (await stored_rollout(store, "r1")).metadata.keys() == {"task", "osmosis"}


async def test_an_unnamed_flat_call_is_400_with_unnamed_rollouts_pass(store, engine, runner):
    """Forwarded it would be a completion without a prompt."""
    body = {key: value for key, value in FLAT.items() if key != "rollout_id"}
    async with dispatching(engine.url, store, runner, agents={"unnamed_rollouts": "pass"}) as proxy:
        status, payload = await proxy.post("/v1/completions", body)

    assert (status, payload["error"]["param"], engine.requests) == (400, "rollout_id", [])


KEYS = {"agents": {"api_keys": ["agent"]}, "control": {"api_keys": ["boss"]}}
BOSS = {"Authorization": "Bearer boss"}
RESULT = {"rollout_id": "r1", "status": "COMPLETED", "finish_reason": "stop", "reward": 0.25}
COMPLETED = "/rollouts/r1/v1/rollout/completed"


def keyed(key):
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture
async def guarded(store, engine, runner):
    """A proxy with keys, and the minted key of its rollout r1, which has a call."""
    engine.plays(WHOLE)
    async with dispatching(engine.url, store, runner, **KEYS) as proxy:
        _, opened = await proxy.post("/rollouts", {"rollout_id": "r1", "metadata": {"task": 7}}, BOSS)
        await proxy.post("/rollouts/r1/v1/chat/completions", CHAT, keyed(opened["api_key"]))
        proxy.minted = opened["api_key"]
        yield proxy


async def dispatch_key(proxy, runner):
    """Dispatch r1; return the key that its rollout server got. The rollout is still running."""
    await proxy.post("/rollouts/r1/dispatch", DISPATCH | {"protocol": "async", "wait": False}, BOSS)
    async with asyncio.timeout(TIMEOUT_S):
        while not runner.requests:
            await asyncio.sleep(0.005)
    return runner.requests[0]["api_key"]


@pytest.mark.parametrize("is_dispatched", [False, True])
@pytest.mark.parametrize("key", ["minted", "agent"])
async def test_a_result_reported_by_an_agent_is_stored_as_a_claim(guarded, runner, store, key, is_dispatched):
    """Reward and status do not change, and its group is not completed."""
    if is_dispatched:
        runner.chat = lambda _request: asyncio.sleep(0)
        await dispatch_key(guarded, runner)
    await guarded.http.patch(f"{guarded.url}/rollouts/r1", json={"reward": -1.0}, headers=BOSS)
    caller = keyed(guarded.minted if key == "minted" else "agent")
    responses = [await guarded.post(COMPLETED, RESULT | {"reward": reward}, caller) for reward in (3e38, 1.0, 1.0)]
    rollout = await stored_rollout(store, "r1")

    assert responses == [(200, {"status": "ok"})] * 3
    assert (rollout.status, rollout.reward, rollout.finished_ms) == ("open", -1.0, None)
    claim = {"status": "COMPLETED", "finish_reason": "stop", "reward": 1.0}
    assert rollout.metadata == {"task": 7, "osmosis": {"claim": claim}}


async def test_the_key_of_a_dispatch_can_report_its_result_once(guarded, runner, store):
    """An earlier claim remains; a later one changes nothing."""
    runner.chat = lambda _request: asyncio.sleep(0)
    key = await dispatch_key(guarded, runner)
    await guarded.post(COMPLETED, RESULT | {"reward": 1.0}, keyed(guarded.minted))
    responses = [await guarded.post(COMPLETED, RESULT, keyed(key)) for _ in range(2)]
    reported = await stored_rollout(store, "r1")
    responses.append(await guarded.post(COMPLETED, RESULT | {"reward": 2.0}, keyed(guarded.minted)))
    responses.append(await guarded.post("/v1/chat/completions", CHAT, keyed(key)))
    other = await guarded.post(COMPLETED, RESULT | {"reward": 2.0}, keyed(key))

    assert [status for status, _ in responses[:3]] == [200, 200, 200]
    assert (reported.status, reported.reward) == ("completed", 0.25)
    assert (
        reported.metadata["osmosis"]["status"], reported.metadata["osmosis"]["claim"]["reward"]
    ) == ("COMPLETED", 1.0)  # fmt: skip
    assert other[0] == 409
    assert reported.metadata == (await stored_rollout(store, "r1")).metadata


async def test_the_key_of_a_dispatch_is_valid_for_calls_of_its_rollout_only(guarded, runner, store):
    """A key with another secret or dispatch is 401."""
    runner.chat = lambda _request: asyncio.sleep(0)
    key = await dispatch_key(guarded, runner)
    await guarded.post("/rollouts", {"rollout_id": "r2"}, BOSS)
    incarnation = (await store.get("r1")).incarnation
    forged = mint("r1", incarnation, b"secret", dispatch="x")
    statuses = [
        (await guarded.post(f"/rollouts/{name}/v1/chat/completions", CHAT, keyed(caller)))[0]
        for name, caller in (("r1", key), ("r2", key), ("r1", forged))
    ]
    on_control = (await guarded.get("/rollouts/r1", keyed(key)))[0]

    assert (statuses, on_control) == ([200, 403, 401], 403)
    assert guarded.minted != key


async def test_a_control_key_can_report_the_result_of_any_rollout(guarded, store):
    """The rollout may be unknown."""
    statuses = [
        (await guarded.post("/v1/rollout/completed", RESULT | {"rollout_id": name, "status": status}, BOSS))[0]
        for name, status in (("r1", "COMPLETED"), ("r1", "COMPLETED"), ("r9", "ERROR"))
    ]

    assert statuses == [200] * 3
    assert [(await stored_rollout(store, name)).status for name in ("r1", "r9")] == ["completed", "failed"]
    assert (await guarded.post("/v1/chat/completions", CHAT, BOSS))[0] == 401


@pytest.mark.parametrize("before", [{"reward": -1.0}, {"status": "aborted"}, {"status": "failed", "reward": -1.0}])
@pytest.mark.parametrize("is_between", [False, True])
async def test_a_result_does_not_change_values_set_by_the_control_api(guarded, runner, store, before, is_between):
    """They are set before the result, or while it is written."""
    runner.chat = lambda _request: asyncio.sleep(0)
    key = await dispatch_key(guarded, runner)
    verb, path = ("post", "/rollouts/r1/finish") if "status" in before else ("patch", "/rollouts/r1")

    async def set_it():
        async with getattr(guarded.http, verb)(guarded.url + path, json=before, headers=BOSS) as response:
            assert response.status == 200

    if is_between:
        update_if = store.update_if

        async def late(name, fields, **named):
            if "status" in fields:  # the result; the dispatch may not have been written yet
                store.update_if = update_if
                await set_it()
            return await update_if(name, fields, **named)

        store.update_if = late
    else:
        await set_it()
    status, _ = await guarded.post(COMPLETED, RESULT, keyed(key))
    rollout = await stored_rollout(store, "r1")

    assert status == 200
    assert before.get("status", "completed") == rollout.status
    assert before.get("reward", rollout.reward) == rollout.reward
    assert (None if "status" in before and "reward" not in before else -1.0) == rollout.reward
    assert rollout.metadata["osmosis"]["status"] == "COMPLETED"


async def test_a_claim_does_not_overwrite_concurrent_changes_of_metadata(guarded, store):
    """Metadata are one stored field."""
    update_if = store.update_if

    async def late(*args, **named):
        store.update_if = update_if
        await guarded.http.patch(f"{guarded.url}/rollouts/r1", json={"metadata": {"task": 8}}, headers=BOSS)
        return await update_if(*args, **named)

    store.update_if = late
    await guarded.post(COMPLETED, RESULT, keyed(guarded.minted))

    claim = {"status": "COMPLETED", "finish_reason": "stop", "reward": 0.25}
    assert (await stored_rollout(store, "r1")).metadata == {"task": 8, "osmosis": {"claim": claim}}


@pytest.mark.parametrize("own", ["mine", {"env": "calculator"}])
async def test_a_claim_keeps_existing_metadata_named_osmosis(guarded, store, own):
    """It is added to an object, and omitted otherwise."""
    await guarded.http.patch(f"{guarded.url}/rollouts/r1", json={"metadata": {"osmosis": own}}, headers=BOSS)
    status, _ = await guarded.post(COMPLETED, RESULT, keyed(guarded.minted))
    kept = (await stored_rollout(store, "r1")).metadata["osmosis"]

    assert (status, kept if isinstance(own, str) else {"env": kept["env"]}) == (200, own)
    assert isinstance(own, str) or "claim" in kept


async def test_without_control_keys_a_result_is_accepted_unless_it_has_an_agents_key(store, engine, runner):
    """Every caller can set rewards then; an agent's key identifies its caller as an agent."""
    engine.plays(WHOLE)
    async with dispatching(engine.url, store, runner) as proxy:
        _, opened = await proxy.post("/rollouts", {"rollout_id": "r1"})
        for caller in (keyed(opened["api_key"]), keyed("rollout:r1")):
            assert (await proxy.post(COMPLETED, RESULT, caller))[0] == 200
        claimed = await stored_rollout(store, "r1")
        await proxy.post(COMPLETED, RESULT, keyed("none"))

    assert (claimed.status, claimed.reward) == ("open", None)
    reported = await stored_rollout(store, "r1")
    assert (reported.status, reported.reward) == ("completed", 0.25)


async def test_with_separate_ports_a_result_without_a_key_is_stored_as_a_claim(store, engine, runner):
    """Agents reach the model API's port only."""
    async with dispatching(engine.url, store, runner, control={"listen": "127.0.0.1:0"}) as proxy:
        status, _ = await proxy.post("/v1/rollout/completed", RESULT)

    assert (status, (rollout := await stored_rollout(store, "r1")).status, rollout.reward) == (200, "open", None)


@pytest.mark.parametrize("prefix", ["/rollouts/r1", "/sessions/r1"])
async def test_a_result_is_400_if_its_body_and_path_name_different_rollouts(proxy, store, prefix):
    status, payload = await proxy.post(f"{prefix}/v1/rollout/completed", RESULT | {"rollout_id": "r2"})

    assert (status, payload["error"]["param"]) == (400, "rollout_id")
    assert (await store.get("r1"), await store.get("r2")) == (None, None)


@pytest.mark.parametrize("caller", ["boss", "minted"])
async def test_a_result_is_limited_to_64_kb(guarded, store, caller):
    """Messages above the limit are omitted; other fields above it are 413."""
    caller = keyed(guarded.minted if caller == "minted" else caller)
    long = {"metrics": {"x": ["y" * 100] * 1000}}
    refused, _ = await guarded.post(COMPLETED, RESULT | long, caller)
    before = await stored_rollout(store, "r1")
    messages = [{"role": "user", "content": "z" * 1000}] * 100
    accepted, _ = await guarded.post(COMPLETED, RESULT | {"final_messages": messages}, caller)
    kept = (await stored_rollout(store, "r1")).metadata["osmosis"]
    kept = kept.get("claim", kept)

    assert (refused, before.metadata, before.status) == (413, {"task": 7}, "open")
    assert (accepted, kept["left_out"], kept["reward"]) == (200, ["final_messages"], 0.25)


async def test_results_are_in_the_rollout_only(guarded, store):
    """Lists, repeated openings and exported rows do not contain them."""
    for caller in (BOSS, keyed(guarded.minted)):
        for _ in range(2):
            await guarded.post(COMPLETED, RESULT, caller)
    _, listed = await guarded.get("/rollouts", BOSS)
    _, reopened = await guarded.post("/rollouts", {"rollout_id": "r1", "metadata": {"task": 7}}, BOSS)
    rows = await guarded.rows("sequences", BOSS)
    _, shown = await guarded.get("/rollouts/r1", BOSS)

    assert [rollout["metadata"] for rollout in listed["rollouts"]] == [{"task": 7}]
    assert reopened["metadata"] == {"task": 7}
    assert [row["metadata"] for row in rows] == [{"task": 7}]
    assert shown["metadata"].keys() == {"task", "osmosis"}


@pytest.mark.parametrize("reward", ["NaN", "1e400", "1e39", "-Infinity"])
async def test_a_result_with_a_reward_outside_float32_is_422(proxy, store, reward):
    body = f'{{"rollout_id": "r1", "status": "COMPLETED", "reward": {reward}}}'
    async with proxy.http.post(f"{proxy.url}/v1/rollout/completed", data=body) as response:
        assert response.status == 422

    assert await store.get("r1") is None


async def test_a_dispatch_response_with_a_reward_outside_float32_fails_the_rollout(proxy, runner, store):
    await proxy.post("/rollouts", {"rollout_id": "r1"})
    runner.response_body = {"rollout_id": "r1", "status": "COMPLETED", "reward": 1e39}
    await proxy.post("/rollouts/r1/dispatch", DISPATCH)
    rollout = await stored_rollout(store, "r1")

    assert (rollout.status, rollout.reward) == ("failed", None)
    assert rollout.metadata["osmosis"]["extra_fields"]["error_category"] == "validation_error"


async def test_a_dispatch_response_above_64_kb_fails_the_rollout(proxy, runner, store):
    """Long messages alone are omitted."""
    fields = {"status": "COMPLETED", "reward": 1.0}
    for name, more in (("r1", {"metrics": {"x": "y" * 70_000}}), ("r2", {"final_messages": [{"x": "y" * 70_000}]})):
        await proxy.post("/rollouts", {"rollout_id": name})
        runner.response_body = {"rollout_id": name, **fields, **more}
        await proxy.post(f"/rollouts/{name}/dispatch", DISPATCH)
    long, kept = await stored_rollout(store, "r1"), await stored_rollout(store, "r2")

    assert (long.status, long.reward, kept.status, kept.reward) == ("failed", None, "completed", 1.0)
    assert kept.metadata["osmosis"]["left_out"] == ["final_messages"]


@pytest.mark.parametrize("sections", [{}, {"agents": {"api_keys": ["agent"]}, "insecure": True}, KEYS])
@pytest.mark.parametrize("key", [None, "any", "rollout:r1", "agent", "boss"])
async def test_a_key_reports_a_result_where_it_rewards_a_session(store, engine, runner, sections, key):
    """The routes of the control API and `/v1/rollout/completed` reward the rollout for the same keys, and for none."""
    headers = {} if key is None else keyed(key)
    rewards = []
    async with dispatching(engine.url, store, runner, **sections) as proxy:
        for path in ("/rollouts/r1/finish", "/sessions/r1/complete", "/v1/rollout/completed", COMPLETED):
            await store.open("r1", {}, now_ms=1)
            body = {"reward_info": {"reward": 0.25}} if "sessions" in path else RESULT
            body = {"status": "completed", "reward": 0.25} if path.endswith("finish") else body
            await proxy.post(path, body, headers)
            rewards.append((await stored_rollout(store, "r1")).reward)
            await store.delete("r1")

    assert len(set(rewards)) == 1, rewards
