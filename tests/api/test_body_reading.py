"""Reading request bodies from the connection: decompression, limits, and accounting of their bytes."""

import gzip
import zlib
from types import SimpleNamespace

import orjson
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict
from tests.support.fakes import proxying
from tests.support.recorded import load

from proxy.api import body as reading
from proxy.api.body import _SOURCES, read_bytes
from proxy.api.context import CONTEXT
from proxy.errors import Overloaded, RequestTooLarge

WHOLE = load("chat_ids_lp")
CHAT = "/rollouts/r1/v1/chat/completions"
BODY = orjson.dumps({"model": "m", "messages": [{"role": "user", "content": "hi" * 500}]})


def raw_deflate(text: bytes) -> bytes:
    packing = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packing.compress(text) + packing.flush()


PACKED = {
    "gzip": [gzip.compress(BODY), gzip.compress(BODY[:50]) + gzip.compress(b"") + gzip.compress(BODY[50:])],
    "x-gzip": [gzip.compress(BODY)],
    "deflate": [zlib.compress(BODY), raw_deflate(BODY)],
    "zstd": [zstandard.compress(BODY), zstandard.compress(BODY[:50]) + zstandard.compress(BODY[50:])],
    "identity": [BODY],
    "": [BODY],
}


CASES = [(coding, number) for coding, several in PACKED.items() for number in range(len(several))]


@pytest.mark.parametrize(("coding", "number"), CASES)
async def test_a_body_in_a_supported_encoding_reaches_the_engine_decompressed(store, engine, http, coding, number):
    """The encoding's name is case-insensitive; deflate has a header or not; streams may have several members or frames."""
    engine.plays(WHOLE)
    async with proxying(engine.url, store) as served:
        for encoding in (coding, coding.upper()):
            async with http.post(
                served.url + CHAT, data=PACKED[coding][number], headers={"Content-Encoding": encoding}
            ) as response:
                assert response.status == 200, await response.text()

    assert [body["messages"][0]["content"] for body in engine.requests] == ["hi" * 500] * 2
    assert all("content-encoding" not in headers for headers in engine.headers)


@pytest.mark.parametrize("coding", ["gzip", "deflate", "zstd"])
async def test_a_damaged_compressed_body_is_400(store, engine, http, coding):
    """Nothing is sent to the engine."""
    packed = PACKED[coding][0]
    async with proxying(engine.url, store) as served:
        for data in (packed[:-9], packed[:1], packed + b"rest of something", b"{}"):
            async with http.post(served.url + CHAT, data=data, headers={"Content-Encoding": coding}) as response:
                payload = await response.json()
            assert (response.status, payload["error"]["code"]) == (400, "bad_request"), data[-20:]

    assert engine.requests == []


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/rollouts", "/v1/embeddings"])
async def test_an_unsupported_encoding_is_415_in_the_dialects_error_shape(store, engine, http, path):
    """The message names the supported encodings."""
    async with proxying(engine.url, store) as served:
        for coding in ["br", "bogus", "gzip, gzip", "gzip, identity"]:
            async with http.post(served.url + path, data=b"{}", headers={"Content-Encoding": coding}) as response:
                payload = await response.json()
            assert response.status == 415, coding
            assert "gzip" in payload["error"]["message"]
            assert payload["error"].get("code", "unsupported_encoding") == "unsupported_encoding"
            assert ("type" in payload) == (path == "/v1/messages")

    assert engine.requests == []


@given(
    text=st.binary(max_size=5000) | st.binary(min_size=1, max_size=9).map(lambda part: part * 9000),
    coding=st.sampled_from(["gzip", "deflate", "zstd"]),
    size=st.integers(1, 3000),
    parts=st.integers(1, 4),
)
def test_decompression_in_pieces_of_any_size_yields_the_text(text, coding, size, parts):
    """No piece is longer than requested."""
    pack = {"gzip": gzip.compress, "deflate": zlib.compress, "zstd": zstandard.compress}[coding]
    cut = len(text) // parts + 1
    several = [text[at : at + cut] for at in range(0, len(text), cut)] if coding != "deflate" else [text]
    source = _SOURCES[coding](b"".join(map(pack, several or [b""])))
    pieces = []
    while piece := source.read(size):
        pieces.append(piece)

    assert text == b"".join(pieces)
    assert all(len(piece) <= size for piece in pieces)


def test_the_number_of_empty_gzip_members_is_limited():
    """Each costs time and yields no byte."""
    source = _SOURCES["gzip"](gzip.compress(b"") * 1001)
    with pytest.raises(EOFError):
        source.read(10)


class Watched:
    """A memory limit that records the highest reservation."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes, self.held, self.highest = limit_bytes, 0, 0

    def take(self, more: int, *, own: int) -> None:
        if self.held + more > self.limit_bytes:
            raise Overloaded("full")
        self.held += more
        self.highest = max(self.highest, self.held)


def make_request(data: bytes, *, limit_bytes: int, held: int, length: int | None = None, coding: str = "gzip"):
    """Return a request with these bytes, as far as `read_bytes` uses it, and its memory limit."""
    reads = [data, b""]

    class Content:
        def is_eof(self):
            return True

        async def readany(self):
            return reads.pop(0)

    class Request(dict):
        content, content_length = Content(), length
        headers = CIMultiDict({"Content-Encoding": coding})

    request = Request()
    agents = SimpleNamespace(max_body_bytes=limit_bytes, body_timeout_s=9)
    limit = Watched(held)
    request.app = {CONTEXT: SimpleNamespace(settings=SimpleNamespace(agents=agents), memory_limit=limit)}
    return request, limit


async def test_memory_is_reserved_before_a_piece_is_decompressed(monkeypatch):
    """A piece for which no memory is free is not decompressed."""
    inflated = []
    inflate = reading._Zlib.read
    monkeypatch.setattr(reading._Zlib, "read", lambda self, size: inflated.append(inflate(self, size)) or inflated[-1])
    request, limit = make_request(gzip.compress(bytes(2**25)), limit_bytes=2**26, held=2**19)
    with pytest.raises(Overloaded):
        await read_bytes(request)

    assert sum(map(len, inflated)) <= 2**19
    assert limit.highest <= 2**19


async def test_the_content_length_is_reserved_before_a_byte_is_read():
    """A length above the maximum is rejected before a byte is read."""
    request, limit = make_request(b"x", limit_bytes=1000, held=10, length=11)
    with pytest.raises(Overloaded):
        await read_bytes(request)
    assert limit.highest == 0
    request, limit = make_request(b"x", limit_bytes=1000, held=10, length=1001)
    with pytest.raises(RequestTooLarge):
        await read_bytes(request)


async def test_a_body_may_decompress_to_100_times_its_size():
    """Up to 1 MB the ratio is ignored; a body above it is rejected before more is decompressed."""
    request, limit = make_request(gzip.compress(bytes(2**20)), limit_bytes=2**26, held=2**27)
    assert len(await read_bytes(request)) == 2**20
    packed = gzip.compress(bytes(2**25))
    request, limit = make_request(packed, limit_bytes=2**26, held=2**27)
    with pytest.raises(RequestTooLarge, match="100 times"):
        await read_bytes(request)

    assert limit.highest < 100 * len(packed) + 2**21


async def test_a_request_releases_its_memory_with_its_response(store, engine, http):
    """This holds for successful and failed requests of both APIs."""
    engine.plays(WHOLE)
    calls = [("POST", CHAT, BODY), ("POST", CHAT, b"no"), ("POST", "/rollouts", b"{}"), ("POST", "/rollouts", b"no")]
    async with proxying(engine.url, store) as served:
        for method, path, data in calls:
            async with http.request(method, served.url + path, data=data) as response:
                await response.read()
            async with http.get(served.url + "/metrics") as metrics:
                assert "tokentape_in_flight_bytes 0.0" in await metrics.text()
