"""A fake engine that scores ids with the simulator's model, and rows with exactly its logprobs."""

from collections.abc import Sequence
from math import exp, log

import orjson
from aiohttp import web

from proxy.simulator.sampler import load_next_token_model, prefix_from

WINDOW = 64


def score(ids: Sequence[int]) -> list[float | None]:
    """The logprob of each id after the ids before it; None for the first."""
    model = load_next_token_model()
    return [None, *(model.distribution(prefix_from(ids[:i])).logprob(ids[i]) for i in range(1, len(ids)))]


def likely(ids: Sequence[int], count: int) -> list[dict[int, float]]:
    """The most likely tokens at each position with their logprobs; none at the first."""
    model = load_next_token_model()
    found: list[dict[int, float]] = [{}]
    for i in range(1, len(ids)):
        distribution = model.distribution(prefix_from(ids[:i]))
        found.append({token: distribution.logprob(token) for token in distribution.top(count)})
    return found


def masked_row(temperature: float = 0.7, kept: int = 5, rollout: str = "r1") -> dict:
    """A row of tokens that were sampled from the `kept` most likely ones, with its masks and the logprobs over these."""
    row = honest_row(rollout)
    ids = row["token_ids"]
    masks, logprobs = [[]] * 10, [None] * 10
    model = load_next_token_model()
    for i in range(10, len(ids)):
        distribution = model.distribution(prefix_from(ids[:i]))
        mask = distribution.top(kept)
        ids[i] = mask[i % kept]
        total = log(sum(exp(distribution.logprob(token) / temperature) for token in mask))
        masks.append(mask)
        logprobs.append(distribution.logprob(ids[i]) / temperature - total)
    span = {**row["spans"][0], "temperature": temperature, "logprobs_over": "mask"}
    return {**row, "logprobs": logprobs, "spans": [span], "sampling_mask": masks}


def honest_row(rollout: str = "r1", first: int = 100, sampled: int = 30, **fields) -> dict:
    """A row of ten prompt ids and `sampled` completion ids, with the logprobs of `score`."""
    model = load_next_token_model()
    ids = [first + 37 * i for i in range(10)]
    for i in range(sampled):
        likely = list(model.distribution(prefix_from(ids)).likely)
        ids.append(likely[i * 7 % len(likely)])
    logprobs = score(ids)
    return {
        "rollout_id": rollout,
        "group_id": None,
        "branch": 0,
        "token_ids": ids,
        "mask": [0] * 10 + [1] * sampled,
        "logprobs": [None] * 10 + logprobs[10:],
        "spans": [{"start": 10, "end": 10 + sampled, "step_id": "S1", "temperature": 1.0, "policy_version": None}],
        **fields,
    }


async def scoring_as_vllm(request: web.Request, body: dict) -> web.StreamResponse:
    """vLLM's responses to the requests of an audit."""
    if request.path == "/v1/models":
        return web.json_response({"data": [{"id": "tiny", "max_model_len": WINDOW}]})
    if request.path != "/v1/completions":
        return web.json_response({"error": {"message": "not found"}}, status=404)
    ids = body["prompt"]
    if len(ids) + body["max_tokens"] > WINDOW:
        return web.json_response({"error": {"message": f"maximum context length is {WINDOW}"}}, status=400)
    top = likely(ids, body["prompt_logprobs"])
    entries = [
        logprob and {str(i): {"logprob": value, "rank": 1} for i, value in {**others, token: logprob}.items()}
        for token, logprob, others in zip(ids, score(ids), top, strict=True)
    ]
    return web.Response(body=orjson.dumps({"choices": [{"text": "", "prompt_logprobs": entries}]}))


async def scoring_as_sglang(request: web.Request, body: dict) -> web.StreamResponse:
    """SGLang's responses to the requests of an audit."""
    if request.path == "/get_server_info":
        return web.json_response({"version": "0.5.23"})
    if request.path != "/generate":
        return web.json_response({"error": {"message": "not found"}}, status=404)
    assert body["logprob_start_len"] == 0
    ids = body["input_ids"]
    entries = [[logprob, i, None] for i, logprob in zip(ids, score(ids), strict=True)]
    return web.Response(body=orjson.dumps({"text": "", "meta_info": {"input_token_logprobs": entries}}))
