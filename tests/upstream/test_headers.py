"""Headers of clients that are sent to engines, as an engine receives them."""

import pytest


@pytest.fixture
def sent(upstream_to, engine_at):
    """Return a function that sends headers to an endpoint with these settings, and returns the lines that arrive."""

    async def send(pairs, /, **settings):
        received = []

        async def serve(reader, writer):
            head = await reader.readuntil(b"\r\n\r\n")
            if head.startswith(b"POST /x "):  # and no detection
                received.extend(head.decode().split("\r\n")[2:-2])
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

        upstream = upstream_to((await engine_at(serve)).removesuffix("/x"), **settings)
        response = await upstream.send(upstream.endpoints[0], "POST", "/x", headers=pairs, body=b"{}")
        response.close()
        return received

    return send


async def test_connection_headers_and_credentials_are_not_sent_to_the_engine(sent):
    """TokenTape's own headers are not either; trace headers and others are. The engine's API key is added."""
    headers = [
        ("Authorization", "Bearer agent"),
        ("x-api-key", "agent"),
        ("Connection", "close, X-Private"),
        ("X-Private", "1"),
        ("Transfer-Encoding", "chunked"),
        ("Content-Encoding", "gzip"),
        ("Host", "me"),
        ("X-Rollout-Id", "r1"),
        ("X-Rollout-Continuation", "append"),
        ("Content-Type", "application/json"),
        ("X-Request-Id", "t"),
    ]

    assert [
        "Content-Type: application/json",
        "X-Request-Id: t",
        "Accept-Encoding: identity",
        "Authorization: Bearer engine",
        "Accept: */*",
        "Content-Length: 2",
    ] == await sent(headers, api_key="engine")


async def test_configured_headers_replace_those_of_the_client(sent):
    lines = await sent(
        [("x-tenant", "theirs"), ("X-Mine", "m"), ("Accept", "a/b")], headers={"X-Tenant": "ours", "X-Other": "o"}
    )

    assert [
        "X-Mine: m",
        "Accept: a/b",
        "X-Tenant: ours",
        "X-Other: o",
        "Accept-Encoding: identity",
        "Content-Length: 2",
    ] == lines


@pytest.mark.parametrize("value", ["a\x01b", "\x1b[31m", "a\x7f", "a\nb"])
async def test_headers_with_control_characters_are_not_sent(sent, value):
    assert "X-Tab: a\tb" in (lines := await sent([("X-Odd", value), ("X-Tab", "a\tb")]))
    assert not [line for line in lines if line.startswith("X-Odd")]
