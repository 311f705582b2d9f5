"""Protocols of other systems, served with TokenTape's recording.

call_routes        the endpoints that sample, with their adapters
atropos/generate   `POST /generate`, as Atropos' token servers call it
atropos/sessions   routes that create, list and delete sessions (with `atropos.enabled`)
atropos/calls      calls of agents within a session
atropos/session    a session: its ID, its chat calls, its nodes
atropos/schemas    request bodies of Atropos' proxy
atropos/engines    the configured engines in the format of Atropos' proxy
osmosis/callbacks  callbacks of Osmosis' rollout servers
osmosis/flat_call  its flat format of `POST /v1/completions`, and the exact count for its mask
osmosis/schemas    request bodies of its rollout servers
osmosis/servers    the configured rollout servers, and requests to them
uni_agent          reward and completion of a session, as in Uni-Agent's gateway for verl
osmosis/dispatch   `POST /rollouts/{id}/dispatch`
"""

from aiohttp import web

from proxy.api.compat.osmosis import dispatch as osmosis_dispatch
from proxy.api.compat.uni_agent import UNI_AGENT_ROUTES

# Routes of the control API; calls of agents have their routes in `call_routes`.
COMPAT_ROUTES: list[web.RouteDef] = [
    web.post("/rollouts/{rollout_id:[^/]+}/dispatch", osmosis_dispatch.dispatch_rollout),
    *UNI_AGENT_ROUTES,
]
