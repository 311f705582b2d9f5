"""Rows as Parquet and Arrow columns, read by pyarrow."""

import io
from array import array

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support import worked
from tests.support.forests import make_choice, make_step, rollouts

from proxy.export import FORMATS, Fill
from proxy.export import containers as module
from proxy.export.containers import CONTAINERS
from proxy.trajectory.sequence import Options

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

LENGTHS = Fill(prompt_length=4, response_length=10)
REPORT = {"skipped": [{"step_id": "a", "why": "echo"}]}


def written(container, name, rows, report=None):
    writer = CONTAINERS[container](FORMATS[name])
    return b"".join([writer.opening(), *map(writer.row, rows), writer.closing(report)])


def read(container, raw):
    return pa.ipc.open_stream(raw).read_all() if container == "arrow" else parquet.read_table(io.BytesIO(raw))


def named(name, row):
    """Return a row with all columns of its format, and JSON columns as text."""
    columns = FORMATS[name].columns
    fields = row if isinstance(row, dict) else dict(zip(columns, row, strict=True))
    values = {column: fields.get(column) for column in columns}
    if name == "sequences":
        rare = ("epoch", "logprobs_over", "resumed", "mixed", "top_p", "top_k", "min_p")
        values["spans"] = [{**span, **{name: span.get(name) for name in rare}} for span in values["spans"]]
    return {
        column: orjson.dumps(value).decode() if columns[column] == "json" and value is not None else value
        for column, value in values.items()
    }


@pytest.mark.parametrize("container", ["arrow", "parquet"])
@pytest.mark.parametrize("name", FORMATS)
def test_rows_of_every_format_round_trip_with_their_nesting(container, name):
    rows = worked.rows(name, fill=LENGTHS) * 3

    assert [named(name, row) for row in rows] == read(container, written(container, name, rows)).to_pylist()


@given(rollouts())
def test_canonical_rows_of_any_rollout_round_trip(steps):
    rows = worked.rows("sequences", steps)

    assert [named("sequences", row) for row in rows] == read("arrow", written("arrow", "sequences", rows)).to_pylist()


@pytest.mark.parametrize("container", ["arrow", "parquet"])
@given(steps=rollouts(), include=st.sampled_from(["exact", "flagged", "retokenized"]))
def test_packed_rows_are_written_as_the_same_bytes_as_rows_with_lists(container, steps, include):
    plan = FORMATS["sequences"].plan(worked.FACTS, steps, Options(include=include))
    rows, packed = list(plan.render()), list(plan.pack())

    assert written(container, "sequences", rows * 3) == written(container, "sequences", packed * 3)


@pytest.mark.parametrize("values", [array("d", [-0.1, -1e-300, -3e38]), array("f"), array("f", [-0.5] * 3)])
@pytest.mark.parametrize("prompt", [1, 13])
def test_packed_logprobs_are_rounded_as_lists_are(values, prompt):
    """A step has no logprobs if its call requested none."""
    steps = [make_step("a", range(prompt), make_choice(0, [7, 8, 9], logprobs=values))]
    plan = FORMATS["sequences"].plan(worked.FACTS, steps, Options())
    (row,), (packed,) = plan.render(), plan.pack()

    assert written("arrow", "sequences", [row] * 3) == written("arrow", "sequences", [packed] * 3)


@pytest.mark.parametrize("limit", [3, 8, 30])
def test_batches_of_packed_rows_have_the_size_of_batches_of_lists(limit, monkeypatch):
    monkeypatch.setattr(module, "BATCH_VALUES", limit)
    plan = FORMATS["sequences"].plan(worked.FACTS, worked.STEPS, Options())

    assert written("arrow", "sequences", [*plan.render()] * 5) == written("arrow", "sequences", [*plan.pack()] * 5)


@pytest.mark.parametrize("container", ["arrow", "parquet"])
def test_token_ids_are_int32_lists_and_logprobs_float32_lists_with_nulls(container):
    table = read(container, written(container, "sequences", worked.rows("sequences")))
    ids, logprobs = (table.schema.field(name).type.value_type for name in ("token_ids", "logprobs"))

    assert (pa.int32(), pa.float32()) == (ids, logprobs)
    assert table["logprobs"].combine_chunks().flatten().null_count == 7


@pytest.mark.parametrize("container", ["arrow", "parquet"])
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=5))
def test_float32_logprobs_round_trip_bit_for_bit(container, logprobs):
    (row,) = worked.rows("sequences")
    table = read(container, written(container, "sequences", [{**row, "logprobs": logprobs}]))

    assert array("f", logprobs).tobytes() == array("f", table["logprobs"][0].as_py()).tobytes()


@pytest.mark.parametrize("container", ["arrow", "parquet"])
def test_an_export_without_rows_has_the_columns(container):
    table = read(container, written(container, "trl", []))

    assert (0, list(FORMATS["trl"].columns)) == (table.num_rows, table.column_names)
    assert table.schema.metadata[b"format"] == b"trl"


@pytest.mark.parametrize("container", ["arrow", "parquet"])
@pytest.mark.parametrize("limit", ["BATCH_ROWS", "BATCH_VALUES"])
def test_rows_are_written_in_batches_of_limited_size(container, limit, monkeypatch):
    monkeypatch.setattr(module, limit, {"BATCH_ROWS": 2, "BATCH_VALUES": 70}[limit])
    writer = CONTAINERS[container](FORMATS["sequences"])
    writer.opening()
    (row,) = worked.rows("sequences")

    assert [bool(writer.row(row)) for _ in range(4)] == [False, True, False, True]


def test_the_report_is_the_metadata_of_a_last_empty_arrow_batch():
    stream = pa.ipc.open_stream(written("arrow", "sequences", worked.rows("sequences"), REPORT))
    batches = list(stream.iter_batches_with_custom_metadata())

    assert [
        (batch.batch.num_rows, batch.custom_metadata and orjson.loads(batch.custom_metadata[b"report"]))
        for batch in batches
    ] == [(1, None), (0, REPORT)]


def test_the_report_is_in_the_parquet_files_metadata():
    raw = written("parquet", "sequences", worked.rows("sequences"), REPORT)

    assert orjson.loads(parquet.read_metadata(io.BytesIO(raw)).metadata[b"report"]) == REPORT


@pytest.mark.parametrize("container", ["arrow", "parquet"])
def test_equal_rows_are_equal_bytes(container):
    rows = worked.rows("sequences", [make_step(str(index), [index], [index + 1]) for index in range(5)])

    assert written(container, "sequences", rows) == written(container, "sequences", rows)


@pytest.mark.parametrize("container", ["parquet", "arrow"])
def test_a_json_column_may_have_lists_of_any_items(container):
    form = FORMATS["verifiers"]
    writer = CONTAINERS[container](form)
    row = {**dict.fromkeys(form.columns), "prompt": [["a"], 5, None, {}]}

    assert writer.opening() + writer.row(row) + writer.closing(None)
