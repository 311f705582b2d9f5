"""JSON values that no engine or agent is expected to send, as text: odd types, huge numbers, deep nesting, odd strings."""

from random import Random

import orjson

DEEPEST = 1_100
SCALARS = (
    b"null", b"true", b"false", b"-1", b"1.5", b"-0.0", b"2147483648", b"9223372036854775808", b"18446744073709551616",
    b"1e400", b"-1e400", b"1e308", b"NaN", b"Infinity", b"-Infinity", b"9" * 400, b"9" * 5_000, b'""', b'"7"', b'"NaN"',
)  # fmt: skip
STRINGS = (
    b'"\\ud800"', b'"\\udfff\\ud800"', b'"\\u0000"', b'"\\u0001\\u001b[2J\\u007f\\u009f"', b'"\\ufeff\\u202e"',
    b'"a\\r\\ndata: [DONE]\\r\\n\\r\\n"', '"\U0001f600\u00e9"'.encode(), b'"=HYPERLINK(1)"', b'"__proto__"',
    b'"' + b"x" * 70_000 + b'"',
)  # fmt: skip
CONTAINERS = (
    b"[]", b"{}", b"[[]]", b"[null]", b"[{}]", b'{"":{}}', b"[true]", b'["a"]', b'{"a":1}', b'{"type":5}', b'{"type":"x"}',
    b'{"id":5}', b"[[1,[2]]]", b"[1.5,null]", b"[[null,7,null]]", b'[{"index":0}]', b'[{"index":[],"function":5}]',
    b'[{"function":{"name":5,"arguments":[]}}]', b'{"content":5}', b'{"content":[5]}', b'{"content":[{"logprob":"a"}]}',
)  # fmt: skip


def nested(random: Random, depth: int | None = None) -> bytes:
    """Return nested lists or objects, mostly around the limits of parsers (128, 254, 1,000, 1,024)."""
    if depth is None:
        depth = random.choice((5, 60, 127, 128, 253, 254, 255, 500, 990, 999, 1_000, 1_023, 1_024, DEEPEST))
    opening, closing = random.choice(((b"[", b"]"), (b'{"a":', b"}"), (b'[{"a":', b"}]")))
    return opening * depth + random.choice((b"1", b"[]", b"null")) + closing * depth


def odd_text(random: Random) -> bytes:
    """Return an odd value as JSON text."""
    match random.randrange(10):
        case 0 | 1 | 2 | 3:
            return random.choice(SCALARS)
        case 4 | 5:
            return random.choice(STRINGS)
        case 6 | 7 | 8:
            return random.choice(CONTAINERS)
        case _:
            return nested(random)


def odd(random: Random) -> orjson.Fragment:
    """Return an odd value, to be inserted into a value that orjson encodes."""
    return orjson.Fragment(odd_text(random))


def odd_type(random: Random, *allowed: type) -> orjson.Fragment:
    """Return an odd value of none of these types; ints and bools are not floats here."""
    while True:
        text = odd_text(random)
        if not isinstance(_read(text), allowed) or (text in (b"true", b"false") and bool not in allowed):
            return orjson.Fragment(text)


def paths_in(value: object, path: tuple = ()) -> list[tuple]:
    """Return the paths of all values within a value, except itself."""
    found = []
    if isinstance(value, dict):
        inner = value.items()
    elif isinstance(value, list):
        inner = enumerate(value)
    else:
        return found
    for key, inner_value in inner:
        found.append((*path, key))
        found += paths_in(inner_value, (*path, key))
    return found


def put(value: object, path: tuple, new: object) -> object:
    """Replace the value at a path in place; return the old one."""
    for key in path[:-1]:
        value = value[key]
    old, value[path[-1]] = value[path[-1]], new
    return old


def _read(text: bytes) -> object:
    """Return a value of the type of an odd text."""
    if text[:1] in b"[{":
        return [] if text[:1] == b"[" else {}
    if text[:1] == b'"':
        return ""
    if text in (b"null", b"true", b"false"):
        return {b"null": None, b"true": True, b"false": False}[text]
    if len(text) > 100 or b"e400" in text:
        return ""  # a number beyond a double is read as a string
    return int(text) if text.lstrip(b"-").isdigit() else float(text)
