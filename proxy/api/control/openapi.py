"""The OpenAPI description of every route of both APIs, made from a table of routes and the models of request bodies.

A test compares the table with the routes that the application serves.
"""

from dataclasses import dataclass
from typing import Any

from aiohttp import web
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from proxy.api.control.export_query import ALONE, BRANCHES, IN_GROUP, OVERLONG, ROW_WEIGHTS, THREADS
from proxy.api.control.group_rows import MEMBERS
from proxy.api.control.schemas import (
    MAX_TOP_K,
    AckBatch,
    ClaimBatch,
    DispatchRollout,
    ExtendBatch,
    FinishRollout,
    LoadAdapter,
    OpenGroup,
    OpenRollout,
    PatchRollout,
    PausePolicy,
    PutEngines,
    PutPolicy,
    ReleaseBatch,
    RequeueGroup,
    SessionReward,
)
from proxy.api.http import json_response
from proxy.export import FORMATS
from proxy.export.containers import CONTAINERS
from proxy.protocols.dialects import DIALECTS, TRANSLATORS
from proxy.protocols.dialects.gemini.paths import GENERATE, STREAM
from proxy.rollouts.group import STATUSES as GROUP_STATUSES
from proxy.rollouts.rollout import STATUSES

_REF = "#/components/schemas/{model}"


@dataclass(frozen=True, slots=True)
class Route:
    """A route: its summary, its query parameters, the model of its body, and the statuses of its responses."""

    method: str
    path: str
    summary: str
    query: tuple[tuple[str, dict[str, Any]], ...] = ()
    body: type[BaseModel] | None = None
    statuses: tuple[int, ...] = (200,)


_TEXT: dict[str, Any] = {"type": "string"}
_COUNT: dict[str, Any] = {"type": "integer", "minimum": 1}
_AFTER = ("after", {"type": "integer", "minimum": 0, "description": "index of a step"})
_SINCE = ("since", {"type": "integer", "minimum": 0, "description": "unix time in seconds"})
_FILTER = (("status", {"enum": list(STATUSES)}), ("group_id", _TEXT), _SINCE, ("limit", _COUNT))
_EXPORT = (
    ("format", {"enum": list(FORMATS)}),
    ("branches", {"enum": list(BRANCHES), "description": "by default all; one for formats with one row per rollout"}),
    ("row_weight", {"enum": list(ROW_WEIGHTS)}),
    ("include", {"enum": ["exact", "flagged", "retokenized"]}),
    ("max_len", _COUNT),
    ("overlong", {"enum": list(OVERLONG)}),
    ("overlong_buffer", _COUNT),
    ("container", {"enum": list(CONTAINERS)}),
    ("report", {"type": "boolean"}),
    (
        "prompt_logprob",
        {"type": "number", "description": "logprob of tokens that were not sampled, in place of the format's own"},
    ),
    ("advantage", {"enum": list(ALONE)}),
    ("discount", {"type": "number", "exclusiveMinimum": 0, "maximum": 1}),
    (
        "policy",
        {"type": "string", "description": "only steps of this policy; by default those of all trained policies"},
    ),
    (
        "rescore",
        {
            "type": "string",
            "description": "also the logprobs of these ids by a scorer now: policy, or one of rescore.scorers",
        },
    ),
    (
        "rescore_top_k",
        {"type": "integer", "minimum": 0, "maximum": MAX_TOP_K, "description": "with its most likely tokens"},
    ),
    ("threads", {"enum": list(THREADS), "description": "by default `threads.export`, or all"}),
    ("pad_id", {"type": "integer", "minimum": 0}),
    ("prompt_length", _COUNT),
    ("response_length", _COUNT),
)
_GROUP_EXPORT = (
    *(option for option in _EXPORT if option[0] != "advantage"),
    ("advantage", {"enum": list(IN_GROUP)}),
    ("members", {"enum": list(MEMBERS)}),
    ("min_group", _COUNT),
    ("only_mixed", {"type": "boolean"}),
)
_GROUP_FILTER = (
    ("status", {"enum": list(GROUP_STATUSES)}),
    ("policy", _TEXT),
    ("limit", _COUNT),
    ("cursor", _TEXT),
)
_TEXTS = (
    ("choice", {"type": "integer", "minimum": 0}),
    (
        "start",
        {
            "type": "integer",
            "minimum": 0,
            "description": "index of the first token; prompt and completion are counted together",
        },
    ),
    ("limit", {**_COUNT, "maximum": 2000}),
)
_TREE = ("texts", {"type": "boolean", "description": "whether drift is explained with texts"})
_R = "/rollouts/{rollout_id}"
_G = "/groups/{group_id}"
_B = "/batches/{batch_id}"
_SETTLED = (200, 400, 404, 409, 422)
_PREFIXES = ("", _R, "/sessions/{rollout_id}")
_ADAPTER = (200, 400, 409, 422, 502, 503, 504)
_DRAIN = (("drain_s", {"type": "number", "minimum": 0, "description": "how long to wait until no call is in flight"}),)
_COMPLETED = "Report the result of a rollout, as a rollout server."
_DISPATCHED = (202, 200, 400, 404, 409, 422)
_CALLS = [(path, f"Make a recorded call in the {dialect.name} dialect.") for path, dialect in DIALECTS.items()]
_CALLS += [
    (path, f"Make a recorded call in the {it.name} dialect, translated to chat.") for path, it in TRANSLATORS.items()
]
_CALLS += [
    (f"/v1beta/models/{{model}}{method}", "Make a recorded call in the gemini dialect, translated to chat.")
    for method in (GENERATE, STREAM)
]
_STORED = "/v1/responses/{response_id}"
_FOUND = (200, 400, 401, 403, 404, 503)
_BY_CHAT = (
    (
        "post",
        "/v1/messages/count_tokens",
        "Count the tokens of a Messages call with the engine's tokenizer.",
        (*_FOUND, 413, 502, 504),
    ),
    (
        "post",
        "/v1beta/models/{model}:countTokens",
        "Count the tokens of a Gemini call with the engine's tokenizer.",
        (*_FOUND, 413, 502, 504),
    ),
    ("get", "/v1beta/models", "List the engine's models and their configured aliases for Gemini clients.", _FOUND),
    ("get", "/v1beta/models/{model}", "Get a model for Gemini clients.", _FOUND),
    ("get", _STORED, "Get a stored response of the Responses API.", _FOUND),
    ("delete", _STORED, "Hide a response from agents; its step is kept.", _FOUND),
    ("get", f"{_STORED}/input_items", "List the input items of a response.", _FOUND),
)

_SESSIONS = (200, 400, 401, 403, 404, 422, 500, 503)
_ATROPOS = (
    ("post", "/setup", "Check that the named engines are configured."),
    ("get", "/servers", "List the engines, in the format of Atropos' proxy."),
    ("post", "/sessions/create", "Open a session, which is a rollout."),
    ("get", "/sessions", "List all sessions."),
    ("get", "/{uuid}/nodes", "List the nodes of a session."),
    ("delete", "/{uuid}", "Delete a session; its rollout is finished and kept (`atropos.keep_sessions`)."),
    ("post", "/{uuid}/v1/chat/completions", "Make a recorded chat call in a session."),
    ("post", "/{uuid}/v1/chat/completions/render", "Render the prompt of a chat call."),
    ("post", "/{uuid}/v1/completions", "Make a recorded completions call in a session."),
    ("get", "/{uuid}/v1/models", "List the engine's models."),
)


def _policy_routes(path: str, what: str, statuses: tuple[int, ...] = ()) -> list[Route]:
    changed = (200, 400, *statuses, 422)
    return [
        Route("get", path, f"Get the announced version of {what}.", statuses=(200, *statuses)),
        Route("put", path, f"Announce a version of {what}.", body=PutPolicy, statuses=changed),
        Route("post", f"{path}/pause", f"Pause new calls of {what}.", _DRAIN, PausePolicy, statuses=changed),
        Route(
            "post",
            f"{path}/adapter",
            f"Load a LoRA adapter of {what} into vLLM.",
            body=LoadAdapter,
            statuses=(*_ADAPTER, *statuses),
        ),
        Route("post", f"{path}/resume", f"Resume calls of {what}.", statuses=(200, *statuses)),
    ]


ROUTES: tuple[Route, ...] = (
    Route("post", "/rollouts", "Open a rollout.", body=OpenRollout, statuses=(201, 200, 400, 409, 422)),
    Route("get", "/rollouts", "List rollouts, newest first.", (*_FILTER, ("cursor", _TEXT)), statuses=(200, 400)),
    Route("get", _R, "Get a rollout: status, counts, rewards.", statuses=(200, 404)),
    Route(
        "patch",
        _R,
        "Set rewards, advantages, metadata and the continuation mode of a rollout.",
        body=PatchRollout,
        statuses=(200, 400, 404, 409, 422),
    ),
    Route("delete", _R, "Delete a rollout and all its steps.", statuses=(204,)),
    Route("post", f"{_R}/finish", "Finish a rollout.", body=FinishRollout, statuses=(200, 400, 404, 409, 422)),
    *(
        Route("post", f"/sessions/{{rollout_id}}/{name}", summary, body=SessionReward, statuses=_SETTLED)
        for name, summary in (
            ("reward_info", "Set the reward of a session, as a task of Uni-Agent does."),
            ("complete", "Finish a session as completed."),
        )
    ),
    Route(
        "post", f"{_R}/dispatch", "Dispatch a rollout to a rollout server.", body=DispatchRollout, statuses=_DISPATCHED
    ),
    Route("get", f"{_R}/steps", "List the steps of a rollout.", (_AFTER, ("limit", _COUNT)), statuses=(200, 400, 404)),
    Route("get", f"{_R}/steps/{{step_id}}", "Get a step.", statuses=(200, 404)),
    Route(
        "get", f"{_R}/steps/{{step_id}}/texts", "Get the texts of a step's tokens.", _TEXTS, statuses=(200, 400, 404)
    ),
    Route("get", f"{_R}/images/{{image}}", "Get an image of a rollout's calls.", statuses=(200, 404, 422)),
    Route("get", f"{_R}/tree", "Get the tree of a rollout's steps, with drift.", (_TREE,), statuses=(200, 400, 404)),
    Route("get", f"{_R}/export", "Export a rollout in a trainer's format.", _EXPORT, statuses=(200, 400, 404)),
    Route(
        "get", "/export", "Export many rollouts as a stream of rows.", (*_EXPORT, *_FILTER), statuses=(200, 400, 404)
    ),
    Route("post", "/groups", "Open a group with its rollouts.", body=OpenGroup, statuses=(201, 200, 400, 409, 422)),
    Route("get", "/groups", "List groups, newest first.", _GROUP_FILTER, statuses=(200, 400, 404)),
    Route("get", _G, "Get a group: its rollouts, their statuses and rewards.", statuses=(200, 404)),
    Route("delete", _G, "Delete a group and its rollouts.", statuses=(204,)),
    Route("get", f"{_G}/export", "Export a group in a trainer's format.", _GROUP_EXPORT, statuses=(200, 400, 404, 409)),
    Route(
        "post",
        f"{_G}/requeue",
        "Put a group that was dropped or is done into the queue again.",
        body=RequeueGroup,
        statuses=_SETTLED,
    ),
    Route("post", "/batches/claim", "Claim complete groups.", body=ClaimBatch, statuses=(200, 400, 404, 422)),
    Route(
        "post",
        f"{_B}/ack",
        "Acknowledge a batch: its groups are removed from the queue.",
        body=AckBatch,
        statuses=_SETTLED,
    ),
    Route(
        "post",
        f"{_B}/release",
        "Release a batch: its groups return to the queue.",
        body=ReleaseBatch,
        statuses=_SETTLED,
    ),
    Route("post", f"{_B}/extend", "Extend the lease of a batch.", body=ExtendBatch, statuses=_SETTLED),
    Route(
        "get",
        "/training",
        "Get what the newest groups of a policy earned.",
        (("policy", _TEXT), ("limit", {**_COUNT, "maximum": 1000})),
        statuses=(200, 400, 404),
    ),
    Route(
        "get",
        "/search",
        "Search for a text in prompts, replies and errors, newest rollouts first.",
        (
            ("q", {**_TEXT, "minLength": 1, "maxLength": 500}),
            *_FILTER[:2],
            ("limit", {**_COUNT, "maximum": 200}),
            ("cursor", _TEXT),
        ),
        statuses=(200, 400),
    ),
    Route("get", "/policies", "List the policies with their models and versions."),
    *_policy_routes("/policies/{policy}", "a policy", (404,)),
    *_policy_routes("/policy", "the policy `default`"),
    Route("get", "/engines", "List the engines with their health and versions."),
    Route("put", "/engines", "Replace the endpoints.", body=PutEngines, statuses=(200, 400, 403, 422)),
    Route(
        "get",
        "/events",
        "Stream changes of rollouts as server-sent events.",
        (("rollout_id", _TEXT),),
        statuses=(200, 400, 503),
    ),
    *(Route("get", path, "Check that the process is alive.") for path in ("/health", "/healthz")),
    *(
        Route("get", path, "Check that the process accepts calls: the store is reachable.", statuses=(200, 503))
        for path in ("/ready", "/readyz")
    ),
    Route("get", "/metrics", "Get metrics in Prometheus' text format."),
    Route("get", "/openapi.json", "Get this description."),
    Route("get", "/", "Redirect a browser to the web page.", statuses=(302, 404)),
    Route("get", "/ui", "Get the web page.", statuses=(200, 304)),
    Route("get", "/ui/", "Redirect to the web page.", statuses=(308,)),
    Route("get", "/ui/{file}", "Get a file of the web page.", statuses=(200, 304, 404)),
    Route("get", "/ui/vendor/{file}", "Get a file of a library of the web page.", statuses=(200, 304, 404)),
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
    *(Route("get", f"{prefix}/health", "Check that the process is alive.") for prefix in _PREFIXES[1:]),
    *(
        Route(method, prefix + path, summary, statuses=statuses)
        for method, path, summary, statuses in _BY_CHAT
        for prefix in _PREFIXES
    ),
    Route("get", "/v1/models", "List the engine's models and their configured aliases.", statuses=(200, 401, 503)),
    Route("get", "/v1/models/{model}", "Get a model.", statuses=(200, 401, 404, 503)),
)


def describe() -> dict[str, Any]:
    """Return the OpenAPI document."""
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
    return json_response(describe())


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
    200: "success",
    201: "created",
    202: "accepted",
    204: "deleted, or did not exist",
    302: "redirect",
    304: "not modified",
    308: "permanent redirect",
    400: "malformed request",
    401: "missing or invalid API key",
    403: "the API key does not permit this request",
    404: "not found",
    408: "timed out while reading the request body",
    409: "conflict with the current state",
    413: "request too large",
    422: "invalid value",
    429: "limit reached",
    500: "the engine returned no response (in the format of Atropos' proxy)",
    502: "the engine disconnected",
    503: "the store or the engines are unreachable",
    504: "the engine timed out",
}
