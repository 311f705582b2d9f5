"""The files of the golden recording, and readable differences between what was recorded and what is."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import orjson
import zstandard

FOLDER = Path(__file__).parent.parent / "golden"
STORE = "store-0.1.0"  # of the last release
SHOWN = 20
_AROUND = 60


def load(name: str) -> Any:
    """Read one file of the recording."""
    packed = (FOLDER / f"{name}.json.zst").read_bytes()
    return orjson.loads(zstandard.ZstdDecompressor(max_window_size=2**27).decompress(packed))


def save(name: str, value: Any) -> int:
    """Write one file of the recording; its size."""
    parameters = zstandard.ZstdCompressionParameters.from_level(19, window_log=27, enable_ldm=True)
    packed = zstandard.ZstdCompressor(compression_params=parameters).compress(orjson.dumps(value))
    (FOLDER / f"{name}.json.zst").write_bytes(packed)
    return len(packed)


def check(recorded: Any, found: Any) -> None:
    """Raise an AssertionError that lists the first differences."""
    lines = list(islice(differences(recorded, found), SHOWN + 1))
    more = ["and more"] if len(lines) > SHOWN else []
    assert not lines, "\n".join(["recorded -> now:", *lines[:SHOWN], *more])


def differences(recorded: Any, found: Any, path: str = "") -> Iterator[str]:
    """Name each place where two values differ. Texts that are JSON are compared as JSON, then as bytes."""
    if recorded == found and type(recorded) is type(found):
        return
    if isinstance(recorded, dict) and isinstance(found, dict):
        for name in [*recorded, *(name for name in found if name not in recorded)]:
            if name not in found:
                yield f"{path}/{name}: {_short(recorded[name])} -> absent"
            elif name not in recorded:
                yield f"{path}/{name}: absent -> {_short(found[name])}"
            else:
                yield from differences(recorded[name], found[name], f"{path}/{name}")
    elif isinstance(recorded, list) and isinstance(found, list):
        for index, (before, after) in enumerate(zip(recorded, found, strict=False)):
            yield from differences(before, after, f"{path}[{_title(before, index)}]")
        if len(recorded) != len(found):
            rest = (recorded if len(recorded) > len(found) else found)[min(len(recorded), len(found))]
            yield f"{path}: {len(recorded)} items -> {len(found)}, the first of the others is {_short(rest)}"
    elif isinstance(recorded, str) and isinstance(found, str):
        yield from _texts(recorded, found, path)
    else:
        yield f"{path}: {_short(recorded)} -> {_short(found)}"


def _texts(recorded: str, found: str, path: str) -> Iterator[str]:
    documents = _documents(recorded), _documents(found)
    if documents[0] is not None and documents[1] is not None:
        inner = list(islice(differences(*documents, f"{path}:"), SHOWN))
        yield from inner or [f"{path}: the same JSON in other bytes, {_first(recorded, found)}"]
    else:
        yield f"{path}: {_first(recorded, found)}"


def _documents(text: str) -> Any:
    """A text as JSON: one document, or one for each line or event; None if it is neither."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        pass
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
    try:
        return [orjson.loads(line) if line.startswith("{") else line for line in lines] if len(lines) > 1 else None
    except orjson.JSONDecodeError:
        return None


def _first(recorded: str, found: str) -> str:
    pairs = enumerate(zip(recorded, found, strict=False))
    index = next((at for at, (before, after) in pairs if before != after), min(len(recorded), len(found)))
    start, end = max(0, index - _AROUND), index + _AROUND
    return f"at {index}: {recorded[start:end]!r} -> {found[start:end]!r}"


def _title(value: Any, index: int) -> str:
    return f"{index} {value['call']}" if isinstance(value, dict) and "call" in value else str(index)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 2 * _AROUND else f"{text[: 2 * _AROUND]}…"
