"""Small PNG files, and messages with images."""

import zlib
from base64 import b64encode
from struct import pack

RED, BLUE = (255, 0, 0), (0, 0, 255)


def png(colour=RED, size=4) -> bytes:
    """Return a PNG file of one colour."""
    rows = b"".join(b"\0" + bytes(colour) * size for _ in range(size))
    parts = [(b"IHDR", pack(">IIBBBBB", size, size, 8, 2, 0, 0, 0)), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    chunks = [pack(">I", len(data)) + kind + data + pack(">I", zlib.crc32(kind + data)) for kind, data in parts]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def data_of(content: bytes) -> str:
    """Return the data of an image as it is in messages."""
    return b64encode(content).decode()


def url_of(content: bytes, kind="image/png") -> str:
    """Return a `data:` URL."""
    return f"data:{kind};base64,{data_of(content)}"


def image(url: str) -> dict:
    """Return a part of a chat message."""
    return {"type": "image_url", "image_url": {"url": url}}


def text(words: str) -> dict:
    """Return a part of a message."""
    return {"type": "text", "text": words}
