"""The containers of rows: JSON, NDJSON, MessagePack, Parquet and Arrow, written row by row in constant memory.

Arrow and Parquet have the columns of the format. pyarrow is imported at first use. Token ids and masks are copied into buffers
without Python numbers, which would cost more than all the rest; of packed rows (`Plan.pack`), logprobs are as well. Packed rows
are written as the same bytes as rows with lists.
"""

from abc import ABC, abstractmethod
from array import array
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from itertools import accumulate
from typing import Any, ClassVar, Final

import msgspec.msgpack
import orjson

from proxy.export.base import BITS, IDS, JSON, Column, Columns, Format
from proxy.trajectory.arrays import Floats
from proxy.trajectory.json_bytes import to_json_bytes

BATCH_ROWS: Final = 1024
BATCH_VALUES: Final = 250_000  # numbers in lists: about 1 MB in a batch, and ten times that as rows; more is no faster

_SCALARS: Final = {"text": "string", "bool": "bool_"}
_PACKED: Final = ((IDS, partial(array, "i")), (BITS, bytes))
_SIZED: Final = (list, array, bytearray, Floats)
_DIGITS: Final = bytes.maketrans(b"\x00\x01", b"01")


class Writer(ABC):
    """Writes the rows of one export of a format: the opening, each row, the closing."""

    content_type: ClassVar[str]
    nests: ClassVar[bool] = True  # a row may be any JSON value; else it has the columns of its format

    def __init__(self, form: Format) -> None:
        """Raise ValueError if a required library is not installed."""
        self.form = form

    def opening(self) -> bytes:
        """Return the bytes before the first row."""
        return b""

    @abstractmethod
    def row(self, row: Any) -> bytes:
        """Return the bytes that can be written with this row; none if rows are collected in batches."""

    def fills(self, row: Any) -> bool:
        """Return whether this row completes a batch, which takes milliseconds to write."""
        return False

    @abstractmethod
    def closing(self, report: Mapping[str, Any] | None) -> bytes:
        """Return the bytes after the last row, with the report of skipped steps if there is one."""


class Json(Writer):
    """One object: `{"format": …, "rows": […], "report": …}`."""

    content_type = "application/json"
    _between = b""

    def opening(self) -> bytes:
        return b'{"format":' + orjson.dumps(self.form.name) + b',"rows":['

    def row(self, row: Any) -> bytes:
        between, self._between = self._between, b","
        return between + to_json_bytes(row)

    def closing(self, report: Mapping[str, Any] | None) -> bytes:
        return b"]}" if report is None else b'],"report":' + orjson.dumps(report) + b"}"


class Ndjson(Writer):
    """One row per line; a report is a last line `{"report": …}`."""

    content_type = "application/x-ndjson"

    def row(self, row: Any) -> bytes:
        return to_json_bytes(row) + b"\n"

    def closing(self, report: Mapping[str, Any] | None) -> bytes:
        return b"" if report is None else orjson.dumps({"report": report}) + b"\n"


class Msgpack(Writer):
    """One message per row, concatenated; a report is a last message `{"report": …}`."""

    content_type = "application/vnd.msgpack"

    def __init__(self, form: Format) -> None:
        super().__init__(form)
        self._encoder = msgspec.msgpack.Encoder()

    def row(self, row: Any) -> bytes:
        return self._encoder.encode(row)

    def closing(self, report: Mapping[str, Any] | None) -> bytes:
        return b"" if report is None else self.row({"report": report})


class _Sink:
    """A write-only file that is drained as it fills."""

    def __init__(self) -> None:
        self._pieces: list[Any] = []
        self._written = 0
        self.closed = False

    def write(self, piece: Any) -> int:
        """Keep bytes, or a buffer of pyarrow, which has the bytes and does not change."""
        self._pieces.append(piece)
        self._written += len(piece)
        return len(piece)

    def tell(self) -> int:
        return self._written

    def drain(self) -> bytes:
        found = b"".join(self._pieces)
        self._pieces.clear()
        return found


class _Batches(Writer):
    """Collects rows and writes them in batches. Raises ValueError if pyarrow is not installed."""

    nests = False

    def __init__(self, form: Format) -> None:
        super().__init__(form)
        self.arrow = _pyarrow("pyarrow")
        # The default pool of pyarrow 26.0 (mimalloc) retains 25 MB more than batches of this size need.
        self.arrow.set_memory_pool(self.arrow.system_memory_pool())
        # The first array imports pandas if it is installed, which takes 0.2 s: here rather than during an export.
        self.arrow.array([0])
        self.columns = form.columns
        self.schema = self.arrow.schema(
            [(name, _type(self.arrow, column)) for name, column in form.columns.items()],
            metadata={"format": form.name},
        )
        self.sink = _Sink()
        self._rows: list[Mapping[str, Any]] = []
        self._values = 0
        self._counted: tuple[Any, int] = (None, 0)  # the last counted row, and its number of values

    def opening(self) -> bytes:
        return self.sink.drain()

    def row(self, row: Any) -> bytes:
        """Add a row, and return the bytes that can be written; mostly none."""
        is_full = self.fills(row)
        self._values += self._counted[1]
        self._counted = (None, 0)
        # A row that is an array has its columns by position.
        self._rows.append(row if isinstance(row, Mapping) else dict(zip(self.columns, row, strict=True)))
        if is_full:
            self.flush()
        return self.sink.drain()

    def fills(self, row: Any) -> bool:
        if self._counted[0] is not row:
            self._counted = (row, _values(row))
        return len(self._rows) + 1 >= BATCH_ROWS or self._values + self._counted[1] >= BATCH_VALUES

    def flush(self) -> None:
        if self._rows:
            self.write(_batch(self.arrow, self.schema, self.columns, self._rows))
        self._rows, self._values = [], 0

    def write(self, batch: Any) -> None:
        """Write a batch."""
        raise NotImplementedError


class Arrow(_Batches):
    """An IPC stream. A report is the metadata of a last, empty batch."""

    content_type = "application/vnd.apache.arrow.stream"

    def __init__(self, form: Format) -> None:
        super().__init__(form)
        self._stream = self.arrow.ipc.new_stream(self.sink, self.schema)

    def write(self, batch: Any) -> None:
        self._stream.write_batch(batch)

    def closing(self, report: Mapping[str, Any] | None) -> bytes:
        self.flush()
        if report is not None:
            empty = _batch(self.arrow, self.schema, self.columns, [])
            self._stream.write_batch(empty, custom_metadata={"report": orjson.dumps(report).decode()})
        self._stream.close()
        return self.sink.drain()


class Parquet(_Batches):
    """A file with one row group for each batch. A report is in the file's metadata."""

    content_type = "application/vnd.apache.parquet"

    def __init__(self, form: Format) -> None:
        super().__init__(form)
        self._file = _pyarrow("pyarrow.parquet").ParquetWriter(self.sink, self.schema)

    def write(self, batch: Any) -> None:
        """Write a batch as a row group. `write_batch` would keep it in memory for a larger one."""
        self._file.write_table(self.arrow.Table.from_batches([batch]))

    def closing(self, report: Mapping[str, Any] | None) -> bytes:
        self.flush()
        if report is not None:
            self._file.add_key_value_metadata({"report": orjson.dumps(report).decode()})
        self._file.close()
        return self.sink.drain()


def _pyarrow(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        raise ValueError("Containers arrow and parquet require pyarrow: pip install 'pyarrow>=18'.") from None


def _type(arrow: Any, column: Column) -> Any:
    if isinstance(column, list):
        return arrow.list_(_type(arrow, column[0]))
    if isinstance(column, dict):
        return arrow.struct([(name, _type(arrow, inner)) for name, inner in column.items()])
    return arrow.string() if column == JSON else getattr(arrow, _SCALARS.get(column, column))()


def _values(row: Any) -> int:
    values = row.values() if isinstance(row, Mapping) else row
    return sum([_size(value) for value in values if isinstance(value, _SIZED)])


def _size(values: Any) -> int:
    inner = isinstance(values, list) and values and isinstance(values[0], list)
    return sum(len(value) if isinstance(value, list) else 1 for value in values) if inner else len(values)


def _batch(arrow: Any, schema: Any, columns: Columns, rows: Sequence[Mapping[str, Any]]) -> Any:
    arrays = [
        _array(arrow, field.type, column, [row.get(name) for row in rows])
        for field, (name, column) in zip(schema, columns.items(), strict=True)
    ]
    return arrow.RecordBatch.from_arrays(arrays, schema=schema)


def _array(arrow: Any, kind: Any, column: Column, values: list[Any]) -> Any:
    if column == JSON:
        return arrow.array([None if value is None else to_json_bytes(value).decode() for value in values], kind)
    if any(isinstance(value, Floats) for value in values):  # then all are
        return _lists(arrow, kind, values, _floats(arrow, kind.value_type, values))
    pack = next((pack for packed, pack in _PACKED if column == packed), None)
    if pack is None or None in values:
        return arrow.array(values, kind)
    flat = b"".join(map(pack, values))
    numbers = arrow.Array.from_buffers(kind.value_type, sum(map(len, values)), [None, arrow.py_buffer(flat)])
    return _lists(arrow, kind, values, numbers)


def _floats(arrow: Any, kind: Any, values: Sequence[Floats]) -> Any:
    """Return the values of all lists as one array. Arrow marks nulls by a bit that is 0, the lowest bit first."""
    present = b"".join(value.present for value in values)
    nulls = present.count(0)
    bits = None
    if nulls:
        number = int(present[::-1].translate(_DIGITS), 2)
        bits = arrow.py_buffer(number.to_bytes((len(present) + 7) // 8, "little"))
    flat = arrow.py_buffer(b"".join(value.values for value in values))
    return arrow.Array.from_buffers(kind, len(present), [bits, flat], nulls)


def _lists(arrow: Any, kind: Any, values: Sequence[Any], numbers: Any) -> Any:
    ends = list(accumulate(map(len, values), initial=0))
    return arrow.ListArray.from_arrays(arrow.array(ends, arrow.int32()), numbers, type=kind)


CONTAINERS: dict[str, type[Writer]] = {
    "json": Json,
    "ndjson": Ndjson,
    "msgpack": Msgpack,
    "parquet": Parquet,
    "arrow": Arrow,
}


def container_for(accept: str | None, named: str | None) -> type[Writer]:
    """Return the container with this name, or else the one that an `Accept` header requests; JSON by default.

    Raises ValueError if the name is unknown.
    """
    if named is not None:
        if named not in CONTAINERS:
            raise ValueError(f"Unknown container {named!r}; use one of {', '.join(CONTAINERS)}.")
        return CONTAINERS[named]
    kinds = [kind.partition(";")[0].strip().lower() for kind in (accept or "").split(",")]
    return next(
        (found for kind in kinds for found in CONTAINERS.values() if found.content_type == kind),
        CONTAINERS["json"],
    )
