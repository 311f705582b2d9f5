"""Protection of an API without keys from web pages: the `Host` of its requests, and the site that they come from.

A page that a user opens can send requests to this machine, and read the responses if a name of its own resolves to it (DNS
rebinding). Browsers send the name under which they reach a host, and the site whose page makes the request (decisions/102).
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from ipaddress import ip_address
from typing import Final
from urllib.parse import urlsplit

from aiohttp import web

from proxy.config.addresses import split_listen
from proxy.config.settings import Settings
from proxy.errors import CrossSite, UnknownHost

_LOOPBACK_NAMES: Final = ("localhost", "*.localhost")  # which browsers never look up
_HOST: Final = re.compile(r"(?:\[([0-9a-f:.]*)\]|([\w.-]*))(?::[0-9]*)?", re.ASCII)
_SHOWN: Final = 200  # characters of a header in a message


def host_name(host: str) -> str:
    """Return the name or address of a `Host` header in lower case, without its port; empty if it is malformed."""
    found = _HOST.fullmatch(host.lower())
    return "" if found is None else (found[1] or found[2] or "").removesuffix(".")


def is_own_host(host: str, patterns: Sequence[str]) -> bool:
    """Return whether a `Host` header has an IP address, or a name that matches a pattern: `name`, `*.name` or `*`.

    An address cannot be rebound: a page of this origin came from this address.
    """
    name = host_name(host)
    try:
        ip_address(name)
    except ValueError:
        return any(name.endswith(one[1:]) if one.startswith("*") else name == one for one in patterns)
    return True


def is_foreign(method: str, headers: Mapping[str, str], *, is_linked: bool) -> bool:
    """Return whether a browser sends this request for a page of another origin; scheme and port count.

    `is_linked`: pages of other sites may link to this path, because a GET of it changes nothing.
    """
    site = headers.get("Sec-Fetch-Site")
    if site is None:  # no browser, an old one, or a plain-text connection to another machine
        origin, host = headers.get("Origin"), headers.get("Host", "")
        return origin is not None and (not host or origin.partition("://")[2].lower() != host.lower())
    if site in {"same-origin", "none"}:  # none: the user entered the URL
        return False
    follows_link = headers.get("Sec-Fetch-Mode") == "navigate" and headers.get("Sec-Fetch-Dest") == "document"
    return not (is_linked and follows_link and method in {"GET", "HEAD"})


class OriginCheck:
    """The check of the requests of one listener, which requires no key for at least one of its APIs.

    `keys` names the settings that would require keys, for messages.
    """

    def __init__(self, patterns: Sequence[str], keys: str) -> None:
        self._keys = keys
        self._is_own: Callable[[str], bool] = lru_cache(256)(lambda host: is_own_host(host, patterns))

    def __repr__(self) -> str:
        return f"<OriginCheck without {self._keys}>"

    def check(self, method: str, headers: Mapping[str, str], *, is_linked: bool) -> None:
        """Raise UnknownHost, or CrossSite for a request as in `is_foreign`. HTTP/1.0 without `Host` comes from no browser."""
        host = headers.get("Host")
        if host is not None and not self._is_own(host):
            name = host_name(host)[:_SHOWN]
            fix = f"Add {name!r} to allowed_hosts, or set" if name else "Set"
            raise UnknownHost(
                f"Host {host[:_SHOWN]!r} is not allowed. Without API keys, the host must be an IP address, localhost, that of "
                f"agents.url or one of allowed_hosts, against web pages that use DNS rebinding. {fix} {self._keys}."
            )
        if is_foreign(method, headers, is_linked=is_linked):
            origin = headers.get("Origin", "")[:_SHOWN]
            raise CrossSite(
                f"Requests of web pages of other origins (Origin: {origin!r}) are refused without API keys. "
                f"Set {self._keys}, or send the request from a program."
            )


ORIGINS: Final = web.AppKey("origins", OriginCheck)  # absent if the listener requires keys


def origin_check(settings: Settings, listen: str, *, serves_model: bool, serves_control: bool) -> OriginCheck | None:
    """Return the check for a listener with one of the APIs or both; None if all of them require keys."""
    sections = [("agents", settings.agents.api_keys)] if serves_model else []
    sections += [("control", settings.control.api_keys)] if serves_control else []
    keys = " and ".join(f"{section}.api_keys" for section, configured in sections if not configured)
    urls = filter(None, (settings.agents.url, settings.osmosis.server_url))
    own = {split_listen(listen)[0].lower(), *(urlsplit(url).hostname or "" for url in urls)}
    return OriginCheck((*_LOOPBACK_NAMES, *own, *settings.allowed_hosts), keys) if keys else None
