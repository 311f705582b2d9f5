"""The engine; test_server.py tests it from the clients' side."""

from proxy.simulator.options import Options

PROMPT = "Return the"


async def test_the_engines_seed_is_used_without_a_requests_seed(start):
    """Requests without a seed give the same ids on an engine with a seed, and different ids on one without."""
    seeded, free = await start(Options(seed=3)), await start(Options())
    body = {"max_tokens": 30, "return_token_ids": True}
    same = [(await seeded.completion(PROMPT, **body))["choices"][0]["token_ids"] for _ in range(3)]
    different = [(await free.completion(PROMPT, **body))["choices"][0]["token_ids"] for _ in range(3)]

    assert same[0] == same[1] == same[2]
    assert len(set(map(tuple, different))) > 1
