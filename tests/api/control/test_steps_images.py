"""Images of calls: recorded in every dialect, stored once, aligned with the prompt, and returned by their names."""

import random
from io import BytesIO

import orjson
import pytest
from tests.support.fakes import proxying
from tests.support.pictures import BLUE, RED, data_of, image, png, text, url_of
from tests.support.session import Options
from tests.support.stored import stored_steps

from proxy.api.control.steps import type_of
from proxy.protocols.plan import names_in
from proxy.server.listener import simulating
from proxy.trajectory.images import placed

ONE, TWO = png(RED), png(BLUE)
ASK = {"role": "user", "content": [text("What is this?"), image(url_of(ONE))]}
WEB = "https://example.com/a.png"


@pytest.fixture
def engine_options():
    return Options(seed=3, image_tokens=4)


JSON = {"Content-Type": "application/json"}


def user(*parts):
    return {"role": "user", "content": list(parts)}


async def step_of(proxy, reply):
    return (await proxy.get(f"/rollouts/r1/steps/{reply.step_id}")).json


async def export(proxy, form="sequences", **query):
    return await proxy.get(f"/rollouts/r1/export?format={form}", params=query)


async def test_the_images_of_a_call_are_returned_byte_for_byte(proxy):
    """The type follows from the bytes; a browser neither guesses another one nor runs anything."""
    reply = await proxy.chat("r1", user(image(url_of(ONE, "text/html")), image(url_of(TWO))), max_tokens=3)
    names = (await step_of(proxy, reply))["extra"]["images"]["ids"]
    found = [await proxy.get(f"/rollouts/r1/images/{name}") for name in names]

    assert [(response.status, response.text) for response in found] == [(200, ONE), (200, TWO)]
    headers = found[0].headers
    assert (headers["Content-Type"], headers["X-Content-Type-Options"]) == ("image/png", "nosniff")
    assert headers["Content-Security-Policy"] == "default-src 'none'; sandbox"
    assert "Content-Disposition" not in headers


async def test_bytes_that_are_no_image_are_a_download(proxy):
    reply = await proxy.chat("r1", user(image(url_of(b"<script>alert(1)</script>", "image/svg+xml"))), max_tokens=3)
    (name,) = (await step_of(proxy, reply))["extra"]["images"]["ids"]
    response = await proxy.get(f"/rollouts/r1/images/{name}")

    assert (response.status, response.text) == (200, b"<script>alert(1)</script>")
    assert (
        response.headers["Content-Type"],
        response.headers["Content-Disposition"],
    ) == ("application/octet-stream", "attachment")


async def test_data_that_is_not_base64_is_422(proxy):
    """The engine rejects it; the step has the error."""
    url = "data:image/png;base64,@@@"
    await proxy.post("/rollouts/r1/v1/chat/completions", {"model": "m", "messages": [user(image(url))]})
    (step,) = await proxy.steps("r1")
    response = await proxy.get(f"/rollouts/r1/images/{step['extra']['images']['ids'][0]}")

    assert (step["status"], step["request"]["messages"][0]["content"][0]["image_url"]["url"]) == ("error", url)
    assert (response.status, response.json["error"]["param"]) == (422, "image")


@pytest.mark.parametrize("name", ["0" * 32, "x", "A" * 32, "%00", "message"])
async def test_an_unknown_image_is_404(proxy, store, name):
    """Also the name of a block that is no image."""
    await proxy.chat("r1", ASK, max_tokens=3)
    if name == "message":
        images = set(names_in([ASK]))
        name = next(block.hex() for block in await store.blocks("r1") if block.hex() not in images)

    assert (await proxy.get(f"/rollouts/r1/images/{name}")).status == 404
    assert (await proxy.get(f"/rollouts/none/images/{names_in([ASK])[0]}")).status == 404


async def test_images_require_a_control_key(store, http, engine_options):
    keys = {"control": {"api_keys": ["secret"]}}
    async with simulating("127.0.0.1:0", engine_options) as engine, proxying(engine, store, **keys) as served:
        body = {"model": "m", "messages": [ASK], "max_tokens": 2}
        async with http.post(f"{served.url}/rollouts/r1/v1/chat/completions", json=body) as response:
            assert response.status == 200
        url = f"{served.url}/rollouts/r1/images/{names_in([ASK])[0]}"
        for headers, status in (({}, 401), ({"Authorization": "Bearer secret"}, 200)):
            async with http.get(url, headers=headers) as response:
                assert status == response.status


async def test_an_image_in_30_calls_is_stored_once(proxy, store):
    """Its data takes the memory of its bytes: base64 is compressed to them."""
    content = random.Random(7).randbytes(200_000)
    messages = [user(text("Look."), image(url_of(content)))]
    for turn in range(30):
        body = BytesIO(orjson.dumps({"model": "policy", "messages": messages, "max_tokens": 2}))
        reply = await proxy.call("POST", "/rollouts/r1/v1/chat/completions", data=body, headers=JSON)
        # The agent shows the same screenshot again and again, as a tool result and as a user's image.
        more = [text(f"Turn {turn}")] + ([image(url_of(content))] if turn % 10 == 0 else [])
        messages += [reply.json["choices"][0]["message"], user(*more)]
    sizes = sorted(len(block) for block in (await store.blocks("r1")).values())
    records = await store.read("r1", 0, 100)

    assert 199_000 < sizes[-1] < 205_000
    assert sum(sizes[:-1]) + sum(map(len, records)) < 100_000
    last = (await stored_steps(store, "r1"))[-1]
    assert [url_of(content)] * 3 == [part["image_url"]["url"] for part in _images(last.request["messages"])][:3]


def _images(messages):
    parts = [part for message in messages if isinstance(message["content"], list) for part in message["content"]]
    return [part for part in parts if "image_url" in part]


MESSAGES = {
    "model": "m",
    "max_tokens": 3,
    "messages": [
        user(text("Take a screenshot.")),
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "look", "input": {}}]},
        user(
            {
                "type": "tool_result",
                "tool_use_id": "t1",
                "content": [
                    text("Done."),
                    {
                        "type": "image",
                        "source": {"type": "base64", "media_type": "image/png", "data": data_of(ONE * 40)},
                    },
                ],
            },
            {"type": "image", "source": {"type": "url", "url": WEB}},
        ),
    ],
}
RESPONSES = {
    "model": "m",
    "max_output_tokens": 3,
    "input": [
        user({"type": "input_text", "text": "Compare."}, {"type": "input_image", "image_url": url_of(ONE * 40)}),
        user({"type": "input_image", "image_url": WEB}),
    ],
}


FOR_URLS = data_of(ONE * 40).replace("+", "-").replace("/", "_")  # as Google's Python SDK writes it
GEMINI = {
    "contents": [
        {"role": "user", "parts": [{"inlineData": {"mimeType": "image/png", "data": FOR_URLS}}]},
        {"role": "user", "parts": [{"fileData": {"mimeType": "image/png", "fileUri": WEB}}]},
    ],
    "generationConfig": {"maxOutputTokens": 3},
}
CALLS = [("v1/messages", MESSAGES), ("v1/responses", RESPONSES), ("v1beta/models/m:generateContent", GEMINI)]


@pytest.mark.parametrize(("path", "body"), CALLS)
async def test_translated_dialects_have_the_same_images(proxy, store, path, body):
    """The data is stored once, although the request and the translated messages have it; an image by URL is its URL."""
    response = await proxy.post(f"/rollouts/r1/{path}", body)
    (step,) = await proxy.steps("r1")
    (recorded,) = await stored_steps(store, "r1")
    name, web = step["extra"]["images"]["ids"]
    records = await store.read("r1", 0, 9)
    stored = [*(await store.blocks("r1")).values(), *records]

    assert response.status == 200, response.text
    of_path = {"model": "m"} | ({"stream": False} if body is GEMINI else {})
    assert recorded.request == {**of_path, **body}
    assert (web, (await proxy.get(f"/rollouts/r1/images/{name}")).text) == (WEB, ONE * 40)
    assert all(len(block) < len(data_of(ONE * 40)) for block in stored)
    assert [row.image for row in placed(recorded, recorded.prompts[0]) if row.start is not None] == [name, web]


async def test_rows_name_the_places_of_images_in_order(proxy):
    """Each repeated image and each image of a tool result has its own place; http URLs are not fetched."""
    first = await proxy.chat("r1", ASK, max_tokens=3)
    tool = {"role": "tool", "tool_call_id": "c", "content": [text("Done."), image(url_of(TWO)), image(url_of(ONE))]}
    second = [ASK, first.message, tool, user(image(WEB))]
    last = await proxy.chat("r1", *second, max_tokens=3)
    step = await step_of(proxy, last)
    (row,) = (await export(proxy)).json["rows"]
    one, two = names_in([ASK])[0], names_in([tool])[0]

    assert [place["image"] for place in row["images"]] == [one, two, one, WEB]
    assert step["fidelity"]["exact"]
    for place in row["images"]:
        run = row["token_ids"][place["start"] : place["start"] + place["length"]]
        assert {step["extra"]["images"]["token"]} == set(run)
        assert 4 <= len(run) < 8
    assert step["extra"]["continuation"]["reason"] == "content"


async def test_rows_of_formats_with_a_place_have_references(proxy):
    """Each is a path of the control API, or the URL that the engine fetched; formats without a place refuse the rollout."""
    await proxy.chat("r1", user(image(url_of(ONE)), image(WEB)), max_tokens=3)
    await proxy.patch("/rollouts/r1", {"reward": 1.0, "metadata": {"env_name": "x"}, "advantages": 0.5})
    path = f"/rollouts/r1/images/{names_in([ASK])[0]}"
    found = {form: (await export(proxy, form)).json for form in ("verl", "trl", "slime", "openrlhf", "scored_data")}
    refused = await export(proxy, "tinker")

    (verl,), (slime,), (openrlhf,) = (found[form]["rows"] for form in ("verl", "slime", "openrlhf"))
    assert verl["multi_modal_data"] == slime["multimodal_inputs"] == {"images": [path, WEB]}
    assert openrlhf["images"] == [path, WEB]
    assert [found[form]["rows"][0]["images"] for form in ("trl", "scored_data")] == [[[path, WEB]]] * 2
    assert (await proxy.get(path)).text == ONE
    assert refused.status == 409
    assert "Format 'tinker' has no place for images; rollout 'r1' has 2." in refused.json["error"]["message"]


async def test_another_image_in_the_same_place_is_another_branch(proxy):
    """The ids of the prompts are equal."""
    first = await proxy.chat("r1", ASK, max_tokens=3)
    second = user(text("What is this?"), image(url_of(TWO)))
    await proxy.chat("r1", second, first.message, user(text("Again?")), max_tokens=3)

    assert len((await export(proxy)).json["rows"]) == 2


class TestEngineWithoutExpandedIds:
    """SGLang 0.5.23 returns the ids before images are inserted."""

    @pytest.fixture
    def engine_options(self):
        return Options(shape="sglang", seed=3, image_tokens=4)

    async def test_its_steps_are_flagged(self, proxy):
        await proxy.chat("r1", ASK, max_tokens=3)
        flagged = (await export(proxy, include="flagged")).json["rows"]

        assert (await export(proxy)).json["rows"] == []
        assert [row["problems"] for row in flagged] == [["prompt_count"]]


async def test_a_placeholder_in_a_text_is_flagged(proxy):
    reply = await proxy.chat("r1", user(text("A <|image_pad|>!"), image(url_of(ONE))), max_tokens=3)
    step = await step_of(proxy, reply)

    assert step["fidelity"]["problems"] == ["image_count"]
    assert (await export(proxy)).json["rows"] == []
    (row,) = (await export(proxy, include="flagged")).json["rows"]
    assert [{"image": names_in([ASK])[0], "start": None, "length": None}] == row["images"]


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b"\x89PNG\r\n\x1a\n", "image/png"),
        (b"\xff\xd8\xff\xe0", "image/jpeg"),
        (b"GIF89a", "image/gif"),
        (b"RIFF1234WEBP", "image/webp"),
        (b"1234ftypavif", "image/avif"),
        (b"<svg>", "application/octet-stream"),
        (b"", "application/octet-stream"),
    ],
)
def test_the_type_of_an_image_follows_from_its_first_bytes(body, kind):
    assert kind == type_of(body)
