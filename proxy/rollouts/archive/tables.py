"""Archived rows as Parquet: written in row groups of bounded size, and read back. pyarrow is imported at first use.

Token ids are plain int32 in large pages compressed by zstd: its window covers the prompts of earlier steps, so that a prompt
that continues another one takes little more than its new ids (docs/datasets.md, sizes). Bit-packed dictionaries would not be
found again.
"""

import sys
from array import array
from collections.abc import Iterator
from importlib import import_module
from itertools import accumulate
from threading import Lock
from typing import Any, Final

from proxy.rollouts.archive.columns import COLUMNS, SCHEMA, SCHEMA_KEY
from proxy.rollouts.archive.rows import Row

GROUP_BYTES: Final = 2**25  # of the rows in a row group, before compression
_GROUP_ROWS: Final = 8192
_ROW_BYTES: Final = 500  # an estimate: the short columns of a row
_READ_ROWS: Final = 64
_ZSTD_LEVEL: Final = 3
_NUMBERS: Final = ("ids", "floats")
_REPEATED: Final = (
    "rollout_id", "group_id", "rollout_status", "advantages", "metadata", "status", "dialect", "model", "engine", "policy",
    "policy_version", "finish_reason",
)  # fmt: skip


class ArchiveWriter:
    """Writes rows to a Parquet file, which is an open binary file. `close` completes it, `abandon` does not.

    Threads may use it at the same time: a page may still be written when the task that waits for it is cancelled.
    """

    def __init__(self, file: Any) -> None:
        self._arrow = arrow()
        self._schema = arrow_schema(self._arrow)
        self._writer = import_module("pyarrow.parquet").ParquetWriter(
            file,
            self._schema,
            compression="zstd",
            compression_level=_ZSTD_LEVEL,
            use_dictionary=list(_REPEATED),
            data_page_size=GROUP_BYTES,
            write_statistics=["rollout_id", "group_id", "created_at", "finished_at", "touched_ms", "index", "step_id"],
        )
        self._lock = Lock()
        self._rows: list[Row] = []
        self._bytes = 0
        self.count = 0

    def write(self, row: Row) -> None:
        """Add a row."""
        with self._lock:
            self._rows.append(row)
            self._bytes += _ROW_BYTES + sum(len(value) for value in row.values() if isinstance(value, bytes | list))
            self.count += 1
            if self._bytes >= GROUP_BYTES or len(self._rows) >= _GROUP_ROWS:
                self._flush()

    def close(self) -> None:
        """Write the last rows and the footer."""
        with self._lock:
            self._flush()
            self._writer.close()

    def abandon(self) -> None:
        """Release the file, unless it is complete."""
        with self._lock:
            self._writer.close()

    def _flush(self) -> None:
        if self._rows:
            columns = [
                _column(self._arrow, field.type, COLUMNS[field.name][0], [row.get(field.name) for row in self._rows])
                for field in self._schema
            ]
            self._rows, self._bytes = [], 0
            self._writer.write_table(
                self._arrow.Table.from_arrays(columns, schema=self._schema), row_group_size=_GROUP_ROWS
            )


def read_rows(file: Any, columns: list[str] | None = None) -> Iterator[Row]:
    """Yield the rows of a Parquet file, in which numbers are little-endian bytes, in memory bounded by a row group.

    Raises:
        ValueError: The file is not an archive, or one of a newer version.
    """
    parquet = import_module("pyarrow.parquet")
    library = arrow()
    try:
        opened = parquet.ParquetFile(file, pre_buffer=False)
    except library.ArrowInvalid as error:
        raise ValueError(f"not a Parquet file: {error}") from None
    schema = int((opened.metadata.metadata or {}).get(SCHEMA_KEY, 0))
    if not 1 <= schema <= SCHEMA:
        raise ValueError(
            f"schema {schema} of the archive is not supported: this version reads up to schema {SCHEMA}"
            if schema
            else "not a file of an archive"
        )
    types = arrow_schema(library)
    if missing := [name for name in columns or COLUMNS if name not in opened.schema_arrow.names]:
        raise ValueError(f"a file of an archive has no column {', '.join(missing)}")
    for batch in opened.iter_batches(batch_size=_READ_ROWS, columns=columns):
        found = {name: _typed(library, batch.column(name), name, types) for name in batch.schema.names}
        for at in range(batch.num_rows):
            yield {
                name: _value(column[at], COLUMNS[name][0] if name in COLUMNS else "text")
                for name, column in found.items()
            }


def _typed(library: Any, column: Any, name: str, types: Any) -> Any:
    """Return a column with its type; other programs write texts and lists with equivalent ones. Raises ValueError."""
    if name not in COLUMNS or column.type == types.field(name).type:
        return column
    try:
        return column.cast(types.field(name).type)
    except (library.ArrowInvalid, library.ArrowNotImplementedError) as error:
        raise ValueError(f"column {name!r} has the type {column.type}, not {types.field(name).type}: {error}") from None


def arrow() -> Any:
    """Return the module pyarrow. Raises ValueError if it is not installed."""
    try:
        return import_module("pyarrow")
    except ImportError:
        raise ValueError(
            "The archive requires pyarrow and fsspec: pip install 'pyarrow>=18' 'fsspec>=2024.6'."
        ) from None


def arrow_schema(library: Any) -> Any:
    """Return the schema of the files."""
    types = {
        "text": library.string(),
        "json": library.string(),
        "ids": library.list_(library.int32()),
        "floats": library.list_(library.float32()),
        "texts": library.list_(library.string()),
        "time": library.timestamp("ms", tz="UTC"),
        "prompts": library.list_(library.list_(library.int32())),
        "choices": library.list_(
            library.struct([("ids", library.list_(library.int32())), ("logprobs", library.list_(library.float32()))])
        ),
        "blocks": library.list_(library.struct([("name", library.binary()), ("block", library.binary())])),
    }
    fields = [
        (name, types.get(kind) or getattr(library, _ARROW.get(kind, kind))()) for name, (kind, _) in COLUMNS.items()
    ]
    return library.schema(fields, metadata={SCHEMA_KEY: str(SCHEMA).encode()})


_ARROW: Final = {"double": "float64"}


def _column(library: Any, kind: Any, name: str, values: list[Any]) -> Any:
    """Return a column. JSON is bytes of UTF-8; numbers are bytes, which are copied without Python numbers."""
    if name not in _NUMBERS:
        if name == "json":
            return library.array(values, library.binary()).cast(kind)
        return library.array(values, kind)
    ends = list(accumulate((len(value or b"") // 4 for value in values), initial=0))
    flat = library.py_buffer(_swapped(b"".join(value or b"" for value in values)))
    numbers = library.Array.from_buffers(kind.value_type, ends[-1], [None, flat])
    nulls = library.array([value is None for value in values], library.bool_())
    return library.ListArray.from_arrays(library.array(ends, library.int32()), numbers, type=kind, mask=nulls)


def _value(scalar: Any, kind: str) -> Any:
    if kind not in _NUMBERS or not scalar.is_valid:
        return scalar.as_py()
    numbers = scalar.values
    if not len(numbers):
        return b""
    raw = memoryview(numbers.buffers()[1])[4 * numbers.offset : 4 * (numbers.offset + len(numbers))]
    return _swapped(bytes(raw))


def _swapped(raw: bytes, byteorder: str = sys.byteorder) -> bytes:
    """Convert between little-endian numbers and those of this machine."""
    if byteorder == "little":
        return raw
    numbers = array("i", raw)
    numbers.byteswap()
    return numbers.tobytes()
