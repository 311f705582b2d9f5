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
