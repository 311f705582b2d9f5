"""Hand-written pages: every code block is run or checked, and every link has a target."""

import asyncio
import json
import threading
from pathlib import Path
from secrets import token_hex

import aiohttp
import orjson
import pytest
from tests.support.fakes import settings_for
from tests.support.pages import ROOT, Block, anchor_of, anchors_of, blocks_of, links_of, pages
from tests.support.running_pages import KEY, Reader, follow

from proxy.server.listener import running, with_an_engine
from storage import StoreOptions, open_store

PAGES = {str(path.relative_to(ROOT)): path for path in pages()}
WITH_BLOCKS = [name for name, path in PAGES.items() if any(True for _ in blocks_of(path))]


async def record(url: str) -> None:
    """Record a call, which the pages on exports and audits presuppose."""
    body = {"model": "policy", "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 8}
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{url}/rollouts/recorded/v1/chat/completions", json=body) as response,
    ):
        assert response.status == 200


@pytest.fixture(scope="module")
def served(server):
    """Run a proxy as `make run` does, one with a control key, and the simulator, in a thread: programs on the pages block."""
    ready, over = threading.Event(), threading.Event()
    urls: list[str] = []

    async def serve() -> None:
        async with with_an_engine(settings_for(None)) as (settings, _):
            engine = settings.engines.endpoints[0].url
            stores = [await open_store(f"unix:{server.socket}", StoreOptions(prefix=token_hex(8))) for _ in range(2)]
            keyed = settings_for(engine, control={"api_keys": [KEY]})
            async with running(settings, stores[0]) as plain, running(keyed, stores[1]) as with_key:
                await record(plain.url)
                urls.extend([plain.url, with_key.url, engine])
                ready.set()
                await asyncio.to_thread(over.wait)
            for store in stores:
                await store.close()

    thread = threading.Thread(target=asyncio.run, args=[serve()])
    thread.start()
    ready.wait(timeout=120)
    yield urls
    over.set()
    thread.join()


@pytest.mark.parametrize("page", WITH_BLOCKS)
def test_every_block_of_a_page_is_run_or_checked(page, served, tmp_path):
    """The blocks run in order, against a proxy with the simulator as its engine."""
    reader = Reader(*served, folder=tmp_path)

    for block in blocks_of(PAGES[page]):
        if block.excerpt_of is not None:
            assert block.text in (ROOT / block.excerpt_of).read_text(), (
                f"{block.place}: not an excerpt of {block.excerpt_of}"
            )
        elif block.checked_by is None:
            follow(block, reader)


def test_the_readme_prints_a_reply_and_its_sequences(served, tmp_path):
    """The client prints a reply, and the export has a row for it, with arrays of equal lengths."""
    reader = Reader(*served, folder=tmp_path)
    _run, _install, client, export = [block for block in blocks_of(PAGES["README.md"]) if block.language != "text"][:4]

    assert follow(client, reader).strip()
    rows = orjson.loads(follow(export, reader))["rows"]
    assert rows
    for row in rows:
        assert len({len(row["token_ids"]), len(row["mask"]), len(row["logprobs"])}) == 1


def test_the_readme_trains_a_group(served, tmp_path):
    """The block about groups, pasted, prints a batch with four rewards and four rows."""
    group = [block for block in blocks_of(PAGES["README.md"]) if block.language == "python"][1]
    printed = [line.partition(" ")[2] for line in follow(group, Reader(*served, folder=tmp_path)).splitlines()]

    assert printed
    assert {tuple(map(len, json.loads(f"[{line.replace('] [', '], [')}]"))) for line in printed} == {(4, 4)}


def test_a_test_that_a_page_names_as_a_blocks_check_names_the_page():
    elsewhere = [block for path in PAGES.values() for block in blocks_of(path) if block.checked_by is not None]

    assert elsewhere
    for block in elsewhere:
        assert Path(block.page).name in (ROOT / block.checked_by).read_text(), block.place


@pytest.mark.parametrize(
    ("language", "text"),
    [
        ("", "anything"),
        ("bash", "curl -s '127.0.0.1:8400/health"),
        ("ruby", "puts 1"),
        ("bash", "docker compose up"),
        ("bash", "curl -s 127.0.0.1:8400/rollouts/no-such-rollout"),
        ("bash", "make no-such-target"),
        ("bash", "make run NOSUCH=1"),
        ("bash", "tokentape serve --no-such-option"),
        ("bash", "tokentape no-such-command"),
        ("bash", "pip install 'tokentape[no-such-extra]'"),
        ("bash", "python no/such/file.py"),
        ("console", "$ tokentape serve --no-such-option\nlistening"),
        ("console", "$ make no-such-target"),
        ("console", "$ vllm serve a-model --no-such-flag"),
        ("console", "$ vllm serve a-model --tool-call-parser no-such-parser"),
        ("yaml", "no_such_setting: 1"),
        ("http", 'POST /rollouts/r1/dispatch HTTP/1.1\n\n{"no_such_field": 1}'),
        ("json", "{'a': 1}"),
        ("toml", "a = "),
        ("python", "no_such_name"),
    ],
)
def test_each_kind_of_check_detects_a_wrong_block(language, text, served, tmp_path):
    with pytest.raises(AssertionError, match="a page:1"):
        follow(Block("a page", 1, language, text), Reader(*served, folder=tmp_path))


@pytest.mark.parametrize("page", PAGES)
def test_every_relative_link_has_a_target(page):
    """A file, and a heading of it; URLs are not requested."""
    for link in links_of(PAGES[page]):
        if "://" in link or link.startswith("mailto:"):
            continue
        name, _, anchor = link.partition("#")
        target = (PAGES[page].parent / name).resolve() if name else PAGES[page]
        assert target.exists(), f"{page}: {link}"
        assert not anchor or anchor in anchors_of(target), f"{page}: {link}"


def test_every_page_is_listed_in_the_index():
    """The lists of docs/index.md are the site's navigation; decisions have a list of their own."""
    index = ROOT / "docs" / "index.md"
    listed = {(index.parent / link.partition("#")[0]).resolve() for link in links_of(index)}

    assert {path for path in PAGES.values() if path.parent.name != "decisions"} - listed - {index} == set()


def test_anchors_equal_githubs():
    """Lower case, dashes for spaces, no punctuation."""
    assert anchor_of("Atropos: `POST /generate`") == "atropos-post-generate"
    assert anchor_of("[X-Reply_Ids](a.md)!") == "x-reply_ids"
