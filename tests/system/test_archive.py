"""The archive in an S3 bucket (moto's server), and read by datasets, DuckDB and Polars, as is the Parquet container."""

import asyncio
import re

import boto3
import datasets
import duckdb
import fsspec
import polars as pl
import pyarrow.parquet as parquet
import pytest
from moto.server import ThreadedMotoServer
from tests.support import worked
from tests.support.archives import archived_versions, archiver, finished, importer
from tests.support.fakes import proxying
from tests.support.forests import make_step
from tests.support.pages import ROOT, blocks_of
from tests.support.playbacks import inherit, record

from proxy.export import FORMATS
from proxy.export.containers import CONTAINERS
from proxy.rollouts.archive.dataset import Dataset

IDS = list(range(301))


@pytest.fixture(scope="module")
def s3():
    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(s3, monkeypatch):
    """The URL of an empty bucket."""
    for name, value in (
        ("ENDPOINT_URL", s3),
        ("ACCESS_KEY_ID", "a"),
        ("SECRET_ACCESS_KEY", "s"),
        ("DEFAULT_REGION", "us-east-1"),
    ):
        monkeypatch.setenv(f"AWS_{name}", value)
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    boto3.client("s3").create_bucket(Bucket="rollouts")
    yield "s3://rollouts/recorded"
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    resource = boto3.resource("s3").Bucket("rollouts")
    resource.objects.all().delete()
    resource.delete()


async def test_an_s3_bucket_is_archived_and_imported(store, bucket):
    """Rollouts leave the store, and return."""
    touched = await finished(store, "a", "b", steps=2)
    result = await archiver(store, bucket, delete=True).sweep()
    left = [name async for name in store.names()]
    imported = await importer(store, bucket).run()

    assert (result.rollouts, result.files, result.deleted, left) == (2, 1, 2, [])
    assert (imported.rollouts, imported.steps) == (2, 4)
    assert touched == await archived_versions(bucket)
    assert touched == {name: (await store.get(name)).touched_ms for name in touched}


async def test_s3_creates_a_file_once(store, bucket, monkeypatch):
    """Also if it was created after this process looked whether it exists."""
    await finished(store, "a")
    await archiver(store, bucket).sweep()
    dataset = Dataset(bucket)
    (name,) = dataset.names()
    before = dataset.versions(name)
    monkeypatch.setattr(type(dataset._fs), "exists", lambda *_args, **_named: False)
    with dataset.staged(name) as (file, path):
        file.write(b"another content")
        file.flush()
        assert not dataset.publish(path, name)

    assert before == dataset.versions(name)


async def test_a_bucket_that_does_not_exist_is_an_error(store, bucket):
    await finished(store, "a")
    with pytest.raises(OSError, match="Cannot write s3://none"):
        await archiver(store, "s3://none/x").sweep()

    assert None is not await store.get("a")


@pytest.fixture
async def archived(store, tmp_path):
    """The path of an archive with two rollouts of two steps each."""
    await finished(store, "a", "b", steps=2)
    await archiver(store, tmp_path).sweep()
    return tmp_path


def test_datasets_loads_it(archived, tmp_path_factory):
    """By the card, without further arguments."""
    cache = str(tmp_path_factory.mktemp("cache"))
    rows = datasets.load_dataset(str(archived), split="train", cache_dir=cache)

    assert len(rows) == 4
    assert {(row["rollout_id"], row["reward"], len(row["prompt_ids"])) for row in rows if row["index"] == 1} == {
        ("a", 0.5, 301),
        ("b", 0.5, 301),
    }
    assert rows[1]["prompt_ids"] == IDS


def test_duckdb_reads_it(archived):
    rows = duckdb.sql(
        f"SELECT rollout_id, len(prompt_ids), completion_ids, date FROM read_parquet('{archived}/*/*.parquet') "
        "WHERE index = 1 ORDER BY rollout_id"
    ).fetchall()

    assert [row[:3] for row in rows] == [("a", 301, [7, 1]), ("b", 301, [7, 1])]
    assert [str(row[3]) for row in rows] == ["1970-01-01"] * 2


def test_polars_reads_it(archived):
    frame = pl.scan_parquet(f"{archived}/*/*.parquet", hive_partitioning=True)
    found = (
        frame.filter(pl.col("index") == 1).sort("rollout_id").select("rollout_id", "prompt_ids", "logprobs").collect()
    )

    assert found["rollout_id"].to_list() == ["a", "b"]
    assert found["prompt_ids"].to_list()[0] == IDS
    assert pl.List(pl.Float32) == found.schema["logprobs"]


def test_the_readers_of_the_page_run(archived, monkeypatch, tmp_path_factory):
    """The Python block of docs/datasets.md, in a folder with the archive `rollouts`."""
    folder = tmp_path_factory.mktemp("page")
    (folder / "rollouts").symlink_to(archived)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "cache")
    (block,) = (block for block in blocks_of(ROOT / "docs" / "datasets.md") if block.language == "python")
    names = {}
    exec(compile(block.text, "docs/datasets.md", "exec"), names)

    assert [len(names["rows"]), names["exact"].collect().height, len(names["steps"])] == [4, 4, 4]


async def test_the_condition_of_the_page_excludes_what_a_playback_inherited(store, tmp_path):
    await finished(store, "a", "b", steps=1)
    await record(store, inherit(make_step("0", [1], [2], rollout_id="a"), "b"))
    await store.update_if("b", {"reward": b"1"}, expect={}, now_ms=9000)
    await archiver(store, tmp_path).sweep()
    (condition,) = re.findall(r"`(json_extract.*?)`", (ROOT / "docs" / "datasets.md").read_text())
    rows = duckdb.sql(f"SELECT step_id, {condition} FROM read_parquet('{tmp_path}/*/*.parquet') ORDER BY step_id")

    assert rows.fetchall() == [("0", False), ("a0000", True), ("b0000", True)]


async def test_a_proxy_archives_finished_rollouts(store, engine, tmp_path):
    """With `archive.url`, in the background, and deletes them if that is set."""
    touched = await finished(store, "a", "b", steps=1)
    options = {"url": str(tmp_path / "archive"), "older_than_s": 0, "interval_s": 0.05, "delete": True}
    async with proxying(engine.url, store, archive=options), asyncio.timeout(50):
        while [name async for name in store.names()]:
            await asyncio.sleep(0.01)

    assert touched == await archived_versions(options["url"])


async def test_the_query_of_the_card_returns_the_newest_versions(store, tmp_path, monkeypatch):
    await finished(store, "a", "b", steps=2)
    await archiver(store, tmp_path).sweep()
    await store.update_if("a", {"reward": b"1"}, expect={}, now_ms=9000)
    await archiver(store, tmp_path).sweep()
    monkeypatch.chdir(tmp_path)
    (query,) = re.findall(r"```sql\n(.*?)```", (tmp_path / "README.md").read_text(), re.DOTALL)
    rows = duckdb.sql(query).fetchall()

    assert [row[:2] for row in rows] == [("a", 1.0)] * 2 + [("b", 0.5)] * 2
    assert [*range(301)] == rows[1][3]


def test_the_datasets_library_reads_the_parquet_container_as_pyarrow_does(tmp_path):
    writer = CONTAINERS["parquet"](FORMATS["sequences"])
    parts = [writer.opening(), *map(writer.row, worked.rows("sequences")), writer.closing(None)]
    path = tmp_path / "rows.parquet"
    path.write_bytes(b"".join(parts))
    loaded = datasets.load_dataset("parquet", data_files=str(path), split="train", cache_dir=str(tmp_path / "cache"))

    assert parquet.read_table(path).to_pylist() == list(loaded)
