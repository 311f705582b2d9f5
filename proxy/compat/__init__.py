"""Other systems' protocols, served over ours: their routes, their words, our recording.

forms             what every form of a call does, and where forms come in
atropos_form      `POST /generate`, as its token servers ask it
osmosis           remote rollouts: the callbacks that rollout servers make
osmosis_form      its flat form of `POST /v1/completions`, and the exact count behind its mask
osmosis_models    what its rollout servers send
osmosis_servers   the configured rollout servers, and how they are asked
osmosis_dispatch  `POST /rollouts/{id}/dispatch`
"""

from aiohttp import web

from proxy.compat import osmosis_dispatch

# Routes of the control face. What agents call comes by way of `calls`.
COMPAT_ROUTES: list[web.RouteDef] = [
    web.post("/rollouts/{rollout_id:[^/]+}/dispatch", osmosis_dispatch.dispatch_rollout),
]
