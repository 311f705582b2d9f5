"""Accessibility of the page: axe-core finds no problem in any view, light or dark."""

import pytest
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import expect

PLAIN = [
    "#/rollouts",
    "#/groups",
    "#/group/math-1",
    "#/plots",
    "#/training",
    "#/rollout/branching",
    "#/rollout/drifting/plots",
]
SEARCH = "#/search/reckon"
TOKENS = ["#/rollout/branching/sequences", "#/rollout/branching/step/branchin-2", "#/rollout/branching/step/branchin-3"]


async def violations(page) -> list[str]:
    found = (await Axe().run(page)).response["violations"]
    return [f"{violation['id']}: {violation['nodes'][0]['html'][:200]}" for violation in found]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("where", [*PLAIN, SEARCH])
async def test_lists_and_plots_are_accessible(contents, open_page, where, scheme):
    """Names, roles and contrasts satisfy WCAG."""
    page = await open_page(f"{contents.url}/ui{where}", scheme=scheme)
    await page.locator(".row:not(.head), .plot, .found > li").first.wait_for()

    assert await violations(page) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("way", ["mask", "logprob"])
@pytest.mark.parametrize("where", TOKENS)
async def test_tokens_are_accessible(contents, open_page, where, way, scheme):
    """Text is readable on every colour of both scales."""
    page = await open_page(f"{contents.url}/ui{where}", scheme=scheme)
    if where.endswith("sequences"):
        await page.locator("#sequences-0").click()
    await expect(page.locator(".tokens .t:not(.noid)").first).to_be_visible()
    await page.get_by_role("button", name=f"by {way}").click()

    assert await violations(page) == []


async def test_the_key_form_and_the_help_are_accessible(guarded, contents, open_page):
    """The form for the API key, and the list of keyboard shortcuts."""
    page = await open_page(f"{guarded.url}/ui", expected=("Failed to load resource",))
    await page.locator("#key").wait_for()
    assert await violations(page) == []
    page = await open_page(f"{contents.url}/ui")
    await page.locator("#rollouts-0").wait_for()
    await page.keyboard.press("?")
    await expect(page.get_by_role("dialog")).to_be_visible()
    assert await violations(page) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_a_selection_a_filter_and_a_comparison_are_accessible(contents, open_page, scheme):
    """With the explanation of the filter, and the tokens that differ."""
    page = await open_page(f"{contents.url}/ui#/rollouts?q=group%3Amath-2", scheme=scheme)
    await page.locator("#rollouts-3").wait_for()
    for row in (0, 1):
        await page.locator(f"#rollouts-{row}").get_by_role("checkbox").check()
    await page.locator("#filter").focus()
    await expect(page.locator("#hint")).to_be_visible()
    assert await violations(page) == []
    await page.goto(f"{contents.url}/ui#/compare/conversation/all/drifting/all")
    await expect(page.locator(".compared .t:not(.noid)").first).to_be_visible()

    assert await violations(page) == []
