"""Thought signatures: what a client returns with a part and cannot change, by which history is restored.

The signature of a part contains the reasoning before it, because clients without `includeThoughts` do not receive it and others
do not send it back, and the id of its function call, because clients may omit ids. It is not encrypted.
"""

import binascii
from base64 import b64decode, b64encode
from dataclasses import dataclass
from typing import Any, Final

import orjson

from proxy.protocols.dialects.validation import a_text
from proxy.trajectory.json_bytes import parse_text

_MARK: Final = b"tokentape"  # nine bytes: twelve characters of base64
_MARK_TEXT: Final = b64encode(_MARK).decode()


@dataclass(frozen=True, slots=True)
class Signature:
    """The content of a signature."""

    call_id: str | None = None
    thoughts: str | None = None


NONE: Final = Signature()


def sign(*, call_id: str | None = None, thoughts: str | None = None) -> str:
    """Return a signature."""
    fields = {"id": call_id, "thoughts": thoughts}
    return b64encode(
        _MARK + orjson.dumps({name: value for name, value in fields.items() if value is not None})
    ).decode()


def read_signature(value: Any, path: str) -> Signature:
    """Return the content of a signature; an empty one for those of others (Google's, or placeholders of clients).

    Google's Python SDK encodes signatures again, with the alphabet for URLs.
    """
    text = a_text(value, path).rstrip("=")
    if not text.startswith(_MARK_TEXT):
        return NONE
    try:
        text = text.replace("-", "+").replace("_", "/")
        fields = parse_text(b64decode(text + "=" * (-len(text) % 4), validate=True)[len(_MARK) :].decode())
    except (binascii.Error, ValueError):
        return NONE
    if not isinstance(fields, dict):
        return NONE
    return Signature(_text(fields.get("id")), _text(fields.get("thoughts")))


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None
