"""Decodes the bodies of engines that compress them although the requests prohibit it (`Accept-Encoding: identity`)."""

import zlib
from typing import Final

import aiohttp

MAX_DECODED_BYTES: Final = 2**18  # per call: a small body may become a very large one
_MAX_MEMBERS: Final = 1000  # of one gzip body; each costs time, and may be empty
_UNSUPPORTED: Final = ("br", "zstd")
CODINGS: Final = frozenset({"gzip", "deflate", *_UNSUPPORTED})


class Decoder:
    """Decodes gzip or deflate, at most `MAX_DECODED_BYTES` at a time. Raises ValueError for other codings."""

    def __init__(self, coding: str) -> None:
        if coding in _UNSUPPORTED:
            raise ValueError(f"Can not decode content-encoding: {coding}")
        self._coding = coding
        self._zlib: zlib._Decompress | None = None
        self._rest = b""
        self._members = 0
        self.is_busy = False  # whether more can be decoded without more data

    def decode(self, data: bytes) -> bytes:
        """Return the next decoded bytes; b"" if more data is required. Raises aiohttp.ClientPayloadError."""
        self._rest += data
        decoded = b""
        while not decoded and (self._rest or self.is_busy):
            try:
                decoded = self._part()
            except zlib.error:
                raise aiohttp.ClientPayloadError(f"Can not decode content-encoding: {self._coding}") from None
        return decoded

    def _part(self) -> bytes:
        if self._zlib is None or self._zlib.eof:
            if self._members == _MAX_MEMBERS:
                raise zlib.error
            self._members += 1
            self._zlib = zlib.decompressobj(self._window_bits(self._rest))
        decoded = self._zlib.decompress(self._rest, MAX_DECODED_BYTES)
        self._rest = self._zlib.unconsumed_tail or self._zlib.unused_data
        self.is_busy = bool(self._rest) or (len(decoded) == MAX_DECODED_BYTES and not self._zlib.eof)
        return decoded

    def _window_bits(self, data: bytes) -> int:
        if self._coding == "gzip":
            return 16 + zlib.MAX_WBITS
        # The first byte of zlib's format (RFC 1950) ends in 8. Some servers send raw deflate instead.
        return zlib.MAX_WBITS if data[0] & 0xF == 8 else -zlib.MAX_WBITS

    def check_end(self) -> None:
        """Raise aiohttp.ClientPayloadError if a deflate stream is incomplete. An incomplete gzip stream is accepted."""
        if self._coding == "deflate" and self._zlib is not None and not self._zlib.eof:
            raise aiohttp.ClientPayloadError(f"Can not decode content-encoding: {self._coding}")
