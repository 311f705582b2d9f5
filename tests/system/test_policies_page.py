"""docs/policies.md: its settings and its commands, against a proxy with these settings."""

import asyncio
import json
import re
from pathlib import Path

import pytest
import yaml
from tests.support.fakes import settings_for
from tests.support.pages import Block, blocks_of
from tests.support.policies import policies_of
from tests.support.running_pages import Reader, follow
from tests.support.stored import stored_steps

from proxy.server.listener import running, simulating
from proxy.simulator.options import Options

PAGE = Path(__file__).parents[2] / "docs" / "policies.md"
BLOCKS = list(blocks_of(PAGE))
SETTINGS, WITH_DEFAULT = (yaml.safe_load(block.text) for block in BLOCKS if block.language == "yaml")


@pytest.fixture
async def proxy(store):
    """A proxy with the first settings of the page, before the simulator."""
    async with (
        simulating("127.0.0.1:0", Options()) as engine,
        running(settings_for(engine, **SETTINGS), store) as served,
    ):
        yield served


async def test_every_block_is_run_in_order(proxy, tmp_path):
    """The last Python block prints the versions after its update."""
    reader = Reader(proxy.url, proxy.url, proxy.url, tmp_path)
    printed = [(block.language, await asyncio.to_thread(follow, block, reader)) for block in BLOCKS]
    (versions,) = (text for language, text in printed if language == "python")
    exported, claimed = map(json.loads, [text for language, text in printed if language == "bash"][-2:])

    assert versions == "[('planner', '14'), ('coder', None), ('judge', None), ('default', None)]\n"
    assert (exported["rows"], claimed["groups"]) == ([], [])


async def test_the_policies_are_listed_as_the_page_shows(proxy, http):
    (shown,) = (block.text for block in BLOCKS if block.language == "json")
    async with http.get(f"{proxy.url}/policies") as response:
        assert json.loads(shown) == await response.json()


async def test_calls_have_the_policies_of_the_table(proxy, store, http):
    rows = re.findall(r"^\| (`.*|`.*no model) \| `(\w+)`.* \|$", PAGE.read_text(), re.MULTILINE)
    expected = {model: policy for models, policy in rows for model in re.findall(r"`([^`]+)`", models)}
    for model in expected:
        url = f"{proxy.url}/rollouts/{model}/v1/chat/completions"
        async with http.post(
            url, json={"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
        ) as response:
            assert response.status == 200

    assert expected.keys() == {"planner", "planner-7b", "gpt-4o", "judge", "other"}
    assert {model: (await stored_steps(store, model))[0].policy for model in expected} == expected


def test_the_default_policy_is_trained_with_the_second_settings_only():
    trained = [policies_of(settings["policies"]).trained for settings in (SETTINGS, WITH_DEFAULT)]

    assert trained == [("planner", "coder"), ("planner", "default")]


def test_a_wrong_block_of_the_page_is_detected(tmp_path):
    with pytest.raises(AssertionError, match="a page:1"):
        follow(Block("a page", 1, "yaml", "policies: {planner: {}}"), Reader("", "", "", tmp_path))
