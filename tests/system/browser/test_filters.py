"""Filters and selections of lists: terms, ranges, the URL, and exports."""

import pytest
from playwright.async_api import expect

ROWS = ".row.g-rollouts:not(.head)"


async def names(page) -> set[str]:
    """Return the IDs of the rollouts in the list."""
    hrefs = await page.locator(f"{ROWS} a").evaluate_all("(links) => links.map((link) => link.getAttribute('href'))")
    return {href.removeprefix("#/rollout/") for href in hrefs}


@pytest.mark.parametrize(
    ("terms", "count"),
    [
        ("reward:1", 1), ("reward:none", 2), ("reward:>=1", None), ("-reward:none reward:0..1", 18), ("steps:4", 1),
        ("flagged:>0", 2), ("drift:>0", 1), ("failed:400", 1), ("task:17", 18), ("metadata.task:arith", 1),
        ('metadata:"arithmetic"', 1), ("exact:no", 2), ("id:conversation", 1), ("group:math-3", 4), ("model:alert", 1),
        ("status:open", 2), ("since:1h", 20), ("until:2000-01-01", 0), ("time:2000-01-01..2001-01-01", 0),
    ],
)  # fmt: skip
async def test_terms_select_rollouts(contents, open_page, terms, count):
    """By fields, ranges, the absence of a value, and times; the URL has them."""
    page = await open_page(f"{contents.url}/ui")
    await expect(page.locator(ROWS)).to_have_count(20)
    await page.locator("#filter").fill(terms)
    rollouts = (await contents.control("GET", "/rollouts"))["rollouts"]
    rewarded = len([one for one in rollouts if one["reward"] is not None and one["reward"] >= 1])
    await expect(page.locator(ROWS)).to_have_count(rewarded if count is None else count)
    other = await open_page(page.url)
    await expect(other.locator("#filter")).to_have_value(terms)
    await expect(other.locator(ROWS)).to_have_count(rewarded if count is None else count)


async def test_versions_and_threads_are_read_from_the_steps(contents, open_page):
    """Only of the rollouts that match the other terms."""
    page = await open_page(f"{contents.url}/ui")
    await expect(page.locator(ROWS)).to_have_count(20)
    urls = []
    page.on("request", lambda request: "/tree" in request.url and urls.append(request.url))
    await page.locator("#filter").fill("math- version:>=3")
    await expect(page.locator(ROWS)).to_have_count(8)
    await expect(page.locator(".sum")).to_have_text("8 of 20 loaded")
    assert len(set(urls)) == 16
    await page.locator("#filter").fill("version:5")
    await expect(page.locator(ROWS)).to_have_count(0)
    await page.locator("#filter").fill("id:conversation thread:main")
    await expect(page.locator(ROWS)).to_have_count(1)


async def test_indexed_fields_are_filtered_by_the_store_and_the_page_says_what_is_not(empty, open_page):
    """Status, group, policy and times; with older rollouts that are not loaded, the page names the other fields."""
    await empty.rollout("oldest", 1)
    for number in range(510):
        await empty.control("POST", "/rollouts", {"rollout_id": f"filtered-{number}"})
    page = await open_page(f"{empty.url}/ui")
    await expect(page.locator(".sum")).to_have_text("500 loaded; older ones exist")
    await page.locator("#filter").fill("steps:0 filtered-9")
    await expect(page.locator(".sum")).to_contain_text("older ones exist; steps, words: only of these")
    await page.locator("#filter").fill("policy:default since:9h")
    await expect(page.locator(".sum")).to_have_text("1 loaded")  # the others have no step, so no policy
    await expect(page.locator("a[href='#/rollout/oldest']")).to_be_visible()


async def test_a_term_that_the_store_does_not_find_selects_among_what_is_loaded(empty, open_page):
    """The absence of an indexed value, and a negated one; the page names their fields."""
    for number in range(502):
        group = {"group_id": "grouped"} if number % 2 else {}
        await empty.control("POST", "/rollouts", {"rollout_id": f"ungrouped-{number}", **group})
    page = await open_page(f"{empty.url}/ui")
    await expect(page.locator(".sum")).to_have_text("500 loaded; older ones exist")
    for terms in ["group:none", "-group:grouped"]:
        await page.locator("#filter").fill(terms)
        await expect(page.locator(".sum")).to_have_text("250 of 500 loaded; older ones exist; group: only of these")


async def test_the_order_is_in_the_url(contents, open_page):
    """With the filter."""
    page = await open_page(f"{contents.url}/ui#/rollouts?q=group%3Amath-1&sort=-reward")
    await expect(page.locator(ROWS)).to_have_count(4)
    header = page.get_by_role("columnheader", name="Reward")
    assert await header.get_attribute("aria-sort") == "descending"
    await header.get_by_role("button").click()
    await expect(page).to_have_url(f"{contents.url}/ui#/rollouts?q=group%3Amath-1&sort=reward")
    await page.locator("#rollouts-0").click()
    await expect(page.locator("#steps-0")).to_be_visible()
    await page.go_back()
    await expect(page.locator("#filter")).to_have_value("group:math-1")
    await expect(page.locator(ROWS)).to_have_count(4)


async def test_groups_are_filtered(contents, open_page):
    """By their status at the proxy, and by their totals."""
    page = await open_page(f"{contents.url}/ui#/groups")
    rows = page.locator(".row.g-groups:not(.head)")
    await expect(rows).to_have_count(5)
    await page.locator("#filter").fill("version:2..3 steps:>0")
    await expect(rows).to_have_count(2)
    async with page.expect_response(lambda response: "status=complete" in response.url) as filtered:
        await page.locator("#filter").fill("status:complete")
    groups = (await (await filtered.value).json())["groups"]
    await expect(rows).to_have_count(len(groups))


async def test_a_selection_is_exported(contents, open_page):
    """As the rows of its rollouts in one file; a command has the same; keys and the header select, too."""
    page = await open_page(f"{contents.url}/ui#/rollouts?q=group%3Amath-1")
    await expect(page.locator(ROWS)).to_have_count(4)
    await page.keyboard.press("j")
    await page.keyboard.press("x")
    await expect(page.locator(".selection")).to_contain_text("1 selected")
    await page.get_by_label("Select all 4 rows").check()
    await expect(page.locator(".selection")).to_contain_text("4 selected")
    await page.keyboard.press("x")
    await page.locator("#rollouts-0").get_by_role("checkbox").uncheck()
    await expect(page.locator(".selection")).to_contain_text("3 selected")
    await page.get_by_label("Format of the export").select_option("steps")
    await page.get_by_label("Format of the export").select_option("sequences")
    async with page.expect_download() as download:
        await page.get_by_role("button", name="Export").click()
    saved = (await (await download.value).path()).read_text().splitlines()
    chosen = await names(page) - {
        (await page.locator("#rollouts-0 a").get_attribute("href")).removeprefix("#/rollout/")
    }
    expected = []
    for name in chosen:
        async with contents.http.get(f"{contents.url}/rollouts/{name}/export?container=ndjson") as response:
            expected += (await response.text()).splitlines()

    assert sorted(expected) == sorted(saved) != []
    await expect(page.get_by_role("region", name="Selection")).to_contain_text("3 of 3 rollouts exported")
    await page.get_by_text("As a command").click()
    command = await page.locator(".selection .toolcall").inner_text()
    assert command.startswith(f"tokentape export --url {contents.url} --format sequences --rollout ")
    assert chosen == set(command.split(" --rollout ")[1:])
    await page.get_by_role("button", name="Clear").click()
    await expect(page.locator(".selection")).to_have_count(0)
