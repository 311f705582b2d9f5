"""The append-only files of the embedded server: checked before it starts, repaired after a crash.

Holds what a person would otherwise do with valkey-check-aof, which is not bundled: whether all files are there, and where
the last one stops being whole. It runs while no server does. Formats are those of aof.c, Valkey 9.1:

- `appendonly.aof.manifest` lists files in the order of loading: one base (a snapshot), then incremental files, the last of
  which is appended to. Without a manifest the server starts empty, whatever files there are.
- An incremental file is a sequence of commands, each an array of bulk strings. What a script writes is one transaction,
  MULTI to EXEC.

A crash damages the end of the last file only: the server was killed within a write, or the power failed and the file
system kept the length of the file but not its last blocks, which then are zeros or garbage. That end is cut off and kept
beside the file. All other damage is for a person to decide on, so it is an error.
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
_BEGUN: Final = "begun"
_BEGUN_SAYS: Final = """\
A store was begun in this directory; its data is in appendonlydir. This file prevents an empty store from taking its place
when appendonlydir is lost. To begin an empty store, move the whole directory away.
"""
_ENTRY: Final = re.compile(r"file (\S+) seq (\d+) type ([bhi])")
_FIRST_BASE: Final = "appendonly.aof.1.base.rdb"  # empty: written when a server starts without data
_COMMAND_BEGINS: Final = re.compile(rb"\*[1-9]\d{0,8}\r\n\$\d{1,9}\r\n")
_LONGEST_NUMBER: Final = 24  # bytes of a line with a count or a length


@dataclass(frozen=True, slots=True)
class Cut:
    """An end that was cut off `file` at offset `at`, `size` bytes long, and saved as `saved`."""

    file: Path
    at: int
    size: int
    saved: Path


def mark_begun(path: Path) -> None:
    """Note that there is a store in `path`, for `check_files`. An empty note counts too: a full disk prevents no start."""
    with suppress(OSError), os.fdopen(_created(path / _BEGUN), "w") as file:
        file.write(_BEGUN_SAYS)


def check_files(path: Path) -> None:
    """Raise `StorageError` if the server would start empty, or not at all, because files of its store are missing."""
    folder = path / _FOLDER
    if not (folder / _MANIFEST).exists():
        found = sorted(file.name for file in folder.glob("appendonly.aof.*") if _may_hold_data(file))
        if found or (path / _BEGUN).exists():
            raise StorageError(
                f"{folder} has no {_MANIFEST}, without which the store would start empty, although "
                f"{f'there is {found[0]}' if found else 'there was a store here'}: restore {_FOLDER} from a backup (see "
                f"reliability.md); to begin an empty store, move {path} away"
            )
        return
    missing = [name for name, kind in _manifest(folder) if kind != "h" and not (folder / name).exists()]
    if missing:
        raise StorageError(
            f"{folder} has no {', '.join(missing)}, which {_MANIFEST} lists: restore {_FOLDER} from a backup; to begin an "
            f"empty store, move {path} away"
        )


def ends_badly(path: Path) -> bool:
    """Whether the last bytes of the file that is appended to cannot end a command. The server does not look at them."""
    _, appended = _loaded(path)
    if not appended or not (size := appended[-1].stat().st_size):
        return False
    with appended[-1].open("rb") as file:
        file.seek(max(0, size - 2))
        return file.read() != b"\r\n"


def repair(path: Path) -> Cut | None:
    """Cut the damaged end off the file that is appended to; None if all files are whole.

    Reads all files that are made of commands. Raises `StorageError` if the damage is not at the end, or the end cannot be
    saved.
    """
    base, appended = _loaded(path)
    for file in [*([base] if base and base.suffix == ".aof" else []), *appended]:
        size = file.stat().st_size
        if size == 0:
            continue
        with file.open("rb") as opened, mmap(opened.fileno(), 0, access=ACCESS_READ) as data:
            end, damaged = _whole_until(data)
            if end == size:
                continue
            following = _whole_after(data, damaged)
        if file != appended[-1]:
            raise StorageError(
                f"{file} is damaged at byte {end} of {size}, and is not the last file of the store: restore {path} from a "
                f"backup, or move it away to begin an empty store"
            )
        if following is not None:
            raise StorageError(
                f"{file} is damaged at byte {damaged}, and {size - following} bytes of whole commands follow it from byte "
                f"{following}: restore it from a backup. To start without what follows, which loses steps: "
                f"cp {file} {file}.damaged && truncate -s {end} {file}"
            )
        return _cut(file, end, size)
    return None


def failed_base(path: Path, log: str) -> Path | None:
    """The base file, if `log`, which the server wrote from its start to its end, shows that it could not be read."""
    base, _ = _loaded(path)
    is_read = "DB loaded from base file" in log or "Reading RDB base file" not in log
    return None if is_read else base


def fsync_appended(path: Path) -> None:
    """Fsync the files that are being appended to: one, and during a rewrite two."""
    for file in (path / _FOLDER).glob("*.incr.aof"):
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _may_hold_data(file: Path) -> bool:
    """Whether a file is more than the first start of a server leaves, which was killed before it wrote its manifest."""
    return file.name != _FIRST_BASE and file.stat().st_size > 0


def _manifest(folder: Path) -> list[tuple[str, str]]:
    """The names and types of the manifest's files; none if it is not a manifest, which the server says itself."""
    try:
        lines = (folder / _MANIFEST).read_text("utf-8", "replace").splitlines()
    except FileNotFoundError:
        return []
    entries = [_ENTRY.fullmatch(line.strip()) for line in lines if not line.startswith("#")]
    return [(entry[1], entry[3]) for entry in entries if entry] if all(entries) else []


def _loaded(path: Path) -> tuple[Path | None, list[Path]]:
    """The base file, if there is one, and the files of commands after it, in the order of loading."""
    folder = path / _FOLDER
    entries = _manifest(folder)
    base = next((folder / name for name, kind in entries if kind == "b"), None)
    return base, [folder / name for name, kind in entries if kind == "i"]


def _whole_until(data: mmap) -> tuple[int, int]:
    """The offset up to which there are whole commands and transactions, and the one at which the first damage is."""
    at = end = 0
    is_open = False
    while found := _command(data, at):
        name, at = found
        is_open = (is_open or name == b"MULTI") and name != b"EXEC"
        if not is_open:
            end = at
    return end, at


def _whole_after(data: mmap, damaged: int) -> int | None:
    """The offset of the first whole command after a damaged one that is not the rest of the same transaction, if any."""
    first = None
    for at, name in _commands_after(data, damaged):
        if name == b"EXEC":
            first = None  # everything up to here is the rest of the damaged transaction
        elif first is None:
            first = at
        if name == b"MULTI":
            break
    return first


def _commands_after(data: mmap, damaged: int) -> Iterator[tuple[int, bytes]]:
    """The offset and the name of each whole command that can be found after an offset."""
    at = damaged + 1
    while begin := _COMMAND_BEGINS.search(data, at):
        at = begin.start()
        if found := _command(data, at):
            yield at, found[0]
            at = found[1]
        else:
            at += 1


def _command(data: mmap, at: int) -> tuple[bytes, int] | None:
    """The name of the command at an offset, and the offset behind it; None if there is no whole command."""
    name = b""
    line = _number(data, at, b"*")
    if line is None or line[0] < 1:
        return None
    count, at = line
    for place in range(count):
        line = _number(data, at, b"$")
        if line is None:
            return None
        length, at = line
        if data[at + length : at + length + 2] != b"\r\n":
            return None
        if place == 0:
            name = data[at : at + length].upper()
        at += length + 2
    return name, at


def _number(data: mmap, at: int, sign: bytes) -> tuple[int, int] | None:
    """The number of the line at an offset, which begins with a sign, and the offset behind the line."""
    end = data.find(b"\r\n", at, at + _LONGEST_NUMBER)
    digits = data[at + 1 : end]
    if end < 0 or data[at : at + 1] != sign or not digits.isdigit():
        return None
    return int(digits), end + 2


def _cut(file: Path, at: int, size: int) -> Cut:
    """Save the end of a file beside it, then cut it off."""
    saved = _unused(file.with_name(f"{file.name}.cut-{at}"))
    try:
        with file.open("rb") as source, os.fdopen(_created(saved), "wb") as copy:
            source.seek(at)
            shutil.copyfileobj(source, copy, 2**20)
            copy.flush()
            os.fsync(copy.fileno())
    except OSError as error:
        saved.unlink(missing_ok=True)
        raise StorageError(
            f"the last {size - at} bytes of {file} are damaged, as after a crash, and cannot be saved before they are cut "
            f"off: {error}; make room, or let this process write there"
        ) from error
    with file.open("rb+") as cut:
        cut.truncate(at)
        os.fsync(cut.fileno())
    return Cut(file, at, size - at, saved)


def _unused(file: Path) -> Path:
    number, name = 1, file
    while name.exists():
        number += 1
        name = file.with_name(f"{file.name}-{number}")
    return name


def _created(file: Path) -> int:
    return os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
