"""Atropos' own trainer service from its package (in .trainers, by `make install`), run as a process."""

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

TRAINERS = Path(__file__).parent.parent.parent / ".trainers"


@asynccontextmanager
async def atropos_service() -> AsyncIterator[str]:
    """Start the service and return its URL. Of its package's dependencies it needs only fastapi and uvicorn."""
    assert (TRAINERS / "atroposlib").is_dir(), "atroposlib is not in .trainers: run make install"
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        url = f"http://127.0.0.1:{held.getsockname()[1]}"
        words = ("-m", "uvicorn", "atroposlib.api:app", "--fd", str(held.fileno()))
        environment = {**os.environ, "PYTHONPATH": str(TRAINERS)}
        run = await asyncio.create_subprocess_exec(sys.executable, *words, pass_fds=(held.fileno(),), env=environment)
    try:
        # The socket accepts connections already: the first response comes once the service runs.
        async with aiohttp.ClientSession() as http, http.get(url + "/") as response:
            assert response.status == 200
        yield url
    finally:
        run.terminate()
        await run.wait()
