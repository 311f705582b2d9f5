"""Images in the prompts of the simulated engine."""

from tests.support.pictures import BLUE, RED, image, png, text, url_of

from proxy.simulator.options import Options
from proxy.simulator.prompts import PLACEHOLDER, expanded, with_placeholders

ASK = [{"role": "user", "content": [text("a"), image(url_of(png(RED))), text("b"), image(url_of(png(BLUE)))]}]
IDS = {"return_token_ids": True, "max_tokens": 2, "seed": 1}


async def test_a_prompt_repeats_the_placeholder_for_each_image(start):
    """At least as often as configured, and depending on the image; usage counts all of them."""
    client = await start(Options(image_tokens=4))
    body = await client.chat(ASK, **IDS)
    ids = body["prompt_token_ids"]
    token = (await client("/tokenize", prompt=PLACEHOLDER, add_special_tokens=False))["tokens"]
    lengths = [len(part) for part in "".join("x" if i == token[0] else " " for i in ids).split()]

    assert 1 == len(token)
    assert 2 == len(lengths)
    assert all(4 <= length < 8 for length in lengths)
    assert len(ids) == body["usage"]["prompt_tokens"]


async def test_sglang_returns_one_placeholder_for_each_image(start):
    """Its usage counts what the model saw."""
    client = await start(Options(shape="sglang", image_tokens=4))
    body = await client.chat(ASK, **IDS, return_prompt_token_ids=True)
    ids = body["choices"][0]["prompt_token_ids"]

    assert 2 == ids.count(max(ids))
    assert len(ids) + 2 * 3 <= body["usage"]["prompt_tokens"]


async def test_invalid_base64_and_an_image_without_a_url_are_400(start):
    client = await start(Options(image_tokens=4))
    for url in ("data:image/png;base64,@@@", None):
        body = {"messages": [{"role": "user", "content": [image(url)]}]}
        async with client.client.post("/v1/chat/completions", json=body) as response:
            assert 400 == response.status


def test_only_messages_with_images_are_changed():
    plain = {"role": "user", "content": "a"}
    messages, urls = with_placeholders([plain, {"role": "tool", "content": [image("https://a/b"), text("c")]}])

    assert plain is messages[0]
    assert [text(PLACEHOLDER), text("c")] == messages[1]["content"]
    assert ["https://a/b"] == urls


def test_placeholders_beyond_the_images_are_not_repeated():
    assert [1, 9, 9, 2, 9] == expanded([1, 9, 2, 9], 9, ["b"], 1)
