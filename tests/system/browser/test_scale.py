"""Large rollouts and small screens: the document stays small, and everything is reachable."""

import asyncio

import pytest
from playwright.async_api import expect
from tests.support.page_contents import STEPS, TOKENS

MAX_NODES = 3_000
ROLLOUTS = 1_200
PHONE = {"width": 360, "height": 740}
NODES = "document.querySelectorAll('*').length"
FITS = "document.documentElement.scrollWidth <= document.documentElement.clientWidth"


async def test_of_thousands_of_steps_only_those_in_view_are_in_the_document(many, open_page):
    """Keys reach the first and the last one; no step is loaded before it is opened."""
    page = await open_page(f"{many.url}/ui#/rollout/many")
    urls = []
    page.on("request", lambda request: urls.append(request.url))
    await expect(page.get_by_role("grid")).to_have_attribute("aria-rowcount", str(STEPS))
    assert await page.evaluate(NODES) < MAX_NODES
    assert [await page.locator(f"#steps-{index} .branch").text_content() for index in range(3)] == ["", "└ ", "│ "]
    await page.keyboard.press("End")
    await expect(page.locator(f"#steps-{STEPS - 1}")).to_be_visible()
    await page.evaluate("document.querySelector('.scroller').scrollTop = 60000")
    await expect(page.locator("#steps-2005")).to_be_visible()
    assert await page.evaluate(NODES) < MAX_NODES
    assert [url for url in urls if "/steps" in url] == []
    await page.locator("#steps-2005").click()
    await expect(page.locator(".tokens .t:not(.noid)").first).to_be_visible()
    assert len([url for url in urls if "/steps/" in url and "/texts" not in url]) == 1


async def test_of_hundreds_of_thousands_of_tokens_only_those_in_view_are_in_the_document(many, open_page):
    """The scroll bar reaches every token from the first to the last."""
    page = await open_page(f"{many.url}/ui#/rollout/long/step/long-0")
    await expect(page.locator(".tokens .t").first).to_be_visible()
    assert f"{TOKENS:,} tokens" in await page.locator(".tokenview").inner_text()
    await page.locator(".tokens").focus()
    await page.keyboard.press("End")
    await expect(page.locator(f"#t-{TOKENS - 1}")).to_be_visible()
    await page.evaluate("(() => { const t = document.querySelector('.tokens'); t.scrollTop = t.scrollHeight / 2; })()")
    middle = f".tokens .t[id^='t-{TOKENS // 2 // 10_000}']"  # within 10,000 tokens of it
    await expect(page.locator(middle).first).to_be_visible()
    assert await page.evaluate(NODES) < MAX_NODES
    assert await page.evaluate("document.querySelectorAll('.tokens .t.k-sampled').length") > 0


async def test_of_many_sequences_only_those_in_view_are_in_the_document(many, open_page):
    """Fifty rows of thousands of tokens; an opened row shows its tokens."""
    page = await open_page(f"{many.url}/ui#/rollout/many/sequences")
    await expect(page.get_by_role("grid")).to_have_attribute("aria-rowcount", "50")
    await page.keyboard.press("End")
    await page.keyboard.press("Enter")
    await expect(page.locator(".tokens .t:not(.noid)").first).to_be_visible()
    assert await page.evaluate(NODES) < MAX_NODES


async def test_a_list_of_many_rollouts_is_loaded_in_pages(many, open_page):
    """The newest 500 first, older ones on request; filters note that there are more."""
    for start in range(0, ROLLOUTS, 100):
        names = [f"listed-{index}" for index in range(start, start + 100)]
        await asyncio.gather(*(many.control("POST", "/rollouts", {"rollout_id": name}) for name in names))
    page = await open_page(f"{many.url}/ui")
    grid, sum_of = page.get_by_role("grid"), page.locator(".sum")
    await expect(sum_of).to_have_text("500 loaded; older ones exist")
    await page.get_by_role("button", name="Load older").click()
    await expect(sum_of).to_have_text("1,000 loaded; older ones exist")
    await page.get_by_role("button", name="Load older").click()
    await expect(sum_of).to_have_text(f"{ROLLOUTS + 2:,} loaded")
    await expect(page.get_by_role("button", name="Load older")).to_be_hidden()
    await grid.focus()
    await page.keyboard.press("End")
    await expect(page.locator(f"#rollouts-{ROLLOUTS + 1}")).to_be_visible()
    assert await page.evaluate(NODES) < MAX_NODES
    await page.locator("#filter").fill("listed-777")
    await expect(grid).to_have_attribute("aria-rowcount", "1")


async def test_plots_of_many_calls_draw_a_sample(many, open_page):
    """And show its size."""
    page = await open_page(f"{many.url}/ui#/rollout/many/plots")
    await expect(page.locator(".plot .dim")).to_contain_text(f"of {STEPS} points are drawn")
    assert await page.evaluate(NODES) < 2 * MAX_NODES


@pytest.mark.parametrize(
    "where",
    [
        "#/rollouts", "#/groups", "#/group/math-1", "#/plots", "#/training", "#/rollout/branching",
        "#/rollout/branching/sequences", "#/rollout/branching/plots", "#/rollout/branching/step/branchin-2",
        "#/rollout/branching/step/branching-4", "#/compare/branching/branchin-1/branching/branchin-2",
    ],
)  # fmt: skip
@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_every_view_fits_a_phone(contents, open_page, where, scheme):
    """Nothing is wider than 360 pixels, light or dark."""
    page = await open_page(f"{contents.url}/ui{where}", viewport=PHONE, scheme=scheme)
    await page.locator(".row:not(.head), .plot, .facts div, .compared").first.wait_for()
    if "step/branchin-2" in where:
        await expect(page.locator(".tokens .t:not(.noid)").first).to_be_visible()

    assert await page.evaluate(FITS)
    wide = "[...document.querySelectorAll('main button, main select, main input, main .fact')]"
    assert (
        await page.evaluate(f"{wide}.filter((e) => e.getBoundingClientRect().right > 361).map((e) => e.outerHTML)")
        == []
    )
