"""The process that listens."""

import aiohttp
import pytest
from fakes import fake_engine, settings_for

from proxy.server import running


async def test_the_control_face_may_have_a_port_of_its_own(store):
    """Then the model face's port serves no control route, and the other way about."""
    async with fake_engine() as engine:
        settings = settings_for(engine.url, control={"listen": "127.0.0.1:0"})
        async with running(settings, store) as served, aiohttp.ClientSession() as http:
            async with http.get(served.control_url + "/rollouts") as control:
                pass
            async with http.get(served.url + "/rollouts") as model:
                pass
            async with http.post(served.control_url + "/v1/chat/completions", json={}) as astray:
                pass

    assert [200, 404, 404] == [control.status, model.status, astray.status]


async def test_a_port_in_use_is_an_error_that_names_it(store):
    """And nothing is left running."""
    async with fake_engine() as engine:
        port = engine.url.rpartition(":")[2]
        with pytest.raises(OSError, match=port):
            async with running(settings_for(engine.url, listen=f"127.0.0.1:{port}"), store):
                pass
