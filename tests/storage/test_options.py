"""Options of a store and parsing of its URL."""

from pathlib import Path

import pytest

from storage import StoreOptions, open_store
from storage.options import Address, parse_url

INVALID = {
    "http://x": "cannot start with 'http'",
    "": "cannot start with ''",
    "redis": "cannot start with 'redis'",
    "redis:x": "cannot start with 'redis'",
    "redis://": "'' is not HOST or HOST:PORT",
    "redis://h:port": "'h:port' is not HOST",
    "redis://h:0": "'h:0' is not HOST",
    "redis://h:65536": "'h:65536' is not HOST",
    "redis://h/one": "invalid database /one",
    "redis+cluster://h/1": "invalid database /1",
    "redis+sentinel://h": r"lacks the name of the primary: redis\+sentinel://h/SERVICE",
    "redis+sentinel://h/main/x": "invalid database /x",
    "redis://a,b": r"for a cluster, use redis\+cluster://a,b",
    "embedded:": "embedded: needs a path",
    "unix:": "unix: needs a path",
}


@pytest.mark.parametrize(
    ("url", "address"),
    {
        "embedded:./data": Address("embedded", path=Path("data")),
        "embedded:/a b/{c}": Address("embedded", path=Path("/a b/{c}")),
        "unix:/run/x.sock": Address("unix", path=Path("/run/x.sock")),
        "redis://h": Address("single", hosts=(("h", 6379),)),
        "redis://h:1/2": Address("single", hosts=(("h", 1),), db=2),
        "redis://[::1]:7": Address("single", hosts=(("::1", 7),)),
        "redis://u%40:p%3A%2F@h": Address("single", hosts=(("h", 6379),), username="u@", password="p:/"),
        "redis://:p@h": Address("single", hosts=(("h", 6379),), password="p"),
        "rediss://h": Address("single", hosts=(("h", 6379),), tls=True),
        "redis+cluster://a:1,b,[::1]:2": Address("cluster", hosts=(("a", 1), ("b", 6379), ("::1", 2))),
        "redis+sentinel://a,b:1/main": Address("sentinel", hosts=(("a", 26_379), ("b", 1)), service="main"),
        "rediss+sentinel://u:p@a/m%2F/2": Address(
            "sentinel", hosts=(("a", 26_379),), tls=True, db=2, username="u", password="p", service="m/"
        ),
        "rediss+cluster://u:p@a": Address("cluster", hosts=(("a", 6379),), tls=True, username="u", password="p"),
    }.items(),
)
def test_a_url_is_parsed(url, address):
    """Each valid form gives an address."""
    assert address == parse_url(url)


@pytest.mark.parametrize(("url", "why"), INVALID.items())
async def test_an_invalid_url_is_refused(url, why):
    """The ValueError names the problem."""
    with pytest.raises(ValueError, match=why):
        await open_store(url)


@pytest.mark.parametrize("url", ["redis://u:secret@h:x", "redis://u:secret@h/x", "redis://u:secret@", "u:secret@h"])
def test_no_error_shows_a_password(url):
    """The message for an invalid URL has no password, nor does the repr of options and addresses."""
    with pytest.raises(ValueError, match=r"valid forms|invalid database") as caught:
        parse_url(url)

    assert "secret" not in str(caught.value)
    assert "secret" not in repr(Address("single", password="secret"))
    assert "secret" not in repr(StoreOptions(password="secret"))


@pytest.mark.parametrize(
    "options",
    [{"prefix": ""}, {"prefix": "{a}"}, {"ttl_s": 0}, {"timeout_s": 0}, {"replicas": 0}, {"max_connections": -1}],
)
def test_invalid_options_are_refused(options):
    """The ValueError names the option."""
    with pytest.raises(ValueError, match=next(iter(options))):
        StoreOptions(**options)
