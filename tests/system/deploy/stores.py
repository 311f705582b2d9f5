"""A real valkey-server with a deployed configuration, and what an operator is told of it.

Holds its start and its end, and one question.
"""

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from storage import open_store
from storage.options import StoreOptions


@contextmanager
def valkey(command: Sequence[str], **environment: str) -> Iterator[bytes]:
    """The server of this command, once it answers: its command line, as every program of the machine reads it."""
    server = subprocess.Popen([*command], stdout=subprocess.PIPE, text=True, env=environment or None)
    try:
        assert any("Ready to accept connections" in line for line in server.stdout)
        yield Path(f"/proc/{server.pid}/cmdline").read_bytes()
    finally:
        server.terminate()
        server.stdout.close()
        assert server.wait(20) == 0


async def facts_of(url: str, password: str | None) -> dict[str, Any]:
    """What an operator is told of a store that has to have each step on disk."""
    store = await open_store(url, StoreOptions(durability="fsync", password=password))
    try:
        return await store.facts()
    finally:
        await store.close()
