"""Every route of /openapi.json, with requests that its schemas allow and forbid, sent to a proxy."""

from contextlib import suppress

import pytest
from hypothesis.errors import Unsatisfiable
from tests.support.fakes import settings_for

from proxy.api.openapi import ROUTES, describe
from proxy.server.listener import running, simulating
from proxy.simulator.options import Options

pytestmark = pytest.mark.timeout(3600)
SHARE = 0.1


async def test_no_request_by_the_description_causes_a_500(fuzz, store):
    """And every status is one that the description lists for the route."""
    schemathesis = pytest.importorskip("schemathesis", reason="`make install` installs schemathesis")
    requests = pytest.importorskip("requests")
    modes = schemathesis.GenerationMode
    described = describe()
    del described["security"], described["components"]["securitySchemes"]  # ours, and valid
    del described["paths"]["/events"]  # a client that reads it to the end waits forever
    schema = schemathesis.openapi.from_dict(described)
    operations = [found.ok() for found in schema.get_all_operations()]
    statuses = {(route.method, route.path): {*route.statuses} for route in ROUTES}
    keys = {"agents": {"api_keys": ["key"]}, "control": {"api_keys": ["key"]}}
    with requests.Session() as session:
        async with (
            simulating("127.0.0.1:0", Options()) as engine,
            running(settings_for(engine, atropos={"enabled": True}, **keys), store) as served,
        ):

            def check(case):
                if isinstance(case.body, dict) and "wait_s" in case.body:
                    case.body["wait_s"] = 0  # a claim may wait for ten minutes; the test may not
                if isinstance(case.body, dict) and isinstance(case.body.get("size"), int):
                    case.body["size"] = min(case.body["size"], 3)  # thousands of rollouts make every list long and slow
                is_put = (case.operation.method, case.operation.path) == ("put", "/engines")
                if is_put and isinstance(case.body, dict) and isinstance(case.body.get("endpoints"), list):
                    for endpoint in case.body["endpoints"]:
                        if isinstance(endpoint, dict) and isinstance(endpoint.get("url"), str):
                            endpoint["url"] = f"{engine}/{endpoint['url']}"  # no other host is called
                try:
                    response = case.call(served.url, session=session, headers={"Authorization": "Bearer key"})
                except (ValueError, requests.RequestException):
                    return  # cannot be sent
                documented = statuses[case.operation.method, case.operation.path] | {400, 404}
                assert response.status_code in documented, (response.status_code, response.text[:500])
                if is_put:
                    session.put(
                        f"{served.url}/engines", json={"endpoints": None}, headers={"Authorization": "Bearer key"}
                    )
                assert response.status_code != 500 or "sessions" in case.path or case.path == "/setup"

            # Schemathesis takes 0.1 s for each: the short run tries a few.
            for operation in operations if fuzz.is_whole else operations[::16]:
                for mode in (modes.POSITIVE, modes.NEGATIVE):
                    try:
                        strategy = operation.as_strategy(generation_mode=mode)
                    except schemathesis.errors.InvalidSchema:
                        continue
                    with suppress(Unsatisfiable):  # a route without parameters forbids nothing
                        await fuzz(SHARE / len(operations) / 2, strategy, check)
