"""Translation of the content parts of Responses to chat content.

Files and images that are referenced by an id are refused: TokenTape stores none.
"""

import base64
import binascii
from typing import Any, Final, TypeAlias

from proxy.protocols.dialects.responses.validation import objects, optional, refused, required, unknown, wrong
from proxy.protocols.dialects.translation import Json

Content: TypeAlias = str | list[Json]

_TEXTS: Final = ("input_text", "output_text", "text")
_DETAILS: Final = ("auto", "low", "high")  # those that chat also has
_KNOWN: Final = "use input_text, input_image, input_file, input_audio, output_text or refusal"


def read_content(value: object, path: str) -> Content:
    """Return the chat content of a user, system or tool message. A single text is a string, as chat's clients send it."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise wrong(path, "a string or a list of parts", value)
    parts = [_part(part, f"{path}[{number}]") for number, part in enumerate(objects(value, path))]
    if len(parts) == 1 and parts[0]["type"] == "text":
        text: str = parts[0]["text"]
        return text
    return parts


def read_assistant_content(value: object, path: str) -> tuple[str | None, str | None]:
    """Return the text and the refusal of an assistant message; None if it has no part of the kind."""
    if isinstance(value, str):
        return value, None
    if not isinstance(value, list):
        raise wrong(path, "a string or a list of parts", value)
    texts: dict[str, list[str]] = {"text": [], "refusal": []}
    for number, part in enumerate(objects(value, path)):
        part_path = f"{path}[{number}]"
        kind = required(part, "type", str, part_path)
        if kind not in {*_TEXTS, "refusal"}:
            raise unknown(f"{part_path}.type", kind, "use output_text or refusal")
        field = "refusal" if kind == "refusal" else "text"
        texts[field].append(required(part, field, str, part_path))
    text, refusal = ("".join(pieces) if pieces else None for pieces in texts.values())
    return text, refusal


def _part(part: Json, path: str) -> Json:
    """Return one part in chat's format."""
    kind = required(part, "type", str, path)
    if kind in _TEXTS:
        return {"type": "text", "text": required(part, "text", str, path)}
    if kind == "input_image":
        return _image(part, path)
    if kind == "input_file":
        return _file(part, path)
    if kind == "input_audio":
        audio = required(part, "input_audio", dict, path)
        part_path = f"{path}.input_audio"
        fields = {name: required(audio, name, str, part_path) for name in ("data", "format")}
        return {"type": "input_audio", "input_audio": fields}
    raise unknown(f"{path}.type", kind, _KNOWN)


def _image(part: Json, path: str) -> Json:
    url = optional(part, "image_url", str, path)
    if url is None:
        raise _not_stored(path, "image_url")
    detail = optional(part, "detail", str, path)
    return {"type": "image_url", "image_url": {"url": url} | ({"detail": detail} if detail in _DETAILS else {})}


def _file(part: Json, path: str) -> Json:
    """Return a text file as text, since engines read no files; another file in chat's format, for the engine to validate."""
    content = optional(part, "file_data", str, path)
    if content is None:
        raise _not_stored(path, "file_data")
    name = optional(part, "filename", str, path)
    text = _text_in(content)
    if text is not None:
        return {"type": "text", "text": text}
    fields: dict[str, Any] = {"file_data": content}
    return {"type": "file", "file": fields if name is None else {**fields, "filename": name}}


def _text_in(content: str) -> str | None:
    """Return the text of a data URL with a text type and UTF-8 content; None for another."""
    head, found, coded = content.partition(";base64,")
    if not found or not head.startswith("data:text/"):
        return None
    try:
        return base64.b64decode(coded, validate=True).decode()
    except (binascii.Error, ValueError):
        return None


def _not_stored(path: str, field: str) -> Exception:
    return refused(path, f"{path} must have {field}; files by id or URL are not supported.")
