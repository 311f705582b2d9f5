"""Responses of engines as bytes: framing, limits, decoding, pace. aiohttp's own client is the reference."""

import asyncio
import gzip
import socket
import struct
import tracemalloc
import zlib

import aiohttp
import pytest

HEAD = b"HTTP/1.1 200 OK\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n"
VALID = {
    "length": HEAD + b"Content-Length: 5\r\nX-A: 1\r\nx-a: 2 \t\r\n\r\nhello",
    "empty": HEAD + b"Content-Length: 0\r\n\r\n",
    "chunks": CHUNKED + b"\r\n5\r\nhello\r\n06;name=value\r\n world\r\n0\r\n\r\n",
    "trailers": CHUNKED + b"Trailer: X-T\r\n\r\n1\r\na\r\n0\r\nX-T: 1\r\n\r\n",
    "space after a size": CHUNKED + b"\r\n5 \r\nhello\r\n0\r\n\r\n",
    "until close": HEAD + b"Content-Type: a/b\r\n\r\nhello",
    "HTTP/1.0": b"HTTP/1.0 404 Not Found\r\n\r\nhello",
    "another coding": HEAD + b"Transfer-Encoding: identity\r\n\r\nhello",
    "space before a colon": HEAD + b"Content-Length : 5\r\n\r\nhello",
    "204": b"HTTP/1.1 204 No Content\r\n\r\n",
    "304": b"HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n",
    "no reason": b"HTTP/1.1 500\r\nContent-Length: 1\r\n\r\na",
    "interim": b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Hints\r\nLink: x\r\n\r\n" + HEAD + b"Content-Length: 1\r\n\r\na",
    "line feeds": b"HTTP/1.1 200 OK\nContent-Length: 1\n\na",
    "control characters": HEAD + b"X-A: a\x01\xff\xc3\xa9b\r\nContent-Length: 0\r\n\r\n",
    "bytes behind": HEAD + b"Content-Length: 1\r\n\r\na" + HEAD + b"Content-Length: 1\r\n\r\nb",
    "invalid status": b"HTTP/1.1 999 Odd\r\nContent-Length: 0\r\n\r\n",
    "status 000": b"HTTP/1.1 000 Odd\r\nContent-Length: 0\r\n\r\n",
    "upgrade": b"HTTP/1.1 101 Switching\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n",
    "128 headers": HEAD + b"Content-Length: 0\r\n" + b"X: y\r\n" * 127 + b"\r\n",
    "long header": HEAD + b"Content-Length: 0\r\nX-Long: " + b"a" * 8184 + b"\r\n\r\n",
    "gzip": HEAD + b"Content-Encoding: gzip\r\n\r\n" + gzip.compress(b"hello" * 1000),
    "two members": HEAD + b"Content-Encoding: GZIP\r\n\r\n" + gzip.compress(b"hello") + gzip.compress(b"world"),
    "deflate": HEAD + b"Content-Encoding: deflate\r\n\r\n" + zlib.compress(b"hello" * 1000),
    "raw deflate": HEAD + b"Content-Encoding: deflate\r\n\r\n" + zlib.compress(b"hello" * 1000, wbits=-15),
    "half of gzip": HEAD + b"Content-Encoding: gzip\r\n\r\n" + gzip.compress(bytes(range(256)))[:150],
    "unknown coding": HEAD + b"Content-Encoding: bogus\r\n\r\nhello",
}  # fmt: skip
INVALID = {
    "nothing": b"",
    "half a head": HEAD + b"Content-Le",
    "not HTTP": b"SSH-2.0-OpenSSH_9.2\r\n",
    "version": b"HTTP/3.7 200 OK\r\nContent-Length: 0\r\n\r\n",
    "half a body": HEAD + b"Content-Length: 6\r\n\r\nhello",
    "half a chunk": CHUNKED + b"\r\n6\r\nhello",
    "no last chunk": CHUNKED + b"\r\n5\r\nhello\r\n",
    "chunk size": CHUNKED + b"\r\n0x5\r\nhello\r\n0\r\n\r\n",
    "negative chunk": CHUNKED + b"\r\n-5\r\nhello\r\n0\r\n\r\n",
    "huge chunk": CHUNKED + b"\r\nfffffffffffffffff\r\n",
    "chunk too long": CHUNKED + b"\r\n4\r\nhello\r\n0\r\n\r\n",
    "two lengths": HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello!",
    "length and chunks": CHUNKED + b"Content-Length: 5\r\n\r\n0\r\n\r\n",
    "length": HEAD + b"Content-Length: +5\r\n\r\nhello",
    "null byte": HEAD + b"X-A: a\x00b\r\nContent-Length: 0\r\n\r\n",
    "129 headers": HEAD + b"Content-Length: 0\r\n" + b"X: y\r\n" * 128 + b"\r\n",
    "long header": HEAD + b"Content-Length: 0\r\nX-Long: " + b"a" * 9000 + b"\r\n\r\n",
    "long name": HEAD + b"a" * 8191 + b": \r\n\r\n",
    "br": HEAD + b"Content-Encoding: br\r\n\r\n\x5b\xff\xff\xff",
    "not gzip": HEAD + b"Content-Encoding: gzip\r\n\r\nhello",
    "half of deflate": HEAD + b"Content-Encoding: deflate\r\n\r\n" + zlib.compress(bytes(range(256)))[:150],
}  # fmt: skip


def sending(response, *, size=None):
    """Return a server that reads a request, sends a response in parts of `size` bytes, and closes the connection."""

    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        for start in range(0, len(response), size or len(response) or 1):
            writer.write(response[start : start + (size or len(response))])
            await writer.drain()
            await asyncio.sleep(0)

    return serve


async def everything(response):
    """Read a response to the end, and return what it has."""
    body = b"".join([read async for read in response.iter_bytes()])
    return response.status, list(response.headers.items()), body


async def reference(url, method="GET"):
    """Return what aiohttp's client makes of the response."""
    async with aiohttp.ClientSession() as http, http.request(method, url, allow_redirects=False) as response:
        return response.status, list(response.headers.items()), await response.read()


@pytest.mark.parametrize("size", [None, 1], ids=["at once", "by byte"])
@pytest.mark.parametrize("name", VALID)
async def test_valid_responses_are_parsed_as_by_aiohttp(client, engine_at, name, size):
    """In one read and byte by byte: status, headers in order, and the decoded body."""
    url = await engine_at(sending(VALID[name], size=size))

    assert await reference(url) == await everything(await client.request("GET", url, headers=(), body=None))


@pytest.mark.parametrize("size", [None, 1], ids=["at once", "by byte"])
@pytest.mark.parametrize("name", INVALID)
async def test_invalid_responses_are_errors(client, engine_at, name, size):
    """aiohttp (3.14) closes the connection after some of these bodies, but its reader keeps waiting."""
    url = await engine_at(sending(INVALID[name], size=size))
    expected = aiohttp.ServerDisconnectedError if name in ("nothing", "half a head") else aiohttp.ClientPayloadError
    with pytest.raises(expected):
        await everything(await client.request("POST", url, headers=(), body=None))


@pytest.mark.parametrize("name", ["half a body", "half a chunk", "no last chunk"])
async def test_incomplete_bodies_have_the_messages_of_aiohttp(client, engine_at, name):
    url = await engine_at(sending(INVALID[name]))
    with pytest.raises(aiohttp.ClientPayloadError) as expected:
        await reference(url, "POST")
    with pytest.raises(aiohttp.ClientPayloadError) as found:
        await everything(await client.request("POST", url, headers=(), body=None))

    assert str(expected.value) == str(found.value)


@pytest.mark.parametrize("header", [("Content-Length", "5"), ("Content-Encoding", "br")])
async def test_a_response_to_head_has_no_body(client, engine_at, header):
    """Which is not decoded, either."""
    url = await engine_at(sending(HEAD + "{}: {}\r\n\r\nhello".format(*header).encode()))

    assert await everything(await client.request("HEAD", url, headers=(), body=None)) == (200, [header], b"")


async def test_what_arrived_before_an_error_is_read_before_it_is_raised(client, engine_at):
    url = await engine_at(sending(CHUNKED + b"\r\n5\r\nhello\r\nx"))
    response = await client.request("POST", url, headers=(), body=None)
    await asyncio.sleep(0.05)

    reads = response.iter_bytes()
    assert await anext(reads) == b"hello"
    with pytest.raises(aiohttp.ClientPayloadError):
        await anext(reads)


async def test_a_reset_is_not_the_end_of_a_body_without_a_length(client, engine_at):
    """Bytes may be lost with the connection."""

    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(HEAD + b"\r\nhello")
        await reader.read(1)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    url = await engine_at(serve)
    response = await client.request("POST", url, headers=(), body=None)
    reads = response.iter_bytes()
    assert await anext(reads) == b"hello"
    response._transport.write(b"x")
    with pytest.raises(aiohttp.ClientPayloadError, match="reset"):
        await anext(reads)


@pytest.mark.parametrize("endless", [
    HEAD + b"X-A: ", HEAD + b"a", CHUNKED + b"\r\n0\r\nX-T: ", CHUNKED + b"\r\n1;a=", b"HTTP/1.1 200 ",
], ids=["value", "name", "trailer", "chunk extension", "reason"])  # fmt: skip
async def test_a_head_a_trailer_and_a_chunk_size_have_to_end(client, engine_at, endless):
    """An engine cannot fill the memory with them, in small reads or large ones."""

    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(endless)
        while not writer.transport.is_closing():
            writer.write(b"a" * 1000)
            await writer.drain()
            await asyncio.sleep(0)

    url = await engine_at(serve)
    with pytest.raises(aiohttp.ClientPayloadError, match="8190"):
        await everything(await client.request("POST", url, headers=(), body=None))


async def test_trailers_are_limited(client, engine_at):
    url = await engine_at(sending(CHUNKED + b"\r\n1\r\na\r\n0\r\n" + b"X: y\r\n" * 300 + b"\r\n"))
    with pytest.raises(aiohttp.ClientPayloadError, match="headers"):
        await everything(await client.request("POST", url, headers=(), body=None))


async def test_a_slow_reader_slows_the_engine(client, engine_at):
    """Of 64 MiB the engine can write what fits in the sockets and 512 KiB; the rest is read at the reader's pace."""
    written, part = [], b"a" * 2**16

    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % 2**26)
        for _ in range(2**10):
            writer.write(part)
            await writer.drain()
            written.append(part)

    url = await engine_at(serve)
    response = await client.request("POST", url, headers=(), body=None)
    before = -1
    while before != len(written):
        before = len(written)
        for _ in range(20):  # of the loop, which may be slow
            await asyncio.sleep(0.01)
    assert before * 2**16 < 2**25
    assert response._waiting_bytes < 2**20
    _, _, body = await everything(response)

    assert (len(body), len(written)) == (2**26, 2**10)


async def test_a_decompression_bomb_is_decoded_at_the_pace_of_the_reader(client, engine_at):
    """128 MiB of zeros are never in memory at once."""
    url = await engine_at(sending(HEAD + b"Content-Encoding: gzip\r\n\r\n" + gzip.compress(bytes(2**27))))
    response = await client.request("POST", url, headers=(), body=None)
    tracemalloc.start()
    try:
        total = 0
        async for read in response.iter_bytes():
            total += len(read)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert total == 2**27
    assert peak < 2**23


async def test_decoding_a_bomb_lets_the_event_loop_run_between_its_parts(client, engine_at):
    url = await engine_at(sending(HEAD + b"Content-Encoding: gzip\r\n\r\n" + gzip.compress(bytes(2**24))))
    response = await client.request("POST", url, headers=(), body=None)
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.get_running_loop().create_task(count())
    reads = 0
    async for _ in response.iter_bytes():
        reads += 1
    counting.cancel()

    assert reads // 2 <= turns


async def test_the_read_timeout_is_between_two_reads(make_client, engine_at):
    """It does not run while reading is paused, and the connection is closed afterwards."""
    closed = asyncio.Event()

    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        for part in (HEAD, b"Content-Length: 2000003\r\n\r\n", b"a", b"b"):
            writer.write(part)
            await asyncio.sleep(0.55)
        writer.write(b"c" * 2_000_000)
        assert await reader.read() == b""
        closed.set()

    client = make_client(read_timeout_s=2)
    url = await engine_at(serve)
    response = await client.request("POST", url, headers=(), body=None)
    while not response._is_paused:
        await asyncio.sleep(0.01)
    await asyncio.sleep(2.2)
    with pytest.raises(aiohttp.SocketTimeoutError, match="Timeout on reading data from socket"):
        await everything(response)
    async with asyncio.timeout(50):
        await closed.wait()


async def test_a_response_that_never_begins_times_out(make_client, engine_at):
    async def serve(reader, writer):
        await reader.read()

    url = await engine_at(serve)
    with pytest.raises(aiohttp.SocketTimeoutError):
        await make_client(read_timeout_s=0.1).request("POST", url, headers=(), body=b"{}")
