"""An engine that scores ids with the simulator's distribution, as a fake engine's answer; and rows that it agrees with."""

from collections.abc import Sequence

import orjson
from aiohttp import web

from proxy.simulator.distribution import load_distribution, prefix_of

WINDOW = 64


def score(ids: Sequence[int]) -> list[float | None]:
    """The logprob of each id after those before it."""
    odds = load_distribution().odds
    return [None, *(odds(prefix_of(ids[:place])).logprob(ids[place]) for place in range(1, len(ids)))]


def honest_row(rollout: str = "r1", first: int = 100, sampled: int = 30, **named) -> dict:
    """A row of ten ids that were given and some that were sampled."""
    odds = load_distribution().odds
    ids = [first + 37 * place for place in range(10)]
    for place in range(sampled):
        likely = list(odds(prefix_of(ids)).likely)
        ids.append(likely[place * 7 % len(likely)])
    values = score(ids)
    return {
        "rollout_id": rollout,
        "group_id": None,
        "branch": 0,
        "token_ids": ids,
        "mask": [0] * 10 + [1] * sampled,
        "logprobs": [None] * 10 + values[10:],
        "spans": [{"start": 10, "end": 10 + sampled, "step_id": "S1", "temperature": 1.0, "policy_version": None}],
        **named,
    }


async def scoring_as_vllm(request: web.Request, body: dict) -> web.StreamResponse:
    """What vLLM answers to the requests of an audit."""
    if request.path == "/v1/models":
        return web.json_response({"data": [{"id": "tiny", "max_model_len": WINDOW}]})
    if request.path != "/v1/completions":
        return web.json_response({"error": {"message": "not found"}}, status=404)
    ids = body["prompt"]
    if len(ids) + body["max_tokens"] > WINDOW:
        return web.json_response({"error": {"message": f"maximum context length is {WINDOW}"}}, status=400)
    told = [value and {str(token): {"logprob": value, "rank": 1}} for token, value in zip(ids, score(ids), strict=True)]
    return web.Response(body=orjson.dumps({"choices": [{"text": "", "prompt_logprobs": told}]}))


async def scoring_as_sglang(request: web.Request, body: dict) -> web.StreamResponse:
    """What SGLang answers to them."""
    if request.path == "/get_server_info":
        return web.json_response({"version": "0.5.23"})
    if request.path != "/generate":
        return web.json_response({"error": {"message": "not found"}}, status=404)
    assert 0 == body["logprob_start_len"]
    told = [[value, token, None] for token, value in zip(body["input_ids"], score(body["input_ids"]), strict=True)]
    return web.Response(body=orjson.dumps({"text": "", "meta_info": {"input_token_logprobs": told}}))
