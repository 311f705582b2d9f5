"""The data of images in JSON values: found, taken out, and put back.

The data of an image is the text after the comma of a `data:` URL, or a whole string (the Messages API). A place is the name
of the image and the path of keys and indexes to its string, which keeps what is before the data.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, TypeAlias

import orjson

MARK: Final = b"\x01"  # begins a piece whose data was taken out; JSON never begins with it

_FOR_URLS: Final = "-"  # after a name: the data has the alphabet of base64 for URLs, as that of Google's SDK
_FROM_URLS: Final = str.maketrans("-_", "+/")
_TO_URLS: Final = str.maketrans("+/", "-_")

Place: TypeAlias = list[Any]  # the name in hex, then the path
_Link: TypeAlias = tuple[Any, Any]  # the link of the container around it, None at the root; and the key or index there


def data_of(text: str) -> str:
    """Return the data in a string: what follows the comma of a `data:` URL, or all of it."""
    return text.partition(",")[2] if text[:5].lower() == "data:" else text


def taken_out(value: Any, names: Mapping[str, bytes]) -> tuple[Any, list[Place]]:
    """Return a JSON value without the data in `names`, and the place of each. The value itself is not changed."""
    lengths = set(map(len, names))
    shortest = min(lengths)
    root: _Link = (None, None)
    copies: dict[int, tuple[_Link, Any]] = {}  # by id() of the link
    places: list[Place] = []
    stack: list[tuple[_Link, Any]] = [(root, value)]
    while stack:  # not recursive: agents nest as deep as they like
        link, node = stack.pop()
        for key, inner in _items(node):
            if isinstance(inner, dict | list):
                stack.append(((link, key), inner))
            elif isinstance(inner, str) and len(inner) >= shortest:
                data = data_of(inner)
                name = _name(data, names) if len(data) in lengths else None
                if name is not None:
                    copies = copies or {id(root): (root, value.copy())}
                    _copy(copies, link)[key] = inner[: len(inner) - len(data)]
                    places.append([name, *_path(link), key])
    return (copies[id(root)][1] if copies else value), places


def put_back(value: Any, places: Iterable[Place], data_named: Callable[[bytes], str]) -> Any:
    """Undo `taken_out`, in the value itself; `data_named` returns the data of an image.

    Raises:
        LookupError, TypeError, ValueError: A place is none in this value.
    """
    for name, *path, last in places:
        node = value
        for key in path:
            node = node[key]
        data = data_named(bytes.fromhex(name.removesuffix(_FOR_URLS)))
        node[last] += data.translate(_TO_URLS) if name.endswith(_FOR_URLS) else data
    return value


def piece_of(message: Any, names: Mapping[str, bytes]) -> bytes:
    """Return a message as JSON; if it has data in `names`, as the mark, the places and a line with the rest.

    Raises:
        TypeError: orjson cannot write it.
    """
    rest, places = taken_out(message, names) if isinstance(message, dict | list) else (message, [])
    text = orjson.dumps(rest)
    return b"".join((MARK, orjson.dumps(places), b"\n", text)) if places else text


def message_of(piece: bytes, data_named: Callable[[bytes], str]) -> Any:
    """Return the message of a piece that begins with the mark. Raises LookupError, TypeError or ValueError if it is damaged."""
    places, _, text = piece[len(MARK) :].partition(b"\n")
    return put_back(orjson.loads(text), orjson.loads(places), data_named)


def _items(node: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(node, dict):
        return node.items()
    return enumerate(node) if isinstance(node, list) else ()


def _name(data: str, names: Mapping[str, bytes]) -> str | None:
    """Return the name of data in a place; None if it is none of the images."""
    name = names.get(data)
    if name is not None:
        return name.hex()
    if "+" in data or "/" in data or (name := names.get(data.translate(_FROM_URLS))) is None:
        return None
    return name.hex() + _FOR_URLS


def _copy(copies: dict[int, tuple[_Link, Any]], link: _Link) -> Any:
    """Return the copy of the container at a link; each container on the way is copied once, the rest is shared."""
    missing = []
    while id(link) not in copies:
        missing.append(link)
        link = link[0]
    node = copies[id(link)][1]
    for link in reversed(missing):
        copy = node[link[1]].copy()
        node[link[1]] = copy
        copies[id(link)] = (link, copy)
        node = copy
    return node


def _path(link: _Link) -> list[Any]:
    """Return the keys and indexes from the root to a link."""
    path = []
    while link[0] is not None:
        path.append(link[1])
        link = link[0]
    return path[::-1]
