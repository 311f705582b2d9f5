"""Routes, and the models of their queries and bodies, which parser and OpenAPI document share; responses; IDs and URLs.

A rollout ID is percent-encoded in a path, slashes included, and unencoded in a header or a body.

Trainers store rewards as float32: larger numbers would be infinite there, and JSON has no infinity.
"""

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from math import isfinite, nan
from typing import Annotated, Any, Final, TypeAlias, TypeVar
from urllib.parse import quote, unquote_to_bytes

import orjson
from aiohttp import web
from pydantic import AfterValidator, BaseModel, Field, FiniteFloat, ValidationError
from yarl import URL

from proxy.api.body import faults_of, read_body, read_bytes
from proxy.api.context import CONTEXT, Context
from proxy.config.addresses import split_listen
from proxy.errors import BadRequest, UnprocessableRequest
from proxy.rollouts.rollout import LARGEST, Rollout, check_numbers, checked_id, no_rollout, read_rollout
from proxy.trajectory.json_bytes import to_json_bytes
from proxy.upstream.concurrency import LARGE_BYTES, off_loop
from proxy.upstream.http_client import HOP_BY_HOP, ROLLOUT_HEADER, STEP_HEADER, end_to_end
from storage.errors import FieldsChanged
from storage.types import Page

_MAX_BODY_BYTES: Final = 8 * 2**20  # terms and metadata are serialized again for the store and the response
_MAX_NAMED_FAULTS: Final = 5  # of a body: a long list may have one per item
_NO_NUMBERS: Final = ("NaN", "Infinity")  # as JavaScript and Python write them; JSON has neither
_GREATEST: Final = 10**12 - 1  # more than any count, index or unix time in seconds, and safe for the store
_DOTS: Final = (".", "..")
_ALL_ADDRESSES: Final = ("0.0.0.0", "::")  # noqa: S104 - addresses to compare with, not to listen on


Read = TypeVar("Read", bound=BaseModel)
Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class Route:
    """A route, for the router and for the OpenAPI document: its handler, and the models of its query and its body.

    `pattern` is the path for aiohttp's router. Routes without a handler are served by the model API (`model.routes`).
    """

    method: str
    pattern: str
    handler: Handler | None
    summary: str
    statuses: tuple[int, ...]
    query: type[BaseModel] | None = None
    body: type[BaseModel] | None = None

    @property
    def path(self) -> str:
        """The path, with the names of its parameters."""
        return re.sub(r":[^{}]+\}", "}", self.pattern)


def route(method: str, pattern: str, handler: Handler | None, summary: str, *statuses: int, **models: Any) -> Route:
    """Return a route. `statuses` lists the HTTP statuses of its responses, by default 200; `models` are `query` and `body`."""
    return Route(method, pattern, handler, summary, statuses or (200,), **models)


def served(routes: Iterable[Route]) -> list[web.RouteDef]:
    """Return the routes for aiohttp's router."""
    return [web.route(it.method.upper(), it.pattern, it.handler) for it in routes if it.handler is not None]


def json_response(value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    """Return a response with the value as JSON."""
    return web.Response(status=status, body=to_json_bytes(value), content_type="application/json", headers=headers)


# Headers that TokenTape sets itself, and headers about the engine's own address: addresses behind TokenTape, credentials for
# them, and the permissions that the engine gives to web pages, also to pages of other origins.
_NOT_SHOWN: Final = HOP_BY_HOP | {
    "content-length", "content-encoding", "date", ROLLOUT_HEADER.lower(), STEP_HEADER.lower(),
    "location", "content-location", "refresh", "link", "alt-svc", "via", "x-served-by", "x-backend-server",
    "x-accel-redirect", "x-sendfile",
    "set-cookie", "set-cookie2", "www-authenticate", "authentication-info",
    "timing-allow-origin", "strict-transport-security", "clear-site-data", "service-worker-allowed", "origin-agent-cluster",
    "report-to", "reporting-endpoints", "nel", "sourcemap", "x-sourcemap",
}  # fmt: skip
_NOT_SHOWN_PREFIXES: Final = ("access-control-", "content-security-policy", "cross-origin-")


# Returns the headers of an engine's response that its client gets.
downstream: Final = partial(end_to_end, dropped=_NOT_SHOWN, prefixes=_NOT_SHOWN_PREFIXES)


@lru_cache(1024)
def id_from_path(segment: str) -> str:
    """Return the decoded ID of a path segment. Raises BadRequest."""
    try:
        return checked_id(unquote_to_bytes(segment).decode())
    except UnicodeError:
        raise BadRequest(
            f"Invalid rollout id {segment!r}: expected percent-encoded UTF-8.", param="rollout_id"
        ) from None


def rollout_id_from(request: web.Request) -> str:
    """Return the rollout ID of the raw path: routers decode too much or too little."""
    return id_from_path(request.raw_path.partition("?")[0].split("/")[2])


def path_prefix(rollout_id: str) -> str:
    """Return the path prefix of a rollout. It is empty for the IDs `.` and `..`, which clients resolve as folders."""
    return "" if rollout_id in _DOTS else f"/rollouts/{quote(rollout_id, safe='')}"


def model_url(request: web.Request, context: Context) -> str:
    """Return the base URL of the model API: the configured URL, or else the URL of this request."""
    settings = context.settings
    if settings.agents.url is not None:
        return settings.agents.url
    host = request.host if settings.control.listen is None else model_host(settings.listen, request.url)
    return f"{request.scheme}://{host}"


def model_host(listen: str, request_url: URL) -> str:
    """Return host and port of a model API on a separate port; if it listens on all addresses, the host of the request."""
    host, port = split_listen(listen)
    return f"{request_url.host_subcomponent}:{port}" if host in _ALL_ADDRESSES else listen


async def rollout_from(request: web.Request) -> Rollout:
    """Return the rollout that the path names. Raises NotFound."""
    name = rollout_id_from(request)
    stored = await request.app[CONTEXT].store.get(name)
    if stored is None:
        raise no_rollout(name)
    return read_rollout(stored)


async def update_rollout(
    context: Context, rollout: Rollout, fields: Mapping[str, bytes | None], expect: Mapping[str, bytes | None]
) -> tuple[bool, Rollout]:
    """Set fields of a rollout if it has the expected ones; return whether it had, and the rollout as it is now.

    Raises NotFound if it was deleted.
    """
    try:
        stored = await context.store.update_if(rollout.rollout_id, fields, expect=expect, now_ms=context.clock.now_ms())
    except FieldsChanged as changed:
        return False, read_rollout(changed.rollout)
    if stored is None:
        raise no_rollout(rollout.rollout_id)
    return True, read_rollout(stored)


def query_from(request: web.Request, model: type[Read], *, takes_others: bool = False) -> Read:
    """Return the parameters of a query. Raises BadRequest, which names the parameter and what is valid.

    `takes_others`: unknown parameters are ignored.
    """
    schemas = parameters(model)
    for name in request.query:
        if name not in schemas and not takes_others:
            raise BadRequest(f"Unknown query parameter {name!r}; use one of {', '.join(sorted(schemas))}.", param=name)
    missing = {name: "" for name, field in model.model_fields.items() if field.is_required()}
    texts = {**missing, **{name: request.query[name] for name in schemas if name in request.query}}
    return model(**{name: _parsed(name, text, schemas[name]) for name, text in texts.items()})


@cache
def parameters(model: type[BaseModel]) -> dict[str, dict[str, Any]]:
    """Return the JSON schemas of the parameters of a query. A query has no null, which is the absence of a parameter."""
    found = {}
    for name, schema in model.model_json_schema()["properties"].items():
        known = {**schema, **schema.get("anyOf", [{}])[0]}
        omitted = {"anyOf", "default", "title", *(["type"] if "enum" in known else [])}
        found[name] = {key: value for key, value in known.items() if key not in omitted}
    return found


def _parsed(name: str, text: str, schema: dict[str, Any]) -> Any:
    """Return the value of a parameter of this JSON schema. Raises BadRequest."""
    kind = schema.get("type")
    words = ["true", "false"] if kind == "boolean" else schema.get("enum")
    if words is not None:
        if text not in words:
            raise BadRequest(f"Invalid value {name}={text!r}; use one of {', '.join(words)}.", param=name)
        return text == "true" if kind == "boolean" else text
    if kind == "integer":
        return _integer(name, text, schema["minimum"], schema.get("maximum", _GREATEST))
    if kind == "number":
        return _number(name, text, schema)
    if "minLength" in schema and not schema["minLength"] <= len(text := text.strip()) <= schema["maxLength"]:
        raise BadRequest(f"{name} must have {schema['minLength']} to {schema['maxLength']} characters.", param=name)
    return text


def _integer(name: str, text: str, minimum: int, maximum: int) -> int:
    # Its length first: Python refuses to read a number of thousands of digits.
    is_number = text.isascii() and text.isdecimal() and len(text) <= len(str(_GREATEST))
    if not is_number or not minimum <= int(text) <= maximum:
        raise BadRequest(f"{name} must be an integer from {minimum} to {maximum}, not {text[:40]!r}.", param=name)
    return int(text)


def _number(name: str, text: str, schema: dict[str, Any]) -> float:
    try:
        value = float(text)
    except ValueError:
        value = nan
    unit = " of seconds" if name.endswith("_s") else ""
    if "minimum" in schema and not schema["minimum"] <= value <= schema["maximum"]:
        valid = f"from {schema['minimum']} to {schema['maximum']}"
        raise BadRequest(f"{name} must be a number{unit} {valid}, not {text!r}.", param=name)
    if not isfinite(value):
        raise BadRequest(f"{name} must be a number, not {text!r}.", param=name)
    if "exclusiveMinimum" in schema and not schema["exclusiveMinimum"] < value <= schema["maximum"]:
        valid = f"above {schema['exclusiveMinimum']} and at most {schema['maximum']}"
        raise BadRequest(f"{name} must be {valid}, not {value}.", param=name)
    return value


Signal = Annotated[FiniteFloat, Field(ge=-LARGEST, le=LARGEST)]
FoundPage = TypeVar("FoundPage", bound=Page | None)
Signals = Annotated[dict[str, Any], AfterValidator(check_numbers)]


def named(value: object, *names: str) -> dict[str, Any]:
    """Return these attributes of a value, by name, for a response."""
    return {name: getattr(value, name) for name in names}


async def page_from(listing: Awaitable[FoundPage]) -> FoundPage:
    """Return a page of a listing. Raises BadRequest for an invalid cursor."""
    try:
        return await listing
    except ValueError as error:
        raise BadRequest(str(error), param="cursor") from None


async def body_from(request: web.Request, model: type[Read]) -> Read:
    """Read the body as this model. Raises BadRequest, UnprocessableRequest, and what `read_bytes` raises."""
    text = await read_bytes(request, most=_MAX_BODY_BYTES)
    return await off_loop(len(text), LARGE_BYTES, read_as, model, text)


def read_as(model: type[Read], text: bytes) -> Read:
    """Return the body as this model; an empty one as `{}`. Raises as `read_object` and `validated`."""
    return validated(model, read_object(text or b"{}"))


def validated(model: type[Read], body: Mapping[str, Any]) -> Read:
    """Return the body as this model. Raises UnprocessableRequest, which names the first invalid fields."""
    try:
        return model.model_validate(body)
    except ValidationError as error:
        faults = faults_of(error)
        named = [
            f"{'.'.join(map(str, fault['loc'])) or 'body'}: {fault['msg']}" for fault in faults[:_MAX_NAMED_FAULTS]
        ]
        more = [f"and {len(faults) - _MAX_NAMED_FAULTS} more"] if len(faults) > _MAX_NAMED_FAULTS else []
        first = faults[0]["loc"]
        raise UnprocessableRequest("; ".join([*named, *more]), param=str(first[0]) if first else None) from None


def read_object(text: bytes) -> dict[str, Any]:
    """Return the JSON object of a body that may have rewards.

    Raises:
        UnprocessableRequest: a number is NaN, infinite, or too large for a float.
        BadRequest: the body is not a JSON object for another reason.
    """
    try:
        return read_body(text)
    except BadRequest:
        try:
            orjson.loads(text)
        except orjson.JSONDecodeError as error:  # orjson 3.11 rejects 1e400 as infinity
            if "infinity" in error.msg or error.doc.startswith(_NO_NUMBERS, error.pos):
                raise UnprocessableRequest(
                    "A number in the request body is NaN, infinite or too large for a float."
                ) from None
        raise
