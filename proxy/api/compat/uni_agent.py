"""The routes of a session in Uni-Agent's gateway for verl (9f394fb), and of verl's RFC 5790: its reward and its completion.

A session is a rollout: the agent calls `/sessions/{id}/v1/…`, and the task posts the reward. `reward_info` is in the metadata;
the rollout's reward is its `reward`, else `reward_score` or `score`.
"""

from typing import Any, Final

from aiohttp import web

from proxy.api.context import CONTEXT
from proxy.api.control.rollouts import change_rollout
from proxy.api.control.schemas import SessionReward
from proxy.api.requests import body_from, json_response, rollout_from, route
from proxy.errors import UnprocessableRequest
from proxy.rollouts.rollout import LARGEST

_REWARDS: Final = ("reward", "reward_score", "score")
_DONE: Final = {"status": "ok"}


async def set_reward_info(request: web.Request) -> web.Response:
    """`POST /sessions/{id}/reward_info`: set the reward and the metadata of a session. 409 once its group is claimed."""
    context, body = request.app[CONTEXT], await body_from(request, SessionReward)
    rollout = await rollout_from(request)
    if body.reward_info is not None:
        reward = _reward(body.reward_info)
        values = {} if reward is None else {"reward": reward}
        await change_rollout(context, rollout, values, {"metadata": {"reward_info": body.reward_info}})
    return json_response(_DONE)


async def complete_session(request: web.Request) -> web.Response:
    """`POST /sessions/{id}/complete`: finish a session as completed, with a reward if there is one. Repeats change nothing."""
    context, body = request.app[CONTEXT], await body_from(request, SessionReward)
    rollout = await rollout_from(request)
    reward = _reward(body.reward_info or {})
    if body.reward_info is not None and not rollout.is_finished:
        rollout = await change_rollout(context, rollout, {}, {"metadata": {"reward_info": body.reward_info}})
    await context.finisher.finish(rollout, "completed", reward=reward)
    return json_response(_DONE)


def _reward(info: dict[str, Any]) -> float | None:
    """Return the reward, if `reward_info` has one. Raises UnprocessableRequest for one beyond float32."""
    for name in _REWARDS:
        value: Any = info.get(name)
        if type(value) in (int, float):
            if not -LARGEST <= value <= LARGEST:
                raise UnprocessableRequest(
                    f"reward_info.{name}: must be within the range of float32 (±{LARGEST:.8g}).",
                    param=f"reward_info.{name}",
                )
            return float(value)
    return None


_SESSION: Final = "/sessions/{rollout_id:[^/]+}"
_STATUSES: Final = (200, 400, 404, 409, 422)
_REWARD: Final = "Set the reward of a session, as a task of Uni-Agent does."
UNI_AGENT_ROUTES: Final = (
    route("post", f"{_SESSION}/reward_info", set_reward_info, _REWARD, *_STATUSES, body=SessionReward),
    route(
        "post",
        f"{_SESSION}/complete",
        complete_session,
        "Finish a session as completed.",
        *_STATUSES,
        body=SessionReward,
    ),
)
