"""Osmosis' remote rollouts through the proxy: the numbered checks, and what its callbacks come to."""

import asyncio

import orjson
import pytest
from aiohttp import web
from recorded import load
from rollout_servers import ADD, QUESTION, dispatching, post, rollout_server
from stored import TIMEOUT_S, rollout_of, some_steps, steps_of

from proxy.compat.osmosis import ticket
from proxy.rollouts import write_fields
from proxy.server import simulating
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


async def exported(proxy, rollout_id="r1"):
    await proxy.http.patch(f"{proxy.url}/rollouts/{rollout_id}", json={"reward": 1.0})
    status, told = await proxy.get(f"/rollouts/{rollout_id}/export?format=osmosis&container=json")
    assert 200 == status, told
    return told["rows"] if isinstance(told, dict) else told


@pytest.mark.parametrize("shape", ["vllm", "sglang"])
async def test_os_1_an_unmodified_rollout_server_gives_one_row_with_the_exact_mask(proxy, runner):
    """Two calls and a tool between them: sampled, outside, sampled; and the claim was right."""
    await proxy.post("/rollouts", {"rollout_id": "r1", "tools": [ADD]})
    status, told = await proxy.post("/rollouts/r1/dispatch", DISPATCH)
    (row,) = await exported(proxy)
    first, second = runner.answers
    outside = len(runner.masks[1])

    assert (200, "COMPLETED", 2) == (status, told["result"]["status"], told["result"]["metrics"]["num_llm_calls"])
    assert [1] * len(first["token_ids"]) + [0] * outside + [1] * len(second["token_ids"]) == row["response_mask"]
    assert {"call": 1, "claimed": outside, "exact": outside} == row["mask_claims"][1]
    assert 0 == (await proxy.get("/rollouts/r1"))[1]["counts"]["mask_mismatches"]


@pytest.mark.parametrize("rollout_id", ["job/7 {a}:\u00e9\u4e2d", "x" * 256])
async def test_os_2_the_body_names_the_rollout_whatever_characters_it_has(proxy, store, rollout_id):
    """Both spellings of a call are grouped by it."""
    for path, body in (("/v1/completions", FLAT), ("/v1/chat/completions", CHAT)):
        status, _ = await proxy.post(path, body | {"rollout_id": rollout_id})
        assert 200 == status

    assert 2 == len(await steps_of(store, rollout_id))


@pytest.mark.parametrize("wrong_by", [-3, 4])
async def test_os_3_a_wrong_mask_is_served_reported_and_not_used(proxy, runner, store, wrong_by):
    """The step and the rollout say so, with both lengths; the row has the exact one."""
    runner.wrong_by = wrong_by
    await proxy.post("/rollouts", {"rollout_id": "r1", "tools": [ADD]})
    await proxy.post("/rollouts/r1/dispatch", DISPATCH)
    (row,) = await exported(proxy)
    _, step = await steps_of(store, "r1")
    claimed = len(runner.masks[1])
    exact = claimed - wrong_by

    assert {"claimed": claimed, "exact": exact, "claimed_sampled": 0} == step.extra["mask_mismatch"]
    assert {"call": 1, "claimed": claimed, "exact": exact} == row["mask_claims"][1]
    assert exact == row["response_mask"].count(0)
    assert step.exact
    assert 1 == (await proxy.get("/rollouts/r1"))[1]["counts"]["mask_mismatches"]


@pytest.mark.parametrize("mask", [[2], [0, 1, -1], [True], "0", {"0": 1}, [0.0]])
async def test_os_4_a_malformed_mask_is_422_and_nothing_is_recorded(proxy, store, mask):
    """Nothing is sent either."""
    status, told = await proxy.post("/v1/completions", FLAT | {"response_mask": mask})

    assert (422, "response_mask") == (status, told["error"]["param"])
    assert await store.look("r1") is None


@pytest.mark.parametrize(
    ("status", "category"), [(429, "rate_limited"), (500, "trainer_server_error"), (503, "trainer_server_error")]
)
async def test_os_5_a_failing_engine_reaches_the_caller_as_such(store, engine, runner, status, category):
    """Its status comes through, the rollout failed, and nothing of it is trained."""

    async def answering(request, body):
        return web.json_response({"error": {"message": "no"}}, status=status)

    engine.answering = answering
    async with dispatching(engine.url, store, runner) as proxy:
        await proxy.post("/rollouts", {"rollout_id": "r1"})
        _, told = await proxy.post("/rollouts/r1/dispatch", DISPATCH)
        _, rows = await proxy.get("/rollouts/r1/export?format=steps&container=json")

    assert ("failed", category, status) == (
        told["status"], told["result"]["extra_fields"]["error_category"], told["result"]["extra_fields"]["http_status"]
    )  # fmt: skip
    assert ["error"] == [step.status for step in await steps_of(store, "r1")]
    assert not (rows["rows"] if isinstance(rows, dict) else rows)


async def test_os_5_an_engine_that_refuses_connections_is_503(store, runner):
    """Retryable, by its status."""
    async with dispatching("http://127.0.0.1:1", store, runner) as proxy:
        status, _ = await proxy.post("/v1/completions", FLAT)

    assert 503 == status


async def test_os_6_nulls_are_removed_from_messages_before_the_engine_sees_them(store, engine, runner):
    """And only there: a null among a tool's arguments is an argument, and what came is recorded as it came."""
    engine.plays(WHOLE)
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": None}}}
    messages = [
        {"role": "user", "content": "hi", "tool_calls": None, "tool_call_id": None},
        {"role": "assistant", "content": None, "tool_calls": [call], "tool_call_id": None},
    ]
    async with dispatching(engine.url, store, runner) as proxy:
        await proxy.post("/v1/completions", FLAT | {"messages": messages, "stop": None})
    (step,) = await steps_of(store, "r1")
    (asked,) = engine.asked

    assert [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": [call]}] == asked["messages"]
    assert not {"rollout_id", "response_mask", "stop"} & asked.keys()
    assert messages == step.request["messages"]
    assert asked["messages"] == step.sent["set"]["messages"]
    assert {"rollout_id", "response_mask", "stop"} <= set(step.sent["unset"])


async def test_os_7_the_callback_key_is_ours_to_check_and_never_the_engines(store, engine, runner):
    """The minted key of the dispatch, or an agent's; without one 401, with another rollout's 403."""
    engine.plays(WHOLE)
    async with dispatching(engine.url, store, runner, agents={"api_keys": ["agent"]}) as proxy:
        await proxy.post("/rollouts", {"rollout_id": "r1"})
        await proxy.post("/rollouts/r1/dispatch", DISPATCH)
        key = runner.asked[0]["callback_api_key"]
        refused = [
            (await proxy.post(prefix + path, FLAT | {"status": "COMPLETED"}, headers))[0]
            for path in ("/v1/completions", "/v1/rollout/completed")
            for prefix, headers in (("", {}), ("/rollouts/r2", {"Authorization": f"Bearer {key}"}))
        ]
        other = {"rollout_id": "r2", "status": "COMPLETED"}
        refused.append((await proxy.post("/v1/rollout/completed", other, {"X-Api-Key": key}))[0])
        taken, _ = await proxy.post(
            "/v1/rollout/completed", {"rollout_id": "r1", "status": "COMPLETED"}, {"X-Api-Key": key}
        )

    assert ([401, 403, 401, 403, 403], 200) == (refused, taken)
    assert "Bearer server-key" == runner.headers[0]["authorization"]
    assert [False] == ["authorization" in headers for headers in engine.headers]
    assert 1 == len(await steps_of(store, "r1"))


async def test_os_8_completed_twice_is_one_completion(proxy, store):
    """200 both times; reward, status and words of the server are on the rollout."""
    await proxy.post("/v1/chat/completions", CHAT)
    result = {"rollout_id": "r1", "status": "COMPLETED", "final_messages": [], "finish_reason": "stop", "reward": 0.25}
    answers = [await proxy.post("/v1/rollout/completed", result) for _ in range(2)]
    rollout = await rollout_of(store, "r1")

    assert [(200, {"status": "ok"})] * 2 == answers
    assert ("completed", 0.25, "stop") == (rollout.status, rollout.reward, rollout.metadata["osmosis"]["finish_reason"])
    assert 409 == (await proxy.post("/v1/rollout/completed", result | {"status": "ERROR"}))[0]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_os_9_a_call_retried_after_a_fault_is_trained_once(store, engine, runner, path):
    """Both attempts are there, and one of them is trained."""
    statuses = [500, 200]

    async def answering(request, body):
        status = statuses.pop(0)
        body = WHOLE.answer if status == 200 else b'{"error": {"message": "no"}}'
        return web.Response(status=status, body=body, content_type="application/json")

    engine.answering = answering
    async with dispatching(engine.url, store, runner) as proxy:
        seen = [(await proxy.post(path, FLAT))[0] for _ in range(2)]
        _, rows = await proxy.get("/rollouts/r1/export?format=sequences&container=json")
    rows = rows["rows"] if isinstance(rows, dict) else rows

    assert [500, 200] == seen
    assert ["error", "complete"] == [step.status for step in await steps_of(store, "r1")]
    assert 1 == len(rows)


async def test_os_9_a_call_whose_reply_was_lost_is_trained_once(store, engine, runner):
    """The attempt that its client left stays visible, and the other one is trained."""
    engine.hangs()
    async with dispatching(engine.url, store, runner) as proxy:
        leaving = asyncio.create_task(proxy.post("/v1/chat/completions", CHAT))
        await engine.reached.wait()
        leaving.cancel()
        await some_steps(store, "r1")
        engine.plays(WHOLE)
        await proxy.post("/v1/chat/completions", CHAT)
        _, rows = await proxy.get("/rollouts/r1/export?format=sequences&container=json")
    rows = rows["rows"] if isinstance(rows, dict) else rows

    assert [("partial", False), ("complete", True)] == [
        (step.status, step.delivered) for step in await steps_of(store, "r1")
    ]
    assert 1 == len(rows)


async def test_os_9_what_was_answered_whole_is_told_again(proxy, store):
    """A reply lost behind us, where nobody can see it: the same call gets the same answer, and one step is there."""
    answers = [await proxy.post("/v1/completions", FLAT) for _ in range(2)]

    assert answers[0] == answers[1]
    assert {"token_ids", "prompt_token_ids", "logprobs"} <= answers[1][1].keys()
    assert 1 == len(await steps_of(store, "r1"))


async def test_os_9_a_key_of_the_clients_own_goes_first(proxy, store):
    """Equal calls under two keys are two calls, by its word."""
    for key in ("a", "b", "b"):
        await proxy.post("/v1/completions", FLAT, {"Idempotency-Key": key})

    assert 2 == len(await steps_of(store, "r1"))


async def test_os_9_equal_calls_of_other_rollouts_are_no_retries_by_themselves(proxy, store):
    """Only what came by Osmosis' protocols is append-only."""
    for _ in range(2):
        await proxy.post("/v1/chat/completions", CHAT)

    assert 2 == len(await steps_of(store, "r1"))


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_os_10_tools_of_the_rollout_are_added_and_usage_is_there(store, engine, runner, path):
    """Only where the call names none."""
    engine.plays(WHOLE)
    other = {"type": "function", "function": {"name": "other"}}
    async with dispatching(engine.url, store, runner) as proxy:
        await proxy.post("/rollouts", {"rollout_id": "r1", "tools": [ADD]})
        _, told = await proxy.post(path, FLAT)
        await proxy.post(path, FLAT | {"tools": [other]})

    assert [[ADD], [other]] == [asked["tools"] for asked in engine.asked]
    assert told["usage"]["completion_tokens"] > 0


async def test_the_flat_answer_has_every_field_that_its_clients_require(proxy, store):
    """Works under a prefix too, and is recorded as the chat call that it is."""
    body = {key: value for key, value in FLAT.items() if key != "rollout_id"}
    async with proxy.http.post(f"{proxy.url}/rollouts/r1/v1/completions", json=body) as answer:
        told = orjson.loads(await answer.read())
    (step,) = await steps_of(store, "r1")
    (choice,) = told["choices"]

    assert ("chat.completion", "default", True, True) == (
        told["object"], told["model"], isinstance(told["id"], str), isinstance(told["created"], int)
    )  # fmt: skip
    assert (0, "assistant", True) == (
        choice["index"],
        choice["message"]["role"],
        isinstance(choice["finish_reason"], str),
    )
    assert step.choices[0].ids.tolist() == told["token_ids"]
    assert step.choices[0].logprobs.tolist() == told["logprobs"]
    assert step.prompts[0].tolist() == told["prompt_token_ids"]
    assert ("chat", "/v1/chat/completions", "osmosis", True) == (
        step.dialect, step.endpoint, step.extra["form"], step.exact
    )  # fmt: skip


async def test_a_flat_answer_has_logprobs_whatever_is_configured_unless_its_client_wants_none(simulator, store, runner):
    """Its clients require them."""
    async with dispatching(simulator, store, runner, record={"logprobs": "off"}) as proxy:
        _, told = await proxy.post("/v1/completions", FLAT)
        _, without = await proxy.post("/v1/completions", FLAT | {"logprobs": False, "seed": 2})

    assert len(told["token_ids"]) == len(told["logprobs"]) > 0
    assert (True, []) == (len(without["token_ids"]) > 0, without["logprobs"])


async def test_a_flat_call_is_no_probe_however_small(store, engine, runner):
    """Passed on as one, it would be a completion without a prompt."""
    engine.plays(WHOLE)
    async with dispatching(engine.url, store, runner, agents={"probes": {"one_token": True}}) as proxy:
        status, _ = await proxy.post("/v1/completions", FLAT | {"max_tokens": 1})

    assert (200, 1) == (status, len(await steps_of(store, "r1")))


async def test_a_rollout_that_is_deleted_while_a_call_waits_for_its_tools_is_404(proxy, store):
    """There is nothing any more that tools could be of."""
    await proxy.post("/rollouts", {"rollout_id": "r1"})
    starting = write_fields({"osmosis": ticket("calculator", "async", "", "starting")})
    await store.amend("r1", starting, expect={}, now_ms=1)
    store.waiting["look"] = asyncio.Event()
    calling = asyncio.create_task(proxy.post("/v1/chat/completions", CHAT))
    async with asyncio.timeout(TIMEOUT_S):
        while "look" not in store.reached:
            await asyncio.sleep(0.005)
    await proxy.http.delete(f"{proxy.url}/rollouts/r1")
    store.waiting["look"].set()

    assert 404 == (await calling)[0]


async def test_a_result_of_a_rollout_without_a_call_is_kept(proxy, store):
    """It failed before its first one, which is worth knowing."""
    result = {"rollout_id": "r9", "status": "ERROR", "error_message": "no tools", "extra_fields": {"http_status": None}}
    status, _ = await proxy.post("/v1/rollout/completed", result)
    rollout = await rollout_of(store, "r9")

    assert (200, "failed", "no tools") == (status, rollout.status, rollout.metadata["osmosis"]["error_message"])


async def test_metadata_of_the_rollout_stays(proxy, store):
    """The server's words stand beside it."""
    await proxy.post("/rollouts", {"rollout_id": "r1", "metadata": {"task": 7}})
    await post(proxy.http, f"{proxy.url}/rollouts/r1/v1/rollout/completed", {"rollout_id": "x", "status": "COMPLETED"})

    assert {"task", "osmosis"} == (await rollout_of(store, "r1")).metadata.keys()


async def test_an_unnamed_flat_call_is_never_passed_on(store, engine, runner):
    """Passed on, it would be a completion without a prompt."""
    body = {key: value for key, value in FLAT.items() if key != "rollout_id"}
    async with dispatching(engine.url, store, runner, agents={"unkeyed": "pass"}) as proxy:
        status, told = await proxy.post("/v1/completions", body)

    assert (400, "rollout_id", []) == (status, told["error"]["param"], engine.asked)
