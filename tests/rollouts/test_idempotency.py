"""Calls with an idempotency key, with one proxy or two over one store."""

import asyncio
import socket
from dataclasses import replace

import orjson
import pytest
from tests.support.fakes import proxying
from tests.support.recorded import load
from tests.support.stored import stored_steps, wait_for_steps, wait_for_undelivered

from proxy.rollouts.idempotency import stored_answer_from
from proxy.rollouts.rollout import read_marks
from proxy.trajectory.tree import grow
from storage.errors import StoreUnreachable

WHOLE, STREAM = load("chat_ids_lp"), load("chat_ids_lp_stream")
FAILED = load("err_badmodel")
CHAT = "/rollouts/r1/v1/chat/completions"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
KEYED = {"Idempotency-Key": "k1"}


@pytest.fixture
async def served(engine, store):
    """A proxy in front of the fake engine."""
    async with proxying(engine.url, store) as served:
        yield served


async def post(http, served, *, body=BODY, headers=KEYED, path=CHAT):
    """Return status, headers and body of a response."""
    headers = {"Content-Type": "application/json", **headers}
    async with http.post(served.url + path, data=orjson.dumps(body), headers=headers) as response:
        return response.status, response.headers, await response.read()


def respond_after_event(engine, cassette):
    """Let the engine respond once the returned event is set."""
    event = asyncio.Event()
    engine.plays(cassette)
    plays = engine.respond

    async def respond(request, body):
        await event.wait()
        return await plays(request, body)

    engine.respond = respond
    return event


def text_of(stream: bytes) -> str:
    """Return the text of a stream of chat events."""
    chunks = [orjson.loads(line[6:]) for line in stream.splitlines() if line.startswith(b"data: {")]
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])


async def metric(http, served, name: str) -> str:
    async with http.get(served.url + "/metrics") as response:
        return next((line for line in (await response.text()).splitlines() if line.startswith(name)), "")


async def test_a_repeated_call_is_replayed_from_the_store(store, engine, http, served):
    """Status, step and JSON are equal; the response has X-Idempotent-Replayed, and the engine gets one request."""
    engine.plays(WHOLE)
    first, second = await post(http, served), await post(http, served)
    counted = await metric(http, served, "tokentape_idempotent_replays_total")

    assert (first[0], second[0], len(engine.requests)) == (200, 200, 1)
    assert orjson.loads(first[2]) == orjson.loads(second[2])
    assert first[1]["X-Step-Id"] == second[1]["X-Step-Id"]
    assert (first[1].get("X-Idempotent-Replayed"), second[1].get("X-Idempotent-Replayed")) == (None, "true")
    assert len(await stored_steps(store, "r1")) == 1
    assert counted.endswith(" 1.0")


async def test_a_repeated_stream_is_replayed_as_a_stream(engine, http, served):
    engine.plays(STREAM)
    body = BODY | {"stream": True}
    first, second = await post(http, served, body=body), await post(http, served, body=body)

    assert len(engine.requests) == 1
    assert "text/event-stream" in second[1]["Content-Type"]
    assert text_of(first[2]) == text_of(second[2]) != ""
    assert second[2].endswith(b"data: [DONE]\n\n")


async def test_another_replica_replays_the_stored_response(store, engine, http):
    engine.plays(WHOLE)
    async with proxying(engine.url, store) as here, proxying(engine.url, store) as there:
        first, second = await post(http, here), await post(http, there)

    assert (1, first[1]["X-Step-Id"]) == (len(engine.requests), second[1]["X-Step-Id"])


@pytest.mark.parametrize("cassette", [WHOLE, STREAM], ids=str)
async def test_repeats_of_a_call_in_flight_wait_for_its_response(store, engine, http, cassette, served):
    """The engine gets one request, and one step is stored."""
    proceed = respond_after_event(engine, cassette)
    body = BODY | {"stream": cassette.is_stream}
    calls = [asyncio.ensure_future(post(http, served, body=body)) for _ in range(5)]
    await engine.reached.wait()
    proceed.set()
    responses = await asyncio.gather(*calls)

    assert (len(engine.requests), {status for status, _, _ in responses}) == (1, {200})
    assert len({headers["X-Step-Id"] for _, headers, _ in responses}) == 1
    assert len(await stored_steps(store, "r1")) == 1


async def test_a_repeat_does_not_wait_for_the_first_clients_connection(store, engine, http):
    """It is replayed once the step is stored."""
    big = orjson.loads(WHOLE.response)
    big["choices"][0]["message"]["content"] = "x" * 2**23  # more than the sockets buffer
    engine.plays(replace(WHOLE, response=orjson.dumps(big)))
    async with proxying(engine.url, store) as served:
        host, port = served.url.removeprefix("http://").split(":")
        text = orjson.dumps(BODY)
        head = f"POST {CHAT} HTTP/1.1\r\nHost: {host}\r\nIdempotency-Key: k1\r\nContent-Length: {len(text)}\r\n\r\n"
        with socket.create_connection((host, int(port))) as unread:  # nothing is read from it
            unread.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**12)
            unread.sendall(head.encode() + text)
            (step,) = await wait_for_steps(store, "r1")
            second = await post(http, served)

    assert (200, step.step_id, 1) == (second[0], second[1]["X-Step-Id"], len(engine.requests))


async def test_a_key_with_another_body_is_422(engine, http, served):
    """This holds while the first call is in flight and afterwards; nothing is sent."""
    proceed = respond_after_event(engine, WHOLE)
    other = BODY | {"temperature": 0.5}
    first = asyncio.ensure_future(post(http, served))
    await engine.reached.wait()
    during = await post(http, served, body=other)
    proceed.set()
    await first
    after = await post(http, served, body=other)

    for status, _, error in (during, after):
        payload = orjson.loads(error)["error"]
        assert (status, payload["param"]) == (422, "Idempotency-Key")
        assert "Use a new key for each body" in payload["message"]
    assert len(engine.requests) == 1


async def test_keys_are_scoped_to_their_rollout(engine, http, served):
    engine.plays(WHOLE)
    first = await post(http, served)
    second = await post(http, served, path=CHAT.replace("r1", "r2"))

    assert first[1]["X-Step-Id"] != second[1]["X-Step-Id"]
    assert len(engine.requests) == 2


async def test_the_keys_of_a_deleted_rollout_are_unused(store, engine, http, served):
    engine.plays(WHOLE)
    first = await post(http, served)
    await store.delete("r1")
    second = await post(http, served)

    assert first[1]["X-Step-Id"] != second[1]["X-Step-Id"]


async def test_a_repeat_of_a_failed_call_is_a_new_attempt(store, engine, http, served):
    """The second step names the first."""
    engine.plays(FAILED)
    failed = await post(http, served)
    engine.plays(WHOLE)
    repeated = await post(http, served)

    first, second = await stored_steps(store, "r1")
    assert (FAILED.status, 200) == (failed[0], repeated[0])
    assert (1, first.step_id) == (second.extra["attempt"], second.extra["retry_of"])
    assert "attempt" not in first.extra


async def test_repeats_that_waited_for_a_failed_call_make_one_new_attempt(engine, http, served):
    proceed = respond_after_event(engine, FAILED)
    calls = [asyncio.ensure_future(post(http, served)) for _ in range(4)]
    await engine.reached.wait()
    engine.plays(WHOLE)
    proceed.set()
    responses = await asyncio.gather(*calls)

    assert [200, 200, 200, FAILED.status] == sorted(status for status, _, _ in responses)
    assert len(engine.requests) == 2


async def test_a_repeat_after_a_disconnect_is_a_new_attempt_that_supersedes_the_first(store, engine, http):
    engine.streams([event + b"\n\n" for event in STREAM.response.split(b"\n\n")[:5]], then="hang")
    body = BODY | {"stream": True}
    async with proxying(engine.url, store) as served:
        async with http.post(served.url + CHAT, data=orjson.dumps(body), headers=KEYED) as response:
            await response.content.readuntil(b"\n\n")
            response.close()
        await asyncio.wait_for(engine.aborted.wait(), 50)
        (lost,) = await wait_for_steps(store, "r1")
        engine.plays(STREAM)
        status, _, _ = await post(http, served, body=body)

    lost, whole = await stored_steps(store, "r1")
    tree = grow([lost, whole])
    assert (200, lost.step_id) == (status, whole.extra["retry_of"])
    assert {lost.step_id} == {tree.nodes[index].step.step_id for index in tree.superseded()}


async def test_a_replayed_undelivered_response_is_delivered(store, engine, http):
    """The step can be trained."""
    store.waiting["append"], store.reached["append"] = asyncio.Event(), asyncio.Event()
    engine.plays(WHOLE)
    async with proxying(engine.url, store) as served:
        call = asyncio.ensure_future(post(http, served))
        await store.reached["append"].wait()
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        while (await metric(http, served, "tokentape_in_flight_calls")) != "tokentape_in_flight_calls 0.0":
            pass
        store.waiting["append"].set()
        (step_id,) = await wait_for_undelivered(store, "r1")
        store.waiting.clear()
        _, headers, _ = await post(http, served)

    assert (headers["X-Step-Id"], len(engine.requests)) == (step_id, 1)
    assert read_marks(await store.marks("r1")).undelivered == frozenset()


async def test_a_finished_rollout_still_replays_stored_responses(engine, http, served):
    """New calls are 409."""
    engine.plays(WHOLE)
    await post(http, served)
    async with http.post(served.url + "/rollouts/r1/finish", json={"status": "completed"}) as finished:
        assert finished.status == 200
    repeated, other = await post(http, served), await post(http, served, headers={"Idempotency-Key": "k2"})

    assert (repeated[0], other[0]) == (200, 409)


async def test_x_stainless_retry_count_is_recorded_as_the_attempt(store, engine, http, served):
    """It is sent by clients without keys."""
    engine.plays(WHOLE)
    for count in ("0", "1", "-1", "x", "99999"):
        await post(http, served, headers={"X-Stainless-Retry-Count": count})

    steps = await stored_steps(store, "r1")
    assert [step.extra.get("attempt") for step in steps] == [None, 1, None, None, None]
    assert len({step.extra["request_key"] for step in steps}) == 1


async def test_a_keyed_call_is_503_before_anything_is_sent_if_its_key_cannot_be_looked_up(store, engine, http):
    engine.plays(WHOLE)
    store.failing.add("marks")
    async with proxying(engine.url, store) as served:
        status, _, error = await post(http, served)

    assert (status, orjson.loads(error)["error"]["type"]) == (503, "store_unavailable")
    assert engine.requests == []
    with pytest.raises(StoreUnreachable):
        await store.marks("r1")


async def test_partial_responses_and_streams_of_generate_cannot_be_replayed(store, engine, http, served):
    engine.plays(STREAM)
    await post(http, served, body=BODY | {"stream": True}, headers={})

    (step,) = await stored_steps(store, "r1")
    assert stored_answer_from(step) is not None
    assert stored_answer_from(replace(step, dialect="generate")) is None
    assert stored_answer_from(replace(step, status="partial")) is None
    assert stored_answer_from(replace(step, response=None)) is None
    assert stored_answer_from(replace(step, response={"choices": [{}]})) is None
