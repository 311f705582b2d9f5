"""The examples of docs/client.md and of the package's docstring run as pasted."""

import asyncio
import contextlib
import doctest
import io
import re
from pathlib import Path

from tests.support.batching import BatchServer, group

import tokentape

PAGE = (Path(__file__).parent.parent.parent / "docs" / "client.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
PROXY = "http://127.0.0.1:8400"


async def run(example: str, url: str) -> str:
    """Run an example in a thread, because the proxy runs in this one; return what it prints."""
    code = compile(example.replace(PROXY, url), "docs/client.md", "exec")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        await asyncio.to_thread(exec, code, {})
    return printed.getvalue()


def test_every_example_of_the_page_has_a_test_below():
    """A new example requires a new test."""
    assert len(EXAMPLES) == 5


async def test_the_rollout_example_prints_a_row_and_the_counts_of_the_rollout(url):
    """The row is in TRL's format."""
    row, rollout = (await run(EXAMPLES[0], url)).splitlines()

    assert "prompt_ids" in row
    assert "'exact': 1" in rollout


async def test_the_batches_example_acknowledges_each_batch_and_ends(engine):
    """Two batches, then none for `wait_s`."""
    server = BatchServer(engine)
    server.ready = [[group("g1"), group("g2")], [group("g3")]]
    server.long_polls = False

    assert await run(EXAMPLES[1].replace("wait_s=10", "wait_s=0.1"), engine.url) == "b1 ['g1', 'g2']\nb2 ['g3']\n"
    assert server.ended() == ["ack b1", "ack b2"]


async def test_the_example_of_weight_updates_announces_a_version(url):
    """No call is in flight."""
    assert await run(EXAMPLES[2], url) == "{'version': '13', 'epoch': 0, 'run': None, 'in_flight': 0}\n"


async def test_the_example_of_rolling_updates_announces_the_version_of_its_endpoints(url):
    assert await run(EXAMPLES[3], url) == "{'version': '14', 'epoch': 0, 'run': None, 'in_flight': 0}\n"


async def test_the_managed_server_example_prints_four_completions(url):
    """A line for each completion and its node."""
    assert len((await run(EXAMPLES[4], url)).splitlines()) == 4


async def test_the_example_of_the_package_is_a_doctest(url):
    """Its three statements run and print what the docstring shows."""
    text = (tokentape.__doc__ or "").replace(PROXY, url)
    test = doctest.DocTestParser().get_doctest(text, {}, "tokentape", None, None)
    runner = doctest.DocTestRunner(verbose=False)
    results = await asyncio.to_thread(runner.run, test)

    assert (results.failed, results.attempted - 1) == (0, 3)
