"""The policy: which version of the weights the engines serve, as the trainer announces it.

Holds the routes of `/policy`. The version is stamped on steps whose engine reports none of its own.
"""

from typing import Any

import orjson
from aiohttp import web

from proxy.control.models import PutPolicy, read_as
from proxy.parts import PARTS
from proxy.policy import POLICY_NOTICE, read_policy


async def show_policy(request: web.Request) -> web.Response:
    """`GET /policy`: the version that is announced, null if none is."""
    return _json({"version": read_policy(await request.app[PARTS].store.notices.read())})


async def put_policy(request: web.Request) -> web.Response:
    """`PUT /policy`: every call that begins after the answer, at any process that shares the store, is stamped with it."""
    said = read_as(PutPolicy, await request.read())
    version = str(said.version)
    parts = request.app[PARTS]
    parts.policy.told({POLICY_NOTICE: await parts.store.notices.announce(POLICY_NOTICE, orjson.dumps(version))})
    return _json({"version": version})


def _json(value: Any) -> web.Response:
    return web.Response(body=orjson.dumps(value), content_type="application/json")
