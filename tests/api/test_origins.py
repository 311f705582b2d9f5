"""Web pages and listeners without keys: the `Host` of requests, and the origin of the page that sends them."""

import asyncio
import time
from urllib.parse import urlsplit

import orjson
import pytest
from tests.support.fakes import proxying, settings_for
from tests.support.recorded import load

from proxy.api.auth import host_name, is_foreign, is_own_host, origin_check
from proxy.errors import CrossSite, UnknownHost

PATTERNS = ("localhost", "*.localhost", "host.docker.internal", "*.pods.internal")
OWN = (
    "localhost", "localhost:8400", "LocalHost:1", "localhost.", "a.localhost:80", "127.0.0.1:8400", "127.9.9.9", "[::1]:8400",
    "[::1]", "0.0.0.0:8400", "10.1.2.3:8400", "[fd00::2]:8400", "host.docker.internal:8400", "HOST.docker.internal",
    "a.pods.internal", "a.b.pods.internal:8400",
)  # fmt: skip
UNKNOWN = (
    "", ":8400", "evil.test", "evil.test:8400", "localhost.evil.test", "127.0.0.1.evil.test", "notlocalhost", "pods.internal",
    "docker.internal", "127.0.0.1@evil.test", "localhost:8400@evil.test", "localhost:x", "[::1", "::1", "[localhost]",
    "[::1]evil.test", "localhost localhost", "2130706433", "0x7f.1", "localhost\\.evil.test", "1.2.3.4.5", "\udcff", "*",
)  # fmt: skip


@pytest.mark.parametrize("host", OWN)
def test_loopback_names_addresses_and_configured_names_are_own_hosts_with_any_port(host):
    assert is_own_host(host, PATTERNS)


@pytest.mark.parametrize("host", UNKNOWN)
def test_other_and_malformed_hosts_are_unknown(host):
    """A name that only contains a known one is another name."""
    assert not is_own_host(host, PATTERNS)


def test_an_asterisk_allows_any_host():
    assert is_own_host("evil.test", ("*",))
    assert host_name("Evil.Test.:80") == "evil.test"


BROWSER = {"Host": "localhost:8400", "Sec-Fetch-Mode": "cors", "Sec-Fetch-Dest": "empty"}
LINK = {
    "Host": "localhost:8400",
    "Sec-Fetch-Site": "cross-site",
    "Sec-Fetch-Mode": "navigate",
    "Sec-Fetch-Dest": "document",
}


@pytest.mark.parametrize(
    ("headers", "foreign"),
    [
        ({}, False),
        ({"Host": "localhost:8400"}, False),
        ({"Host": "localhost:8400", "Sec-Fetch-Mode": "cors"}, False),  # fetch of Node.js
        ({**BROWSER, "Sec-Fetch-Site": "same-origin"}, False),
        ({**BROWSER, "Sec-Fetch-Site": "same-origin", "Origin": "https://balancer.test"}, False),
        ({**BROWSER, "Sec-Fetch-Site": "none"}, False),
        ({**BROWSER, "Sec-Fetch-Site": "same-site"}, True),
        ({**BROWSER, "Sec-Fetch-Site": "cross-site"}, True),
        ({**BROWSER, "Sec-Fetch-Site": ""}, True),
        ({"Host": "localhost:8400", "Origin": "http://localhost:8400"}, False),
        ({"Host": "LOCALHOST:8400", "Origin": "http://localhost:8400"}, False),
        ({"Host": "tape.test", "Origin": "https://tape.test"}, False),
        ({"Host": "localhost:8400", "Origin": "http://localhost:3000"}, True),
        ({"Host": "localhost:8400", "Origin": "http://127.0.0.1:8400"}, True),
        ({"Host": "localhost:8400", "Origin": "https://evil.test"}, True),
        ({"Host": "localhost:8400", "Origin": "null"}, True),
        ({"Host": "localhost:8400", "Origin": ""}, True),
        ({"Host": "", "Origin": "null"}, True),
        ({"Origin": "null"}, True),
        ({"Origin": "file://"}, True),
        (LINK, True),
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
def test_requests_of_pages_of_another_origin_are_foreign(headers, foreign, method):
    """`Sec-Fetch-Site` decides; older browsers send `Origin` alone, and programs send neither."""
    assert foreign == is_foreign(method, headers, is_linked=False)


@pytest.mark.parametrize(
    ("method", "headers", "foreign"),
    [
        ("GET", LINK, False),
        ("HEAD", LINK, False),
        ("POST", LINK, True),  # a form
        ("GET", {**LINK, "Sec-Fetch-Dest": "iframe"}, True),
        ("GET", {**LINK, "Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "image"}, True),
    ],
)
def test_other_sites_may_link_to_paths_if_get_changes_nothing(method, headers, foreign):
    assert foreign == is_foreign(method, headers, is_linked=True)


@pytest.mark.parametrize("text", ["[", "a.", ":1", "::", "a:", "[::1]", "*", "localhost."])
def test_a_long_host_is_checked_in_linear_time(text):
    """Ten times as many characters take about ten times as long."""

    def duration(count: int) -> float:
        host = text * count
        samples = []
        for _ in range(5):
            began = time.thread_time()
            is_own_host(host, PATTERNS)
            samples.append(time.thread_time() - began)
        return min(samples)

    assert duration(100_000) < 40 * max(duration(10_000), 1e-4)


def test_a_listener_with_keys_for_all_its_apis_has_no_check():
    """Web pages know no key, so any host and any origin may use one."""
    keys = {"api_keys": ["k" * 20]}
    both = settings_for(None, agents=keys, control=keys)
    control = settings_for(None, control=keys)

    assert origin_check(both, both.listen, serves_model=True, serves_control=True) is None
    assert origin_check(control, control.listen, serves_model=False, serves_control=True) is None
    assert (
        repr(origin_check(control, control.listen, serves_model=True, serves_control=True))
        == "<OriginCheck without agents.api_keys>"
    )


def test_the_hosts_of_the_configured_urls_and_of_the_address_are_allowed():
    """Containers and balancers have names of their own: `agents.url`, `osmosis.server_url`, `listen` and `allowed_hosts`."""
    settings = settings_for(
        None,
        insecure=True,
        agents={"url": "http://Tape.test:9000/prefix"},
        osmosis={"server_url": "https://servers.test"},
        allowed_hosts=["Host.docker.internal"],
    )
    check = origin_check(settings, "machine.test:8400", serves_model=True, serves_control=True)
    for name in ("tape.test:9000", "servers.test", "machine.test:8400", "host.docker.internal:1"):
        check.check("POST", {"Host": name}, is_linked=False)
    with pytest.raises(
        UnknownHost, match=r"Add 'proxy' to allowed_hosts, or set agents.api_keys and control.api_keys\."
    ):
        check.check("GET", {"Host": "proxy:8400"}, is_linked=True)
    with pytest.raises(UnknownHost, match=r"Set agents.api_keys and control.api_keys\."):
        check.check("GET", {"Host": "@" * 10_000}, is_linked=True)
    with pytest.raises(CrossSite, match=r"\(Origin: 'null'\).*Set agents.api_keys and control.api_keys"):
        check.check("POST", {"Host": "tape.test", "Origin": "null"}, is_linked=True)


async def send(url: str, head: str, body: bytes = b"") -> tuple[int, dict, bytes]:
    """Send a request line and headers as they are; return the status, the JSON of the body, and the head."""
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        length = f"Content-Length: {len(body)}\r\n" if body else ""
        closes = "" if "HTTP/1.0" in head else "Connection: close\r\n"
        writer.write(head.replace("\n", "\r\n").encode() + f"\r\n{length}{closes}\r\n".encode() + body)
        async with asyncio.timeout(50):
            answered, _, text = (await reader.read()).partition(b"\r\n\r\n")
    finally:
        writer.close()
    return int(answered.split()[1]), orjson.loads(text) if text[:1] == b"{" else {}, answered


CHAT = b'{"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}'
CHANGES = [
    ("POST /rollouts", b'{"rollout_id": "planted"}'),
    ("PATCH /rollouts/r1", b'{"reward": 1}'),
    ("POST /rollouts/r1/finish", b'{"status": "completed"}'),
    ("DELETE /rollouts/r1", b""),
    ("POST /sessions/r1/complete", b"{}"),
    ("POST /v1/rollout/completed", b'{"rollout_id": "r1", "status": "COMPLETED"}'),
    ("POST /policy/pause", b"{}"),
    ("PUT /policy", b'{"version": "9"}'),
    ("POST /policy/adapter", b'{"path": "/tmp/a"}'),
    ("POST /batches/claim", b'{"consumer": "evil"}'),
    ("POST /v1/chat/completions", CHAT),
    ("POST /rollouts/r1/v1/chat/completions", CHAT),
    ("POST /v1/messages", b'{"max_tokens": 1, "messages": []}'),
    ("POST /v1beta/models/tiny:generateContent", b"{}"),
    ("POST /tokenize", b"{}"),
    ("GET /tokenize", b""),
    ("OPTIONS /tokenize", b""),
    ("OPTIONS /rollouts", b""),
    ("POST /sessions/create", b"{}"),
]
FOREIGN = {
    "fetch": "Origin: https://evil.test\nSec-Fetch-Site: cross-site\nSec-Fetch-Mode: no-cors",
    "port": "Origin: http://localhost:3000\nSec-Fetch-Site: same-site\nSec-Fetch-Mode: cors",
    "opaque": "Origin: null",
    "old browser": "Origin: https://evil.test",
    "link": "Sec-Fetch-Site: cross-site\nSec-Fetch-Mode: navigate\nSec-Fetch-Dest: iframe",
}


@pytest.mark.parametrize("kind", FOREIGN)
async def test_a_foreign_page_changes_nothing(store, engine, kind):
    """On every route of both APIs, for every content type; the engine gets no request, preflights included."""
    engine.plays(load("chat_ids_lp"))
    await store.open("r1", {}, now_ms=1)
    async with proxying(engine.url, store, atropos={"enabled": True}) as served:
        answers = [
            await send(
                served.url, f"{line} HTTP/1.1\nHost: localhost:8400\nContent-Type: text/plain\n{FOREIGN[kind]}", body
            )
            for line, body in CHANGES
        ]

    assert [403] * len(CHANGES) == [status for status, _, _ in answers]
    assert not [head for _, _, head in answers if b"access-control" in head.lower()]
    assert [name async for name in store.names()] == ["r1"]
    assert (await store.get("r1")).fields == {}
    assert engine.requests == []


async def test_a_rebound_name_gets_nothing(store, engine):
    """The page has the origin of the proxy then: its `Host` alone gives it away. The message names the setting."""
    engine.plays(load("chat_ids_lp"))
    rebound = "Host: evil.test:8400\nOrigin: http://evil.test:8400\nSec-Fetch-Site: same-origin"
    reads = [
        (f"GET {path}", b"") for path in ("/rollouts", "/export?format=steps", "/events", "/ready", "/ui", "/v1/models")
    ]
    await store.open("r1", {}, now_ms=1)
    async with proxying(engine.url, store, atropos={"enabled": True}) as served:
        answers = [await send(served.url, f"{line} HTTP/1.1\n{rebound}", body) for line, body in CHANGES + reads]
        _, openai, _ = await send(served.url, f"GET /rollouts HTTP/1.1\n{rebound}")
        _, anthropic, _ = await send(served.url, f"POST /v1/messages HTTP/1.1\n{rebound}", b"{}")

    assert [403] * len(answers) == [status for status, _, _ in answers]
    assert (
        openai["error"]["code"],
        "Add 'evil.test' to allowed_hosts" in openai["error"]["message"],
    ) == ("unknown_host", True)
    assert (anthropic["type"], anthropic["error"]["type"]) == ("error", "permission_error")
    assert [name async for name in store.names()] == ["r1"]
    assert engine.requests == []


async def test_programs_the_ui_and_links_are_served(store, engine):
    """curl's content type, HTTP/1.0 without `Host`, the page's own requests, and links of other sites to the page."""
    engine.plays(load("chat_ids_lp"))
    own = "Sec-Fetch-Site: same-origin\nSec-Fetch-Mode: cors"
    link = "Sec-Fetch-Site: cross-site\nSec-Fetch-Mode: navigate\nSec-Fetch-Dest: document"
    form = "Content-Type: application/x-www-form-urlencoded"
    async with proxying(engine.url, store, allowed_hosts=["host.docker.internal"]) as served:
        answers = [
            await send(served.url, "POST /rollouts HTTP/1.0", b'{"rollout_id": "r1"}'),
            await send(served.url, f"POST /rollouts HTTP/1.1\nHost: localhost:8400\n{form}", b'{"rollout_id": "r2"}'),
            await send(served.url, "POST /rollouts HTTP/1.1\nHost: host.docker.internal:8400", b'{"rollout_id": "r3"}'),
            await send(served.url, f"GET /rollouts HTTP/1.1\nHost: [::1]:8400\n{own}"),
            await send(served.url, f"GET /ui HTTP/1.1\nHost: localhost\n{link}"),
            await send(served.url, "POST /v1/chat/completions HTTP/1.1\nHost: 127.0.0.1\nSec-Fetch-Mode: cors", CHAT),
        ]

    assert [status for status, _, _ in answers] == [201, 201, 201, 200, 200, 200]


async def test_each_listener_is_checked_unless_its_api_requires_keys(store, engine):
    """A key for one of two ports protects that port only; a key for one of two APIs on a port protects that API only."""
    engine.plays(load("chat_ids_lp"))
    evil, foreign = "Host: evil.test", f"Host: localhost\n{FOREIGN['fetch']}"
    keys = {"api_keys": ["key"]}
    for sections, expected in [
        ({"control": {"listen": "127.0.0.1:0"}}, (403, 403, 403, 403)),
        ({"agents": keys, "control": {"listen": "127.0.0.1:0"}}, (401, 401, 403, 403)),
        ({"control": {"listen": "127.0.0.1:0", **keys}}, (403, 403, 401, 401)),
        ({"control": keys}, (403, 403, 403, 403)),
        ({"agents": keys, "control": keys}, (401, 401, 401, 401)),
    ]:
        async with proxying(engine.url, store, **sections) as served:
            statuses = tuple(
                [
                    (await send(url, f"POST {path} HTTP/1.1\n{headers}", b"{}"))[0]
                    for url, path in ((served.url, "/v1/chat/completions"), (served.control_url, "/rollouts"))
                    for headers in (evil, foreign)
                ]
            )
        assert statuses == expected, sections

    assert engine.requests == []
