"""The client's documentation: its examples run as they stand."""

import asyncio
import contextlib
import doctest
import inspect
import io
import re
from ast import PyCF_ALLOW_TOP_LEVEL_AWAIT
from pathlib import Path

from batching import Batching, group
from scripted import Words

import tokentape

PAGE = (Path(__file__).parent.parent.parent / "docs" / "client.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
HERE = "http://127.0.0.1:8400"


class Decoding(Words):
    """Some tokenizer: the ids are the simulator's, and it knows no word of them."""

    def decode(self, ids, skip_special_tokens=False):
        return " ".join(map(str, ids))


async def run(example: str, url: str) -> str:
    """What an example prints; one that blocks does so in a thread, for the proxy is served here."""
    code = compile(example.replace(HERE, url), "docs/client.md", "exec", flags=PyCF_ALLOW_TOP_LEVEL_AWAIT)
    names = {"tokenizer": Decoding()}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        if code.co_flags & inspect.CO_COROUTINE:
            await eval(code, names)
        else:
            await asyncio.to_thread(exec, code, names)
    return printed.getvalue()


def test_every_example_of_the_page_is_asserted_below():
    """So that a new one is too."""
    assert 3 == len(EXAMPLES)


async def test_the_example_of_a_rollout(url):
    """A row, and the rollout that it is of."""
    row, rollout = (await run(EXAMPLES[0], url)).splitlines()

    assert "prompt_ids" in row
    assert "'exact': 1" in rollout


async def test_the_example_of_batches(engine):
    """Two batches, each acknowledged; then nothing for a while."""
    batching = Batching(engine)
    batching.ready = [[group("g1"), group("g2")], [group("g3")]]
    batching.patient = False

    assert "b1 ['g1', 'g2']\nb2 ['g3']\n" == await run(EXAMPLES[1], engine.url)
    assert ["ack b1", "ack b2"] == batching.verbs()


async def test_the_example_of_managed_server(url):
    """Four samples and their nodes."""
    assert 4 == len((await run(EXAMPLES[2], url)).splitlines())


async def test_the_example_of_the_package(url):
    """As a doctest has it."""
    text = (tokentape.__doc__ or "").replace(HERE, url)
    test = doctest.DocTestParser().get_doctest(text, {}, "tokentape", None, None)
    runner = doctest.DocTestRunner(verbose=False)
    results = await asyncio.to_thread(runner.run, test)

    assert (0, 3) == (results.failed, results.attempted - 1)
