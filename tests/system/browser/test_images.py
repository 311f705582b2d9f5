"""Images beside their messages: drawn from their route, which is the only place that the page loads images from."""

from playwright.async_api import expect
from tests.support.fakes import settings_for
from tests.support.pictures import BLUE, RED, image, png, text, url_of

from proxy.server.listener import running, simulating
from proxy.simulator.options import Options

PIXEL = "(canvas) => [...canvas.getContext('2d').getImageData(1, 1, 1, 1).data].join(' ')"


async def test_the_images_of_a_message_are_drawn_in_its_place(contents, open_page):
    """An image by URL is its URL, and bytes that are no image are a text."""
    parts = [text("Compare."), image(url_of(png(RED))), image("https://example.com/a.png"), image(url_of(b"no image"))]
    tool = {"role": "tool", "tool_call_id": "c", "content": [image(url_of(png(BLUE)))]}
    messages = [{"role": "user", "content": parts}, tool]
    http = contents.http
    body = {"model": "m", "messages": messages, "max_tokens": 4}
    async with (
        simulating("127.0.0.1:0", Options(image_tokens=4)) as engine,
        running(settings_for(engine), contents.store) as served,
    ):
        async with http.post(f"{served.url}/rollouts/pictures/v1/chat/completions", json=body) as response:
            assert response.status == 200
        async with http.get(f"{served.url}/rollouts/pictures/steps") as response:
            (step,) = (await response.json())["steps"]
        page = await open_page(f"{served.url}/ui#/rollout/pictures/step/{step['step_id']}")
        pictures = page.locator(".message canvas.picture:not([hidden])")

        await expect(pictures).to_have_count(2)
        await expect(page.locator(".message[data-role=user]")).to_contain_text(
            "image 2, by URL: https://example.com/a.png"
        )
        await expect(page.locator(".message[data-role=user]")).to_contain_text("image 3 is not shown")
        assert [await picture.evaluate(PIXEL) for picture in await pictures.all()] == ["255 0 0 255", "0 0 255 255"]
        await expect(page.locator(".message[data-role=tool] canvas")).to_have_attribute("aria-label", "image 4")
        await page.goto("about:blank")
        async with http.delete(f"{served.url}/rollouts/pictures") as response:
            assert response.status == 204
