"""Playbacks: marks of inherited steps, what a rollout plays back, and the branches at a step with their rewards."""

from contextlib import AsyncExitStack

import pytest
import pytest_asyncio
from playwright.async_api import expect
from tests.support.branched import STEPS, branch, mark, record, replay
from tests.system.browser.conftest import start_contents
from tests.system.browser.test_access import violations
from tests.system.browser.test_scale import FITS, PHONE

FIRST = {"step_id": "s1", "path": "messages[2].content", "value": "<b>now</b>\u202e", "recorded": "then"}


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def played(server):
    """A proxy with a rollout `a/b`, three rollouts that branch from it, and a playback of all of it."""
    async with AsyncExitStack() as stack:
        made = await start_contents(stack, server, "ui-played")
        source = await record(made.store, "a/b", *STEPS, reward=0.5)
        await branch(made.store, source, "s2", "b0", "x0", "x1", reward=1.0, status="completed", group_id="g")
        await branch(made.store, source, "s2", "b1", "y0", reward=0.0, status="failed", group_id="g")
        await branch(made.store, source, "s2", "b2", reached=False)
        await replay(made.store, source, "p", mismatch={"count": 2, "first": FIRST})
        await mark(made.store, source, rollouts=("b0", "b1", "b2", "p"))
        yield made


async def test_inherited_steps_are_marked_on_the_time_line_and_link_to_their_source(played, open_page):
    """A live step has no mark."""
    page = await open_page(f"{played.url}/ui#/rollout/b0")
    rows = page.locator(".row.g-steps:not(.head)")
    await expect(rows).to_have_count(4)
    marks = [await row.locator("a.inherited").count() for row in await rows.all()]
    lines = [await row.locator(".timeline.inherited").count() for row in await rows.all()]
    labels = [await row.locator(".timeline").get_attribute("aria-label") for row in await rows.all()]

    assert [1, 1, 0, 0] == marks == lines == [label.endswith(", inherited") for label in labels]
    assert "inherited: sampled as step s0 of rollout a/b" == await rows.first.locator("a.inherited").get_attribute(
        "title"
    )
    await rows.nth(1).locator("a.inherited").click()
    await expect(page.locator("h1")).to_have_text("Step s1")
    await expect(page.locator(".path")).to_contain_text("a/b")


async def test_an_inherited_step_names_its_source_and_is_not_trained_here(played, open_page):
    """Its tokens are marked as sampled in another row, and it has no speed."""
    page = await open_page(f"{played.url}/ui#/rollout/b0/step/s1")
    fact = page.locator(".facts div", has_text="Inherited from").locator("dd")
    await expect(fact).to_have_text("step s1 of rollout a/b")
    assert ["#/rollout/a%2Fb/step/s1", "#/rollout/a%2Fb"] == [
        await link.get_attribute("href") for link in await fact.locator("a").all()
    ]
    await expect(page.locator(".tokens .k-context")).to_have_count(1)
    await expect(page.locator(".facts div", has_text="Speed").locator("dd")).to_have_text("\N{EN DASH}")
    await page.goto(f"{played.url}/ui#/rollout/a%2Fb/step/s1")
    await expect(page.locator(".tokens .k-sampled")).to_have_count(1)
    await expect(page.locator(".facts div", has_text="Inherited from")).to_have_count(0)


async def test_a_playback_shows_its_source_and_its_first_mismatch(played, open_page):
    page = await open_page(f"{played.url}/ui#/rollout/b0")
    fact = page.locator(".facts div", has_text="Playback").locator("dd")
    await expect(fact).to_have_text("of a/b, before step s2: 2 answered, 2 live")
    await expect(page.locator(".facts div", has_text="Steps").locator("dd").first).to_have_text("4, 2 inherited")
    await expect(page.locator(".fork")).to_have_count(0)
    await page.goto(f"{played.url}/ui#/rollout/p")
    await expect(fact).to_have_text("of a/b: 0 answered, 0 live, 2 refused")
    await expect(page.locator(".fork")).to_contain_text("2 refused: the first call differs from step s1 at")
    await expect(page.locator(".fork code")).to_have_text(["messages[2].content", "then", "<b>now</b>⟨U+202E⟩"])


async def test_lists_mark_playbacks(played, open_page):
    page = await open_page(f"{played.url}/ui")
    rows = page.locator(".row.g-rollouts:not(.head)")
    await expect(rows).to_have_count(5)
    titles = "(rows) => rows.map((r) => [r.querySelector('a').hash, r.querySelector('.inherited')?.title])"

    assert {
        "#/rollout/a%2Fb": None,
        "#/rollout/b0": "playback of a/b: 2 answered, 2 live",
        "#/rollout/b1": "playback of a/b: 2 answered, 1 live",
        "#/rollout/b2": "playback of a/b: 2 answered, 0 live",
        "#/rollout/p": "playback of a/b: 0 answered, 0 live",
    } == dict(await rows.evaluate_all(titles))


async def test_a_step_lists_its_branches_with_their_rewards(played, open_page):
    """The time line has their number and mean reward; the rollout lists all playbacks."""
    page = await open_page(f"{played.url}/ui#/rollout/a%2Fb")
    branched = page.locator(".branchmark")
    await expect(branched).to_have_text(["⋔ 3 · 0.5"])
    text = "3 branches: mean reward 0.5, standard deviation 0.5 of 2"
    assert text == await branched.get_attribute("title")
    await expect(page.locator(".facts div", has_text="Playbacks").locator("a")).to_have_text(["b0", "b1", "b2", "p"])
    await page.locator(".row.g-steps", has=branched).locator("a").click()
    await expect(page.locator(".branches p")).to_have_text(text)
    await expect(page.locator(".branches li")).to_have_text(
        ["b0 completed, reward 1", "b1 failed, reward 0", "b2 open, reward \N{EN DASH} (not at this step yet)"]
    )
    await page.locator(".branches a").first.click()
    await expect(page.locator("h1")).to_have_text("b0")


VIEWS = [
    "#/rollouts",
    "#/rollout/b0",
    "#/rollout/p",
    "#/rollout/a%2Fb",
    "#/rollout/b0/step/s1",
    "#/rollout/a%2Fb/step/s2",
]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("where", VIEWS)
async def test_views_of_playbacks_are_accessible_and_fit_a_phone(played, open_page, where, scheme):
    page = await open_page(f"{played.url}/ui{where}", scheme=scheme)
    await page.locator("a.inherited, .inherited, .fork, .branchmark, .branches li, .tokens .k-context").first.wait_for()

    assert [] == await violations(page)
    await page.set_viewport_size(PHONE)
    assert await page.evaluate(FITS)
