"""Access to both APIs: agents' keys, keys minted for a rollout, control keys; without keys, the check of web pages.

A page that a user opens can send requests to this machine, and read the responses if the page's host name resolves to it (DNS
rebinding). Browsers send the name under which they reach a host, and the site of the page that makes the request
(docs/decisions/102).
"""

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import ip_address
from typing import Final
from urllib.parse import urlsplit

from aiohttp import web

from proxy.api.api_keys import MintedKey, proves, read_minted
from proxy.api.context import CONTEXT, Context
from proxy.config.addresses import split_listen
from proxy.config.settings import Settings
from proxy.errors import CrossSite, Damaged, Forbidden, StoreUnavailable, Unauthorized, UnknownHost
from proxy.rollouts.rollout import read_rollout
from storage.errors import StorageError

KEY_PREFIX: Final = "rollout:"  # of an API key that is the name of a rollout
_LOOPBACK_NAMES: Final = ("localhost", "*.localhost")  # which browsers never look up
_HOST: Final = re.compile(r"(?:\[([0-9a-f:.]*)\]|([\w.-]*))(?::[0-9]*)?", re.ASCII)
_SHOWN: Final = 200  # characters of a header in a message


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller of a request: its key, and the parsed key if it was minted for a rollout.

    `is_dispatched` is whether the key was minted for the rollout's dispatch, not for its agent.
    """

    key: str | None
    minted: MintedKey | None
    is_dispatched: bool = False


def bearer(authorization: str | None) -> str | None:
    """Return the key of an `Authorization: Bearer` header, if present."""
    scheme, _, key = (authorization or "").partition(" ")
    return key.strip() or None if scheme.lower() == "bearer" else None


def google_key(request: web.Request) -> str | None:
    """Return the key of a Gemini client, if present: a header or a query parameter, which is in no log, record or trace."""
    return request.headers.get("X-Goog-Api-Key") or request.query.get("key")


async def identify(
    request: web.Request, context: Context, *, takes_control_keys: bool = False, other_key: str | None = None
) -> Caller:
    """Return the caller of a request of the model API.

    Raises Unauthorized for a missing or invalid key, Forbidden for a request that the `OriginCheck` refuses.
    `other_key` is the key where the client's dialect has it, for a request without the usual headers.
    """
    if (origins := request.app.get(ORIGINS)) is not None:  # GET as well: a passthrough path may change an engine
        origins.check(request.method, request.headers, is_linked=False)
    key = bearer(request.headers.get("Authorization")) or request.headers.get("X-Api-Key") or other_key
    minted = read_minted(key) if key else None
    if minted is not None:
        return Caller(key, minted, await prove(context, minted))
    if takes_control_keys and has_control(key, context):
        return Caller(key, None)
    if context.agent_keys.are_required and (key is None or key not in context.agent_keys):
        raise Unauthorized("Invalid API key." if key else "An API key is required.")
    return Caller(key, None)


def has_control(key: str | None, context: Context) -> bool:
    """Return whether the key of a request of the model API, or none, gives access to the control API as well.

    Without a configured control key, the control API is open to all but agents' keys; on its own port, only there.
    """
    if key is not None and key in context.control_keys:
        return True
    is_open = not context.control_keys.are_required and context.settings.control.listen is None
    return is_open and (key is None or not _is_of_agents(key, context))


def may_report(caller: Caller, context: Context) -> bool:
    """Return whether a caller may report the result of a rollout, which sets its reward and status.

    It requires the key of the rollout's dispatch, or access to the control API, which can set both anyway.
    """
    return caller.is_dispatched or has_control(caller.key, context)


def _is_of_agents(key: str, context: Context) -> bool:
    """Return whether agents have this key: a minted one, a configured one, or the name of a rollout."""
    return read_minted(key) is not None or key.startswith(KEY_PREFIX) or key in context.agent_keys


async def prove(context: Context, minted: MintedKey) -> bool:
    """Check a minted key against its rollout; return whether it is the key of the rollout's dispatch.

    Raises Unauthorized.
    """
    try:
        stored = await context.store.get(minted.rollout_id)
    except StorageError as error:
        raise StoreUnavailable(f"The store is unavailable: {error}") from error
    if stored is not None and proves(minted, stored.incarnation, context.secret):
        return False
    try:
        dispatch = None if stored is None else read_rollout(stored).osmosis.get("asked")
    except Damaged:
        dispatch = None
    if stored is None or dispatch is None or not proves(minted, stored.incarnation, context.secret, dispatch=dispatch):
        raise Unauthorized("Invalid API key: it belongs to no existing rollout.")
    return True


def check_minted(minted: MintedKey | None, rollout_id: str | None) -> None:
    """Raise Forbidden if a minted key is used for another rollout."""
    if minted is not None and rollout_id not in (None, minted.rollout_id):
        raise Forbidden(f"The API key belongs to another rollout than {rollout_id!r}.")


# The routes of the model API: two for most calls, and one for every other path outside of the control API.
CALL_PATHS: Final = ("/rollouts/{rollout}/v1/{path}", "/v1/{path}")
OTHER_PATHS: Final = "/{path}"
MODEL_API: Final = (*CALL_PATHS, OTHER_PATHS)
SESSION_API: Final = "/{uuid}/v1"  # the sessions of Atropos' proxy, which agents call
# For load balancers, which have no keys; and the files of the page, which contain no data.
_OPEN: Final = ("/health", "/healthz", "/ready", "/readyz", "/", "/ui", "/ui/", "/ui/{file}", "/ui/vendor/{file}")


@web.middleware
async def require_control_key(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Reject requests of the control API without a control key, if one is configured; `identify` is for the model API."""
    resource = request.match_info.route.resource
    canonical = "" if resource is None else resource.canonical
    if canonical not in MODEL_API and not canonical.startswith(f"{SESSION_API}/"):
        if (origins := request.app.get(ORIGINS)) is not None:
            origins.check(request.method, request.headers, is_linked=True)
        if canonical and canonical not in _OPEN:
            check_control_key(request, request.app[CONTEXT])
    return await handler(request)


def check_control_key(request: web.Request, context: Context) -> None:
    """Raise Unauthorized for a missing or unknown key, Forbidden for an agent's."""
    key = bearer(request.headers.get("Authorization")) or request.headers.get("X-Api-Key")
    if key is not None and key not in context.control_keys and _is_of_agents(key, context):
        raise Forbidden("This API key is for the model API only; the control API requires a control key.")
    if context.control_keys.are_required and (key is None or key not in context.control_keys):
        raise Unauthorized("A control key is required (Authorization: Bearer …).")


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
