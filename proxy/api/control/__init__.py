"""The control API for trainers and operators.

schemas       models of request bodies
rollouts      open, list, get, reward, finish, delete
steps         recorded steps and their tree
token_texts   texts of a step's tokens
images        an image of a rollout
exports       rows for trainers
export_query  options of an export, and the rows of one rollout
groups        open, list, get, export, requeue, delete
group_rows    rows of a group, combined
batches       claim, acknowledge, extend, release
claims        selection of the groups of a claim
policy        the policies: their versions, the pause while weights change, and LoRA adapters
engines       state and replacement of endpoints
training      what the newest groups of a policy earned
search        rollouts whose prompts, replies or errors have a text
events        changes of rollouts as server-sent events
openapi       OpenAPI description of every route of both APIs
"""

from aiohttp import web

from proxy.api import health
from proxy.api.control import (
    batches,
    engines,
    events,
    exports,
    groups,
    images,
    openapi,
    policy,
    rollouts,
    search,
    steps,
    token_texts,
    training,
)

_ROLLOUT = "/rollouts/{rollout_id:[^/]+}"  # any ID: it is decoded from the raw path
_GROUP = "/groups/{group_id:[^/]+}"
_BATCH = "/batches/{batch_id:[^/]+}"
_POLICY = "/policies/{policy:[^/]+}"


def _policy_routes(path: str) -> list[web.RouteDef]:
    """Return the routes of a policy; `/policy` is the policy `default`."""
    return [
        web.get(path, policy.show_policy),
        web.put(path, policy.put_policy),
        web.post(f"{path}/pause", policy.pause_policy),
        web.post(f"{path}/resume", policy.resume_policy),
        web.post(f"{path}/adapter", policy.load_adapter),
    ]


CONTROL_ROUTES: list[web.RouteDef] = [
    web.post("/rollouts", rollouts.open_rollout),
    web.get("/rollouts", rollouts.list_rollouts),
    web.get(_ROLLOUT, rollouts.show_rollout),
    web.patch(_ROLLOUT, rollouts.patch_rollout),
    web.delete(_ROLLOUT, rollouts.delete_rollout),
    web.post(f"{_ROLLOUT}/finish", rollouts.finish_rollout),
    web.get(f"{_ROLLOUT}/steps", steps.list_steps),
    web.get(f"{_ROLLOUT}/steps/{{step_id:[^/]+}}", steps.show_step),
    web.get(f"{_ROLLOUT}/steps/{{step_id:[^/]+}}/texts", token_texts.show_texts),
    web.get(f"{_ROLLOUT}/images/{{image:[^/]+}}", images.show_image),
    web.get(f"{_ROLLOUT}/tree", steps.show_tree),
    web.get(f"{_ROLLOUT}/export", exports.export_rollout),
    web.get("/export", exports.export_many),
    web.post("/groups", groups.open_group),
    web.get("/groups", groups.list_groups),
    web.get(_GROUP, groups.show_group),
    web.delete(_GROUP, groups.delete_group),
    web.get(f"{_GROUP}/export", groups.export_group),
    web.post(f"{_GROUP}/requeue", groups.requeue_group),
    web.post("/batches/claim", batches.claim_batch),
    web.post(f"{_BATCH}/ack", batches.ack_batch),
    web.post(f"{_BATCH}/release", batches.release_batch),
    web.post(f"{_BATCH}/extend", batches.extend_batch),
    web.get("/search", search.search_rollouts),
    web.get("/training", training.show_training),
    web.get("/policies", policy.list_policies),
    *_policy_routes(_POLICY),
    *_policy_routes("/policy"),
    web.get("/engines", engines.show_engines),
    web.put("/engines", engines.put_engines),
    web.get("/events", events.show_events),
    *(web.get(path, health.show_health) for path in ("/health", "/healthz")),
    *(web.get(path, health.show_ready) for path in ("/ready", "/readyz")),
    web.get("/metrics", health.show_metrics),
    web.get("/openapi.json", openapi.show_openapi),
]
