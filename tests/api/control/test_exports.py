"""Exports of one rollout and of many."""

import asyncio
import io

import aiohttp
import msgspec
import orjson
import pyarrow.ipc
import pyarrow.parquet
import pytest

from storage.errors import StoreUnreachable
from storage.types import StepWrite


async def store_unreadable_step(store, rollout_id):
    """Store an invalid record among a rollout's steps."""
    stored = await store.get(rollout_id)
    await store.append(StepWrite(rollout_id, stored.incarnation, "broken", b"TT\x01 not a record"), now_ms=1)


async def test_a_conversation_is_one_row_of_parallel_arrays(proxy):
    """Every sampled token is trained once; the ids are those recorded."""
    await proxy.turns("r1", 3)
    steps = await proxy.steps("r1")
    (row,) = (await proxy.get("/rollouts/r1/export?format=sequences")).json["rows"]

    assert len(row["token_ids"]) == len(row["mask"]) == len(row["logprobs"])
    assert steps[-1]["prompt_ids"] + steps[-1]["choices"][0]["ids"] == row["token_ids"]
    assert sum(len(step["choices"][0]["ids"]) for step in steps) == sum(row["mask"])
    for step, span in zip(steps, row["spans"], strict=True):
        assert step["choices"][0]["ids"] == row["token_ids"][span["start"] : span["end"]]
        assert step["choices"][0]["logprobs"] == row["logprobs"][span["start"] : span["end"]]


async def test_repeated_exports_are_equal(proxy):
    await proxy.turns("r1", 3)

    assert (await proxy.get("/rollouts/r1/export")).text == (await proxy.get("/rollouts/r1/export")).text


async def test_the_steps_format_has_one_row_per_choice(proxy):
    await proxy.chat("r1", n=3)
    rows = (await proxy.get("/rollouts/r1/export?format=steps")).json["rows"]

    assert [row["choice"] for row in rows] == [0, 1, 2]


async def test_the_container_is_chosen_by_parameter_or_accept_header(proxy):
    """The default is JSON."""
    await proxy.chat("r1")
    by_name = await proxy.get("/rollouts/r1/export?container=ndjson")
    by_accept = await proxy.get("/rollouts/r1/export", headers={"Accept": "application/x-ndjson"})
    whole = (await proxy.get("/rollouts/r1/export")).json

    assert by_name.text == by_accept.text
    assert whole["rows"] == [orjson.loads(by_name.text)]


async def test_skipped_steps_are_reported_in_a_header_and_in_the_report(proxy):
    """An export without rows is 200."""
    await proxy.post("/rollouts/r1/v1/completions", {"prompt": "hi", "echo": True, "max_tokens": 2})
    response = await proxy.get("/rollouts/r1/export?report=true")
    empty = await proxy.get("/rollouts/r1/export")

    assert (empty.status, empty.json["rows"]) == (200, [])
    assert response.headers["X-Export-Skipped"].startswith("1; ")
    assert "echo" in response.json["report"]["skipped"][0]["why"]


@pytest.mark.parametrize("path", ["/rollouts/r1/export", "/export"])
async def test_an_invalid_export_option_is_400_and_named(proxy, path):
    await proxy.chat("r1")
    for query in [
        "format=nope",
        "branches=most",
        "include=all",
        "max_len=0",
        "overlong=x",
        "container=zip",
        "report=maybe",
        "fromat=x",
    ]:
        response = await proxy.get(f"{path}?{query}")
        assert (400, query.partition("=")[0]) == (response.status, response.json["error"]["param"])


@pytest.mark.parametrize("query", ["status=nope", "limit=0", "since=x", f"limit={'9' * 5000}"])
async def test_an_invalid_filter_is_400_before_anything_is_streamed(proxy, query):
    response = await proxy.get(f"/export?{query}")

    assert (400, query.partition("=")[0]) == (response.status, response.json["error"]["param"])


async def test_an_export_that_fails_before_its_first_row_returns_the_error(proxy, store):
    await proxy.chat("r1")
    store.failing.add("get")
    single = await proxy.get("/rollouts/r1/export")
    many = await proxy.get("/export")

    assert (single.status, single.json["error"]["type"]) == (503, "store_unavailable")
    assert many.status == 503


@pytest.mark.parametrize("path", ["/rollouts/r1/export", "/export"])
async def test_a_head_request_returns_headers_only(proxy, path):
    """A client would read a body as the next response on the connection."""
    await proxy.chat("r1")
    head = await proxy.call("HEAD", path)
    responses = [await proxy.get(path) for _ in range(2)]

    assert (head.status, head.text, head.headers["Content-Type"].partition(";")[0]) == (200, b"", "application/json")
    assert [response.status for response in responses] == [200, 200]


@pytest.mark.parametrize("container", ["json", "ndjson"])
async def test_an_export_that_fails_midway_breaks_the_connection(proxy, store, container):
    """A client cannot mistake its rows for all rows."""
    await proxy.chat("older")
    await asyncio.sleep(0.002)  # rollouts of one millisecond have no order of age
    await proxy.chat("newer")
    read = store.read_all

    async def fail_at_the_second(name, limit):
        if name == "older":
            raise StoreUnreachable("the test took the store away")
        return await read(name, limit)

    store.read_all = fail_at_the_second
    async with proxy.http.get(f"{proxy.url}/export?container={container}") as response:
        with pytest.raises(aiohttp.ClientPayloadError):
            await response.read()


@pytest.mark.parametrize("format_name", ["sequences", "verifiers"])
async def test_an_unreadable_rollout_is_skipped_in_an_export_of_many(proxy, store, format_name):
    """It is in the report; its own export is 409 with the index of the step."""
    await proxy.chat("good")
    await proxy.chat("bad")
    for name in ("good", "bad"):
        await proxy.finish(name, reward=1)
    await store_unreadable_step(store, "bad")
    response = await proxy.get(f"/export?report=true&format={format_name}")
    own = await proxy.get("/rollouts/bad/export")

    assert (response.status, len(response.json["rows"])) == (200, 1)
    assert [row["rollout_id"] for row in response.json["report"]["rows"]] == ["good"]
    assert [
        (entry["rollout_id"], "Step at index 1" in entry["why"]) for entry in response.json["report"]["skipped"]
    ] == [("bad", True)]
    assert (own.status, own.json["error"]["code"]) == (409, "damaged_step")


def rows_in(container, text):
    """Return the number of rows in an export, and its report."""
    match container:
        case "json":
            return len(orjson.loads(text)["rows"]), orjson.loads(text)["report"]
        case "ndjson":
            *rows, report = map(orjson.loads, text.splitlines())
            return len(rows), report["report"]
        case "msgpack":
            rows, mark, report = text.rpartition(b"\x81\xa6report")
            return rows.count(b"\xaarollout_id"), msgspec.msgpack.decode(mark + report)["report"]
        case "parquet":
            file = pyarrow.parquet.ParquetFile(io.BytesIO(text))
            return file.metadata.num_rows, orjson.loads(file.metadata.metadata[b"report"])
    reader = pyarrow.ipc.open_stream(text)
    *batches, last = [reader.read_next_batch_with_custom_metadata() for _ in range(2)]
    return sum(batch.batch.num_rows for batch in batches), orjson.loads(last.custom_metadata[b"report"])


@pytest.mark.parametrize("path", ["/rollouts/{r}/export", "/groups/g/export", "/export"])
@pytest.mark.parametrize("container", ["json", "ndjson", "msgpack", "parquet", "arrow"])
async def test_the_report_has_an_entry_for_each_row_in_every_container(proxy, container, path):
    """An entry has the rollout, steps, reward and advantage of its row."""
    first, _ = await proxy.group("g", 1, 0)
    await proxy.patch(f"/rollouts/{first}", {"advantages": 0.5})
    response = await proxy.get(f"{path.format(r=first)}?report=true&container={container}&format=steps")
    if container == "json" and path.startswith("/groups"):
        count, report = len(response.json["group"]), response.json["report"]
    else:
        count, report = rows_in(container, response.text)
    entries = {entry["rollout_id"]: entry for entry in report["rows"]}
    steps = await proxy.steps(first)

    assert count == len(report["rows"]) == (1 if path.startswith("/rollouts") else 2)
    assert {
        "rollout_id": first, "step_ids": [step["step_id"] for step in steps], "reward": 1.0, "advantage": 0.5, "weight": 1.0,
    } == entries[first]  # fmt: skip


async def test_a_marin_group_in_a_columnar_container_has_one_row_per_rollout(proxy):
    await proxy.group("g", 1, 0, metadata={"env_name": "demo"})
    response = await proxy.get("/groups/g/export?format=marin&container=parquet&report=true")
    table = pyarrow.parquet.read_table(io.BytesIO(response.text)).to_pylist()

    assert [row["env_name"] for row in table] == ["demo", "demo"]
    assert [row["episode_reward"] for row in table] == [1.0, 0.0]


async def test_a_rollout_deleted_during_an_export_of_many_is_skipped(proxy, store):
    await proxy.chat("r1")
    await proxy.chat("r2")
    store.waiting["read_all"], store.reached["read_all"] = asyncio.Event(), asyncio.Event()
    exporting = asyncio.ensure_future(proxy.get("/export"))
    await store.reached["read_all"].wait()
    await proxy.delete("/rollouts/r1")
    store.waiting.pop("read_all").set()
    rows = (await exporting).json["rows"]

    assert [row["rollout_id"] for row in rows] == ["r2"]


async def test_an_export_of_many_applies_the_filters_and_reports_skipped_steps(proxy):
    for name in ("r1", "r2", "r3"):
        await proxy.post("/rollouts", {"rollout_id": name, "group_id": "odd" if name != "r2" else "even"})
        await proxy.turns(name, 2)
    await proxy.post("/rollouts/r3/finish", {"status": "completed"})
    await proxy.post("/rollouts/r2/v1/completions", {"prompt": "hi", "echo": True, "max_tokens": 2})

    async def rollouts(query):
        return [row["rollout_id"] for row in (await proxy.get(f"/export?{query}")).json["rows"]]

    assert set(await rollouts("")) == {"r1", "r2", "r3"}
    assert set(await rollouts("group_id=odd")) == {"r1", "r3"}
    assert await rollouts("status=completed") == ["r3"]
    assert await rollouts("since=9999999999") == []
    assert len(await rollouts("limit=2")) == 2
    report = (await proxy.get("/export?report=true")).json["report"]
    assert [entry["rollout_id"] for entry in report["skipped"]] == ["r2"]


async def test_a_rollout_of_40_steps_is_exported(proxy):
    """Long exports are computed in a thread."""
    await proxy.turns("r1", 40)
    (row,) = (await proxy.get("/rollouts/r1/export")).json["rows"]

    assert len(row["spans"]) == 40


async def test_an_undelivered_step_is_not_exported(proxy, store):
    reply = await proxy.chat("r1")
    stored = await store.get("r1")
    await store.mark("r1", stored.incarnation, {f"undelivered:{reply.step_id}": b"1"}, now_ms=1)
    response = await proxy.get("/rollouts/r1/export")

    assert response.json["rows"] == []
    assert "not delivered" in response.headers["X-Export-Skipped"]
    assert len((await proxy.get("/rollouts/r1/export?include=flagged")).json["rows"]) == 1
    assert (await proxy.get("/rollouts/r1")).json["counts"]["undelivered"] == 1


async def test_a_rollout_that_the_format_cannot_express_is_409(proxy):
    """In an export of many it is skipped with the reason."""
    await proxy.chat("r1")
    refused = await proxy.get("/rollouts/r1/export?format=scored_data")
    many = await proxy.get("/export?format=scored_data&report=true")
    await proxy.patch("/rollouts/r1", {"reward": 1.0})

    assert (refused.status, refused.json["error"]["code"]) == (409, "conflict")
    assert "Format 'scored_data' requires a reward; rollout 'r1' has none." in refused.json["error"]["message"]
    assert (many.json["rows"], [entry["rollout_id"] for entry in many.json["report"]["skipped"]]) == ([], ["r1"])
    assert (await proxy.get("/rollouts/r1/export?format=scored_data")).json["rows"][0]["scores"] == [1.0]


async def test_formats_with_messages_read_requests_and_responses(proxy):
    await proxy.turns("r1", 2)
    await proxy.patch("/rollouts/r1", {"reward": 1.0})
    steps = (await proxy.get("/rollouts/r1/export?format=verifiers")).json["rows"]
    (output,) = (await proxy.get("/rollouts/r1/export?format=verl")).json["rows"]

    assert [len(step["prompt"]) for step in steps] == [1, 3]
    assert output["num_turns"] == 4


async def test_arrow_and_parquet_have_the_rows_of_json(proxy):
    ipc, parquet = pytest.importorskip("pyarrow.ipc"), pytest.importorskip("pyarrow.parquet")
    await proxy.turns("r1", 2)
    rows = (await proxy.get("/rollouts/r1/export")).json["rows"]
    for path in ("/rollouts/r1/export", "/export"):
        arrow = await proxy.get(path, headers={"Accept": "application/vnd.apache.arrow.stream"})
        file = await proxy.get(f"{path}?container=parquet")
        for table in (ipc.open_stream(arrow.text).read_all(), parquet.read_table(io.BytesIO(file.text))):
            assert [row["token_ids"] for row in rows] == table["token_ids"].to_pylist()


@pytest.mark.parametrize(
    ("query", "expected"), [("", [None]), ("prompt_logprob=0", [0]), ("prompt_logprob=-1.5", [-1.5])]
)
async def test_prompt_logprob_fills_the_logprobs_of_prompt_tokens(proxy, query, expected):
    """By default they are null."""
    await proxy.chat("r1")
    (row,) = (await proxy.get(f"/rollouts/r1/export?{query}")).json["rows"]

    assert row["logprobs"][:1] == expected


@pytest.mark.parametrize("value", ["x", "nan", "inf", ""])
async def test_an_invalid_prompt_logprob_is_400(proxy, value):
    await proxy.chat("r1")

    assert (await proxy.get(f"/rollouts/r1/export?prompt_logprob={value}")).status == 400


async def test_an_export_of_many_has_all_rollouts_newest_first(proxy):
    names = [f"r{number}" for number in range(35)]
    for name in names:
        await proxy.chat(name)

    async def exported(query=""):
        return [row["rollout_id"] for row in (await proxy.get(f"/export{query}")).json["rows"]]

    assert names[::-1] == await exported()
    assert names[:-21:-1] == await exported("?limit=20")
