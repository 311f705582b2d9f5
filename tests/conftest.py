"""Fixtures of all tests: a store, a fake engine, HTTP clients; and the profiles of hypothesis."""

import gc
import os
import shutil
import signal
import subprocess
import sys
from asyncio import base_events
from collections import Counter
from collections.abc import Generator
from contextlib import AsyncExitStack
from pathlib import Path
from secrets import token_hex

import aiohttp
import pytest
import pytest_asyncio
from hypothesis import HealthCheck, settings
from tests.support.fakes import FailingStore, fake_engine
from tests.support.leaks import Leaks

from storage import StoreOptions, open_store
from storage.embedded.server import start_embedded

# OpenAI's client and ours load the system's certificate authorities on construction, which takes 20 ms, and tests construct a
# thousand clients. This file has one unused authority instead; tests of TLS configure their own.
os.environ["SSL_CERT_FILE"] = str(Path(__file__).parent / "support" / "unused_authority.pem")

# A shell lets its jobs in the background ignore Ctrl-C, and so would the commands that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# With the default thresholds, a fifth of the time of all tests is garbage collection: each test of the API leaves a proxy's
# cycles, and a collection visits every module. So collections are rarer, and skip what exists before the first test.
gc.set_threshold(20_000, 20, 20)

# hypothesis has no deadline and no check of the time that drawing takes, since a busy machine is slow: only pytest's timeout
# applies. Each run draws other examples, so few examples per run are many in a week; `make fuzz` draws more.
UNCHECKED = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
settings.register_profile("unhurried", deadline=None, suppress_health_check=UNCHECKED, max_examples=25)
settings.register_profile("thorough", deadline=None, suppress_health_check=UNCHECKED, max_examples=500)
settings.load_profile("unhurried")

if sys.version_info < (3, 12):

    def attach(server: base_events.Server) -> None:
        """Do what Python 3.11 does, without its assertion that the server is open (python/cpython#109564).

        With the assertion, a connection that is accepted just before the server closes is dropped without being closed, and
        the test that runs when it is garbage-collected fails: observed with engines that are probed as their test ends.
        """
        server._active_count += 1
        if server._waiters is None:
            server._waiters = []

    base_events.Server._attach = attach


SLOW_FILES = (
    "tests/server/", "tests/system/faults/", "tests/cli/test_main.py", "tests/system/security/test_cost.py",
    "tests/system/fuzz/", "tests/protocols/test_sse.py", "tests/rollouts/test_steps.py", "tests/test_skips.py",
    "tests/golden/", "tests/api/control/", "tests/system/", "tests/storage/",
    "tests/api/test_in_flight.py", "tests/tokentape/",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run files with tests that take seconds first, so that no core runs one of them alone at the end."""
    items.sort(key=lambda item: not item.nodeid.startswith(SLOW_FILES))


def pytest_collection_finish() -> None:
    """Exempt the modules and the collected tests from garbage collection."""
    gc.collect()
    gc.freeze()


LEAKS = Leaks()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, None, None]:
    """Fail the test that leaked: otherwise garbage collection fails the one that runs when it finds the leak."""
    try:
        yield
    finally:
        leaked = LEAKS.after_test(is_last_of_file=nextitem is None or nextitem.path != item.path)
    if leaked:
        pytest.fail("not closed: " + "; ".join(leaked), pytrace=False)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the skipped tests and their reasons at any verbosity, so that none looks like a passed test."""
    reasons = Counter(
        report.longrepr[2].removeprefix("Skipped: ") if isinstance(report.longrepr, tuple) else str(report.longrepr)
        for report in terminalreporter.getreports("skipped")
    )
    if reasons:
        terminalreporter.section("not tested", yellow=True)
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count} skipped: {reason}", yellow=True)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def server(tmp_path_factory):
    """A Valkey for all tests, since starting it takes longer than most tests."""
    started = await start_embedded(tmp_path_factory.mktemp("server") / "store", "acknowledged")
    yield started
    await started.stop()


@pytest.fixture
async def store(server):
    """An empty store under its own prefix; a test can make its operations fail."""
    opened = await open_store(f"unix:{server.socket}", StoreOptions(prefix=token_hex(8)))
    yield FailingStore(opened)
    await opened.close()


@pytest.fixture
async def engine():
    """A fake engine, which a test configures."""
    async with fake_engine() as engine:
        yield engine


@pytest.fixture
async def http():
    """A plain HTTP client."""
    async with aiohttp.ClientSession() as session:
        yield session


@pytest.fixture
async def sdk():
    """A factory of OpenAI and Anthropic clients, which are closed after the test."""
    async with AsyncExitStack() as stack:

        def make_client(kind, url, api_key="none", **options):
            client = kind(base_url=url, api_key=api_key, **{"max_retries": 0, **options})
            stack.push_async_callback(client.close)
            return client

        yield make_client


@pytest.fixture
def certificate(tmp_path):
    """A self-signed certificate for 127.0.0.1, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed (Debian: apt-get install openssl), so TLS is not tested")
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-keyout", key, "-out", certificate, "-subj", "/CN=tokentape", "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip
    return certificate, key
