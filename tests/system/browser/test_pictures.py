"""Screenshots of the page for its readers: `make test-ui PICTURES=docs/images` takes them again."""

import re
from io import BytesIO

import pytest
from PIL import Image
from playwright.async_api import expect

MAX_BYTES = 200_000
PHONE = {"width": 360, "height": 740}
LOW = {"width": 1280, "height": 400}
SMALL = {"width": 1280, "height": 560}
DESK = {"width": 1280, "height": 800}
TALL = {"width": 1280, "height": 1100}


@pytest.fixture
def take(request, tmp_path):
    """Take a screenshot of a page and limit its size for the repository."""
    folder = request.config.getoption("--pictures") or tmp_path

    async def taking(page, name: str) -> None:
        await page.evaluate("document.fonts.ready")
        path = folder / f"ui-{name}.png"
        seen = Image.open(BytesIO(await page.screenshot())).convert("RGB")
        seen.quantize(256, kmeans=3).save(path, optimize=True)  # a third of the bytes; rare colours keep their values
        assert 5_000 < path.stat().st_size < MAX_BYTES

    return taking


async def step_url(contents, rollout: str, index: int) -> str:
    (step,) = (await contents.control("GET", f"/rollouts/{rollout}/steps"))["steps"][index : index + 1]
    return f"{contents.url}/ui#/rollout/{rollout}/step/{step['step_id']}"


async def test_pictures_of_lists(contents, open_page, take):
    """Light, dark, and at a phone's width."""
    for name, scheme, viewport in (
        ("list", "light", DESK),
        ("list-dark", "dark", DESK),
        ("list-phone", "light", PHONE),
    ):
        page = await open_page(f"{contents.url}/ui", scheme=scheme, viewport=viewport)
        await expect(page.locator("a[href='#/rollout/conversation']")).to_be_attached()
        await expect(page.locator("#live")).to_have_text("live")
        await take(page, name)


async def test_pictures_of_groups(contents, open_page, take):
    """With their totals."""
    page = await open_page(f"{contents.url}/ui#/groups", viewport=LOW)
    await expect(page.locator(".row.g-groups", has_text="math-1").locator(".c-steps")).to_have_text(re.compile("[1-9]"))
    await take(page, "groups")


async def test_pictures_of_trees(contents, many, open_page, take):
    """One with branches, one with 5,000 steps."""
    page = await open_page(f"{contents.url}/ui#/rollout/branching", viewport=DESK)
    await expect(page.locator("#steps-4")).to_be_visible()
    await take(page, "tree")
    page = await open_page(f"{many.url}/ui#/rollout/many", viewport=DESK, scheme="dark")
    await expect(page.locator("#steps-3")).to_be_visible()
    await page.evaluate("document.querySelector('.scroller').scrollTop = 60000")
    await expect(page.locator("#steps-2005")).to_be_visible()
    await take(page, "tree-5000-dark")


async def test_pictures_of_tokens(contents, many, open_page, take):
    """By mask and by logprob, light and dark, at a phone's width, and of 200,000 tokens."""
    url = await step_url(contents, "conversation", 1)
    for name, scheme, way in (("tokens-mask", "light", "mask"), ("tokens-logprob-dark", "dark", "logprob")):
        page = await open_page(url, scheme=scheme, viewport=TALL)
        await expect(page.locator(".tokens .t:not(.noid)").first).to_be_visible()
        await page.get_by_role("button", name=f"by {way}").click()
        await page.locator(".tokenview").scroll_into_view_if_needed()
        await page.locator(".tokens .k-sampled").nth(9).hover()
        await take(page, name)
    page = await open_page(await step_url(contents, "drifting", 1), viewport=PHONE)
    await expect(page.locator(".drifts")).to_be_visible()
    await expect(page.locator(".tokens .t:not(.noid)").first).to_be_visible()
    await page.get_by_role("button", name="by logprob").click()
    await page.mouse.move(1, 1)
    await page.keyboard.press("n")
    await page.evaluate("document.querySelector('.tokenview').scrollIntoView()")
    await take(page, "tokens-phone")
    page = await open_page(f"{many.url}/ui#/rollout/long/step/long-0", viewport=TALL)
    await expect(page.locator(".tokens .t:not(.noid)").first).to_be_visible()
    await page.get_by_role("button", name="by logprob").click()
    await page.locator(".jump").fill("100990")
    await page.keyboard.press("Enter")
    await expect(page.locator("#t-100990:not(.noid)")).to_be_visible()
    await page.evaluate("document.querySelector('.tokenview').scrollIntoView()")
    await take(page, "tokens-200000")


async def test_pictures_of_sequences(contents, open_page, take):
    """Rows, one of them open."""
    page = await open_page(f"{contents.url}/ui#/rollout/branching/sequences", viewport=DESK)
    await page.locator("#sequences-1").click()
    await expect(page.locator(".tokens .t:not(.noid)").first).to_be_visible()
    await take(page, "sequences")


async def test_pictures_of_training(contents, open_page, take):
    """Reward by policy version and by time, spread, advantages, lengths, staleness."""
    page = await open_page(f"{contents.url}/ui#/training", viewport=TALL)
    await expect(page.locator("#live")).to_have_text("live")
    await expect(page.locator(".plot canvas")).to_have_count(6)
    await take(page, "training")


async def test_pictures_of_search(contents, open_page, take):
    """Rollouts with a text."""
    page = await open_page(f"{contents.url}/ui#/search/sentence", viewport=DESK)
    await expect(page.locator(".sum")).to_contain_text("all there are")
    await take(page, "search")


async def test_pictures_of_comparisons(contents, open_page, take):
    """Two rollouts side by side, with their tokens; and a filter with a selection."""
    page = await open_page(f"{contents.url}/ui#/compare/conversation/all/drifting/all", viewport=DESK)
    await expect(page.locator(".compared .t:not(.noid)").first).to_be_visible()
    await take(page, "compared")
    page = await open_page(f"{contents.url}/ui#/rollouts?q=math-+reward%3A%3E0.2&sort=-reward", viewport=SMALL)
    for row in (0, 2):
        await page.locator(f"#rollouts-{row}").get_by_role("checkbox").check()
    await page.locator("#filter").focus()
    await take(page, "filter")


async def test_pictures_of_branches(empty, open_page, take):
    """A rollout with branches before two of its steps, and the step with four of them."""
    await empty.rollout("source", 5, reward=1.0)
    steps = [step["step_id"] for step in (await empty.control("GET", "/rollouts/source/steps"))["steps"]]
    for before, rewards in ((1, (1, 0, 0, 0)), (3, (1, 1, 0, 1))):
        terms = {"before": steps[before], "count": len(rewards), "group_id": f"before-{before}"}
        opened = await empty.control("POST", "/rollouts/source/branches", terms)
        for member, reward in zip(opened["rollouts"], rewards, strict=True):
            await empty.turns(member["base_url"], 5)
            await empty.finish(member["rollout_id"], reward)
    page = await open_page(f"{empty.url}/ui#/rollout/source", viewport=SMALL)
    await expect(page.locator(".branchmark")).to_have_count(2)
    await take(page, "branches")
    page = await open_page(f"{empty.url}/ui#/rollout/{member['rollout_id']}", viewport=SMALL, scheme="dark")
    await expect(page.locator("a.inherited")).to_have_count(4)
    await take(page, "playback-dark")


async def test_pictures_of_plots(contents, open_page, take):
    """Reward by policy version, tokens per second, logprobs."""
    page = await open_page(f"{contents.url}/ui#/plots", viewport=DESK)
    await expect(page.locator(".sum")).to_have_text("20 of 20 rollouts with steps")
    await take(page, "plots")
