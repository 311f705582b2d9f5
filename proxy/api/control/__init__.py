"""The routes of the control API, for trainers and operators."""

from typing import Final

from proxy.api.control import batches, claims, engines, exports, groups, rollouts, schemas, steps
from proxy.api.health import show_health, show_metrics, show_ready
from proxy.api.requests import Route, route

_R: Final = "/rollouts/{rollout_id:[^/]+}"  # any ID: it is decoded from the raw path
_G: Final = "/groups/{group_id:[^/]+}"
_B: Final = "/batches/{batch_id:[^/]+}"
_P: Final = "/policies/{policy:[^/]+}"
_STEP: Final = f"{_R}/steps/{{step_id:[^/]+}}"
_OPENED: Final = (201, 200, 400, 409, 422)
_CHANGED: Final = (200, 400, 404, 409, 422)
_READ: Final = (200, 400, 404)
_ALIVE: Final = "Check that the process is alive."
_READY: Final = "Check that the process accepts calls: the store is reachable."


def _policy_routes(path: str, what: str, *statuses: int) -> list[Route]:
    """Return the routes of a policy; `/policy` is the policy `default`."""
    changed, loaded = (200, 400, *statuses, 422), (200, 400, 409, 422, 502, 503, 504, *statuses)
    pause = {"query": schemas.Drain, "body": schemas.PausePolicy}
    version = f"version of {what}."
    load, resume = f"Load a LoRA adapter of {what} into vLLM.", f"Resume calls of {what}."
    return [
        route("get", path, engines.show_policy, f"Get the announced {version}", 200, *statuses),
        route("put", path, engines.put_policy, f"Announce a {version}", *changed, body=schemas.PutPolicy),
        route("post", f"{path}/pause", engines.pause_policy, f"Pause new calls of {what}.", *changed, **pause),
        route("post", f"{path}/adapter", engines.load_adapter, load, *loaded, body=schemas.LoadAdapter),
        route("post", f"{path}/resume", engines.resume_policy, resume, *changed, 409, body=schemas.ResumePolicy),
    ]


CONTROL_ROUTES: Final[tuple[Route, ...]] = (
    route("post", "/rollouts", rollouts.open_rollout, "Open a rollout.", *_OPENED, body=schemas.OpenRollout),
    route(
        "get", "/rollouts", rollouts.list_rollouts, "List rollouts, newest first.", 200, 400, query=schemas.ListRollouts
    ),
    route("get", _R, rollouts.show_rollout, "Get a rollout: status, counts, rewards.", 200, 404),
    route(
        "patch", _R, rollouts.patch_rollout, "Set rewards, advantages, metadata and the continuation mode of a rollout.",
        *_CHANGED, body=schemas.PatchRollout,
    ),
    route("delete", _R, rollouts.delete_rollout, "Delete a rollout and all its steps.", 204),
    route("post", f"{_R}/finish", rollouts.finish_rollout, "Finish a rollout.", *_CHANGED, body=schemas.FinishRollout),
    route("get", f"{_R}/steps", steps.list_steps, "List the steps of a rollout.", *_READ, query=schemas.ListSteps),
    route("get", _STEP, steps.show_step, "Get a step.", 200, 404),
    route(
        "get", f"{_STEP}/texts", steps.show_texts, "Get the texts of a step's tokens.", *_READ, query=schemas.ShowTexts
    ),
    route("get", f"{_R}/images/{{image:[^/]+}}", steps.show_image, "Get an image of a rollout's calls.", 200, 404, 422),
    route(
        "get", f"{_R}/tree", steps.show_tree, "Get the tree of a rollout's steps, with drift.", *_READ, query=schemas.ShowTree
    ),
    route(
        "post", f"{_R}/branches", groups.open_branches, "Open a group of playbacks of a rollout that branch before a step.",
        *_OPENED, 404, body=schemas.OpenBranches,
    ),
    route("get", f"{_R}/branches", groups.list_branches, "List the rollouts that play a rollout back.", 200, 404),
    route(
        "get", f"{_R}/values", groups.show_values, "Get the values of a rollout's states: the mean rewards of its branches.",
        *_READ, 409, query=schemas.ShowValues,
    ),
    route(
        "get", f"{_R}/export", exports.export_rollout, "Export a rollout in a trainer's format.",
        *_READ, query=schemas.ExportRollout,
    ),
    route("get", "/export", exports.export_many, "Export many rollouts as a stream of rows.", *_READ, query=schemas.ExportMany),
    route("post", "/groups", groups.open_group, "Open a group with its rollouts.", *_OPENED, body=schemas.OpenGroup),
    route("get", "/groups", groups.list_groups, "List groups, newest first.", *_READ, query=schemas.ListGroups),
    route("get", _G, groups.show_group, "Get a group: its rollouts, their statuses and rewards.", 200, 404),
    route("delete", _G, groups.delete_group, "Delete a group and its rollouts.", 204),
    route(
        "get", f"{_G}/export", groups.export_group, "Export a group in a trainer's format.",
        *_READ, 409, query=schemas.ExportGroup,
    ),
    route(
        "post", f"{_G}/requeue", groups.requeue_group, "Put a group that was dropped or is done into the queue again.",
        *_CHANGED, body=schemas.RequeueGroup,
    ),
    route("post", "/batches/claim", claims.claim_batch, "Claim complete groups.", *_READ, 422, body=schemas.ClaimBatch),
    route(
        "post", f"{_B}/ack", batches.ack_batch, "Acknowledge a batch: its groups are removed from the queue.",
        *_CHANGED, body=schemas.AckBatch,
    ),
    route(
        "post", f"{_B}/release", batches.release_batch, "Release a batch: its groups return to the queue.",
        *_CHANGED, body=schemas.ReleaseBatch,
    ),
    route("post", f"{_B}/extend", batches.extend_batch, "Extend the lease of a batch.", *_CHANGED, body=schemas.ExtendBatch),
    route(
        "post", f"{_B}/mismatch", batches.post_mismatch, "Report how the trainer's logprobs of a batch differ.",
        200, 400, 409, 422, body=schemas.PostMismatch,
    ),
    route("get", f"{_B}/mismatch", batches.show_mismatch, "Get the mismatch of a batch, and its verdicts.", 200, 404),
    route(
        "get", "/training", groups.show_training, "Get what the newest groups of a policy earned.",
        *_READ, query=schemas.ShowTraining,
    ),
    route(
        "get", "/search", rollouts.search_rollouts, "Search for a text in prompts, replies and errors, newest rollouts first.",
        200, 400, query=schemas.Search,
    ),
    route("get", "/policies", engines.list_policies, "List the policies with their models and versions."),
    *_policy_routes(_P, "a policy", 404),
    *_policy_routes("/policy", "the policy `default`"),
    route("get", "/engines", engines.show_engines, "List the engines with their health and versions."),
    route("put", "/engines", engines.put_engines, "Replace the endpoints.", 200, 400, 403, 422, body=schemas.PutEngines),
    route(
        "get", "/events", rollouts.show_events, "Stream changes of rollouts as server-sent events.",
        200, 400, 503, query=schemas.ShowEvents,
    ),
    *(route("get", path, show_health, _ALIVE) for path in ("/health", "/healthz")),
    *(route("get", path, show_ready, _READY, 200, 503) for path in ("/ready", "/readyz")),
    route("get", "/metrics", show_metrics, "Get metrics in Prometheus' text format."),
)  # fmt: skip
