"""Checks and repairs of the append-only files of the embedded server, while it is not running.

valkey-check-aof, which the server is under that name, cuts the end off without saving it, and does not look for complete
commands after the damage. The formats are defined by aof.c, Valkey 9.1:

- `appendonly.aof.manifest` lists the files in the order in which they are loaded: one base file (a snapshot), then incremental
  files. The server appends to the last one. Without a manifest the server starts empty, even if there are files.
- An incremental file is a sequence of commands, each an array of bulk strings. The writes of a script are one transaction,
  from MULTI to EXEC.

A crash damages only the end of the last file: the server was killed during a write, or the power failed and the file system
kept the length of the file but not its last blocks, which then contain zeros or garbage. This end is cut off and saved in
another file. All other damage is an error, as a person must decide what to do.
"""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Final

from storage.errors import StorageError

_FOLDER: Final = "appendonlydir"
_MANIFEST: Final = "appendonly.aof.manifest"
_MARKER: Final = "begun"
_MARKER_TEXT: Final = """\
This directory contains a store, with its data in appendonlydir. This file prevents the start of an empty store if
appendonlydir is lost. To create an empty store, move the whole directory away.
"""
_ENTRY: Final = re.compile(r"file (\S+) seq (\d+) type ([bhi])")
_FIRST_BASE: Final = "appendonly.aof.1.base.rdb"  # an empty snapshot, written when a server starts without data
_COMMAND_START: Final = re.compile(rb"\*[1-9]\d{0,8}\r\n\$\d{1,9}\r\n")
_MAX_NUMBER_BYTES: Final = 24  # length of a line with a count or a length


@dataclass(frozen=True, slots=True)
class Cut:
    """The end of `file` that was cut off at `offset`: `size` bytes, saved in the file `saved`."""

    file: Path
    offset: int
    size: int
    saved: Path


def mark_created(path: Path) -> None:
    """Create the marker file of the store in `path`, for `check_files`. An empty file is sufficient, as on a full disk."""
    with suppress(OSError), os.fdopen(_create(path / _MARKER), "w") as file:
        file.write(_MARKER_TEXT)


def check_files(path: Path) -> None:
    """Raise `StorageError` if the server would start empty or not start because files are missing."""
    folder = path / _FOLDER
    if not (folder / _MANIFEST).exists():
        found = sorted(file.name for file in folder.glob("appendonly.aof.*") if _may_have_data(file))
        if found or (path / _MARKER).exists():
            raise StorageError(
                f"{folder} has no {_MANIFEST}, so the store would start empty although "
                f"{f'{found[0]} exists' if found else 'the directory had a store'}: restore {_FOLDER} from a backup (see "
                f"reliability.md); to create an empty store, move {path} away"
            )
        return
    missing = [name for name, kind in _manifest(folder) if kind != "h" and not (folder / name).exists()]
    if missing:
        raise StorageError(
            f"{folder} has no {', '.join(missing)}, which {_MANIFEST} lists: restore {_FOLDER} from a backup; to create an "
            f"empty store, move {path} away"
        )


def has_damaged_end(path: Path) -> bool:
    """Return whether the last file does not end as a command does. The server does not check this."""
    _, appended = _loaded(path)
    if not appended or not (size := appended[-1].stat().st_size):
        return False
    with appended[-1].open("rb") as file:
        file.seek(max(0, size - 2))
        return file.read() != b"\r\n"


def repair(path: Path) -> Cut | None:
    """Cut the damaged end off the last file; return None if there is no damage.

    Reads all files that consist of commands. Raises `StorageError` if the damage is not at the end, or if the end cannot be
    saved.
    """
    base, appended = _loaded(path)
    for file in [*([base] if base and base.suffix == ".aof" else []), *appended]:
        size = file.stat().st_size
        if size == 0:
            continue
        with file.open("rb") as opened, mmap(opened.fileno(), 0, access=ACCESS_READ) as data:
            end, damaged = _intact_end(data)
            if end == size:
                continue
            following = _first_intact_after(data, damaged)
        if file != appended[-1]:
            raise StorageError(
                f"{file} is damaged at byte {end} of {size}, and is not the last file of the store: restore {path} from a "
                f"backup, or move it away to create an empty store"
            )
        if following is not None:
            raise StorageError(
                f"{file} is damaged at byte {damaged}, and complete commands follow from byte {following} "
                f"({size - following} bytes): restore it from a backup. To start without them, which loses steps: "
                f"cp {file} {file}.damaged && truncate -s {end} {file}"
            )
        return _cut(file, end, size)
    return None


def failed_base(path: Path, log: str) -> Path | None:
    """Return the base file if the server could not read it, according to the log of its run."""
    base, _ = _loaded(path)
    is_read = "DB loaded from base file" in log or "Reading RDB base file" not in log
    return None if is_read else base


def fsync_appended(path: Path) -> None:
    """Fsync the incremental files: one, or two during a rewrite."""
    for file in (path / _FOLDER).glob("*.incr.aof"):
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _may_have_data(file: Path) -> bool:
    """Return False for the files of a server that was killed at its first start, before it wrote a manifest."""
    return file.name != _FIRST_BASE and file.stat().st_size > 0


def _manifest(folder: Path) -> list[tuple[str, str]]:
    """Return the names and types of the files in the manifest; none if it is invalid, which the server reports."""
    try:
        lines = (folder / _MANIFEST).read_text("utf-8", "replace").splitlines()
    except FileNotFoundError:
        return []
    entries = [_ENTRY.fullmatch(line.strip()) for line in lines if not line.startswith("#")]
    return [(entry[1], entry[3]) for entry in entries if entry] if all(entries) else []


def _loaded(path: Path) -> tuple[Path | None, list[Path]]:
    """Return the base file, if there is one, and the incremental files in the order in which they are loaded."""
    folder = path / _FOLDER
    entries = _manifest(folder)
    base = next((folder / name for name, kind in entries if kind == "b"), None)
    return base, [folder / name for name, kind in entries if kind == "i"]


def _intact_end(data: mmap) -> tuple[int, int]:
    """Return the end offset of the complete commands and transactions, and the offset of the first damage."""
    offset = end = 0
    is_open = False
    while found := _command(data, offset):
        name, offset = found
        is_open = (is_open or name == b"MULTI") and name != b"EXEC"
        if not is_open:
            end = offset
    return end, offset


def _first_intact_after(data: mmap, damaged: int) -> int | None:
    """Return the offset of the first complete command after the damage that is not in the same transaction, or None."""
    first = None
    for offset, name in _commands_after(data, damaged):
        if name == b"EXEC":
            first = None  # all commands before are the rest of the damaged transaction
        elif first is None:
            first = offset
        if name == b"MULTI":
            break
    return first


def _commands_after(data: mmap, damaged: int) -> Iterator[tuple[int, bytes]]:
    """Iterate over the offsets and names of complete commands after an offset."""
    offset = damaged + 1
    while begin := _COMMAND_START.search(data, offset):
        offset = begin.start()
        if found := _command(data, offset):
            yield offset, found[0]
            offset = found[1]
        else:
            offset += 1


def _command(data: mmap, offset: int) -> tuple[bytes, int] | None:
    """Return the name of the command at an offset and its end offset; None if there is no complete command."""
    name = b""
    line = _number(data, offset, b"*")
    if line is None or line[0] < 1:
        return None
    count, offset = line
    for index in range(count):
        line = _number(data, offset, b"$")
        if line is None:
            return None
        length, offset = line
        if data[offset + length : offset + length + 2] != b"\r\n":
            return None
        if index == 0:
            name = data[offset : offset + length].upper()
        offset += length + 2
    return name, offset


def _number(data: mmap, offset: int, sign: bytes) -> tuple[int, int] | None:
    """Return the number in the line at an offset, which starts with a sign, and the end offset of the line."""
    end = data.find(b"\r\n", offset, offset + _MAX_NUMBER_BYTES)
    digits = data[offset + 1 : end]
    if end < 0 or data[offset : offset + 1] != sign or not digits.isdigit():
        return None
    return int(digits), end + 2


def _cut(file: Path, offset: int, size: int) -> Cut:
    """Save the end of a file in another file, then cut it off."""
    saved = _unused_name(file.with_name(f"{file.name}.cut-{offset}"))
    try:
        with file.open("rb") as source, os.fdopen(_create(saved), "wb") as copy:
            source.seek(offset)
            shutil.copyfileobj(source, copy, 2**20)
            copy.flush()
            os.fsync(copy.fileno())
    except OSError as error:
        saved.unlink(missing_ok=True)
        raise StorageError(
            f"the last {size - offset} bytes of {file} are damaged, as after a crash, and cannot be saved before they are "
            f"cut off: {error}; free disk space, or allow this process to write there"
        ) from error
    with file.open("rb+") as cut:
        cut.truncate(offset)
        os.fsync(cut.fileno())
    return Cut(file, offset, size - offset, saved)


def _unused_name(file: Path) -> Path:
    number, name = 1, file
    while name.exists():
        number += 1
        name = file.with_name(f"{file.name}-{number}")
    return name


def _create(file: Path) -> int:
    return os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
