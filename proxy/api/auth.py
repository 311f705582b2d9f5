"""Authentication of both APIs: agents' keys, keys minted for a rollout, and control keys."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from aiohttp import web

from proxy.api.api_keys import MintedKey, proves, read_minted
from proxy.api.context import CONTEXT, Context
from proxy.api.origins import ORIGINS
from proxy.api.rollout_id import KEY_PREFIX
from proxy.errors import Damaged, Forbidden, StoreUnavailable, Unauthorized
from proxy.rollouts.rollout import read_rollout
from storage.errors import StorageError


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

    Raises Unauthorized for a missing or invalid key, Forbidden for a request that `check_origin` refuses.
    `other_key` is the key where the client's dialect has it, for a request without the usual headers.
    """
    check_origin(request, is_linked=False)  # GET as well: `engines.passthrough` may have paths that change an engine
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
    is_open = not context.control_keys and context.settings.control.listen is None
    return is_open and (key is None or not _is_of_agents(key, context))


def may_report(caller: Caller, context: Context) -> bool:
    """Return whether a caller may report the result of a rollout, which sets its reward and status.

    It requires the key of the rollout's dispatch, or access to the control API, whose routes do the same.
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


def check_origin(request: web.Request, *, is_linked: bool) -> None:
    """Raise UnknownHost or CrossSite for a request that a listener without keys refuses."""
    check = request.app.get(ORIGINS)
    if check is not None:
        check.check(request.method, request.headers, is_linked=is_linked)


# The routes of the model API: those of most calls, and that of every path outside of the control API.
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
        check_origin(request, is_linked=True)
        if canonical and canonical not in _OPEN:
            check_control_key(request, request.app[CONTEXT])
    return await handler(request)


def check_control_key(request: web.Request, context: Context) -> None:
    """Raise Unauthorized for a missing or unknown key, Forbidden for an agent's."""
    key = bearer(request.headers.get("Authorization")) or request.headers.get("X-Api-Key")
    if key is not None and key not in context.control_keys and _is_of_agents(key, context):
        raise Forbidden("This API key is for the model API only; the control API requires a control key.")
    if context.control_keys and (key is None or key not in context.control_keys):
        raise Unauthorized("A control key is required (Authorization: Bearer …).")
