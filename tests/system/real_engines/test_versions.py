"""Weight versions, pauses and aborts of a real SGLang while it samples."""

import asyncio

import aiohttp
import pytest

from .calls import CHAT, COMPLETIONS, QUESTION
from .test_exactness import TOLERANCE, differences
from .test_leaving import until
from .through import through_proxy

LONG = {"model": "tiny", "temperature": 1, "max_tokens": 1500, "ignore_eos": True}
CHAT_CALL = (CHAT, LONG | {"messages": QUESTION})
COMPLETIONS_CALL = (COMPLETIONS, LONG | {"prompt": [46, 77, 306, 1020]})


async def admin(http, engine, path, body):
    async with http.post(engine.url + path, json=body) as response:
        assert response.status == 200, await response.text()


@pytest.fixture
async def during(sglang, tmp_path):
    """A function that makes a call, does something while the engine samples it, and returns the step and its row."""

    async def made(call, act, *, stream=False, **settings):
        path, body = call
        async with through_proxy(sglang.url, tmp_path, **settings) as proxy, aiohttp.ClientSession() as http:
            before = await sglang.metric("sampled")
            url = f"{proxy.url}/rollouts/r1{path}"
            calling = asyncio.ensure_future(http.post(url, json=body | {"stream": stream}))
            await until(lambda count: count >= before + 20, lambda: sglang.metric("sampled"))
            await act(http)
            response = await calling
            assert response.status == 200
            await response.read()
            (step,) = await proxy.steps("r1")
            (row,) = await proxy.rows("r1") or [None]
        return step, row

    return made


@pytest.mark.parametrize("call", [CHAT_CALL, COMPLETIONS_CALL], ids=["chat", "completions"])
async def test_weights_that_change_in_flight_have_different_versions(sglang, during, call):
    """Each sampled token has the version that sampled it, in the step and in the row."""

    async def change(http, version="v2"):
        body = {"new_version": version, "abort_all_requests": False}
        await admin(http, sglang, "/update_weight_version", body)

    try:
        step, row = await during(call, change)
    finally:
        async with aiohttp.ClientSession() as http:
            await change(http, "default")

    first, second = step["choices"][0]["spans"]
    assert (first["policy_version"], second["policy_version"]) == ("default", "v2")
    assert (0, second["start"], 1500) == (first["start"], first["end"], second["end"])
    assert [span["policy_version"] for span in row["spans"]] == ["default", "v2"]
    assert step["fidelity"]["exact"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_a_paused_call_is_exact(sglang, during, mode, stream):
    """It waits, and continues with its keys and values or computes them again; the scores equal the sampled logprobs."""

    async def pause(http):
        await admin(http, sglang, "/pause_generation", {"mode": mode})
        sampled = await sglang.metric("sampled")
        await admin(http, sglang, "/continue_generation", {})
        await until(lambda count: count > sampled, lambda: sglang.metric("sampled"))

    step, row = await during(CHAT_CALL, pause, stream=stream)

    assert (step["fidelity"]["exact"], len(step["choices"][0]["ids"])) == (True, 1500), step["fidelity"]
    assert max(await differences(sglang, row)) < TOLERANCE
    assert (mode == "retract" and not stream) == bool(step["extra"].get("retractions"))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", ["/abort_request", "/pause_generation"])
async def test_an_aborted_call_has_what_was_sampled(sglang, during, path, stream):
    """With its finish reason `abort`; it is flagged and not exported, unless it is resumed."""

    async def abort(http):
        await admin(http, sglang, path, {"abort_all": True} if path == "/abort_request" else {"mode": "abort"})
        await admin(http, sglang, "/continue_generation", {})

    step, row = await during(CHAT_CALL, abort, stream=stream, agents={"max_resumes": 0})
    (choice,) = step["choices"]

    assert choice["finish_reason"] == "abort"
    assert 0 < len(choice["ids"]) == len(choice["logprobs"]) < 1500
    assert (step["fidelity"]["problems"], row) == (["aborted"], None)
