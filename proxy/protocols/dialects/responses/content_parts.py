"""Content parts of Responses, as chat content.

Files and images that are only named by an id are refused: TokenTape stores none.
"""

import base64
import binascii
from typing import Any, Final, TypeAlias

from proxy.protocols.dialects.responses.validation import objects, optional, refused, required, unknown, wrong
from proxy.protocols.dialects.translation import Json

Content: TypeAlias = str | list[Json]

_TEXTS: Final = ("input_text", "output_text", "text")
_DETAILS: Final = ("auto", "low", "high")  # that chat has as well
_KNOWN: Final = "use input_text, input_image, input_file, input_audio, output_text or refusal"


def read_content(value: object, at: str) -> Content:
    """What a user, a system or a tool says. A single text is told as a string, as chat's clients do."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise wrong(at, "a string or a list of parts", value)
    parts = [_part(part, f"{at}[{number}]") for number, part in enumerate(objects(value, at))]
    if len(parts) == 1 and parts[0]["type"] == "text":
        text: str = parts[0]["text"]
        return text
    return parts


def read_said(value: object, at: str) -> tuple[str | None, str | None]:
    """What an assistant said, and what it refused by; None: no such part."""
    if isinstance(value, str):
        return value, None
    if not isinstance(value, list):
        raise wrong(at, "a string or a list of parts", value)
    said: dict[str, list[str]] = {"text": [], "refusal": []}
    for number, part in enumerate(objects(value, at)):
        where = f"{at}[{number}]"
        kind = required(part, "type", str, where)
        if kind not in {*_TEXTS, "refusal"}:
            raise unknown(f"{where}.type", kind, "use output_text or refusal")
        field = "refusal" if kind == "refusal" else "text"
        said[field].append(required(part, field, str, where))
    text, refusal = ("".join(pieces) if pieces else None for pieces in said.values())
    return text, refusal


def _part(part: Json, at: str) -> Json:
    """One part in chat's shape."""
    kind = required(part, "type", str, at)
    if kind in _TEXTS:
        return {"type": "text", "text": required(part, "text", str, at)}
    if kind == "input_image":
        return _image(part, at)
    if kind == "input_file":
        return _file(part, at)
    if kind == "input_audio":
        audio = required(part, "input_audio", dict, at)
        where = f"{at}.input_audio"
        fields = {name: required(audio, name, str, where) for name in ("data", "format")}
        return {"type": "input_audio", "input_audio": fields}
    raise unknown(f"{at}.type", kind, _KNOWN)


def _image(part: Json, at: str) -> Json:
    url = optional(part, "image_url", str, at)
    if url is None:
        raise _unheld(at, "image_url")
    detail = optional(part, "detail", str, at)
    return {"type": "image_url", "image_url": {"url": url} | ({"detail": detail} if detail in _DETAILS else {})}


def _file(part: Json, at: str) -> Json:
    """A text file is told as its text, since engines read no files; another in chat's shape, for the engine to judge."""
    content = optional(part, "file_data", str, at)
    if content is None:
        raise _unheld(at, "file_data")
    name = optional(part, "filename", str, at)
    text = _text_in(content)
    if text is not None:
        return {"type": "text", "text": text}
    fields: dict[str, Any] = {"file_data": content}
    return {"type": "file", "file": fields if name is None else {**fields, "filename": name}}


def _text_in(content: str) -> str | None:
    """The text of a data URL that says that it holds text in UTF-8."""
    head, found, coded = content.partition(";base64,")
    if not found or not head.startswith("data:text/"):
        return None
    try:
        return base64.b64decode(coded, validate=True).decode()
    except (binascii.Error, ValueError):
        return None


def _unheld(at: str, field: str) -> Exception:
    return refused(at, f"{at} must have {field}; files by id or URL are not supported.")
