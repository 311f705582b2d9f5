"""The control face: what trainers and people call, one file a noun.

access     who may, and how requests name things
models     what people send
rollouts   open, list, look, reward, finish, delete
steps      the recorded steps, and their tree
exports    rows for trainers
system     health, engines, metrics
openapi    the description of every route, of both faces
"""

from aiohttp import web

from proxy.control import exports, openapi, rollouts, steps, system

_ROLLOUT = "/rollouts/{rollout_id:[^/]+}"  # any id: what it spells is read from the path as it came

CONTROL_ROUTES: list[web.RouteDef] = [
    web.post("/rollouts", rollouts.open_rollout),
    web.get("/rollouts", rollouts.list_rollouts),
    web.get(_ROLLOUT, rollouts.show_rollout),
    web.patch(_ROLLOUT, rollouts.patch_rollout),
    web.delete(_ROLLOUT, rollouts.delete_rollout),
    web.post(f"{_ROLLOUT}/finish", rollouts.finish_rollout),
    web.get(f"{_ROLLOUT}/steps", steps.list_steps),
    web.get(f"{_ROLLOUT}/steps/{{step_id:[^/]+}}", steps.show_step),
    web.get(f"{_ROLLOUT}/tree", steps.show_tree),
    web.get(f"{_ROLLOUT}/export", exports.export_rollout),
    web.get("/export", exports.export_many),
    web.get("/engines", system.show_engines),
    web.get("/health", system.show_health),
    web.get("/ready", system.show_ready),
    web.get("/metrics", system.show_metrics),
    web.get("/openapi.json", openapi.show_openapi),
]
