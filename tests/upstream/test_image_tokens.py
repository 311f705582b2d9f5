"""The placeholder tokens of images: configured, or looked up once."""

from aiohttp import web
from tests.support.fakes import proxying
from tests.support.pictures import RED, image, png, url_of
from tests.support.stored import stored_steps

BODY = {"model": "m", "messages": [{"role": "user", "content": [image(url_of(png(RED)))]}]}
IDS = {"<image>": [9], "<|image|>": [8]}
PROMPT = [1, 9, 9, 2]


def answering(engine, looked_up, *, tokenizes=True, prompt=PROMPT):
    """Make the engine return this prompt, and the ids of the names that are single tokens."""

    async def respond(request, body):
        if request.path == "/tokenize":
            looked_up.append(body["prompt"])
            if not tokenizes:
                return web.json_response({"error": "no"}, status=404)
            return web.json_response({"tokens": IDS.get(body["prompt"], [1, 2]), "count": 1, "max_model_len": 99})
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": "a"},
            "finish_reason": "stop",
            "token_ids": [5],
        }
        choice |= {"logprobs": {"content": [{"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []}]}}
        usage = {"prompt_tokens": len(prompt), "completion_tokens": 1, "total_tokens": len(prompt) + 1}
        return web.json_response(
            {
                "id": "c",
                "object": "chat.completion",
                "model": "m",
                "choices": [choice],
                "usage": usage,
                "prompt_token_ids": prompt,
            }
        )

    engine.respond = respond


async def recorded(engine, store, http, calls=1, **endpoint):
    engines = {"endpoints": [{"url": engine.url, "kind": "vllm", **endpoint}]}
    async with proxying(None, store, engines=engines, continuation={"mode": "off"}) as served:
        for _ in range(calls):
            async with http.post(f"{served.url}/rollouts/r1/v1/chat/completions", json=BODY) as response:
                assert 200 == response.status
    return [(step.extra["images"]["token"], step.problems) for step in await stored_steps(store, "r1")]


async def test_placeholders_are_looked_up_by_name_once(engine, store, http):
    looked_up: list[str] = []
    answering(engine, looked_up)

    assert [(9, ())] * 2 == await recorded(engine, store, http, calls=2)
    assert {"<image>", "<|image_pad|>"} <= set(looked_up)
    assert len(set(looked_up)) == len(looked_up)


async def test_configured_placeholders_are_not_looked_up(engine, store, http):
    looked_up: list[str] = []
    answering(engine, looked_up, prompt=[1, 77, 2])

    assert [(77, ())] == await recorded(engine, store, http, image_tokens=[77])
    assert [] == looked_up


async def test_an_empty_list_disables_the_check(engine, store, http):
    """For models whose images have several runs."""
    answering(engine, [], prompt=[1, 9, 2, 9])

    assert [(None, ())] == await recorded(engine, store, http, image_tokens=[])


async def test_another_number_of_placeholders_than_images_is_a_problem(engine, store, http):
    answering(engine, [], prompt=[1, 9, 2, 9])

    assert [(None, ("image_count",))] == await recorded(engine, store, http)


async def test_an_engine_that_does_not_tokenize_has_no_placeholder(engine, store, http):
    """It is not tried again with each call."""
    looked_up: list[str] = []
    answering(engine, looked_up, tokenizes=False)

    assert [(None, ())] * 2 == await recorded(engine, store, http, calls=2)
    assert len(set(looked_up)) == len(looked_up)
