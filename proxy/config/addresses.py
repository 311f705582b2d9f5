"""Parsing of HOST:PORT and base URLs, and removal of credentials from URLs."""

import re
from ipaddress import ip_address
from urllib.parse import SplitResult, urlsplit

_HOST = re.compile(r"[\w-]{1,63}(\.[\w-]{1,63})*\.?", re.ASCII)


def split_listen(listen: str) -> tuple[str, int]:
    """Return host and port of `HOST:PORT`, `[::1]:PORT` or `:PORT` (all addresses).

    Raises ValueError if it is none of these.
    """
    host, colon, port = listen.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"invalid address {listen!r}: expected HOST:PORT, such as 127.0.0.1:8400")
    return host.removeprefix("[").removesuffix("]") or "0.0.0.0", int(port)  # noqa: S104 - the user chose it


def base_url(url: str) -> str:
    """Return the URL without a trailing slash and /v1.

    Raises ValueError if it is not an http(s) base URL, or has credentials, a query or a fragment.
    """
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not _can_be_called(url, parts):
        raise ValueError(
            f"invalid URL {without_secrets(url)!r}: expected an http or https URL, such as http://127.0.0.1:8000"
        )
    if parts.query or parts.fragment or parts.username:
        raise ValueError(
            f"invalid base URL {without_secrets(url)!r}: remove credentials, query and fragment; set a key with api_key"
        )
    return url.rstrip("/").removesuffix("/v1")


def _can_be_called(url: str, parts: SplitResult) -> bool:
    """Return whether a URL needs no encoding, and its host and port are valid."""
    try:
        has_port = parts.port != 0
    except ValueError:
        return False
    is_plain = url.isascii() and url.isprintable() and " " not in url
    return (
        is_plain and has_port and (":" in (parts.hostname or "") or _HOST.fullmatch(parts.hostname or "") is not None)
    )


def host_pattern(pattern: str) -> str:
    """Return a name, `*.name` or `*` in lower case. Raises ValueError."""
    if pattern != "*" and not _HOST.fullmatch(pattern.removeprefix("*.")):
        raise ValueError(f"invalid host {pattern!r}: expected a name without scheme and port, *.NAME or *")
    return pattern.lower().removesuffix(".")


def without_secrets(url: str) -> str:
    """Return a URL without user and password, for messages."""
    return re.sub(r"//.*@", "//…@", url)  # up to the last @: a password may contain slashes


def is_loopback(host: str) -> bool:
    """Return whether a host is only reachable from this machine."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False  # a name, which may resolve to any address
