"""The control API: what trainers and people call, one file a noun.

access     who may, and how requests name things
models     what people send
rollouts   open, list, look, reward, finish, delete
steps      the recorded steps, and their tree
texts      the texts of a step's tokens, for people
exports    rows for trainers
wanted     what an export is asked for
groups     open, list, look, export, delete
gathering  the rows of a group, put together
completion when a group is complete
batches    claim, acknowledge, extend, release
claims     which groups a claim gets
policy     the version of the weights, and the pause while they change
engines    how they stand, and which ones there are
system     health, metrics
events     what happens to rollouts, as it happens
openapi    the description of every route, of both APIs
"""

from aiohttp import web

from proxy.api import health as system
from proxy.api.control import batches, engines, events, exports, groups, openapi, policy, rollouts, steps
from proxy.api.control import token_texts as texts

_ROLLOUT = "/rollouts/{rollout_id:[^/]+}"  # any id: what it spells is read from the path as it came
_GROUP = "/groups/{group_id:[^/]+}"
_BATCH = "/batches/{batch_id:[^/]+}"

CONTROL_ROUTES: list[web.RouteDef] = [
    web.post("/rollouts", rollouts.open_rollout),
    web.get("/rollouts", rollouts.list_rollouts),
    web.get(_ROLLOUT, rollouts.show_rollout),
    web.patch(_ROLLOUT, rollouts.patch_rollout),
    web.delete(_ROLLOUT, rollouts.delete_rollout),
    web.post(f"{_ROLLOUT}/finish", rollouts.finish_rollout),
    web.get(f"{_ROLLOUT}/steps", steps.list_steps),
    web.get(f"{_ROLLOUT}/steps/{{step_id:[^/]+}}", steps.show_step),
    web.get(f"{_ROLLOUT}/steps/{{step_id:[^/]+}}/texts", texts.show_texts),
    web.get(f"{_ROLLOUT}/tree", steps.show_tree),
    web.get(f"{_ROLLOUT}/export", exports.export_rollout),
    web.get("/export", exports.export_many),
    web.post("/groups", groups.open_group),
    web.get("/groups", groups.list_groups),
    web.get(_GROUP, groups.show_group),
    web.delete(_GROUP, groups.delete_group),
    web.get(f"{_GROUP}/export", groups.export_group),
    web.post("/batches/claim", batches.claim_batch),
    web.post(f"{_BATCH}/ack", batches.ack_batch),
    web.post(f"{_BATCH}/release", batches.release_batch),
    web.post(f"{_BATCH}/extend", batches.extend_batch),
    web.get("/policy", policy.show_policy),
    web.put("/policy", policy.put_policy),
    web.post("/policy/pause", policy.pause_policy),
    web.post("/policy/resume", policy.resume_policy),
    web.get("/engines", engines.show_engines),
    web.put("/engines", engines.put_engines),
    web.get("/events", events.show_events),
    web.get("/health", system.show_health),
    web.get("/ready", system.show_ready),
    web.get("/metrics", system.show_metrics),
    web.get("/openapi.json", openapi.show_openapi),
]
