"""A headless Chromium and a proxy, started once for all tests.

The page of a test fails it for any script that hostile contents got to run, any report of the security policy, and any
error on the console.
"""

import asyncio
import os
import shutil
import subprocess
from contextlib import AsyncExitStack
from pathlib import Path
from secrets import token_hex

import aiohttp
import pytest
import pytest_asyncio
from playwright.async_api import async_playwright, expect
from tests.support.fakes import settings_for
from tests.support.page_contents import Contents, large, small

from proxy.server.listener import running, simulating
from proxy.simulator.options import Options
from storage import StoreOptions, open_store

SLOW_MS = 20_000
REPORTS = """addEventListener('securitypolicyviolation', (found) =>
  console.error(`violation: ${found.violatedDirective} ${found.blockedURI}`))"""
expect.set_options(timeout=SLOW_MS)  # tolerates a busy machine
DESK = {"width": 1280, "height": 900}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--pictures", type=Path, help="where to store the screenshots; by default they are discarded")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run all tests in one loop: the browser belongs to the loop in which it was started."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)


def find_chromium() -> str:
    """Return the path of Chromium; install it if this is possible here. Fails with the fix otherwise."""
    names = ("chromium", "chromium-browser", "google-chrome")
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None and hasattr(os, "geteuid") and os.geteuid() == 0 and shutil.which("apt-get"):
        for command in (["update", "-qq"], ["install", "-y", "-qq", "chromium"]):
            subprocess.run(["apt-get", *command], check=True, stdout=subprocess.DEVNULL)
        found = shutil.which("chromium")
    if found is None:
        pytest.exit("The page's tests need Chromium: install it (Debian: apt-get install chromium).", returncode=1)
    return found


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser():
    """A headless Chromium."""
    async with async_playwright() as playwright:
        args = (
            "--no-sandbox",
            "--host-resolver-rules=MAP rebound.test 127.0.0.1",  # a stranger's name that resolves to this machine
            "--disable-features=LocalNetworkAccessChecks",  # as in browsers that let pages send requests to this machine
        )
        started = await playwright.chromium.launch(executable_path=find_chromium(), args=args)
        yield started
        await started.close()


async def start_contents(stack: AsyncExitStack, server, prefix: str, **settings) -> Contents:
    """Start an empty proxy to fill."""
    store = await open_store(f"unix:{server.socket}", StoreOptions(prefix=prefix))
    stack.push_async_callback(store.close)
    engine = await stack.enter_async_context(simulating("127.0.0.1:0", Options()))
    served = await stack.enter_async_context(running(settings_for(engine, **settings), store))
    http = await stack.enter_async_context(aiohttp.ClientSession())
    return Contents(served.url, store, http)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def contents(server):
    """A proxy with rollouts of many kinds."""
    async with AsyncExitStack() as stack:
        made = await start_contents(stack, server, "ui-small")
        await small(made)
        yield made


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def many(server):
    """A proxy with 5,000 steps, and a step of 200,000 tokens."""
    async with AsyncExitStack() as stack:
        made = await start_contents(stack, server, "ui-large")
        await large(made)
        yield made


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def guarded(server):
    """A proxy that requires keys, with one rollout."""
    async with AsyncExitStack() as stack:
        keys = {"control": {"api_keys": ["control-key"]}, "agents": {"api_keys": ["agent-key"]}}
        made = await start_contents(stack, server, "ui-guarded", **keys)
        headers = {"Authorization": "Bearer control-key"}
        async with made.http.post(f"{made.url}/rollouts", json={"rollout_id": "secret"}, headers=headers) as response:
            assert response.status == 201
        yield made


@pytest_asyncio.fixture(loop_scope="session")
async def empty(server):
    """A proxy without rollouts."""
    async with AsyncExitStack() as stack:
        yield await start_contents(stack, server, f"ui-{token_hex(4)}")


@pytest_asyncio.fixture(loop_scope="session")
async def open_page(browser):
    """Open pages with `await open_page(url, **options)`. None of them may report an unexpected problem by the end."""
    met, contexts = [], []

    async def opening(url: str, *, viewport=None, scheme="light", expected=()):
        context = await browser.new_context(
            viewport=viewport or DESK, color_scheme=scheme, service_workers="block", accept_downloads=True
        )
        contexts.append(context)
        page = await context.new_page()
        page.set_default_timeout(SLOW_MS)

        def meet(sentence: str) -> None:
            if not any(text in sentence for text in expected):
                met.append(sentence)

        async def dismiss(dialog) -> None:
            meet(f"dialog: {dialog.message}")
            await dialog.dismiss()

        page.on("dialog", dismiss)
        page.on("pageerror", lambda error: meet(f"error: {error}"))
        page.on("console", lambda message: message.type in ("error", "warning") and meet(f"console: {message.text}"))
        await page.add_init_script(REPORTS)
        await page.goto(url)
        return page

    yield opening
    for context in contexts:
        await context.close()
    await asyncio.sleep(0)
    assert met == []
