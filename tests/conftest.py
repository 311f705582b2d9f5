"""What all tests share: real parts, made quickly, and hypothesis without a clock of its own."""

import os
import shutil
import subprocess
import sys
from asyncio import base_events
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from secrets import token_hex

import aiohttp
import pytest
import pytest_asyncio
from fakes import FailingStore, fake_engine
from hypothesis import settings

from storage import StoreOptions, open_store
from storage.embedded.server import start_embedded

# A client of OpenAI's or ours reads all authorities of the system when it is made, 20 ms of them, and tests make a thousand
# clients. They trust nobody: what is encrypted here says itself whom to trust.
os.environ["SSL_CERT_FILE"] = str(Path(__file__).parent / "support" / "nobody.pem")

# A busy machine is slow, not wrong: pytest's own timeout is the only clock. Each run draws anew, so few examples a run are
# many in a week; `make fuzz` draws more at once.
settings.register_profile("unhurried", deadline=None, max_examples=40)
settings.register_profile("thorough", deadline=None, max_examples=500)
settings.load_profile("unhurried")

if sys.version_info < (3, 12):

    def attach(server: base_events.Server) -> None:
        """As Python 3.11 has it, but for its assertion that the server is open (python/cpython#109564).

        A connection that is accepted just before the server closes would be dropped without being closed, and whichever test
        runs when it is collected would fail for it: seen with engines that are asked what they are as their test ends.
        """
        server._active_count += 1
        if server._waiters is None:
            server._waiters = []

    base_events.Server._attach = attach


_PROCESSES = (
    "tests/server/test_supervisor.py",
    "tests/system/faults/",
    "tests/cli/test_main.py",
    "tests/system/test_replicas.py",
    "tests/audit/",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files whose tests take seconds go first, so that no core is left with one of them at the end."""
    items.sort(key=lambda item: not item.nodeid.startswith(_PROCESSES))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what was not tested and why, whatever the verbosity: a skipped test must not look like one that passed."""
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
    """One Valkey for all tests: its start would be most of a test's time."""
    started = await start_embedded(tmp_path_factory.mktemp("server") / "store", "acknowledged")
    yield started
    await started.stop()


@pytest.fixture
async def store(server):
    """An empty store, which fails where a test says so: what lies under a prefix of its own."""
    opened = await open_store(f"unix:{server.socket}", StoreOptions(prefix=token_hex(8)))
    yield FailingStore(opened)
    await opened.close()


@pytest.fixture
async def engine():
    """An engine that does what the test says."""
    async with fake_engine() as engine:
        yield engine


@pytest.fixture
async def http():
    """A client that knows nothing of OpenAI."""
    async with aiohttp.ClientSession() as session:
        yield session


@pytest.fixture
async def sdk():
    """Makes clients of OpenAI's or Anthropic's, which are closed with the test."""
    async with AsyncExitStack() as stack:

        def made(kind, url, api_key="none", **said):
            client = kind(base_url=url, api_key=api_key, **{"max_retries": 0, **said})
            stack.push_async_callback(client.close)
            return client

        yield made


@pytest.fixture
def certificate(tmp_path):
    """A certificate for 127.0.0.1 that signs itself, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed (Debian: apt-get install openssl), so TLS is not tested")
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-keyout", key, "-out", certificate, "-subj", "/CN=tokentape", "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip
    return certificate, key
