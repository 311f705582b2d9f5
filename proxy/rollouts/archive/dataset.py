"""The files of an archive under a path or a URL of fsspec (s3://…, gs://…, hf://datasets/…).

A file is created once and never changed. `date=YYYY-MM-DD/NAME.parquet` has rollouts that were finished on that day (UTC).
Every method blocks: call it in a thread.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import BinaryIO, Final

from proxy.rollouts.archive.rows import Row
from proxy.rollouts.archive.tables import COLUMNS, KINDS, SCHEMA, read_rows

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
