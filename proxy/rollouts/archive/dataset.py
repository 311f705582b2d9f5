"""The files of an archive under a path or a URL of fsspec (s3://…, gs://…, hf://datasets/…), and their columns.

A file is created once and never changed. `date=YYYY-MM-DD/NAME.parquet` has rollouts that were finished on that day (UTC), in
row groups of bounded size. Every method blocks: call it in a thread. pyarrow is imported at first use.

Token ids are plain int32 in large pages compressed by zstd: its window covers the prompts of earlier steps, so that a prompt
that continues another one takes little more than its new ids (docs/datasets.md, sizes). Bit-packed dictionaries would not be
found again.
"""

import os
import sys
import tempfile
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from itertools import accumulate
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO, Final

from proxy.rollouts.archive.rows import Row

SCHEMA: Final = 1  # readers accept files up to this version; a new column that readers can ignore does not change it
SCHEMA_KEY: Final = b"tokentape.schema"  # in the metadata of a file
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

# The kind (see `KINDS`) and the meaning of each column. The same in every file of a schema version.
COLUMNS: Final[dict[str, tuple[str, str]]] = {
    "rollout_id": ("text", "The rollout of the step."),
    "group_id": ("text", "The group of the rollout."),
    "rollout_status": ("text", "completed, failed, aborted or truncated."),
    "reward": ("double", "The reward of the rollout."),
    "advantages": ("json", "The advantages of the rollout, as they were posted."),
    "metadata": ("json", "The metadata of the rollout."),
    "created_at": ("time", "When the rollout was created."),
    "finished_at": ("time", "When the rollout was finished."),
    "touched_ms": ("int64", "When the rollout was written last, in Unix milliseconds: its version."),
    "index": ("int32", "The position of the step in its rollout; null in the only row of a rollout without steps."),
    "step_id": ("text", "The step."),
    "received_at": ("time", "When the call arrived."),
    "duration_s": ("double", "The time from its arrival to the last byte of the engine's response."),
    "status": ("text", "complete, partial or error."),
    "delivered": ("bool", "Whether the client received the whole response."),
    "late": ("bool", "Whether the step was stored after the rollout was finished."),
    "exact": ("bool", "Whether the step passed every fidelity check."),
    "problems": ("texts", "The codes of the checks that it failed."),
    "dialect": ("text", "The dialect of the call."),
    "model": ("text", "The model that the engine served."),
    "engine": ("text", "The name of the engine."),
    "policy": ("text", "The policy of the model."),
    "policy_version": ("text", "The policy version when the call was sent."),
    "temperature": ("double", "The sampling temperature, if it is known."),
    "finish_reason": ("text", "The finish reason of the first choice."),
    "prompt_ids": ("ids", "All token ids of the prompt (of the first prompt, if there are several)."),
    "completion_ids": ("ids", "The sampled token ids of the first choice."),
    "logprobs": ("floats", "The logprob of each of them."),
    "more_prompts": ("prompts", "The ids of the other prompts of a call with several."),
    "more_choices": ("choices", "The ids and logprobs of the other choices."),
    "request": ("json", "The request of the client."),
    "sent": ("json", "What the proxy changed in it."),
    "response": ("json", "The response of the engine."),
    "head": ("json", "The facts of the step, as the store has them: usage, sampling, timing, spans of choices, …"),
    "record_schema": ("int32", "For the import: the schema of the record; null if `record` has it."),
    "rest": ("binary", "For the import: experts and masks of the choices."),
    "record": ("binary", "For the import: the record itself, if it is not equal to its columns."),
    "blocks": ("blocks", "For the import: the blocks of `record`."),
    "rollout": ("json", "For the import, in the first row of a rollout: its fields, counts and marks."),
    "group": ("json", "For the import, in the first row of a group's first rollout in the file: its fields and marks."),
}

# Each kind of column: its name in the card of a dataset, and its type from the module pyarrow.
KINDS: Final[dict[str, tuple[str, Callable[[Any], Any]]]] = {
    "text": ("string", lambda arrow: arrow.string()),
    "json": ("string (JSON)", lambda arrow: arrow.string()),
    "ids": ("list of int32", lambda arrow: arrow.list_(arrow.int32())),
    "floats": ("list of float32", lambda arrow: arrow.list_(arrow.float32())),
    "texts": ("list of string", lambda arrow: arrow.list_(arrow.string())),
    "time": ("timestamp (ms, UTC)", lambda arrow: arrow.timestamp("ms", tz="UTC")),
    "bool": ("bool", lambda arrow: arrow.bool_()),
    "int32": ("int32", lambda arrow: arrow.int32()),
    "int64": ("int64", lambda arrow: arrow.int64()),
    "double": ("double", lambda arrow: arrow.float64()),
    "binary": ("binary", lambda arrow: arrow.binary()),
    "prompts": ("list of lists of int32", lambda arrow: arrow.list_(arrow.list_(arrow.int32()))),
    "choices": ("list of (ids, logprobs)", lambda arrow: arrow.list_(_struct(arrow, ids="ids", logprobs="floats"))),
    "blocks": ("list of (name, block)", lambda arrow: arrow.list_(_struct(arrow, name="binary", block="binary"))),
}


def _struct(arrow: Any, **fields: str) -> Any:
    return arrow.struct([(name, KINDS[kind][1](arrow)) for name, kind in fields.items()])


class ArchiveWriter:
    """Writes rows to a Parquet file, which is an open binary file. `close` completes it, `abandon` does not.

    `size`: the bytes of the rows that it has in memory, until they are `group_bytes`.

    Threads may use it at the same time: a page may still be written when the task that waits for it is cancelled.
    """

    def __init__(self, file: Any, group_bytes: int = GROUP_BYTES) -> None:
        self._group_bytes = group_bytes
        self._arrow = arrow()
        self._schema = arrow_schema(self._arrow)
        self._writer = import_module("pyarrow.parquet").ParquetWriter(
            file,
            self._schema,
            compression="zstd",
            compression_level=_ZSTD_LEVEL,
            use_dictionary=list(_REPEATED),
            data_page_size=group_bytes,
            write_statistics=["rollout_id", "group_id", "created_at", "finished_at", "touched_ms", "index", "step_id"],
        )
        self._lock = Lock()
        self._rows: list[Row] = []
        self.size = 0
        self.count = 0

    def write(self, row: Row) -> None:
        """Add a row."""
        with self._lock:
            self._rows.append(row)
            self.size += _ROW_BYTES + sum(len(value) for value in row.values() if isinstance(value, bytes | list))
            self.count += 1
            if self.size >= self._group_bytes or len(self._rows) >= _GROUP_ROWS:
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
            self._rows, self.size = [], 0
            self._writer.write_table(
                self._arrow.Table.from_arrays(columns, schema=self._schema), row_group_size=_GROUP_ROWS
            )


def read_rows(file: Any, columns: list[str] | None = None) -> Iterator[Row]:
    """Yield the rows of a Parquet file, in which numbers are little-endian bytes, in memory bounded by a row group.

    Raises ValueError if the file is not an archive, or one of a newer version.
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
            "The archive requires the extra tokentape[archive] (in a clone: pip install '.[archive]'): pyarrow is missing."
        ) from None


def arrow_schema(library: Any) -> Any:
    """Return the schema of the files."""
    fields = [(name, KINDS[kind][1](library)) for name, (kind, _) in COLUMNS.items()]
    return library.schema(fields, metadata={SCHEMA_KEY: str(SCHEMA).encode()})


def _column(library: Any, arrow_type: Any, kind: str, values: list[Any]) -> Any:
    """Return a column. JSON is bytes of UTF-8; numbers are bytes, which are copied without Python numbers."""
    if kind not in _NUMBERS:
        if kind == "json":
            return library.array(values, library.binary()).cast(arrow_type)
        return library.array(values, arrow_type)
    ends = list(accumulate((len(value or b"") // 4 for value in values), initial=0))
    flat = library.py_buffer(_swapped(b"".join(value or b"" for value in values)))
    numbers = library.Array.from_buffers(arrow_type.value_type, ends[-1], [None, flat])
    nulls = library.array([value is None for value in values], library.bool_())
    return library.ListArray.from_arrays(library.array(ends, library.int32()), numbers, type=arrow_type, mask=nulls)


def _value(scalar: Any, kind: str) -> Any:
    if kind not in _NUMBERS or not scalar.is_valid:
        return scalar.as_py()
    numbers = scalar.values
    if not len(numbers):
        return b""
    raw = memoryview(numbers.buffers()[1])[4 * numbers.offset : 4 * (numbers.offset + len(numbers))]
    return _swapped(bytes(raw))


def _swapped(raw: bytes, byteorder: str = sys.byteorder) -> bytes:
    """Convert int32 numbers from little-endian to this machine's byte order, or back."""
    if byteorder == "little":
        return raw
    numbers = array("i", raw)
    numbers.byteswap()
    return numbers.tobytes()


_CARD_NAME: Final = "README.md"

_CARD: Final = """\
---
pretty_name: Recorded rollouts
tags:
- reinforcement-learning
- rollouts
- tokentape
configs:
- config_name: default
  data_files:
  - split: train
    path: "date=*/*.parquet"
---
# Recorded rollouts

Rollouts of language models, recorded by TokenTape: for each call of an agent the token ids that the engine saw and sampled,
with their logprobs, the request and the response. One row is one step; the columns of its rollout are repeated in each row.
The files of `date=YYYY-MM-DD` have the rollouts that were finished on that day (UTC).

A rollout that was changed after it was archived is in a later file again. Its newest version has the highest `touched_ms`.

```sql
SELECT rollout_id, reward, step_id, prompt_ids, completion_ids, logprobs
FROM read_parquet('date=*/*.parquet')
QUALIFY touched_ms = max(touched_ms) OVER (PARTITION BY rollout_id)
ORDER BY rollout_id, index
```

`tokentape import` brings the rollouts back into a store, from which every trainer's format can be exported.

Schema version {schema}:

| column | type | content |
|---|---|---|
{rows}
"""
_VERSION: Final = ["rollout_id", "touched_ms"]
_LOCAL: Final = ("file", "local")
_WITHOUT_FOLDERS: Final = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "hf")  # makedirs would create the bucket


class ArchiveError(OSError):
    """The path or URL of an archive cannot be read or written. The message has the reason."""


class Dataset:
    """The files under a URL. The library that fsspec uses for it (s3fs, gcsfs, …) finds the credentials."""

    def __init__(self, url: str) -> None:
        self.url = url
        try:
            fsspec = import_module("fsspec")
            self._fs, self._root = fsspec.core.url_to_fs(url)
        except ImportError as error:
            raise ValueError(
                f"{url}: {error}. The archive requires the extra tokentape[archive] (in a clone: pip install '.[archive]'), "
                "and the package of the URL: s3fs, gcsfs or huggingface_hub."
            ) from None
        protocols = {self._fs.protocol} if isinstance(self._fs.protocol, str) else set(self._fs.protocol)
        self._is_local = not protocols.isdisjoint(_LOCAL)
        self._is_s3 = "s3" in protocols
        self._has_folders = protocols.isdisjoint(_WITHOUT_FOLDERS)
        self._errors: tuple[type[Exception], ...] = (OSError, *_client_errors())

    @contextmanager
    def staged(self, name: str) -> Iterator[tuple[BinaryIO, Path]]:
        """Yield a file on this machine to write, which `publish` makes the file of this name. It is removed at the end."""
        target = Path(self._path(name))
        with self._reported("write"):
            folder = target.parent if self._is_local else None
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
            handle, path = tempfile.mkstemp(".part", f".{target.stem}.", folder)
        try:
            with os.fdopen(handle, "wb") as file:
                yield file, Path(path)
        finally:
            Path(path).unlink(missing_ok=True)

    def publish(self, staged: Path, name: str) -> bool:
        """Create the file of this name; return False if it exists. It is complete, or it does not exist.

        Local files are linked, and S3 rejects a second creation; other file systems are read just before.
        """
        target = self._path(name)
        with self._reported("write"):
            if self._is_local:
                return _link(staged, Path(target))
            self._fs.invalidate_cache()
            if self._fs.exists(target):
                return False
            try:
                self._make_folder(target.rpartition("/")[0])
                self._fs.put_file(str(staged), target, **({"mode": "create"} if self._is_s3 else {}))
            except FileExistsError:
                return False
            self._fs.invalidate_cache()
            size = self._fs.info(target)["size"]
            if size != staged.stat().st_size:
                raise ArchiveError(f"{target} has {size} bytes instead of {staged.stat().st_size}.")
            return True

    def versions(self, name: str) -> dict[str, int] | None:
        """Return the rollouts of a file with their `touched_ms`; None if the file does not exist."""
        try:
            return {row["rollout_id"]: row["touched_ms"] for row in self.read(name, _VERSION)}
        except FileNotFoundError:
            return None

    def read(self, name: str, columns: list[str] | None = None) -> Iterator[Row]:
        """Yield the rows of a file. Raises FileNotFoundError; ValueError for a file that is not one of an archive."""
        with self._reported("read"):
            self._fs.invalidate_cache()
            with self._fs.open(self._path(name), "rb") as file:
                yield from read_rows(file, columns)

    def names(self) -> list[str]:
        """Return the names of all files, the oldest first. A URL of one file is its only name."""
        with self._reported("read"):
            self._fs.invalidate_cache()
            if self._root.endswith(".parquet"):
                return [""]
            found = self._fs.find(self._root)
        inner = (path.removeprefix(self._root).strip("/") for path in found)
        return sorted(
            name for name in inner if name.endswith(".parquet") and not name.rpartition("/")[2].startswith(".")
        )

    def write_card(self) -> None:
        """Write the README.md of the dataset, as the Hugging Face Hub reads it, unless it has one."""
        path = self._path(_CARD_NAME)
        with self._reported("write"):
            if not self._fs.exists(path):
                self._make_folder(self._root)
                rows = "\n".join(f"| `{name}` | {KINDS[kind][0]} | {text} |" for name, (kind, text) in COLUMNS.items())
                self._fs.pipe_file(path, _CARD.format(schema=SCHEMA, rows=rows).encode())

    def _make_folder(self, path: str) -> None:
        if self._has_folders:
            self._fs.makedirs(path, exist_ok=True)

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}" if name else self._root

    @contextmanager
    def _reported(self, verb: str) -> Iterator[None]:
        """Raise ArchiveError for the errors of file systems, except FileNotFoundError of a file that is read."""
        try:
            yield
        except ArchiveError:
            raise
        except self._errors as error:
            if verb == "read" and isinstance(error, FileNotFoundError):
                raise
            raise ArchiveError(f"Cannot {verb} {self.url}: {error}") from error


def _link(staged: Path, target: Path) -> bool:
    """Give a file its name, durably; return False if the name exists."""
    with staged.open("rb") as file:
        os.fsync(file.fileno())
    try:
        target.hardlink_to(staged)
    except FileExistsError:
        return False
    for folder in (target.parent, target.parent.parent):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    return True


def _client_errors() -> list[type[Exception]]:
    """Return the errors of clients of object stores that are no OSError, if these are installed."""
    with suppress(ImportError):
        errors = import_module("botocore.exceptions")
        return [errors.BotoCoreError, errors.ClientError]
    return []
