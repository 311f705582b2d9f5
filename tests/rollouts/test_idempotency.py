"""Attempts: calls made again under one key, over real sockets, a real store, and one proxy or two."""

import asyncio
import socket
from dataclasses import replace

import orjson
import pytest
from fakes import proxying
from recorded import load
from stored import stored_steps, wait_for_steps, wait_for_undelivered

from proxy.rollouts.idempotency import stored_answer_from
from proxy.rollouts.rollout import read_marks
from proxy.trajectory.tree import grow
from storage.errors import StoreUnreachable

WHOLE, STREAM = load("chat_ids_lp"), load("chat_ids_lp_stream")
FAILED = load("err_badmodel")
CHAT = "/rollouts/r1/v1/chat/completions"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
KEYED = {"Idempotency-Key": "k1"}


async def post(http, served, *, body=BODY, headers=KEYED, path=CHAT):
    """The status, headers and body of an answer."""
    headers = {"Content-Type": "application/json", **headers}
    async with http.post(served.url + path, data=orjson.dumps(body), headers=headers) as response:
        return response.status, response.headers, await response.read()


def waits_before(engine, cassette):
    """The engine answers once the event is set."""
    go_on = asyncio.Event()
    engine.plays(cassette)
    plays = engine.respond

    async def respond(request, body):
        await go_on.wait()
        return await plays(request, body)

    engine.respond = respond
    return go_on


def said(stream: bytes) -> str:
    """The text of a stream of chat events."""
    chunks = [orjson.loads(line[6:]) for line in stream.splitlines() if line.startswith(b"data: {")]
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])


async def metric(http, served, name: str) -> str:
    async with http.get(served.url + "/metrics") as response:
        return next((line for line in (await response.text()).splitlines() if line.startswith(name)), "")


async def test_what_was_answered_is_answered_from_the_store(store, engine, http):
    """The same status, step and JSON, without a second call of the engine or a second step; and it says so."""
    engine.plays(WHOLE)
    async with proxying(engine.url, store) as served:
        first, again = await post(http, served), await post(http, served)
        counted = await metric(http, served, "tokentape_idempotent_replays_total")

    assert (200, 200, 1) == (first[0], again[0], len(engine.requests))
    assert orjson.loads(first[2]) == orjson.loads(again[2])
    assert first[1]["X-Step-Id"] == again[1]["X-Step-Id"]
    assert (None, "true") == (first[1].get("X-Idempotent-Replayed"), again[1].get("X-Idempotent-Replayed"))
    assert 1 == len(await stored_steps(store, "r1"))
    assert counted.endswith(" 1.0")


async def test_a_stream_is_answered_again_as_a_stream(store, engine, http):
    """All its events, with the end, at once."""
    engine.plays(STREAM)
    body = BODY | {"stream": True}
    async with proxying(engine.url, store) as served:
        first, again = await post(http, served, body=body), await post(http, served, body=body)

    assert 1 == len(engine.requests)
    assert "text/event-stream" in again[1]["Content-Type"]
    assert said(first[2]) == said(again[2]) != ""
    assert again[2].endswith(b"data: [DONE]\n\n")


async def test_another_replica_gives_the_stored_answer_too(store, engine, http):
    """What was answered is known to all who share the store."""
    engine.plays(WHOLE)
    async with proxying(engine.url, store) as one, proxying(engine.url, store) as two:
        first, again = await post(http, one), await post(http, two)

    assert (1, first[1]["X-Step-Id"]) == (len(engine.requests), again[1]["X-Step-Id"])


@pytest.mark.parametrize("cassette", [WHOLE, STREAM], ids=str)
async def test_a_repeat_of_a_call_in_flight_waits_and_gets_its_answer(store, engine, http, cassette):
    """However many ask, the engine is asked once, and all are told of one step."""
    go_on = waits_before(engine, cassette)
    body = BODY | {"stream": cassette.is_stream}
    async with proxying(engine.url, store) as served:
        asking = [asyncio.ensure_future(post(http, served, body=body)) for _ in range(5)]
        await engine.reached.wait()
        go_on.set()
        answers = await asyncio.gather(*asking)

    assert (1, {200}) == (len(engine.requests), {status for status, _, _ in answers})
    assert 1 == len({headers["X-Step-Id"] for _, headers, _ in answers})
    assert 1 == len(await stored_steps(store, "r1"))


async def test_a_repeat_does_not_wait_for_a_client_that_does_not_read(store, engine, http):
    """Once the step is stored, its answer is there, whatever the first client's connection is doing."""
    big = orjson.loads(WHOLE.response)
    big["choices"][0]["message"]["content"] = "x" * 2**23  # more than sockets buffer, when one of them is small
    engine.plays(replace(WHOLE, response=orjson.dumps(big)))
    async with proxying(engine.url, store) as served:
        host, port = served.url.removeprefix("http://").split(":")
        text = orjson.dumps(BODY)
        head = f"POST {CHAT} HTTP/1.1\r\nHost: {host}\r\nIdempotency-Key: k1\r\nContent-Length: {len(text)}\r\n\r\n"
        with socket.create_connection((host, int(port))) as unread:  # never read from, and closed whatever happens
            unread.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**12)
            unread.sendall(head.encode() + text)
            (step,) = await wait_for_steps(store, "r1")
            again = await post(http, served)

    assert (200, step.step_id, 1) == (again[0], again[1]["X-Step-Id"], len(engine.requests))


async def test_a_key_stands_for_one_body(store, engine, http):
    """Another body under it is refused in a sentence, while the first is in flight and afterwards, and nothing is sent."""
    go_on = waits_before(engine, WHOLE)
    other = BODY | {"temperature": 0.5}
    async with proxying(engine.url, store) as served:
        first = asyncio.ensure_future(post(http, served))
        await engine.reached.wait()
        during = await post(http, served, body=other)
        go_on.set()
        await first
        after = await post(http, served, body=other)

    for status, _, error in (during, after):
        told = orjson.loads(error)["error"]
        assert (422, "Idempotency-Key") == (status, told["param"])
        assert "Use a new key for each body" in told["message"]
    assert 1 == len(engine.requests)


async def test_a_key_is_known_within_its_rollout(store, engine, http):
    """Agents of two rollouts may use the same key."""
    engine.plays(WHOLE)
    async with proxying(engine.url, store) as served:
        one = await post(http, served)
        two = await post(http, served, path=CHAT.replace("r1", "r2"))

    assert one[1]["X-Step-Id"] != two[1]["X-Step-Id"]
    assert 2 == len(engine.requests)


async def test_a_deleted_rollout_takes_its_keys_along(store, engine, http):
    """In its next life the key is new."""
    engine.plays(WHOLE)
    async with proxying(engine.url, store) as served:
        one = await post(http, served)
        await store.delete("r1")
        two = await post(http, served)

    assert one[1]["X-Step-Id"] != two[1]["X-Step-Id"]


async def test_a_failed_call_is_made_again_as_its_retry(store, engine, http):
    """An error of the engine is not given twice; the second step names the first."""
    engine.plays(FAILED)
    async with proxying(engine.url, store) as served:
        failed = await post(http, served)
        engine.plays(WHOLE)
        again = await post(http, served)

    first, second = await stored_steps(store, "r1")
    assert (FAILED.status, 200) == (failed[0], again[0])
    assert (1, first.step_id) == (second.extra["attempt"], second.extra["retry_of"])
    assert "attempt" not in first.extra


async def test_those_who_waited_for_a_call_that_failed_make_it_once(store, engine, http):
    """One of them asks the engine again, and the others wait for that one."""
    go_on = waits_before(engine, FAILED)
    async with proxying(engine.url, store) as served:
        asking = [asyncio.ensure_future(post(http, served)) for _ in range(4)]
        await engine.reached.wait()
        engine.plays(WHOLE)
        go_on.set()
        answers = await asyncio.gather(*asking)

    assert [200, 200, 200, FAILED.status] == sorted(status for status, _, _ in answers)
    assert 2 == len(engine.requests)


async def test_a_client_that_left_and_asks_again(store, engine, http):
    """Its first call was taken from the engine; the second is a call of its own, which replaces it."""
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
    assert {lost.step_id} == {tree.nodes[place].step.step_id for place in tree.superseded()}


async def test_an_undelivered_answer_that_is_given_again_is_delivered(store, engine, http):
    """The client left before the end and came back for it: it has its turn after all, and the step may be trained."""
    store.waiting["append"], store.reached["append"] = asyncio.Event(), asyncio.Event()
    engine.plays(WHOLE)
    async with proxying(engine.url, store) as served:
        asking = asyncio.ensure_future(post(http, served))
        await store.reached["append"].wait()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        while (await metric(http, served, "tokentape_in_flight_calls")) != "tokentape_in_flight_calls 0.0":
            pass
        store.waiting["append"].set()
        (step_id,) = await wait_for_undelivered(store, "r1")
        store.waiting.clear()
        _, headers, _ = await post(http, served)

    assert (step_id, 1) == (headers["X-Step-Id"], len(engine.requests))
    assert frozenset() == read_marks(await store.marks("r1")).undelivered


async def test_a_limit_that_is_reached_does_not_hold_back_an_answer_that_was_given(store, engine, http):
    """A finished rollout takes no more calls, but what was answered before is answered still."""
    engine.plays(WHOLE)
    async with proxying(engine.url, store) as served:
        await post(http, served)
        async with http.post(served.url + "/rollouts/r1/finish", json={"status": "completed"}) as finished:
            assert 200 == finished.status
        again, other = await post(http, served), await post(http, served, headers={"Idempotency-Key": "k2"})

    assert (200, 409) == (again[0], other[0])


async def test_a_retry_header_marks_the_step(store, engine, http):
    """A client without keys, whose library counts its retries: the step says which attempt it was."""
    engine.plays(WHOLE)
    async with proxying(engine.url, store) as served:
        for count in ("0", "1", "-1", "x", "99999"):
            await post(http, served, headers={"X-Stainless-Retry-Count": count})

    steps = await stored_steps(store, "r1")
    assert [None, 1, None, None, None] == [step.extra.get("attempt") for step in steps]
    assert 1 == len({step.extra["request_key"] for step in steps})


async def test_a_store_that_is_away_is_told_before_anything_is_sent(store, engine, http):
    """A keyed call that cannot be looked up is not made."""
    engine.plays(WHOLE)
    store.failing.add("marks")
    async with proxying(engine.url, store) as served:
        status, _, error = await post(http, served)

    assert (503, "store_unavailable") == (status, orjson.loads(error)["error"]["type"])
    assert [] == engine.requests
    with pytest.raises(StoreUnreachable):
        await store.marks("r1")


async def test_what_cannot_be_told_again_is_asked_again(store, engine, http):
    """A stream of generate has events that nobody else can write; what broke off was no answer."""
    engine.plays(STREAM)
    async with proxying(engine.url, store) as served:
        await post(http, served, body=BODY | {"stream": True}, headers={})

    (step,) = await stored_steps(store, "r1")
    assert stored_answer_from(step) is not None
    assert stored_answer_from(replace(step, dialect="generate")) is None
    assert stored_answer_from(replace(step, status="partial")) is None
    assert stored_answer_from(replace(step, response=None)) is None
    assert stored_answer_from(replace(step, response={"choices": [{}]})) is None
