"""Media of Gemini parts, as chat parts: images, audio and video with data or a URL, and texts."""

import binascii
from base64 import b64decode
from typing import Final
from urllib.parse import urlsplit

from proxy.protocols.dialects.gemini.fields import required
from proxy.protocols.dialects.translation import Json
from proxy.protocols.dialects.validation import a_text, refusal

_AUDIO_FORMATS: Final = {"mpeg": "mp3", "mp3": "mp3", "x-wav": "wav", "wave": "wav", "wav": "wav"}
_GOOGLE: Final = ".googleapis.com"  # of the Files API, whose files an engine cannot read


def inline_part(blob: Json, path: str) -> Json:
    """Return data in the request as a chat part; a text is a text part. Raises UnprocessableRequest for other types."""
    kind, subtype = _mime_type(blob, path)
    # Google's Python SDK writes base64 with the alphabet for URLs, which data URLs and audio do not have.
    data = required(a_text, blob, "data", path).replace("-", "+").replace("_", "/")
    if kind == "text":
        return {"type": "text", "text": _decoded(data, path)}
    if kind == "audio":
        return {"type": "input_audio", "input_audio": {"data": data, "format": _AUDIO_FORMATS.get(subtype, subtype)}}
    return _by_url(kind, f"data:{kind}/{subtype};base64,{data}", path)


def file_part(file: Json, path: str) -> Json:
    """Return a file with a public URL as a chat part. Raises UnprocessableRequest for files that Google stores."""
    url = required(a_text, file, "fileUri", path)
    if not _is_public(url):
        raise refusal(f"{path}.fileUri", "must be a public URL; files that Google stores are not supported")
    return _by_url(_mime_type(file, path)[0], url, path)


def _is_public(url: str) -> bool:
    try:
        parts = urlsplit(url)
    except ValueError:
        return False
    return parts.scheme in {"http", "https"} and not (parts.hostname or "").endswith(_GOOGLE)


def _mime_type(media: Json, path: str) -> tuple[str, str]:
    kind, _, subtype = required(a_text, media, "mimeType", path).partition(";")[0].strip().lower().partition("/")
    return kind, subtype


def _by_url(kind: str, url: str, path: str) -> Json:
    if kind not in {"image", "video", "audio"}:
        raise refusal(
            f"{path}.mimeType", "must be an image, a video, audio or a text with its data; send other media as text"
        )
    return {"type": f"{kind}_url", f"{kind}_url": {"url": url}}


def _decoded(data: str, path: str) -> str:
    try:
        return b64decode(data, validate=True).decode()
    except (binascii.Error, ValueError):
        raise refusal(f"{path}.data", "must be UTF-8 in base64") from None
