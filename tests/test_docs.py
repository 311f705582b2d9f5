"""Documents that cannot lie: what the code prints is up to date, and the README's lines are run."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import aiohttp
import orjson
import pytest
import yaml
from fakes import settings_for
from prometheus_client import CollectorRegistry

from docs.generate import pages, settings_of
from proxy.config import Settings
from proxy.metrics import make_metrics
from proxy.server import running, with_an_engine

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


@pytest.mark.parametrize("path", pages(), ids=lambda path: path.name)
def test_generated_pages_are_up_to_date(path):
    """`make docs` would change nothing."""
    assert pages()[path] == path.read_text()


def test_the_example_configuration_is_the_defaults_in_full():
    """Each setting stands in config.example.yaml with its default, and nothing else does."""
    example = yaml.safe_load((ROOT / "config.example.yaml").read_text())

    assert Settings().model_dump(mode="json") == example


def test_every_setting_says_what_it_means():
    """A setting nobody can look up does not exist."""
    assert [] == [name for name, _, _, description in settings_of(Settings) if not description]


def test_every_metric_is_documented():
    """Nor does a metric."""
    page = (ROOT / "docs" / "metrics.md").read_text()
    names = [metric.name for made in make_metrics(CollectorRegistry()).all() for metric in made.describe()]

    assert [] == [name for name in names if f"`{name}`" not in page]


async def test_the_lines_of_the_readme_print_a_reply_and_its_sequences(tmp_path):
    """The README's client lines and its export line, as they stand, against a proxy as `make run` starts it."""
    client = re.search(r"```python\n(.*?)```", README, re.DOTALL)[1]
    export = re.search(r"curl -s '([^']+)'", README)[1]
    settings = settings_for(None, store={"url": f"embedded:{tmp_path / 'store'}"})
    async with with_an_engine(settings) as (complete, is_simulated), running(complete) as served:
        assert is_simulated
        host = served.url.removeprefix("http://")
        said = await _run(client.replace("127.0.0.1:8400", host))
        async with (
            aiohttp.ClientSession() as http,
            http.get(f"http://{export.replace('127.0.0.1:8400', host)}") as answer,
        ):
            rows = orjson.loads(await answer.read())["rows"]

    assert said.strip()
    assert 1 == len(rows)
    (lengths,) = {(len(row["token_ids"]), len(row["mask"]), len(row["logprobs"])) for row in rows}
    assert 1 == len(set(lengths))


async def test_the_lines_of_the_api_page_are_all_answered(tmp_path):
    """Each curl line of docs/http-api.md, in order, gets a 2xx."""
    page = (ROOT / "docs" / "http-api.md").read_text()
    lines = [line for block in re.findall(r"```bash\n(.*?)```", page, re.DOTALL) for line in block.splitlines()]
    settings = settings_for(None, store={"url": f"embedded:{tmp_path / 'store'}"})
    async with with_an_engine(settings) as (complete, _), running(complete) as served, aiohttp.ClientSession() as http:
        for line in lines:
            words = shlex.split(line)
            url = next(word for word in words if word.startswith("127.0.0.1"))
            body = words[words.index("-d") + 1] if "-d" in words else None
            method = words[words.index("-X") + 1] if "-X" in words else "POST" if body else "GET"
            url = url.replace("127.0.0.1:8400", served.url)
            headers = dict([words[words.index("-H") + 1].split(": ")]) if "-H" in words else {}
            async with http.request(method, url, data=body, headers=headers) as answer:
                assert answer.status in (200, 201, 204), (line, await answer.text())

    assert len(lines) >= 8


async def _run(program: str) -> str:
    """What a Python program prints, run beside the event loop."""
    import asyncio

    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False
    )
    assert 0 == done.returncode, done.stderr
    return done.stdout


def test_decisions_are_short_and_say_what_would_change_them():
    """At most 30 lines, each ending in what would change our mind."""
    decisions = sorted((ROOT / "docs" / "decisions").glob("*.md"))

    assert decisions
    for decision in decisions:
        lines = decision.read_text().strip().splitlines()
        assert len(lines) <= 30, decision
        assert lines[-1].startswith("We would change our mind if "), decision
