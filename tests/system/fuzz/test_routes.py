"""Every route of the description, with what its schemas allow and what they do not, before a real proxy."""

from contextlib import suppress

import pytest
from fakes import settings_for
from hypothesis.errors import Unsatisfiable

from proxy.control.openapi import ROUTES, describe
from proxy.server import running, simulating
from proxy.simulator.options import Options

pytestmark = pytest.mark.timeout(3600)
SHARE = 0.1


async def test_no_request_that_the_description_allows_or_forbids_fails_us(fuzz, store):
    """No 500, and no status but those that the description tells of the route."""
    schemathesis = pytest.importorskip("schemathesis", reason="`make install` brings schemathesis")
    requests = pytest.importorskip("requests")
    modes = schemathesis.GenerationMode
    described = describe()
    del described["security"], described["components"]["securitySchemes"]  # the key is ours to say, and right
    del described["paths"]["/events"]  # whoever reads it to its end waits for ever
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
                    case.body["wait_s"] = 0  # a claim may wait for ten minutes, and we may not
                if isinstance(case.body, dict) and isinstance(case.body.get("size"), int):
                    case.body["size"] = min(
                        case.body["size"], 3
                    )  # thousands of rollouts make every list long, and slow
                is_put = (case.operation.method, case.operation.path) == ("put", "/engines")
                if is_put and isinstance(case.body, dict) and isinstance(case.body.get("endpoints"), list):
                    for endpoint in case.body["endpoints"]:
                        if isinstance(endpoint, dict) and isinstance(endpoint.get("url"), str):
                            endpoint["url"] = f"{engine}/{endpoint['url']}"  # whatever is drawn, nobody else is called
                try:
                    answer = case.call(served.url, session=session, headers={"Authorization": "Bearer key"})
                except (ValueError, requests.RequestException):
                    return  # what cannot be sent
                told = statuses[case.operation.method, case.operation.path] | {400, 404}
                assert answer.status_code in told, (answer.status_code, answer.text[:500])
                if is_put:
                    session.put(
                        f"{served.url}/engines", json={"endpoints": None}, headers={"Authorization": "Bearer key"}
                    )
                assert answer.status_code != 500 or "sessions" in case.path or case.path == "/setup"

            # Schemathesis takes a tenth of a second for each: the short run tries some.
            for operation in operations if fuzz.is_whole else operations[::16]:
                for mode in (modes.POSITIVE, modes.NEGATIVE):
                    try:
                        strategy = operation.as_strategy(generation_mode=mode)
                    except schemathesis.errors.InvalidSchema:
                        continue
                    with suppress(Unsatisfiable):  # a route without a parameter forbids nothing
                        await fuzz(SHARE / len(operations) / 2, strategy, check)
