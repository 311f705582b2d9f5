"""Engines and proxies as processes, which tests kill."""

import asyncio
import signal
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path

import aiohttp
import orjson
from tests.system.faults.system import Part, free_port


class Fleet:
    """Two engines and two proxies with one store, all of which are restarted when they are killed."""

    def __init__(self, folder: Path, server, prefix: str) -> None:
        ports = [free_port() for _ in range(4)]
        self.urls = [f"http://127.0.0.1:{port}" for port in ports]
        simulate = ["simulate", "--token-delay-s", "0.004", "--listen"]
        self.engines = [
            Part(f"engine{n}", [sys.executable, "-m", "proxy", *simulate, f"127.0.0.1:{ports[n]}"], folder)
            for n in (0, 1)
        ]
        endpoints = [{"url": url, "name": f"engine{n}", "kind": "vllm"} for n, url in enumerate(self.urls[:2])]
        settings = {
            "store": {"url": f"unix:{server.socket}", "prefix": prefix},
            "engines": {"endpoints": endpoints, "max_attempts": 9},
            "agents": {"max_resumes": 99, "resume_timeout_s": 30},
            "log": {"level": "warning"},
        }
        self.proxies, self.kills = [], Counter()
        for n in (2, 3):
            path = folder / f"proxy{n}.yaml"
            path.write_bytes(orjson.dumps({**settings, "listen": f"127.0.0.1:{ports[n]}"}))  # JSON is YAML
            words = [sys.executable, "-m", "proxy", "serve", "--config", str(path)]
            self.proxies.append(Part(f"proxy{n}", words, folder))

    async def start(self, http: aiohttp.ClientSession) -> None:
        await asyncio.gather(*(part.start() for part in (*self.engines, *self.proxies)))
        await asyncio.gather(*(self.answers(http, url) for url in self.urls))

    async def answers(self, http: aiohttp.ClientSession, url: str) -> None:
        async with asyncio.timeout(30):
            while True:
                with suppress(aiohttp.ClientError, OSError):
                    async with http.get(f"{url}/health") as response:
                        if response.status == 200:
                            return
                await asyncio.sleep(0.02)

    async def kill(self, http: aiohttp.ClientSession, part: Part) -> None:
        """Kill a part and start it again."""
        url = self.urls[[*self.engines, *self.proxies].index(part)]
        self.kills[url] += 1
        await part.end(signal.SIGKILL)
        await part.start()
        await self.answers(http, url)
        self.kills[url] += 1

    async def stop(self) -> None:
        for part in (*self.proxies, *self.engines):
            if part.process is not None:
                with suppress(ProcessLookupError):
                    part.process.kill()
                await part.process.wait()
