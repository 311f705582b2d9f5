"""Decoding of compressed bodies, in parts."""

import gzip
import zlib

import aiohttp
import pytest

from proxy.upstream.http_client import MAX_DECODED_BYTES, Decoder

TEXT = bytes(range(256)) * 5000


def decoded(coding, *parts):
    """Return the decoded parts."""
    decoder = Decoder(coding)
    found = [decoded for part in parts for decoded in decoder.parts(part)]
    decoder.check_end()
    return found


@pytest.mark.parametrize(("coding", "packed"), [
    ("gzip", gzip.compress(TEXT)), ("gzip", gzip.compress(b"") + gzip.compress(TEXT)), ("deflate", zlib.compress(TEXT)),
    ("deflate", zlib.compress(TEXT, wbits=-15)),
])  # fmt: skip
@pytest.mark.parametrize("size", [1, 7, 10_000_000])
def test_any_parts_are_decoded(coding, packed, size):
    """At most 256 KiB each."""
    found = decoded(coding, *(packed[start : start + size] for start in range(0, len(packed), size)))

    assert b"".join(found) == TEXT
    assert max(map(len, found)) <= MAX_DECODED_BYTES


@pytest.mark.parametrize("coding", ["br", "zstd"])
def test_other_codings_are_errors(coding):
    with pytest.raises(ValueError, match=f"Can not decode content-encoding: {coding}"):
        Decoder(coding)


@pytest.mark.parametrize(("coding", "packed"), [
    ("gzip", b"hello"), ("gzip", gzip.compress(TEXT)[:-8] + b"x" * 8), ("gzip", gzip.compress(b"") * 1001),
    ("deflate", zlib.compress(TEXT)[:100]),
])  # fmt: skip
def test_broken_streams_are_errors(coding, packed):
    """As are more than 1,000 members."""
    with pytest.raises(aiohttp.ClientPayloadError, match=f"Can not decode content-encoding: {coding}"):
        decoded(coding, packed)


def test_an_incomplete_gzip_stream_is_accepted():
    """As by aiohttp's client; JSON that is cut is detected by its parser."""
    assert TEXT.startswith(b"".join(decoded("gzip", gzip.compress(TEXT)[:300])))
