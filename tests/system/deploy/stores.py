"""A real valkey-server with a deployed configuration, and what TokenTape reports about it."""

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from storage import open_store
from storage.options import StoreOptions


@contextmanager
def valkey(command: Sequence[str], **environment: str) -> Iterator[bytes]:
    """Start a server with this command; yield its command line, which every user of the machine can read, once it
    answers.
    """
    server = subprocess.Popen([*command], stdout=subprocess.PIPE, text=True, env=environment or None)
    try:
        assert any("Ready to accept connections" in line for line in server.stdout)
        yield Path(f"/proc/{server.pid}/cmdline").read_bytes()
    finally:
        server.terminate()
        server.stdout.close()
        assert server.wait(20) == 0


async def store_warnings(url: str, password: str | None) -> dict[str, Any]:
    """Return the warnings that an operator gets if each step must be on disk."""
    store = await open_store(url, StoreOptions(durability="fsync", password=password))
    try:
        return await store.info()
    finally:
        await store.close()
