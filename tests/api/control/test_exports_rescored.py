"""Exports with the logprobs of the same ids by another engine, or by the policy now."""

import asyncio
import io

import aiohttp
import orjson
import pyarrow.ipc
import pytest
from tests.support.fakes import fake_engine, proxying
from tests.support.rescored import BELOW, Teacher, length_of, trained
from tests.support.session import session_with

from proxy.server.listener import simulating
from proxy.simulator.options import Options


@pytest.fixture
async def engines():
    """Two endpoints of the teacher."""
    async with fake_engine() as first, fake_engine() as second:
        yield first, second


@pytest.fixture
def teacher(engines):
    """What both endpoints do."""
    taught = Teacher()
    for engine in engines:
        engine.respond = taught
    return taught


@pytest.fixture
def sections(engines, teacher):
    scorer = {"endpoints": [{"url": engine.url, "kind": "vllm"} for engine in engines], "version": "t1"}
    return {"rescore": {"scorers": {"teacher": scorer}, "timeout_s": 50, "max_in_flight": 3}}


async def rows_of(proxy, path):
    response = await proxy.get(path)
    assert response.status == 200, response.text
    return response.json["rows"]


async def test_a_teacher_scores_the_trained_tokens_of_each_row(proxy, teacher):
    """Other tokens have null; the recorded logprobs are unchanged; each row is scored once, with all its turns."""
    await proxy.turns("r1", 3)
    (plain,) = await rows_of(proxy, "/rollouts/r1/export")
    (row,) = await rows_of(proxy, "/rollouts/r1/export?rescore=teacher")

    assert plain == {name: value for name, value in row.items() if not name.startswith("rescored")}
    assert {k: v for k, v in row["rescored"].items() if k != "engine"} == {"model": "big", "policy_version": "t1"}
    expected = [value - BELOW for value in trained(row["logprobs"], row["mask"])]
    assert pytest.approx(trained(row["rescored_logprobs"], row["mask"]), abs=1e-6) == expected
    assert [bit == 0 for bit in row["mask"]] == [value is None for value in row["rescored_logprobs"]]
    assert [row["token_ids"]] == teacher.scored


async def test_the_policy_scores_its_own_ids_again(proxy):
    """The simulator at temperature 1 returns the recorded logprobs."""
    await proxy.put("/policy", {"version": 4})
    await proxy.turns("r1", 2)
    (row,) = await rows_of(proxy, "/rollouts/r1/export?rescore=policy&report=true")

    assert trained(row["logprobs"], row["mask"]) == pytest.approx(
        trained(row["rescored_logprobs"], row["mask"]), abs=1e-3
    )
    assert row["rescored"] == {"engine": "fake", "model": "policy", "policy_version": "4"}


async def test_each_branch_is_scored_and_shared_tokens_once(proxy, teacher):
    """What another row trains is null in this one."""
    shared = await proxy.chat("r1")
    await proxy.chat("r1", {"role": "user", "content": "hi"}, shared.message, {"role": "user", "content": "a"})
    await proxy.chat("r1", {"role": "user", "content": "hi"}, shared.message, {"role": "user", "content": "b"})
    rows = await rows_of(proxy, "/rollouts/r1/export?rescore=teacher")

    assert len(rows) == len(teacher.scored) == 2
    for row in rows:
        assert [bit == 0 for bit in row["mask"]] == [value is None for value in row["rescored_logprobs"]]


async def test_a_repeated_export_takes_cached_scores(proxy, teacher):
    """The rows are equal byte by byte, in each route and container."""
    await proxy.turns("r1", 2)
    first = await proxy.get("/rollouts/r1/export?rescore=teacher")
    again = await proxy.get("/export?rescore=teacher&container=ndjson")
    arrow = await proxy.get("/rollouts/r1/export?rescore=teacher&rescore_top_k=0&container=arrow")
    (read,) = pyarrow.ipc.open_stream(io.BytesIO(arrow.text)).read_all().to_pylist()

    assert first.json["rows"] == [orjson.loads(again.text)]
    assert read["rescored"] == first.json["rows"][0]["rescored"]
    assert read["rescored_logprobs"] == pytest.approx(first.json["rows"][0]["rescored_logprobs"], nan_ok=True)
    assert len(teacher.scored) == 1


async def test_another_replica_takes_the_scores_from_the_store(proxy, teacher, store, sections, http):
    """A claim that another process began continues there."""
    await proxy.turns("r1", 2)
    first = await proxy.get("/rollouts/r1/export?rescore=teacher")
    async with (
        proxying(None, store, **sections) as replica,
        http.get(f"{replica.url}/rollouts/r1/export?rescore=teacher") as response,
    ):
        assert first.text == await response.read()

    assert len(teacher.scored) == 1


async def test_many_rollouts_are_scored_at_the_same_time(proxy, teacher):
    """At most `max_in_flight` of them."""
    for number in range(9):
        await proxy.chat(f"r{number}", {"role": "user", "content": f"hi {number}"})
    teacher.together = asyncio.Barrier(3)
    response = await proxy.get("/export?rescore=teacher&container=ndjson")

    assert len(response.text.splitlines()) == len(teacher.scored) == 9
    assert teacher.most_at_once == 3


async def test_the_most_likely_tokens_are_beside_the_scores(proxy, teacher):
    """The most likely one first; a token that is not among them has its own logprob only in the scores."""
    await proxy.chat("r1")
    (row,) = await rows_of(proxy, "/rollouts/r1/export?rescore=teacher&rescore_top_k=2")
    arrow = await proxy.get("/rollouts/r1/export?rescore=teacher&rescore_top_k=2&container=arrow")
    (read,) = pyarrow.ipc.open_stream(io.BytesIO(arrow.text)).read_all().to_pylist()

    assert {tuple(ids) for ids in trained(row["rescored_top_ids"], row["mask"])} == {(1001, 1002)}
    assert {tuple(values) for values in trained(row["rescored_top_logprobs"], row["mask"])} == {(-0.25, -0.5)}
    assert row["rescored_top_ids"] == read["rescored_top_ids"]
    assert None in row["rescored_top_ids"]


@pytest.mark.parametrize(
    ("query", "status", "words"),
    [
        ("rescore=nobody", 400, "Unknown scorer 'nobody'; use one of policy, teacher"),
        (
            "rescore=teacher&format=trl",
            400,
            "no place for logprobs of a teacher; use one of sequences, scored_data, verl",
        ),
        (
            "rescore=policy&format=slime",
            400,
            "no place for logprobs of the policy; use one of sequences, verl_dataproto, areal",
        ),
        (
            "rescore=teacher&format=slime&rescore_top_k=3",
            400,
            "no place for the most likely tokens; use one of sequences",
        ),
        ("rescore_top_k=3", 400, "rescore_top_k requires rescore"),
        ("rescore=teacher&rescore_top_k=101", 400, "rescore_top_k must be an integer from 0 to 100"),
    ],
)
async def test_a_scorer_or_a_format_that_cannot_be_used_is_rejected(proxy, query, status, words):
    """The error names those that can."""
    await proxy.chat("r1")
    for path in ("/rollouts/r1/export", "/export"):
        response = await proxy.get(f"{path}?{query}")
        assert status == response.status
        assert words in response.json["error"]["message"]


@pytest.mark.parametrize("path", ["/rollouts/r1/export?", "/export?", "/groups/g/export?"])
async def test_an_engine_that_fails_is_an_error_before_the_first_byte(proxy, engines, teacher, path):
    """After the other endpoint was tried too. With the engines back, the same export succeeds."""
    (member,) = await proxy.group("g", 1)
    path = path.replace("r1", member)
    teacher.failing = 500
    failed = await proxy.get(f"{path}rescore=teacher")
    teacher.failing = None

    assert (failed.status, failed.json["error"]["code"]) == (502, "engine_error")
    assert "overloaded" in failed.json["error"]["message"]
    assert [sum("prompt_logprobs" in body for body in engine.requests) for engine in engines] == [1, 1]
    assert (await proxy.get(f"{path}rescore=teacher")).status == 200


async def test_an_unreachable_scorer_is_an_error(proxy, engines, teacher):
    await proxy.chat("r1")
    for engine in engines:
        engine.respond = _closes
    response = await proxy.get("/rollouts/r1/export?rescore=teacher")

    assert response.status in (502, 503)
    assert response.json["error"]["code"].startswith("engine_")


async def _closes(request, body):
    request.transport.close()
    await asyncio.Event().wait()


async def test_a_row_that_exceeds_the_context_window_is_refused(proxy, teacher):
    """An export of many rollouts skips and reports it."""
    await proxy.turns("long", 4)
    teacher.window = 40
    alone = await proxy.get("/rollouts/long/export?rescore=teacher")
    many = await proxy.get("/export?rescore=teacher&report=true")

    assert (alone.status, "exceed the engine's context window of 40" in alone.json["error"]["message"]) == (409, True)
    assert many.json["rows"] == []
    assert "cannot be scored" in many.json["report"]["skipped"][0]["why"]


async def test_an_engine_with_another_vocabulary_is_an_error(proxy, teacher):
    """Its texts of the ids differ, or it gives the recorded tokens next to no probability."""
    await proxy.turns("r1", 3)
    teacher.texts = dict.fromkeys(range(200_000), "other")
    by_text = await proxy.get("/export?rescore=teacher")
    teacher.texts, teacher.below = None, 30.0
    by_scores = await proxy.get("/rollouts/r1/export?rescore=teacher")
    teacher.below = 3.0
    allowed = await proxy.get("/rollouts/r1/export?rescore=teacher")

    assert (by_text.status, by_scores.status, allowed.status) == (422, 422, 200)
    assert "has another vocabulary than engine fake: id" in by_text.json["error"]["message"]
    assert "next to no probability" in by_scores.json["error"]["message"]


async def test_an_engine_that_returns_no_texts_does_not_block_later_exports(store, engines, teacher):
    """They are compared one after the other; each waits for `rescore.timeout_s` at most."""
    hanging = asyncio.Event()

    async def hang(request, body):
        if request.path == "/detokenize":
            await hanging.wait()
        return await teacher(request, body)

    for engine in engines:
        engine.respond = hang
    scorer = {"endpoints": [{"url": engine.url, "kind": "vllm"} for engine in engines]}
    sections = {"rescore": {"scorers": {"teacher": scorer}, "timeout_s": 2}}
    async with simulating("127.0.0.1:0", Options()) as url, session_with(url, store, **sections) as proxy:
        await proxy.chat("r1")
        async with asyncio.timeout(50):
            failed = await proxy.get("/rollouts/r1/export?rescore=teacher")
        hanging.set()
        later = await proxy.get("/rollouts/r1/export?rescore=teacher")

    assert (failed.status, later.status) == (504, 200)
    assert "rescore.timeout_s" in failed.json["error"]["message"]


async def test_an_export_that_fails_halfway_is_incomplete_and_continues_from_the_cache(proxy, teacher):
    """The connection is closed, so that its rows are not taken as all; a repeated export scores only the others."""
    await proxy.turns("oldest", 3)
    for number in range(2):
        await proxy.chat(f"r{number}", {"role": "user", "content": f"hi {number}"})
    teacher.longest = await length_of(proxy, "oldest") - 1
    with pytest.raises(aiohttp.ClientPayloadError):
        await proxy.get("/export?rescore=teacher&container=ndjson")
    teacher.longest = 10**9
    response = await proxy.get("/export?rescore=teacher&container=ndjson")

    assert len(response.text.splitlines()) == len(teacher.scored) == 3


async def test_a_report_has_the_engine_of_each_row(proxy):
    """Beside the reward of the row; the rows of a trainer's format have no place for it."""
    await proxy.put("/policy", {"version": 4})
    (member,) = await proxy.group("g", 1)
    expected = {"engine": "fake", "model": "policy", "policy_version": "4"}
    for path in (f"/rollouts/{member}/export?format=areal", "/export?format=areal", "/groups/g/export?format=areal"):
        response = await proxy.get(f"{path}&rescore=policy&report=true")
        assert [row["rescored"] for row in response.json["report"]["rows"]] == [expected]
