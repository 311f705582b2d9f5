"""The lists of rollouts, groups and steps: contents, filters, order, keyboard navigation."""

import asyncio
import re

import pytest
from playwright.async_api import expect

from proxy.continuation.types import REASONS

NONE = "\N{EN DASH}"


async def column(page, table: str, key: str) -> list[str]:
    return await page.locator(f".row.g-{table}:not(.head) .c-{key}").all_inner_texts()


async def test_every_rollout_is_listed_with_its_values(contents, open_page):
    """Status, reward, steps, tokens, exact and flagged steps, drift and group equal the control API's."""
    page = await open_page(f"{contents.url}/ui")
    await expect(page.locator(".row.g-rollouts:not(.head)")).to_have_count(20)
    rollouts = {rollout["rollout_id"]: rollout for rollout in (await contents.control("GET", "/rollouts"))["rollouts"]}

    assert len(rollouts) == 20
    for name in ("conversation", "drifting", "branching"):
        row = page.locator(".row.g-rollouts", has=page.locator(f"a[href='#/rollout/{name}']"))
        counts, drift = rollouts[name]["counts"], rollouts[name]["drift"]
        assert rollouts[name]["status"] == await row.locator(".c-status").inner_text()
        assert str(counts["steps"]) == await row.locator(".c-steps").inner_text()
        assert str(counts["sampled_tokens"]) == await row.locator(".c-tokens").inner_text()
        assert str(sum(drift.values()) if drift is not None else NONE) == await row.locator(".c-drift").inner_text()
        assert ("⚑" in await row.locator(".c-fidelity").inner_text()) == (counts["flagged"] > 0)


async def test_a_list_is_filtered_by_text_and_by_status(contents, open_page):
    """The text is searched in IDs, groups, models and metadata; `/` focuses the field."""
    page = await open_page(f"{contents.url}/ui")
    rows = page.locator(".row.g-rollouts:not(.head)")
    await expect(rows).to_have_count(20)
    await page.keyboard.press("/")
    await page.keyboard.type("MATH-3")
    await expect(rows).to_have_count(4)
    assert await column(page, "rollouts", "group") == ["math-3"] * 4
    await page.locator("#filter").fill("arithmetic")
    await expect(rows).to_have_count(1)
    await page.locator("#filter").fill("")
    async with page.expect_response(lambda response: "status=open" in response.url) as filtered:
        await page.get_by_label("Status", exact=True).select_option("open")
    assert (
        len((await (await filtered.value).json())["rollouts"]) == 2
    )  # by the proxy, also of rollouts that are not loaded
    await expect(rows).to_have_count(2)
    await expect(page.locator("#filter")).to_have_value("status:open")
    await page.locator("#filter").fill("no such thing")
    await expect(page.locator(".empty")).to_have_text("No rollout matches the filter.")


async def test_a_list_is_sorted_by_its_columns(contents, open_page):
    """The first click sorts in the useful direction, the second reverses it; rows without a value are last in both."""
    page = await open_page(f"{contents.url}/ui")
    await expect(page.locator(".row.g-rollouts:not(.head)")).to_have_count(20)
    orders = []
    for _ in range(2):
        await page.get_by_role("columnheader", name="Reward").get_by_role("button").click()
        orders.append(await column(page, "rollouts", "reward"))
    down, up = ([float(reward) for reward in order if reward != NONE] for order in orders)

    assert down == sorted(down, reverse=True) != []
    assert up == sorted(up)
    assert orders[0][-2:] == orders[1][-2:] == [NONE, NONE]
    assert await page.get_by_role("columnheader", name="Reward").get_attribute("aria-sort") == "ascending"


async def test_everything_is_reached_by_keyboard(contents, open_page):
    """j and k move, Enter opens, Esc returns, ? shows the help, g g opens the groups."""
    page = await open_page(f"{contents.url}/ui")
    await expect(page.locator(".row.g-rollouts:not(.head)")).to_have_count(20)
    await page.keyboard.press("End")
    await expect(page.locator("#rollouts-19")).to_have_attribute("aria-selected", "true")
    await page.keyboard.press("k")
    await page.keyboard.press("ArrowDown")
    await page.keyboard.press("Enter")
    await expect(page).to_have_url(f"{contents.url}/ui#/rollout/conversation")
    await expect(page.locator("#steps-3")).to_be_visible()
    await page.keyboard.press("j")
    await page.keyboard.press("j")
    await page.keyboard.press("Enter")
    await expect(page.locator(".tokens")).to_be_visible()
    second = page.url
    await expect(page.get_by_role("button", name="later →")).to_be_enabled()
    await page.keyboard.press("]")
    await expect(page).not_to_have_url(second)
    await expect(page.locator(".tokens")).to_be_visible()
    await expect(page.get_by_role("button", name="← earlier")).to_be_enabled()
    await page.keyboard.press("[")
    await expect(page).to_have_url(second)
    await page.keyboard.press("Escape")
    await expect(page).to_have_url(f"{contents.url}/ui#/rollout/conversation")
    await page.keyboard.press("?")
    await expect(page.get_by_role("dialog")).to_contain_text("filter the list")
    await page.keyboard.press("Escape")
    await expect(page.get_by_role("dialog")).to_be_hidden()
    await page.keyboard.press("g")
    await page.keyboard.press("g")
    await expect(page.locator(".row.g-groups:not(.head)")).to_have_count(5)


async def test_focus_is_visible(contents, open_page):
    """Every element that Tab reaches has an outline."""
    page = await open_page(f"{contents.url}/ui")
    await expect(page.locator(".row.g-rollouts:not(.head)")).to_have_count(20)
    script = (
        "(({ tagName, textContent }) => [tagName, textContent, getComputedStyle(document.activeElement).outlineStyle])"
    )
    script += "(document.activeElement)"
    found = []
    for _ in range(20):
        await page.keyboard.press("Tab")
        found.append(await page.evaluate(script))

    assert {"A", "BUTTON", "INPUT", "SELECT", "DIV"} <= {name for name, _, _ in found}
    assert [element for element in found if element[0] != "BODY" and element[2] == "none"] == []


async def test_a_group_is_listed_and_opened(contents, open_page):
    """The list has the group's totals and the number of groups in the queue, its page each of its rollouts."""
    group = await contents.control("GET", "/groups/math-2")
    page = await open_page(f"{contents.url}/ui#/groups")
    row = page.locator(".row.g-groups", has=page.locator("a[href='#/group/math-2']"))
    await expect(row.locator(".c-steps")).to_have_text(str(sum(rollout["steps"] for rollout in group["rollouts"])))
    await expect(row.locator(".c-tokens")).to_have_text(
        str(sum(rollout["sampled_tokens"] for rollout in group["rollouts"]))
    )
    assert abs(float(await row.locator(".c-reward").inner_text()) - sum(group["rewards"]) / 4) < 0.001
    assert await row.locator(".c-drift").inner_text() == "0"
    groups = (await contents.control("GET", "/groups"))["groups"]
    counted = [(state, sum(each["status"] == state for each in groups)) for state in ("complete", "claimed", "dropped")]
    states = "".join(f", {number} {state}" for state, number in counted if number)
    await expect(page.locator(".bar .sum")).to_have_text(f"{len(groups)} of {len(groups)} loaded{states}")
    assert "complete" in states
    await page.locator("a[href='#/group/math-2']").click()
    await expect(page.locator(".row.g-members:not(.head)")).to_have_count(4)

    assert sorted(group["rewards"]) == sorted(map(float, await column(page, "members", "reward")))
    steps = [str(rollout["steps"]) for rollout in group["rollouts"]]
    assert steps == await column(page, "members", "steps")
    assert "mean" in await page.locator(".facts").inner_text()
    await page.locator(".row.g-members:not(.head) a").first.click()
    await expect(page.locator("#steps-0")).to_be_visible()


async def test_a_tree_is_shown_on_a_timeline(contents, open_page):
    """Branches are indented, bars are at the times of calls, and flagged and failed steps are marked."""
    page = await open_page(f"{contents.url}/ui#/rollout/branching")
    await expect(page.locator(".row.g-steps:not(.head)")).to_have_count(5)
    lefts = [
        await page.evaluate("(at) => parseFloat(document.querySelector(`#steps-${at} .timebar`).style.left)", index)
        for index in range(5)
    ]

    assert lefts == sorted(lefts)
    assert 0 == lefts[0] < lefts[1]
    assert [await page.locator(f"#steps-{index} .d-1").count() for index in range(5)] == [0, 1, 1, 0, 0]
    assert [await page.locator(f"#steps-{index} .branch").text_content() for index in range(5)] == [
        "",
        "└ ",
        "└ ",
        "",
        "",
    ]
    assert "⚑ echo" in await page.locator("#steps-3 .c-kind").inner_text()
    assert await page.locator("#steps-4 .c-kind").inner_text() == "error"


async def test_drift_is_marked_in_the_tree(contents, open_page):
    """The mark names its kind; its title has the reason why the call was not continued, which is not marked again."""
    page = await open_page(f"{contents.url}/ui#/rollout/drifting")
    (first, *_) = (await contents.control("GET", "/rollouts/drifting/tree"))["drift"]
    await expect(page.locator(".driftmark").first).to_have_text(f"◆ {first['kind']}")
    await expect(page.locator(".driftmark").first).to_have_attribute(
        "title", f"{first['kind']} (not continued: {first['why']})"
    )
    assert first["reason"] == first["kind"]
    await expect(page.locator(".forked")).to_have_count(0)


async def test_continued_calls_and_forks_are_marked_in_the_tree(contents, open_page):
    """A fork has the code of its reason; the sentence is the title."""
    page = await open_page(f"{contents.url}/ui#/rollout/branching")
    await expect(page.locator("#steps-1 .continued")).to_have_text("»")
    await expect(page.locator("#steps-1 .continued")).to_have_attribute(
        "title", "continued: 50 ids kept, 6 ids rendered"
    )
    await expect(page.locator("#steps-2 .forked")).to_have_text("≠ history")
    await expect(page.locator("#steps-2 .forked")).to_have_attribute("title", f"not continued: {REASONS['history']}")
    await expect(page.locator(".continued, .forked")).to_have_count(2)


async def test_an_unknown_view_shows_an_error(contents, open_page):
    """So does a hash that cannot be decoded, or that names a missing rollout."""
    missing = ("Failed to load resource",)
    page = await open_page(f"{contents.url}/ui#/%E0%A4%A")
    await expect(page.locator("h1")).to_have_text("Page not found")
    page = await open_page(f"{contents.url}/ui#/rollout/none/step/none", expected=missing)
    await expect(page.get_by_role("alert")).to_contain_text("Rollout 'none' not found")
    page = await open_page(f"{contents.url}/ui#/rollout/..")
    await expect(page.get_by_role("alert")).to_contain_text("Browsers treat an ID of only dots as a folder")


async def test_the_theme_is_chosen_and_kept_for_the_tab(contents, open_page):
    """Light, dark, or as the system."""
    page = await open_page(f"{contents.url}/ui", scheme="dark")
    back = "getComputedStyle(document.documentElement).backgroundColor"
    dark = await page.evaluate(back)
    await page.locator("#theme").click()
    chosen = expect(page.locator("html"))
    await chosen.to_have_attribute("data-theme", "light")
    light = await page.evaluate(back)
    await page.reload()
    await chosen.to_have_attribute("data-theme", "light")

    assert ("rgb(20, 23, 28)", "rgb(255, 255, 255)", await page.evaluate(back)) == (dark, light, light)


async def test_a_list_has_the_task_the_failed_calls_and_the_duration(contents, open_page):
    """The first words of the first call, and the HTTP statuses of those that failed."""
    page = await open_page(f"{contents.url}/ui")
    row = page.locator(".row.g-rollouts", has=page.locator("a[href='#/rollout/branching']"))
    await expect(row.locator(".c-task")).to_have_text("Hello?")
    await expect(row.locator(".c-failed")).to_have_text("1 (400)")
    await expect(row.locator(".c-took")).to_have_text(re.compile("[0-9] s"))
    await page.locator("#filter").fill("17 times 23")
    await expect(page.locator(".row.g-rollouts", has=page.locator("a[href='#/rollout/conversation']"))).to_be_visible()


async def test_a_fork_shows_its_kind_and_both_texts(contents, open_page):
    """In the tree and on the step's page; the timeline has an axis and the time to the first byte."""
    page = await open_page(f"{contents.url}/ui#/rollout/branching")
    await expect(page.locator("#steps-2 .forkmark")).to_contain_text("↳")
    await expect(page.locator(".c-time .axis")).to_contain_text("Time 0 s")
    await expect(page.locator("#steps-0 .c-first")).to_have_text("100 ms")
    await expect(page.locator("#steps-0 .timeline")).to_have_attribute("title", re.compile("first byte after 100 ms"))
    await page.locator("#steps-2").click()
    await expect(page.locator(".fork")).to_contain_text("compared with")


@pytest.mark.parametrize("width", [1400, 390])
@pytest.mark.parametrize("where", ["#/rollouts", "#/groups", "#/group/math-1", "#/rollout/branching"])
async def test_no_value_is_cut_off(contents, open_page, where, width):
    """Only texts of any length end in an ellipsis: ids, tasks, replies, groups, and names of problems."""
    page = await open_page(f"{contents.url}/ui{where}", viewport={"width": width, "height": 900})
    await page.locator(".row:not(.head)").first.wait_for()
    await expect(page.locator(".row:not(.head)").first).to_be_visible()
    free = ".c-id, .c-task, .c-group, .c-opening, .c-held, .c-step, .c-time, .c-kind"
    cut = f"[...document.querySelectorAll('.cell:not({free})')].filter((cell) => cell.scrollWidth > cell.clientWidth)"

    assert await page.evaluate(f"{cut}.map((cell) => `${{cell.className}} ${{cell.textContent}}`)") == []


async def test_no_focus_ring_is_shown_before_a_key_is_pressed(contents, open_page):
    """Neither after loading nor after a click on a row."""
    page = await open_page(f"{contents.url}/ui")
    await page.locator("#rollouts-0").wait_for()
    rings = "document.querySelectorAll(':focus-visible:not(main)').length"
    assert await page.evaluate(rings) == 0
    await page.locator("#rollouts-0").click()
    await page.locator("#steps-0").wait_for()
    assert await page.evaluate(rings) == 0


async def test_groups_have_their_totals_at_once(contents, open_page):
    """They come with the list, in one request."""
    page = await open_page("about:blank")
    urls = []
    page.on(
        "request", lambda request: "/ui" not in request.url and "/groups" in request.url and urls.append(request.url)
    )
    await page.goto(f"{contents.url}/ui#/groups")
    await expect(page.locator(".row.g-groups:not(.head)")).to_have_count(5)
    rewards = await column(page, "groups", "reward")

    assert len([reward for reward in rewards if reward != NONE]) == 4  # one group is open
    assert {f"{contents.url}/groups?limit=200&totals=true"} == set(urls)


async def test_a_dropped_group_shows_why(empty, open_page):
    """In a column of its own, and on the page of the group; the column of consumers has none."""
    opened = await empty.control("POST", "/groups", {"group_id": "equal", "size": 2})
    for rollout in opened["rollouts"]:
        await empty.turns(rollout["base_url"], 1)
        await empty.finish(rollout["rollout_id"], 1.0)
    await empty.control("POST", "/batches/claim", {"consumer": "trainer", "format": "sequences", "only_mixed": True})
    why = "all its 2 rollouts have the same reward"
    page = await open_page(f"{empty.url}/ui#/groups", viewport={"width": 1440, "height": 900})
    await expect(page.locator("#groups-0 .c-why")).to_have_text(why)
    await expect(page.locator("#groups-0 .c-held")).to_have_text(NONE)
    await page.locator("#groups-0").click()
    await expect(page.locator(".facts")).to_contain_text(why)


async def test_a_rollout_without_exact_steps_has_no_check_mark(empty, open_page):
    """Such as one whose only call failed."""
    opened = await empty.control("POST", "/rollouts", {"rollout_id": "refused"})
    async with empty.http.post(f"{opened['base_url']}/chat/completions", json={"model": "policy"}) as response:
        assert 400 <= response.status < 500
    page = await open_page(f"{empty.url}/ui", expected=("Failed to load",))
    await expect(page.locator("#rollouts-0 .c-fidelity")).to_have_text(NONE)
    await expect(page.locator("#rollouts-0 .c-fidelity .exact")).to_have_count(0)


async def test_marks_of_steps_are_whole(empty, open_page):
    """On a screen of usual width, if a step has several."""
    start = empty.ids(9)
    steps = [empty.step("marked", 0, start, empty.ids(5))]
    problems = {"problems": ("no_prompt_ids",), "delivered": False, "status": "partial", "late": True}
    steps.append(empty.step("marked", 1, start, empty.ids(5), **problems))
    await empty.made("marked", steps)
    page = await open_page(f"{empty.url}/ui#/rollout/marked", viewport={"width": 1440, "height": 900})
    kind = page.locator("#steps-1 .c-kind")
    await expect(kind).to_contain_text("undelivered")

    assert await kind.evaluate("(cell) => cell.scrollWidth <= cell.clientWidth")


async def test_training_shows_that_it_loads(contents, open_page):
    """Its charts are there with a note until the response arrives."""
    page = await open_page("about:blank")
    released = asyncio.Event()

    async def hold(route) -> None:
        await released.wait()
        await route.continue_()

    await page.route(re.compile("/training[?]"), hold)
    await page.goto(f"{contents.url}/ui#/training")
    await expect(page.locator(".plot")).to_have_count(6)
    await expect(page.locator(".bar .sum")).to_have_text("Loading…")
    released.set()
    await expect(page.locator(".bar .sum")).to_contain_text("rollouts")
