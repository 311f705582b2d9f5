"""Images in the messages of a chat: placeholder tokens in the prompt, as vLLM 0.32 expands them.

The prompt has one placeholder for each image, which vLLM repeats: here as often as the option `image_tokens`, and a few times
more, depending on the data. The text of a message can contain the placeholder as well, as with real models.
"""

import binascii
from collections.abc import Sequence
from typing import Any, Final
from zlib import crc32

from proxy.simulator.errors import invalid_value

PLACEHOLDER: Final = "<|image_pad|>"
_SIZES: Final = 4

Message = dict[str, Any]


def with_placeholders(messages: Sequence[Message]) -> tuple[list[Message], list[str]]:
    """Return the messages with a text in place of each image, and the URLs of the images.

    Raises:
        RequestError: an image has no URL, or data that is not base64.
    """
    urls: list[str] = []
    prepared = list(messages)
    for index, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, list) and any(map(_is_image, content)):
            parts = [{"type": "text", "text": PLACEHOLDER} if _is_image(part) else part for part in content]
            urls += [_url(part) for part in content if _is_image(part)]
            prepared[index] = {**message, "content": parts}
    return prepared, urls


def expanded(ids: Sequence[int], token: int, urls: Sequence[str], length: int) -> list[int]:
    """Return the ids with the first placeholders repeated, one for each image."""
    found: list[int] = []
    lengths = iter([length + crc32(url.encode()) % _SIZES for url in urls])
    for i in ids:
        found += [i] * (next(lengths, 1) if i == token else 1)
    return found


def _is_image(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") in {"image_url", "input_image"}


def _url(part: Message) -> str:
    url = part.get("image_url")
    url = url.get("url") if isinstance(url, dict) else url
    if not isinstance(url, str):
        raise invalid_value("image_url must be a URL.", "messages")
    head, comma, data = url.partition(",")
    if comma and head.startswith("data:"):
        try:
            binascii.a2b_base64(data, strict_mode=True)
        except binascii.Error as error:
            raise invalid_value(str(error)) from error
    return url
