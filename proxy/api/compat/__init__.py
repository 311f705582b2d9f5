"""Other systems' protocols, served over ours: their routes, their words, our recording.

forms             what every form of a call does, and where forms come in
atropos_form      `POST /generate`, as its token servers ask it
atropos           the sessions of its proxy: created, looked at, deleted (routes are put up by `app`, with `atropos.enabled`)
atropos_calls     what agents call within a session
atropos_session   a session: its name, its chat calls, its nodes
atropos_models    what clients of its proxy send
atropos_engines   the configured engines, as its proxy tells of them
osmosis           remote rollouts: the callbacks that rollout servers make
osmosis_form      its flat form of `POST /v1/completions`, and the exact count behind its mask
osmosis_models    what its rollout servers send
osmosis_servers   the configured rollout servers, and how they are asked
osmosis_dispatch  `POST /rollouts/{id}/dispatch`
"""

from aiohttp import web

from proxy.api.compat.osmosis import dispatch as osmosis_dispatch

# Routes of the control API. What agents call comes by way of `calls`.
COMPAT_ROUTES: list[web.RouteDef] = [
    web.post("/rollouts/{rollout_id:[^/]+}/dispatch", osmosis_dispatch.dispatch_rollout),
]
