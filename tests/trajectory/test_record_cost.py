"""Bytes of a growing rollout's records, and the time to read them."""

import random
from array import array

from proxy.trajectory.arrays import pack_ids
from proxy.trajectory.codec import encode
from proxy.trajectory.step import Choice, EngineFacts, Step, Timing


def a_step(request, prompt, choices=(), response=None):
    return Step(
        step_id="01JABCDEFGHJKMNPQRSTVWXYZ0",
        rollout_id="train/epoch-3/task-00417/sample-5",
        dialect="chat",
        endpoint="/v1/chat/completions",
        engine=EngineFacts("engine-0", "vllm", "0.32.0", "http://engine-0:8000"),
        model_asked="policy",
        model_served="policy",
        request=request,
        sent={"set": {"logprobs": True, "return_token_ids": True}, "unset": []},
        response=response,
        prompts=(pack_ids(prompt),),
        choices=choices,
        usage={"prompt_tokens": len(prompt), "completion_tokens": 200, "total_tokens": len(prompt) + 200},
        sampling={"temperature": 1.0, "top_p": 1.0, "logprobs_mode": "raw_logprobs"},
        timing=Timing(1795229447.25, 1795229447.26, 1795229447.3, 1795229448.4, 1795229448.5),
        status="complete",
        extra={"request_key": "0123456789abcdef0123456789abcdef"},
    )


def growing_rollout(turns, tokens):
    """Return the steps of a rollout that grows to this many tokens, with ids and texts as random as real ones."""
    draw = random.Random(3)
    words = ["".join(draw.choices("etaoinshrdlucmf", k=draw.randint(1, 7))) for _ in range(5000)]
    spread = [1 / (rank + 10) for rank in range(5000)]

    def text(count):
        return " ".join(draw.choices(words, spread, k=count))

    messages = [{"role": "system", "content": text(100)}]
    tools = [{"type": "function", "function": {"name": f"tool_{i}", "description": text(60)}} for i in range(5)]
    ids = draw.sample(range(150_000), 500)
    per_turn = (tokens - len(ids)) // turns
    common = draw.sample(range(150_000), 5000)
    for turn in range(turns):
        seen, reply = per_turn * 2 // 3, per_turn - per_turn * 2 // 3
        messages.append({"role": "tool" if turn else "user", "content": text(seen * 3 // 4)})
        ids = ids + draw.choices(common, spread, k=seen)
        sampled = draw.choices(common, spread, k=reply)
        logprobs = array("f", [-draw.expovariate(2) for _ in range(reply)])
        response = {"role": "assistant", "content": text(reply * 3 // 4)}
        yield a_step(
            {"model": "policy", "messages": list(messages), "tools": tools, "temperature": 1.0},
            ids,
            (Choice(0, pack_ids(sampled), logprobs, "stop"),),
            {"id": f"chatcmpl-{turn}", "choices": [{"index": 0, "message": response, "finish_reason": "stop"}]},
        )
        messages.append(response)
        ids = ids + sampled


def stored_bytes(turns, tokens):
    """Return the size of the records, blocks and block names of such a rollout."""
    total, known, names = 0, set(), set()
    for step in growing_rollout(turns, tokens):
        written = encode(step, known)
        known = set(written.names)
        new = written.blocks.keys() - names
        names |= new
        total += len(written.record) + sum(len(name) + len(written.blocks[name]) for name in new)
    return total


def test_a_growing_rollout_takes_at_most_13_bytes_per_token():
    """32k tokens in 50 turns, and four times as much in 200."""
    small, large = stored_bytes(50, 32_768), stored_bytes(200, 4 * 32_768)

    assert small / 32_768 <= 13  # the store itself may add 3 bytes per token
    assert large < 4.4 * small


def test_a_prompt_of_token_ids_is_stored_once():
    """The request's ids and those in the response are the same blocks."""
    ids = list(range(20_000))
    alone = encode(a_step({}, ids))
    twice = encode(a_step({"prompt": ids}, ids))

    assert alone.blocks == twice.blocks
    assert len(twice.record) < len(alone.record) + 100
