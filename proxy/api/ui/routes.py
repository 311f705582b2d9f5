"""Routes that serve the files of the page, each with its content type, its ETag and the security headers.

Only files of these types in its folder are served. They contain no secrets and require no key: the page requests everything
that it shows from the control API, which requires one.
"""

from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Final

from aiohttp import ETag, web

from proxy.api.requests import route
from proxy.errors import NotFound

_FOLDER: Final = Path(__file__).parent
_TYPES: Final = {".html": "text/html", ".svg": "image/svg+xml", ".css": "text/css", ".js": "text/javascript"}
_FILES: Final[dict[str, str]] = {  # of this folder and of vendor/
    path.relative_to(_FOLDER).as_posix(): _TYPES[path.suffix]
    for path in (*_FOLDER.iterdir(), *(_FOLDER / "vendor").iterdir())
    if path.suffix in _TYPES
}
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS: Final = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",  # cached, and revalidated by its ETag: an upgrade takes effect at once
}


async def redirect_browser(request: web.Request) -> web.Response:
    """`GET /`: redirects a browser to the page. Raises NotFound for other clients."""
    if "text/html" not in request.headers.get("Accept", ""):
        raise NotFound("GET / is no endpoint; the model API is below /v1, and the web UI is at /ui.")
    return web.Response(status=302, headers={"Location": "ui", "Vary": "Accept"})


async def show_page(request: web.Request) -> web.Response:
    """`GET /ui`."""
    return _served(request, "index.html")


async def redirect_to_page(_request: web.Request) -> web.Response:
    """`GET /ui/`: redirects to `/ui`, because the page refers to its files relative to `/ui`."""
    return web.Response(status=308, headers={"Location": "../ui"})


async def show_file(request: web.Request) -> web.Response:
    """`GET /ui/{file}`: a script, a style, the icon."""
    return _served(request, request.match_info["file"])


async def show_vendored(request: web.Request) -> web.Response:
    """`GET /ui/vendor/{file}`: a file of a library."""
    return _served(request, f"vendor/{request.match_info['file']}")


def _served(request: web.Request, name: str) -> web.Response:
    """Raises NotFound."""
    if name not in _FILES:
        raise NotFound(f"File {name[:100]!r} not found; the web UI is at /ui.", param="file")
    body, tag = _file(name)
    known = request.if_none_match or ()
    is_known = any(etag.value in (tag, "*") for etag in known)  # a weak one too: RFC 9110, section 13.1.2
    response = web.Response(status=304, headers=_HEADERS)
    if not is_known:
        response = web.Response(body=body, content_type=_FILES[name], charset="utf-8", headers=_HEADERS)
    response.etag = ETag(tag)
    return response


@cache
def _file(name: str) -> tuple[bytes, str]:
    """Return a file and its strong ETag, read once."""
    body = (_FOLDER / name).read_bytes()
    return body, sha256(body).hexdigest()[:32]


PAGE_ROUTES: Final = (
    route("get", "/", redirect_browser, "Redirect a browser to the web page.", 302, 404),
    route("get", "/ui", show_page, "Get the web page.", 200, 304),
    route("get", "/ui/", redirect_to_page, "Redirect to the web page.", 308),
    route("get", "/ui/{file}", show_file, "Get a file of the web page.", 200, 304, 404),
    route("get", "/ui/vendor/{file}", show_vendored, "Get a file of a library of the web page.", 200, 304, 404),
)
