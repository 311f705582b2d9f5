"""Agents that make streamed and unstreamed calls with unique IDs, abandon some, and note what each client received."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from random import Random

import aiohttp
import orjson

MODES = ["whole"] * 20 + ["cut"] * 3 + ["garbage", "refuse", "hang"]


class Agents:
    """Agents that make calls until they are stopped. `ended` maps each call to its step ID once the client saw its end."""

    def __init__(self, url: str, dice: Random, count: int, *, pause_s: float = 0, modes: Sequence[str] = MODES) -> None:
        self._url, self._dice, self._pause_s, self._modes = url, dice, pause_s, modes
        self.ended: dict[str, str] = {}
        self.calls = 0
        self.statuses: dict[int, int] = {}
        self._stopped = asyncio.Event()
        self._tasks = [asyncio.create_task(self._agent(number)) for number in range(count)]

    async def stop(self) -> None:
        self._stopped.set()
        await asyncio.gather(*self._tasks)

    async def _agent(self, number: int) -> None:
        turn = 0
        timeout = aiohttp.ClientTimeout(total=20)
        async with aiohttp.ClientSession(timeout=timeout) as http:
            while not self._stopped.is_set():
                turn += 1
                self.calls += 1
                try:
                    await self._call(http, f"a{number}-{turn // 20}", f"u{number}.{turn}")
                except (aiohttp.ClientError, OSError, TimeoutError):
                    await asyncio.sleep(0.05)
                await asyncio.sleep(self._pause_s)

    async def _call(self, http: aiohttp.ClientSession, rollout: str, uid: str) -> None:
        dice, stream = self._dice, self._dice.random() < 0.6
        content = f"{uid} {dice.choice(self._modes)} {dice.randrange(14)}"
        leaves_after = dice.choice((0, 1, 300, 2000)) if dice.random() < 0.1 else None
        body = {"model": "m", "messages": [{"role": "user", "content": content}], "stream": stream}
        if leaves_after == 0:
            call = asyncio.ensure_future(http.post(f"{self._url}/rollouts/{rollout}/v1/chat/completions", json=body))
            await asyncio.wait([call], timeout=dice.random() / 50)
            if call.done() and call.exception() is None:
                call.result().close()
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            return
        async with http.post(f"{self._url}/rollouts/{rollout}/v1/chat/completions", json=body) as response:
            self.statuses[response.status] = self.statuses.get(response.status, 0) + 1
            text = b""
            async for read in response.content.iter_any():
                text += read
                if leaves_after is not None and len(text) >= leaves_after:
                    response.close()
                    return
                if stream and text.endswith(b"data: [DONE]\n\n"):
                    self._saw_the_end(uid, response)  # an agent stops reading
        if response.status == 200 and not stream:
            with suppress(orjson.JSONDecodeError):  # a garbled response cannot be parsed
                orjson.loads(text)
                self._saw_the_end(uid, response)
        if response.status != 200:
            await asyncio.sleep(0.05)

    def _saw_the_end(self, uid: str, response: aiohttp.ClientResponse) -> None:
        self.ended[uid] = response.headers["X-Step-Id"]
