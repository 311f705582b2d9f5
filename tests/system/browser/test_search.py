"""The search: rollouts that have a text in a prompt, a reply or an error."""

from playwright.async_api import expect


async def test_a_search_lists_rollouts_with_their_matches_and_what_it_searched(contents, open_page):
    """A match leads to its step, with the keyboard as well; the URL has the text."""
    page = await open_page(f"{contents.url}/ui")
    await expect(page.locator(".row.g-rollouts:not(.head)").first).to_be_visible()
    await page.keyboard.press("g")
    await page.keyboard.press("s")
    await expect(page.locator("#filter")).to_be_focused()
    await page.keyboard.type("RECKON, and")
    await page.keyboard.press("Enter")
    await expect(page.locator(".sum")).to_contain_text("all there are")
    assert page.url.endswith("#/search/RECKON%2C%20and")
    first = page.locator(".found > li").first
    assert "You reckon, and answer in a sentence." in await first.locator("ul li").first.inner_text()
    assert await first.locator("mark").first.inner_text() == "reckon, and"
    await first.locator("ul a").first.click()
    await expect(page.locator("h1")).to_contain_text("Step")


async def test_without_a_match_the_page_has_what_was_searched(contents, open_page):
    page = await open_page(f"{contents.url}/ui#/search/no%20such%20text")
    await expect(page.locator(".sum")).to_contain_text("all there are; 0 have the text")
    await expect(page.locator(".found > li")).to_have_count(0)


async def test_hostile_text_is_shown_as_text(contents, open_page):
    page = await open_page(f"{contents.url}/ui#/search/alert")
    await expect(page.locator(".found > li").first).to_be_visible()
