"""`GET /openapi.json`: every route of both APIs.

Holds the table of routes, with what each does, and makes the description from it and from the models that read bodies. A
test compares the table with the routes that are really there.
"""

from dataclasses import dataclass
from typing import Any

import orjson
from aiohttp import web
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from proxy.api.control.export_query import GIVEN
from proxy.api.control.group_rows import ADVANTAGES
from proxy.api.control.schemas import (
    AckBatch,
    ClaimBatch,
    DispatchRollout,
    ExtendBatch,
    FinishRollout,
    OpenGroup,
    OpenRollout,
    PatchRollout,
    PausePolicy,
    PutEngines,
    PutPolicy,
    ReleaseBatch,
)
from proxy.export import FORMATS
from proxy.export.containers import CONTAINERS
from proxy.protocols.dialects import DIALECTS, TRANSLATORS
from proxy.rollouts.group import STATUSES as GROUP_STATUSES
from proxy.rollouts.rollout import STATUSES

_REF = "#/components/schemas/{model}"


@dataclass(frozen=True, slots=True)
class Route:
    """One route: what it does, its query, the model of its body, and the statuses it may answer with."""

    method: str
    path: str
    summary: str
    query: tuple[tuple[str, dict[str, Any]], ...] = ()
    body: type[BaseModel] | None = None
    statuses: tuple[int, ...] = (200,)


_TEXT: dict[str, Any] = {"type": "string"}
_COUNT: dict[str, Any] = {"type": "integer", "minimum": 1}
_AFTER = ("after", {"type": "integer", "minimum": 0, "description": "the index of a step"})
_SINCE = ("since", {"type": "integer", "minimum": 0, "description": "unix seconds"})
_FILTER = (("status", {"enum": list(STATUSES)}), ("group_id", _TEXT), _SINCE, ("limit", _COUNT))
_EXPORT = (
    ("format", {"enum": list(FORMATS)}),
    ("branches", {"enum": ["all", "longest", "last"]}),
    ("include", {"enum": ["exact", "flagged", "retokenized"]}),
    ("max_len", _COUNT),
    ("overlong", {"enum": ["cut", "drop", "keep"]}),
    ("container", {"enum": list(CONTAINERS)}),
    ("report", {"type": "boolean"}),
    ("prompt_logprob", {"type": "number", "description": "stands where nothing was sampled, for the format's own"}),
    ("advantage", {"enum": list(GIVEN)}),
    ("pad_id", {"type": "integer", "minimum": 0}),
    ("prompt_length", _COUNT),
    ("response_length", _COUNT),
)
_GROUP_EXPORT = (
    *(option for option in _EXPORT if option[0] != "advantage"),
    ("advantage", {"enum": list(ADVANTAGES)}),
    ("min_group", _COUNT),
    ("only_mixed", {"type": "boolean"}),
)
_GROUP_FILTER = (("status", {"enum": list(GROUP_STATUSES)}), ("limit", _COUNT), ("cursor", _TEXT))
_TEXTS = (
    ("choice", {"type": "integer", "minimum": 0}),
    ("start", {"type": "integer", "minimum": 0, "description": "the first token, of prompt and reply together"}),
    ("limit", {**_COUNT, "maximum": 2000}),
)
_TREE = ("texts", {"type": "boolean", "description": "whether drift is explained by texts"})
_R = "/rollouts/{rollout_id}"
_G = "/groups/{group_id}"
_B = "/batches/{batch_id}"
_SETTLED = (200, 400, 404, 409, 422)
_PREFIXES = ("", _R, "/sessions/{rollout_id}")
_DRAIN = (("drain_s", {"type": "number", "minimum": 0, "description": "wait so long for none in flight"}),)
_COMPLETED = "A rollout server reports the result of a rollout."
_DISPATCHED = (202, 200, 400, 404, 409, 422)
_CALLS = [(path, f"A recorded call, in the {dialect.name} dialect.") for path, dialect in DIALECTS.items()]
_CALLS += [(path, f"A recorded call, in the {one.name} dialect, by way of chat.") for path, one in TRANSLATORS.items()]
_CALLS.append(("/generate", "A recorded completions call of ids, as Atropos' token servers make it."))
_STORED = "/v1/responses/{response_id}"
_FOUND = (200, 400, 401, 403, 404, 503)
_BY_CHAT = (
    (
        "post",
        "/v1/messages/count_tokens",
        "The tokens of a Messages call, counted by the engine.",
        (*_FOUND, 413, 502, 504),
    ),
    ("get", _STORED, "An answer of Responses, as it was given.", _FOUND),
    ("delete", _STORED, "Hide an answer from agents; its step stays.", _FOUND),
    ("get", f"{_STORED}/input_items", "The items that a call of Responses came with.", _FOUND),
)

_SESSIONS = (200, 400, 401, 403, 404, 422, 500, 503)
_ATROPOS = (
    ("post", "/setup", "Check that engines are configured."),
    ("get", "/servers", "The engines, as Atropos' proxy lists servers."),
    ("post", "/sessions/create", "Open a rollout as a session."),
    ("get", "/sessions", "All sessions."),
    ("get", "/{uuid}/nodes", "The nodes of a session."),
    ("delete", "/{uuid}", "End a session; its rollout is finished and kept (`atropos.keep_sessions`)."),
    ("post", "/{uuid}/v1/chat/completions", "A recorded chat of a session."),
    ("post", "/{uuid}/v1/chat/completions/render", "The prompt that a chat would have."),
    ("post", "/{uuid}/v1/completions", "A recorded completions call of a session."),
    ("get", "/{uuid}/v1/models", "The engine's models."),
)

ROUTES: tuple[Route, ...] = (
    Route("post", "/rollouts", "Open a rollout.", body=OpenRollout, statuses=(201, 200, 400, 409, 422)),
    Route("get", "/rollouts", "List rollouts, newest first.", (*_FILTER, ("cursor", _TEXT)), statuses=(200, 400)),
    Route("get", _R, "A rollout: status, counts, rewards.", statuses=(200, 404)),
    Route("patch", _R, "Set rewards, advantages, metadata.", body=PatchRollout, statuses=(200, 400, 404, 409, 422)),
    Route("delete", _R, "Delete a rollout and all its steps.", statuses=(204,)),
    Route("post", f"{_R}/finish", "Finish a rollout.", body=FinishRollout, statuses=(200, 400, 404, 409, 422)),
    Route("post", f"{_R}/dispatch", "Have a rollout server run it.", body=DispatchRollout, statuses=_DISPATCHED),
    Route("get", f"{_R}/steps", "Its steps, whole.", (_AFTER, ("limit", _COUNT)), statuses=(200, 400, 404)),
    Route("get", f"{_R}/steps/{{step_id}}", "One step, whole.", statuses=(200, 404)),
    Route("get", f"{_R}/steps/{{step_id}}/texts", "The texts of its tokens.", _TEXTS, statuses=(200, 400, 404)),
    Route("get", f"{_R}/tree", "The tree of its steps, with drift.", (_TREE,), statuses=(200, 400, 404)),
    Route("get", f"{_R}/export", "Its rows in a trainer's format.", _EXPORT, statuses=(200, 400, 404)),
    Route("get", "/export", "Rows of many rollouts, streamed.", (*_EXPORT, *_FILTER), statuses=(200, 400)),
    Route("post", "/groups", "Open a group with its rollouts.", body=OpenGroup, statuses=(201, 200, 400, 409, 422)),
    Route("get", "/groups", "List groups, newest first.", _GROUP_FILTER, statuses=(200, 400)),
    Route("get", _G, "A group: its rollouts, their statuses and rewards.", statuses=(200, 404)),
    Route("delete", _G, "Delete a group and its rollouts.", statuses=(204,)),
    Route("get", f"{_G}/export", "A group as a trainer takes it.", _GROUP_EXPORT, statuses=(200, 400, 404, 409)),
    Route("post", "/batches/claim", "Claim complete groups.", body=ClaimBatch, statuses=(200, 400, 422)),
    Route("post", f"{_B}/ack", "Done with a batch, for good.", body=AckBatch, statuses=_SETTLED),
    Route("post", f"{_B}/release", "Give a batch back.", body=ReleaseBatch, statuses=_SETTLED),
    Route("post", f"{_B}/extend", "Hold a batch for longer.", body=ExtendBatch, statuses=_SETTLED),
    Route("get", "/policy", "The policy version that is announced."),
    Route("put", "/policy", "Announce a policy version.", body=PutPolicy, statuses=(200, 400, 422)),
    Route("post", "/policy/pause", "Hold new calls.", _DRAIN, PausePolicy, statuses=(200, 400, 422)),
    Route("post", "/policy/resume", "Let calls go on."),
    Route("get", "/engines", "The engines, their health and versions."),
    Route("put", "/engines", "Put other endpoints in their place.", body=PutEngines, statuses=(200, 400, 403, 422)),
    Route(
        "get", "/events", "What happens to rollouts, as it happens.", (("rollout_id", _TEXT),), statuses=(200, 400, 503)
    ),
    Route("get", "/health", "The process is alive."),
    Route("get", "/ready", "Store and engines can be reached.", statuses=(200, 503)),
    Route("get", "/metrics", "Metrics for Prometheus."),
    Route("get", "/openapi.json", "This description."),
    Route("get", "/ui", "The page for people.", statuses=(200, 304)),
    Route("get", "/ui/", "The way to it.", statuses=(308,)),
    Route("get", "/ui/{file}", "A file of the page.", statuses=(200, 304, 404)),
    *(
        Route("post", prefix + path, summary, statuses=(200, 400, 401, 403, 408, 409, 413, 422, 429, 502, 503, 504))
        for path, summary in _CALLS
        for prefix in _PREFIXES
    ),
    *(
        Route("post", f"{prefix}/v1/rollout/completed", _COMPLETED, statuses=(200, 400, 401, 403, 409, 413, 422))
        for prefix in _PREFIXES
    ),
    *(
        Route(method, path, f"{summary} Only with atropos.enabled.", statuses=_SESSIONS)
        for method, path, summary in _ATROPOS
    ),
    *(Route("get", f"{prefix}/health", "The process is alive.") for prefix in _PREFIXES[1:]),
    *(
        Route(method, prefix + path, summary, statuses=statuses)
        for method, path, summary, statuses in _BY_CHAT
        for prefix in _PREFIXES
    ),
    Route("get", "/v1/models", "The engine's models, and aliases of them.", statuses=(200, 401, 503)),
    Route("get", "/v1/models/{model}", "One model.", statuses=(200, 401, 404, 503)),
)


def describe() -> dict[str, Any]:
    """The OpenAPI document."""
    bodies = [(route.body, "validation") for route in ROUTES if route.body is not None]
    _, schemas = models_json_schema(bodies, ref_template=_REF)  # type: ignore[arg-type]
    paths: dict[str, dict[str, Any]] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {"title": "TokenTape", "version": "0.1.0", "summary": "A recording reverse proxy for RL."},
        "paths": paths,
        "components": {
            "schemas": schemas.get("$defs", {}),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}],
    }


async def show_openapi(_request: web.Request) -> web.Response:
    """`GET /openapi.json`."""
    return web.Response(body=orjson.dumps(describe()), content_type="application/json")


def _operation(route: Route) -> dict[str, Any]:
    named = [part[1:-1] for part in route.path.split("/") if part.startswith("{")]
    parameters = [{"name": name, "in": "path", "required": True, "schema": _TEXT} for name in named]
    parameters += [{"name": name, "in": "query", "schema": schema} for name, schema in route.query]
    operation: dict[str, Any] = {
        "summary": route.summary,
        "parameters": parameters,
        "responses": {str(status): {"description": _MEANINGS[status]} for status in route.statuses},
    }
    if route.body is not None:
        schema = {"$ref": _REF.format(model=route.body.__name__)}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return operation


_MEANINGS = {
    200: "done",
    201: "made",
    202: "begun",
    204: "gone",
    304: "as the browser has it",
    308: "it is elsewhere",
    400: "malformed",
    401: "no key, or a wrong one",
    403: "a key for something else",
    404: "unknown",
    408: "its body came too slowly",
    409: "it stands differently already",
    413: "too large",
    422: "a value is not allowed",
    429: "a limit is used up",
    500: "the engine gave no answer, in the shape of Atropos' proxy",
    502: "the engine broke off",
    503: "store or engines away",
    504: "the engine was silent",
}
