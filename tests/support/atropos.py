"""Atropos' own trainer service, as its package ships it (`make install` puts it into .trainers), run as a process."""

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
    """The service, listening: its URL. Of what its package depends on, it needs fastapi and uvicorn alone."""
    assert (TRAINERS / "atroposlib").is_dir(), "atroposlib is not in .trainers: make install"
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        place = f"http://127.0.0.1:{held.getsockname()[1]}"
        words = ("-m", "uvicorn", "atroposlib.api:app", "--fd", str(held.fileno()))
        environment = {**os.environ, "PYTHONPATH": str(TRAINERS)}
        run = await asyncio.create_subprocess_exec(sys.executable, *words, pass_fds=(held.fileno(),), env=environment)
    try:
        # The socket takes connections already: the first answer comes when the service is up.
        async with aiohttp.ClientSession() as http, http.get(place + "/") as answer:
            assert 200 == answer.status
        yield place
    finally:
        run.terminate()
        await run.wait()
