"""Checks of the engines that score rows."""

import pytest
from tests.support.fakes import settings_for
from tests.support.findings import all_findings
from tests.support.rescored import Teacher

from proxy.server.listener import simulating
from proxy.simulator.options import Options


@pytest.mark.parametrize(
    ("endpoint", "grade", "words"),
    [
        ({}, "ok", "scores token ids with 'big'"),
        ({"kind": "plain"}, "fault", "engine kind 'plain' cannot score token ids"),
        ({"url": "http://127.0.0.1:9", "kind": "vllm"}, "fault", "unreachable"),
    ],
)
async def test_a_scorer_is_checked(engine, tmp_path, endpoint, grade, words):
    """The fix names its setting."""
    engine.respond = Teacher()
    scorers = {"teacher": {"endpoints": [{"url": engine.url, **endpoint}]}}
    async with simulating("127.0.0.1:0", Options()) as policy:
        settings = settings_for(policy, store={"url": f"embedded:{tmp_path / 'store'}"}, rescore={"scorers": scorers})
        (found,) = [finding for finding in await all_findings(settings) if finding.subject == "scorer teacher"]

    assert grade == found.grade
    assert words in found.seen
    assert (grade == "fault") == ("rescore.scorers.teacher" in found.fix)
