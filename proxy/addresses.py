"""Addresses: where to listen, base URLs, and what of a URL may be printed.

Holds pure readings of what people type as addresses. It must not resolve a name or open anything.
"""

import re
from ipaddress import ip_address
from urllib.parse import SplitResult, urlsplit

_HOST = re.compile(r"[\w-]{1,63}(\.[\w-]{1,63})*\.?", re.ASCII)


def split_listen(listen: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT`, `[::1]:PORT` or `:PORT` (every address). Raises ValueError."""
    host, colon, port = listen.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"{listen!r} is not HOST:PORT such as 127.0.0.1:8400")
    return host.removeprefix("[").removesuffix("]") or "0.0.0.0", int(port)  # noqa: S104 - said so by the user


def base_url(url: str) -> str:
    """The URL, without /v1, if it is a base URL and nothing more. Raises ValueError."""
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not _can_be_called(url, parts):
        raise ValueError(f"{without_secrets(url)!r} is not an http or https URL such as http://127.0.0.1:8000")
    if parts.query or parts.fragment or parts.username:
        raise ValueError(f"{without_secrets(url)!r} holds more than a base URL; give a key as api_key")
    return url.rstrip("/").removesuffix("/v1")


def _can_be_called(url: str, parts: SplitResult) -> bool:
    """Whether a URL is spelt as it is sent, its host can be looked up, and its port is one."""
    try:
        has_port = parts.port != 0
    except ValueError:
        return False
    is_plain = url.isascii() and url.isprintable() and " " not in url
    return (
        is_plain and has_port and (":" in (parts.hostname or "") or _HOST.fullmatch(parts.hostname or "") is not None)
    )


def without_secrets(url: str) -> str:
    """A URL as it may be printed: without user and password."""
    return re.sub(r"//.*@", "//…@", url)  # up to the last @: a password may hold slashes and others


def is_loopback(host: str) -> bool:
    """Whether nobody but this machine can reach it."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False  # a name, which may resolve to anything
