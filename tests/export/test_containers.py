"""Containers: rows serialized as bytes."""

import sys
from array import array
from math import inf, nan

import msgspec.msgpack
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.export import FORMATS
from proxy.export.containers import CONTAINERS, container_for

ROWS = st.lists(st.fixed_dictionaries({"token_ids": st.lists(st.integers(0, 9)), "text": st.text()}), max_size=4)
REPORT = st.none() | st.just({"skipped": [{"step_id": "a", "why": "echo"}]})


def rendered(name, rows, report=None):
    writer = CONTAINERS[name](FORMATS["sequences"])
    return b"".join([writer.opening(), *map(writer.row, rows), writer.closing(report)])


@given(ROWS, REPORT)
def test_json_is_one_object_with_format_rows_and_report(rows, report):
    expected = {"format": "sequences", "rows": rows} | ({} if report is None else {"report": report})

    assert orjson.loads(rendered("json", rows, report)) == expected


@given(ROWS, REPORT)
def test_ndjson_has_one_row_per_line_and_the_report_as_last_line(rows, report):
    lines = rendered("ndjson", rows, report).split(b"\n")
    expected = [*rows, *([] if report is None else [{"report": report}])]

    assert ([orjson.loads(line) for line in lines[:-1]], lines[-1]) == (expected, b"")


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False)))
def test_a_float32_logprob_is_read_back_as_the_same_number(logprobs):
    recorded = array("f", logprobs)
    (row,) = orjson.loads(rendered("json", [{"logprobs": recorded.tolist()}]))["rows"]

    assert recorded.tobytes() == array("f", row["logprobs"]).tobytes()


@given(ROWS, REPORT)
def test_msgpack_has_one_message_per_row_and_the_report_as_last_message(rows, report):
    decoder = msgspec.msgpack.Decoder()
    whole = rendered("msgpack", rows, report)
    expected = [*rows, *([] if report is None else [{"report": report}])]

    assert whole == b"".join(map(CONTAINERS["msgpack"](FORMATS["sequences"]).row, expected))
    assert [decoder.decode(rendered("msgpack", [row])) for row in expected] == expected


@pytest.mark.parametrize(("name", "library"), [("arrow", "pyarrow"), ("parquet", "pyarrow")])
def test_a_container_without_its_library_names_the_extra(name, library, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)

    with pytest.raises(ValueError, match=r"require pyarrow: pip install"):
        rendered(name, [])


@pytest.mark.parametrize("name", ["json", "ndjson"])
def test_nan_and_infinity_become_null(name):
    """In rows and in the report."""
    assert b"NaN" not in rendered(name, [{"reward": nan}], {"reward": inf})
    assert rendered(name, [{"reward": nan}], {"reward": inf}).count(b'{"reward":null}') == 2


@pytest.mark.parametrize(
    ("accept", "named", "expected"),
    [
        (None, None, "json"),
        ("*/*", None, "json"),
        ("text/html", None, "json"),
        ("application/x-ndjson", None, "ndjson"),
        ("text/html, Application/X-NDJSON;q=0.9, application/json", None, "ndjson"),
        ("application/x-ndjson", "json", "json"),
        (None, "ndjson", "ndjson"),
        ("application/vnd.apache.arrow.stream", None, "arrow"),
        ("application/vnd.apache.parquet", None, "parquet"),
        ("application/vnd.msgpack", None, "msgpack"),
    ],
)
def test_the_container_is_chosen_by_name_else_by_the_accept_header_else_json(accept, named, expected):
    assert CONTAINERS[expected] is container_for(accept, named)


def test_an_unknown_container_is_rejected_with_the_known_names():
    with pytest.raises(
        ValueError, match=r"^Unknown container 'xml'; use one of json, ndjson, msgpack, parquet, arrow\.$"
    ):
        container_for(None, "xml")
