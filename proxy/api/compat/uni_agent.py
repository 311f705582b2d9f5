"""The routes of a session in Uni-Agent's gateway for verl (9f394fb), and of verl's RFC 5790: its reward and its completion.

A session is a rollout: the agent calls `/sessions/{id}/v1/…`, and the task posts the reward. `reward_info` is in the metadata;
the rollout's reward is its `reward`, else `reward_score` or `score`.
"""

from math import isfinite
from typing import Any, Final

from aiohttp import web

from proxy.api.context import CONTEXT
from proxy.api.control.rollouts import change_rollout
from proxy.api.control.schemas import SessionReward, body_from
from proxy.api.http import json_response
from proxy.api.query import rollout_from
from proxy.rollouts.rollout import Rollout

_REWARDS: Final = ("reward", "reward_score", "score")
_DONE: Final = {"status": "ok"}


async def set_reward_info(request: web.Request) -> web.Response:
    """`POST /sessions/{id}/reward_info`: set the reward and the metadata of a session. 409 once its group is claimed."""
    context, body = request.app[CONTEXT], await body_from(request, SessionReward)
    rollout = await rollout_from(request)
    if body.reward_info is not None:
        await change_rollout(context, rollout, _values(rollout, body.reward_info))
    return json_response(_DONE)


async def complete_session(request: web.Request) -> web.Response:
    """`POST /sessions/{id}/complete`: finish a session as completed, with a reward if there is one. Repeats change nothing."""
    context, body = request.app[CONTEXT], await body_from(request, SessionReward)
    rollout = await rollout_from(request)
    values = {} if body.reward_info is None else _values(rollout, body.reward_info)
    await context.finisher.finish(rollout, "completed", reward=values.get("reward"), metadata=values.get("metadata"))
    return json_response(_DONE)


def _values(rollout: Rollout, info: dict[str, Any]) -> dict[str, Any]:
    """Return the metadata and, if `reward_info` has one, the reward."""
    rewards = [info[name] for name in _REWARDS if type(info.get(name)) in (int, float) and isfinite(info[name])]
    return {"metadata": {**rollout.metadata, "reward_info": info}, **({"reward": float(rewards[0])} if rewards else {})}


UNI_AGENT_ROUTES: Final = [
    web.post("/sessions/{rollout_id:[^/]+}/reward_info", set_reward_info),
    web.post("/sessions/{rollout_id:[^/]+}/complete", complete_session),
]
