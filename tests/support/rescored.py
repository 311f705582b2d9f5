"""Proxies with scorers: the simulator as the policy, and fake teachers with logprobs that a known difference lowers."""

import asyncio
from collections.abc import Iterable

import orjson
from aiohttp import web
from tests.support.scoring import score

from proxy.simulator.model import load_model

BELOW = 0.5  # nats by which a teacher's logprobs are below the simulator's


class Teacher:
    """What a fake engine does as a teacher: it scores ids with the simulator's model, less `below`.

    `texts`: its text of an id, in place of the simulator's; None: it has no /detokenize. `failing`: the status of its
    scoring requests; requests with more ids than `longest` fail as well. `together`: they wait for each other. `adapters`:
    entries of its model list.
    """

    def __init__(self, below: float = BELOW) -> None:
        self.below = below
        self.window = 32_768
        self.texts: dict[int, str] | None = {}
        self.failing: int | None = None
        self.longest = 10**9
        self.reached = asyncio.Event()
        self.scored: list[list[int]] = []
        self.at_once = self.most_at_once = 0
        self.together: asyncio.Barrier | None = None
        self.adapters: list[dict] = []

    async def __call__(self, request: web.Request, body: dict) -> web.StreamResponse:
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": "big", "max_model_len": self.window}, *self.adapters]})
        if request.path == "/detokenize" and self.texts is not None:
            ids = body["tokens"]
            own = load_model().tokenizer.decode(ids)
            return web.json_response({"prompt": "".join(self.texts.get(token, own) for token in ids)})
        if request.path != "/v1/completions":
            return web.json_response({"error": {"message": "not found"}}, status=404)
        self.reached.set()
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            if self.together is not None:
                await self.together.wait()
            if self.failing is not None or len(body["prompt"]) > self.longest:
                return web.json_response({"error": {"message": "overloaded"}}, status=self.failing or 503)
            return self._scores(body)
        finally:
            self.at_once -= 1

    def _scores(self, body: dict) -> web.Response:
        ids, count = body["prompt"], body["prompt_logprobs"]
        self.scored.append(ids)
        entries = [None, *map(self._entry, ids[1:], score(ids)[1:], [count] * len(ids))]
        return web.Response(body=orjson.dumps({"choices": [{"text": "", "prompt_logprobs": entries}]}))

    def _entry(self, token: int, logprob: float, count: int) -> dict:
        likely = {str(1000 + rank): {"logprob": -0.25 * rank, "rank": rank} for rank in range(1, count + 1)}
        return {str(token): {"logprob": logprob - self.below, "rank": 9}, **likely}


def trained(values: Iterable, mask: Iterable[int]) -> list:
    """Return the values where the mask is 1."""
    return [value for value, bit in zip(values, mask, strict=True) if bit]


async def record_group(proxy, name: str, *rewards: float | None) -> list[str]:
    """Record a group of finished rollouts with different tokens, the later ones with more turns."""
    opened = await proxy.post("/groups", {"group_id": name, "size": len(rewards)})
    members = [rollout["rollout_id"] for rollout in opened.json["rollouts"]]
    for number, (member, reward) in enumerate(zip(members, rewards, strict=True)):
        messages = []
        for turn in range(1 + 2 * number):
            messages.append({"role": "user", "content": f"{name} {turn}"})
            messages.append((await proxy.chat(member, *messages)).message)
        await proxy.finish(member, reward=reward)
    return members


async def length_of(proxy, rollout: str) -> int:
    """Return the number of tokens of a rollout's only row."""
    (row,) = (await proxy.get(f"/rollouts/{rollout}/export")).json["rows"]
    return len(row["token_ids"])
