"""A test that leaks fails, and not one that runs later."""

import asyncio
import os
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent

LEAKY = '''
import asyncio
import socket

import aiohttp
import pytest


class Cycle:
    """Something that only garbage collection finds."""

    def __init__(self, held):
        self.held, self.itself = held, self


@pytest.fixture(scope="module")
def shared():
    with socket.socket() as opened:
        yield opened


def test_a_socket_leaks():
    Cycle(socket.socket())


def test_after_it():
    pass


async def test_a_transport_leaks():
    one, other = socket.socketpair()
    Cycle(other.makefile())
    other.close()
    Cycle(await asyncio.get_running_loop().create_connection(asyncio.Protocol, sock=one))


async def test_after_the_transport():
    pass


def test_a_shared_socket_does_not_leak(shared):
    pass


async def test_a_closed_client_does_not_leak():
    async with aiohttp.ClientSession() as session:
        Cycle(session)


async def test_the_file_ends_with_a_client_that_leaks():
    Cycle(aiohttp.ClientSession())
'''


async def test_a_leak_fails_its_own_test(tmp_path):
    """A client that was never connected fails the last test of its file."""
    (tmp_path / "test_leaky.py").write_text(LEAKY)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", "-vv", "-c", ROOT / "pyproject.toml",
        "--rootdir", ROOT, "-p", "conftest", tmp_path / "test_leaky.py",
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}:{ROOT / 'tests' / 'support'}"},
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    printed, _ = await process.communicate()
    failed = {
        line.split("::")[1].split()[0]
        for line in printed.decode().splitlines()
        if line.startswith("ERROR ") and "::" in line
    }

    assert failed == {
        "test_a_socket_leaks",
        "test_a_transport_leaks",
        "test_the_file_ends_with_a_client_that_leaks",
    }, printed.decode()
