"""The pace of calls; test_server has the rest, as clients meet it."""

from proxy.simulator.options import Options

PROMPT = "Return the"


async def test_an_engines_seed_stands_in_for_a_requests(start):
    """Requests without a seed are all alike on an engine that has one, and not on one that has none."""
    seeded, free = await start(Options(seed=3)), await start(Options())
    body = {"max_tokens": 30, "return_token_ids": True}
    alike = [(await seeded.completion(PROMPT, **body))["choices"][0]["token_ids"] for _ in range(3)]
    other = [(await free.completion(PROMPT, **body))["choices"][0]["token_ids"] for _ in range(3)]

    assert alike[0] == alike[1] == alike[2]
    assert len(set(map(tuple, other))) > 1
