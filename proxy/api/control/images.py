"""The route that returns an image of a rollout.

An agent chose the bytes, so a browser must not run them: the content type follows from the first bytes, and anything that is
not a raster image is a download.
"""

import asyncio
import binascii
from typing import Final

from aiohttp import web

from proxy.api.context import CONTEXT
from proxy.api.control.schemas import RequestModel
from proxy.api.query import query_from, rollout_from
from proxy.errors import NotFound, UnprocessableRequest
from proxy.trajectory.blocks import BlockReader, BrokenChain
from proxy.trajectory.images import block_of

_TYPES: Final = (  # the position of the bytes that identify a type
    (0, b"\x89PNG\r\n\x1a\n", "image/png"),
    (0, b"\xff\xd8\xff", "image/jpeg"),
    (0, b"GIF87a", "image/gif"),
    (0, b"GIF89a", "image/gif"),
    (8, b"WEBP", "image/webp"),
    (0, b"BM", "image/bmp"),
    (4, b"ftypavif", "image/avif"),
)
_OTHER: Final = "application/octet-stream"
_HEADERS: Final = {
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": "default-src 'none'; sandbox",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "private, max-age=3600, immutable",  # the name is a hash of the bytes
}


async def show_image(request: web.Request) -> web.Response:
    """`GET /rollouts/{id}/images/{image}`: the bytes. Raises NotFound, and UnprocessableRequest for data that is not base64."""
    query_from(request, RequestModel)
    rollout = await rollout_from(request)
    name = request.match_info["image"]
    block = block_of(name)
    blocks = {} if block is None else await request.app[CONTEXT].store.blocks(rollout.rollout_id, [block])
    missing = NotFound(f"Rollout {rollout.rollout_id!r} has no image {name[:100]!r}.", param="image")
    if block is None or block not in blocks:
        raise missing
    try:
        body = await asyncio.to_thread(_decoded, blocks, block)
    except BrokenChain:  # of another kind: a message, or ids
        raise missing from None
    except binascii.Error as error:
        raise UnprocessableRequest(f"The data of the image is not base64: {error}", param="image") from error
    content_type = type_of(body)
    headers = _HEADERS if content_type != _OTHER else {**_HEADERS, "Content-Disposition": "attachment"}
    return web.Response(body=body, content_type=content_type, headers=headers)


def type_of(body: bytes) -> str:
    """Return the content type of a raster image by its first bytes; that of unknown bytes for anything else."""
    found = (kind for start, magic, kind in _TYPES if body[start : start + len(magic)] == magic)
    return next(found, _OTHER)


def _decoded(blocks: dict[bytes, bytes], name: bytes) -> bytes:
    """Return the bytes of an image. Raises BrokenChain, binascii.Error."""
    return binascii.a2b_base64(BlockReader(blocks).image(name), strict_mode=True)
