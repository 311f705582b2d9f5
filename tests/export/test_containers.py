"""Containers: rows as bytes, one after the other."""

import sys
from array import array
from math import inf, nan

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.export import FORMATS
from proxy.export.containers import CONTAINERS, container_for

ROWS = st.lists(st.fixed_dictionaries({"token_ids": st.lists(st.integers(0, 9)), "text": st.text()}), max_size=4)
REPORT = st.none() | st.just({"skipped": [{"step_id": "a", "why": "echo"}]})


def rendered(name, rows, report=None):
    writer = CONTAINERS[name].writer(FORMATS["sequences"])
    return b"".join([writer.opening(), *map(writer.row, rows), writer.closing(report)])


@given(ROWS, REPORT)
def test_json(rows, report):
    """JSON is one object, with the format, the rows, and the report if one is wanted."""
    expected = {"format": "sequences", "rows": rows} | ({} if report is None else {"report": report})

    assert expected == orjson.loads(rendered("json", rows, report))


@given(ROWS, REPORT)
def test_ndjson(rows, report):
    """NDJSON has one row a line; a report is a last line of its own."""
    lines = rendered("ndjson", rows, report).split(b"\n")
    expected = [*rows, *([] if report is None else [{"report": report}])]

    assert (expected, b"") == ([orjson.loads(line) for line in lines[:-1]], lines[-1])


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False)))
def test_float32(logprobs):
    """A logprob of float32 is rendered so that the very number is read back."""
    recorded = array("f", logprobs)
    (row,) = orjson.loads(rendered("json", [{"logprobs": recorded.tolist()}]))["rows"]

    assert recorded.tobytes() == array("f", row["logprobs"]).tobytes()


@given(ROWS, REPORT)
def test_msgpack(rows, report):
    """MessagePack has one message a row; a report is a last one."""
    decoder = pytest.importorskip("msgspec.msgpack").Decoder()
    whole = rendered("msgpack", rows, report)
    expected = [*rows, *([] if report is None else [{"report": report}])]

    assert whole == b"".join(map(CONTAINERS["msgpack"].writer(FORMATS["sequences"]).row, expected))
    assert expected == [decoder.decode(rendered("msgpack", [row])) for row in expected]


@pytest.mark.parametrize(
    ("name", "library"), [("arrow", "pyarrow"), ("parquet", "pyarrow"), ("msgpack", "msgspec.msgpack")]
)
def test_not_installed(name, library, monkeypatch):
    """A container whose library is not installed is refused with the extra that brings it."""
    monkeypatch.setitem(sys.modules, library, None)

    with pytest.raises(ValueError, match=rf"require.*; install tokentape\[{'m' if name == 'msgpack' else 'a'}"):
        rendered(name, [])


@pytest.mark.parametrize("name", ["json", "ndjson"])
def test_no_number(name):
    """What is no number to JSON is null, in a row and in the report."""
    assert b"NaN" not in rendered(name, [{"reward": nan}], {"reward": inf})
    assert 2 == rendered(name, [{"reward": nan}], {"reward": inf}).count(b'{"reward":null}')


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
def test_choice(accept, named, expected):
    """A container is chosen by its name, else by `Accept`, else it is JSON."""
    assert CONTAINERS[expected] is container_for(accept, named)


def test_unknown():
    """An unknown container is refused with the names of the known ones."""
    with pytest.raises(
        ValueError, match=r"^Unknown container 'xml'; use one of json, ndjson, msgpack, parquet, arrow\.$"
    ):
        container_for(None, "xml")
