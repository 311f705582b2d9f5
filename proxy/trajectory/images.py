"""The images of a call: their names, their places among the ids of its prompt, and their data in JSON values.

A step with images has in `extra.images`: `ids`, the name of each image in the order of the messages, and `token`, the id of
the placeholder that the engine repeats for an image, or null if it is unknown. The name of an image is its URL if
the engine fetches it, or else the hash of its data, 32 hexadecimal digits.

The data of an image is the text after the comma of a `data:` URL, or a whole string (the Messages API). A place is the name
of the image and the path of keys and indexes to its string, which keeps what is before the data.
"""

import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any, Final, NamedTuple, TypeAlias

import orjson

from proxy.trajectory.arrays import Ids, Prompt
from proxy.trajectory.step import Step

IMAGES: Final = "images"  # in `extra`
UNALIGNED: Final = "image_count"
_HASH: Final = re.compile("[0-9a-f]{32}")
_REPLACED: Final = 4  # ids of a placeholder that `distinct` replaces
_BYTES_PER_ID: Final = 4
MARK: Final = b"\x01"  # begins a piece from which data was taken out; JSON never begins with it
_FOR_URLS: Final = "-"  # after a name: the data is base64 with the alphabet for URLs, as Google's SDK sends it
_FROM_URLS: Final = str.maketrans("-_", "+/")
_TO_URLS: Final = str.maketrans("+/", "-_")
Place: TypeAlias = list[Any]  # the name in hex, then the path
_Link: TypeAlias = tuple[Any, Any]  # the link of the container around it, None at the root; and the key or index there


class PlacedImage(NamedTuple):
    """An image of a prompt: its name, and the range of its placeholder; None if that is unknown."""

    image: str
    start: int | None
    length: int | None


def parts_of(messages: Any) -> Iterator[Any]:
    """Yield the parts of each message that has a list as content, in order."""
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list):
            yield from content


def has_images(messages: Any) -> bool:
    """Return whether a part of the messages is an image, of any form."""
    return any(isinstance(part, dict) and part.get("image_url") is not None for part in parts_of(messages))


def urls_of(messages: Any) -> Iterator[str]:
    """Yield the URL of each image in the parts of messages, in order."""
    for part in parts_of(messages):
        url = part.get("image_url") if isinstance(part, dict) else None
        url = url.get("url") if isinstance(url, dict) else url
        if isinstance(url, str):
            yield url


def names_in(messages: Any) -> list[str]:
    """Return the name of each image in the parts of messages, in order."""
    return [_name_of(url).hex() if _has_data(url) else url for url in urls_of(messages)]


def data_in(messages: Any) -> dict[str, bytes]:
    """Return the names of the images with data in the parts of messages, by their data."""
    return {
        data: _name_of(url) for url in urls_of(messages) if _has_data(url) and (data := data_of(url)) and data.isascii()
    }


def recorded(step: Step) -> Sequence[str]:
    """Return the names of the images of a step; none if it has none."""
    return names_from(step.extra)


def names_from(extra: Any) -> Sequence[str]:
    """Return the names of the images in the `extra` of a step."""
    found = extra.get(IMAGES) if isinstance(extra, Mapping) else None
    names = found.get("ids") if isinstance(found, Mapping) else None
    return names if isinstance(names, list) and all(isinstance(name, str) for name in names) else ()


def block_of(name: str) -> bytes | None:
    """Return the name of the block that has the data of an image; None for an image that is referenced by URL."""
    return bytes.fromhex(name) if _HASH.fullmatch(name) else None


def runs(ids: Ids, token: int) -> list[tuple[int, int]]:
    """Return the start and the length of each run of a token."""
    found: list[tuple[int, int]] = []
    end = 0
    while True:
        try:
            start = ids.index(token, end)
        except ValueError:
            return found
        end = start + 1
        while end < len(ids) and ids[end] == token:
            end += 1
        found.append((start, end - start))


def aligned(
    names: Sequence[str], candidates: Sequence[int], prompts: Sequence[Ids]
) -> tuple[int | None, tuple[str, ...]]:
    """Return the placeholder of these images in a prompt, and the problems of the prompt.

    The placeholder is the candidate with one run for each image; None if no candidate has these runs, or several have. It is a
    problem if a candidate is in the prompt, but none has as many runs.
    """
    if len(prompts) != 1:
        return None, ()
    counts = {token: len(runs(prompts[0], token)) for token in dict.fromkeys(candidates)}
    fitting = [token for token, count in counts.items() if count == len(names)]
    if len(fitting) == 1:
        return fitting[0], ()
    return None, (UNALIGNED,) if not fitting and any(counts.values()) else ()


def placed(step: Step, prompt: Prompt) -> list[PlacedImage]:
    """Return the images of a step with their places in its prompt, in order."""
    names = recorded(step)
    ranges = _ranges(step, prompt[:]) if names else None
    if ranges is None:
        return [PlacedImage(name, None, None) for name in names]
    return [PlacedImage(name, *span) for name, span in zip(names, ranges, strict=True)]


def distinct(step: Step, prompt: Prompt) -> tuple[str, Prompt]:
    """Return a key, and ids that differ where the images of two prompts differ; prompts join only under one key.

    A placeholder has the same ids for every image, so that prompts with other images would be equal. Each is replaced by
    negative ids of the image's name. If the places of the images are unknown, the key has their names.
    """
    names = recorded(step)
    if not names:
        return "", prompt
    ids = prompt[:]
    ranges = _ranges(step, ids)
    if ranges is None:
        return "\n".join(names), prompt
    for name, (start, length) in zip(names, ranges, strict=True):
        count = min(length, _REPLACED)
        digest = blake2b(name.encode("utf-8", "surrogatepass"), digest_size=_BYTES_PER_ID * count).digest()
        ids[start : start + count] = array("i", [-1 - (value & 0x7FFFFFFF) for value in memoryview(digest).cast("I")])
    return "", ids


def _ranges(step: Step, ids: Ids) -> list[tuple[int, int]] | None:
    found = step.extra.get(IMAGES)
    token = found.get("token") if isinstance(found, Mapping) else None
    if type(token) is not int:
        return None
    ranges = runs(ids, token)
    return ranges if len(ranges) == len(recorded(step)) else None


def _has_data(url: str) -> bool:
    return url[:5].lower() == "data:"


def _name_of(url: str) -> bytes:
    data = data_of(url).encode("utf-8", "surrogatepass")
    return blake2b(data, digest_size=16, person=b"image", salt=bytes(16)).digest()  # as `blocks.names_of`


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

    Raises TypeError if orjson cannot write it.
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
    path = []
    while link[0] is not None:
        path.append(link[1])
        link = link[0]
    return path[::-1]
