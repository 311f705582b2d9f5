"""`tokentape certify` with each real engine: the results are those in docs/certified, from which docs/exactness.md is made.

`make certified` records them again.
"""

import orjson
import pytest

from docs.exactness import CERTIFIED
from proxy.cli.certify import Request, run_suite
from proxy.cli.certify.access import access_to
from proxy.cli.certify.certificate import results_of
from proxy.cli.console import notes
from proxy.config.settings import load

from . import environment

LIMIT_S = 600
VERSIONS = {"llamacpp": environment.LLAMACPP}  # its server reports none


@pytest.mark.timeout(LIMIT_S, func_only=True)
@pytest.mark.parametrize("engine", ["vllm", "sglang", "sglang_without_parsers", "llamacpp"])
async def test_the_results_of_each_shape_are_those_recorded(request, pytestconfig, engine):
    """Nothing is worse and nothing better: of every shape the result, and the problems of its step."""
    url = request.getfixturevalue(engine).url
    settings = load(engines={"endpoints": [{"url": url, "version": VERSIONS.get(engine)}]})
    async with access_to(settings, url, None, LIMIT_S) as access:
        certificate = await run_suite(access, Request(url, settings, admin=True), notes(quiet=True))
    found = certificate.to_json()
    kind, _, flags = engine.partition("_")
    path = CERTIFIED / f"{kind}-{certificate.version}{flags and '-'}{flags.replace('_', '-')}.json"
    if pytestconfig.getoption("record_certified"):
        path.write_bytes(orjson.dumps(found, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))

    assert "" == certificate.ended
    assert path.exists(), "run make certified, and read what changed in docs/exactness.md"
    assert results_of(orjson.loads(path.read_bytes())) == results_of(found), "run make certified if this is as intended"
