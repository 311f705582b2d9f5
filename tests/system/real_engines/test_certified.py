"""`tokentape certify` with each real engine: the results are those in docs/certified, from which docs/exactness.md is made.

`make certified` records them again.
"""

import orjson
import pytest
from tests.support.certifying import results_of

from docs.exactness import CERTIFIED
from proxy.cli.certify import Request, run_suite
from proxy.cli.certify.access import access_to
from proxy.cli.console import notes
from proxy.config.settings import load

from . import environment

LIMIT_S = 600
VERSIONS = {"llamacpp": environment.LLAMACPP}  # its server reports none


@pytest.mark.timeout(LIMIT_S, func_only=True)
@pytest.mark.parametrize("engine", ["vllm", "sglang", "sglang_without_parsers", "llamacpp"])
async def test_the_results_of_each_shape_are_those_recorded(request, pytestconfig, engine):
    """Nothing is worse and nothing better: of every shape the result, and the problems of its step.

    A difference has to be found twice: how an engine divides a stream, and what a call is interrupted in, depend on the load.
    """
    url = request.getfixturevalue(engine).url
    certificate, path = await certified(url, engine)
    if not pytestconfig.getoption("record_certified") and path.exists() and differs(certificate, path):
        certificate, path = await certified(url, engine)
    found = certificate.to_json()
    if pytestconfig.getoption("record_certified"):
        path.write_bytes(orjson.dumps(found, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))

    assert certificate.ended == ""
    assert path.exists(), "run make certified, and read what changed in docs/exactness.md"
    assert results_of(orjson.loads(path.read_bytes())) == results_of(found), "run make certified if this is as intended"


async def certified(url, engine):
    """Return the results of an engine, and the path of those recorded."""
    settings = load(engines={"endpoints": [{"url": url, "version": VERSIONS.get(engine)}]})
    async with access_to(settings, url, None, LIMIT_S) as access:
        certificate = await run_suite(access, Request(url, settings, admin=True), notes(quiet=True))
    kind, _, flags = engine.partition("_")
    return certificate, CERTIFIED / f"{kind}-{certificate.version}{flags and '-'}{flags.replace('_', '-')}.json"


def differs(certificate, path):
    return results_of(orjson.loads(path.read_bytes())) != results_of(certificate.to_json())
