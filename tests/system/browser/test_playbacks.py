"""Playbacks: marks of inherited steps, what a rollout plays back, and the branches at a step with their rewards."""

from contextlib import AsyncExitStack
from dataclasses import dataclass
from urllib.parse import quote

import pytest
import pytest_asyncio
from playwright.async_api import expect
from tests.support.branched import STEPS, branch, mark, record
from tests.support.page_contents import ALERT, HOSTILE_ID
from tests.system.browser.conftest import start_contents
from tests.system.browser.test_access import violations
from tests.system.browser.test_safety import HIDDEN, created_elements
from tests.system.browser.test_scale import FITS, PHONE

HOSTILE_TEXT = "<b>now</b>\u202e"


@dataclass
class Played:
    """A proxy with a rollout `a/b`, three rollouts that branch before its third step, and a refused playback of all of it."""

    url: str
    steps: list[str]


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def played(server):
    async with AsyncExitStack() as stack:
        made = await start_contents(stack, server, "ui-played")
        await made.rollout("a/b", 4, reward=0.5)
        steps = [step["step_id"] for step in (await made.control("GET", "/rollouts/a%2Fb/steps"))["steps"]]
        terms, group = {"of": "a/b", "before": steps[2]}, {"group_id": "g"}
        for name, turns, status, reward in (("b0", 4, "completed", 1), ("b1", 3, "failed", 0), ("b2", 1, None, None)):
            opened = await made.control("POST", "/rollouts", {"rollout_id": name, "playback": terms, **group})
            await made.turns(opened["base_url"], turns)
            if status is not None:
                await made.control("POST", f"/rollouts/{name}/finish", {"status": status, "reward": reward})
        opened = await made.control("POST", "/rollouts", {"rollout_id": "p", "playback": {"of": "a/b"}})
        body = {"model": "policy", "messages": [{"role": "system", "content": HOSTILE_TEXT}], "max_tokens": 60}
        for _ in range(2):
            async with made.http.post(f"{opened['base_url']}/chat/completions", json=body) as response:
                assert response.status == 422
        yield Played(made.url, steps)


async def test_inherited_steps_are_marked_on_the_time_line_and_link_to_their_source(played, open_page):
    """The branch step links to the step that it repeats; other live steps have no mark."""
    page = await open_page(f"{played.url}/ui#/rollout/b0")
    rows = page.locator(".row.g-steps:not(.head)")
    await expect(rows).to_have_count(4)
    marks = [await row.locator("a.inherited").all_inner_texts() for row in await rows.all()]
    lines = [await row.locator(".timeline.inherited").count() for row in await rows.all()]
    labels = [await row.locator(".timeline").get_attribute("aria-label") for row in await rows.all()]
    titles = [await mark.get_attribute("title") for mark in await page.locator("a.inherited").all()]

    assert marks == [["▷ inherited"], ["▷ inherited"], ["⋔ branch"], []]
    assert lines == [label.endswith(", inherited") for label in labels] == [1, 1, 0, 0]
    sampled = [f"inherited: sampled as step {step} of rollout a/b" for step in played.steps[:2]]
    assert [*sampled, f"sent with the prompt ids of step {played.steps[2]} of rollout a/b"] == titles
    await rows.nth(1).locator("a.inherited").click()
    await expect(page.locator("h1")).to_have_text(f"Step {played.steps[1]}")
    await expect(page.locator(".path")).to_contain_text("a/b")


async def test_a_playback_is_compared_with_its_source_and_branches_with_each_other(played, open_page):
    """Their inherited turns are the same; the branches of a step are columns."""
    page = await open_page(f"{played.url}/ui#/rollout/b1")
    await page.get_by_role("link", name="Compare with its source").click()
    await expect(page.locator(".compared thead a")).to_have_text(["a/b", "b1"])
    await expect(page.locator(".compared tbody tr.same").first).to_be_visible()
    page = await open_page(f"{played.url}/ui#/rollout/a%2Fb/step/{played.steps[2]}")
    await page.get_by_role("link", name="Compare 3 of them").click()
    await expect(page.locator(".compared thead th")).to_have_count(4)


def fact(page, name: str):
    """Return the value of a fact at the top of a view."""
    return page.locator(".facts div", has=page.get_by_text(name, exact=True)).locator("dd")


async def test_an_inherited_step_names_its_source_and_is_not_trained_here(played, open_page):
    """Its tokens are marked as sampled in another row, and it has no speed."""
    step = played.steps[1]
    page = await open_page(f"{played.url}/ui#/rollout/b0/step/{step}")
    await expect(fact(page, "Inherited from")).to_have_text(f"step {step} of rollout a/b")
    links = await fact(page, "Inherited from").locator("a").all()
    assert [await link.get_attribute("href") for link in links] == [f"#/rollout/a%2Fb/step/{step}", "#/rollout/a%2Fb"]
    await expect(page.locator(".tokens .k-context").first).to_be_visible()
    await expect(page.locator(".tokens .k-sampled")).to_have_count(0)
    await expect(fact(page, "Speed")).to_have_text("\N{EN DASH}")
    await page.goto(f"{played.url}/ui#/rollout/a%2Fb/step/{step}")
    await expect(page.locator(".tokens .k-sampled").first).to_be_visible()
    await expect(fact(page, "Inherited from")).to_have_count(0)


async def test_a_playback_shows_its_source_and_its_first_mismatch(played, open_page):
    page = await open_page(f"{played.url}/ui#/rollout/b0")
    await expect(fact(page, "Playback")).to_have_text(f"of a/b, before step {played.steps[2]}: 2 answered, 2 live")
    await expect(fact(page, "Steps")).to_have_text("4, 2 inherited")
    await expect(page.locator(".row.g-steps:not(.head)")).to_have_count(4)
    await expect(page.locator(".fork")).to_have_count(0)
    await page.goto(f"{played.url}/ui#/rollout/p")
    await expect(fact(page, "Playback")).to_have_text("of a/b: 0 answered, 0 live, 2 refused")
    await expect(page.locator(".fork")).to_contain_text(
        f"2 refused: the first call differs from step {played.steps[0]} at"
    )
    shown = ["messages[0].content", "You reckon, and answer in a sentence.", "<b>now</b>⟨U+202E⟩"]
    await expect(page.locator(".fork code")).to_have_text(shown)


async def test_a_row_names_the_last_step_that_it_inherited(played, open_page):
    page = await open_page(f"{played.url}/ui#/rollout/b0/sequences")
    shown = page.locator(".sequences p", has_text="are inherited")
    await expect(shown).to_contain_text(f"tokens are inherited, the last of step {played.steps[1]} of rollout a/b")


async def test_lists_mark_playbacks(played, open_page):
    page = await open_page(f"{played.url}/ui")
    rows = page.locator(".row.g-rollouts:not(.head)")
    await expect(rows).to_have_count(5)
    titles = "(rows) => rows.map((r) => [r.querySelector('a').hash, r.querySelector('.inherited')?.title])"

    assert dict(await rows.evaluate_all(titles)) == {
        "#/rollout/a%2Fb": None,
        "#/rollout/b0": "playback of a/b: 2 answered, 2 live",
        "#/rollout/b1": "playback of a/b: 2 answered, 1 live",
        "#/rollout/b2": "playback of a/b: 1 answered, 0 live",
        "#/rollout/p": "playback of a/b: 0 answered, 0 live",
    }
    await page.locator("#filter").fill("a/b b1")  # its source and its name
    await expect(rows).to_have_count(1)
    await page.goto(f"{played.url}/ui#/group/g")
    await expect(page.locator(".row.g-members .inherited")).to_have_text(["▷"] * 3)


async def test_a_step_lists_its_branches_with_their_rewards(played, open_page):
    """The time line has their number and mean reward; the rollout lists all playbacks."""
    page = await open_page(f"{played.url}/ui#/rollout/a%2Fb")
    branched = page.locator(".branchmark")
    await expect(branched).to_have_text(["⋔ 3 · 0.5"])
    text = "3 branches: mean reward 0.5, standard deviation 0.5 of 2"
    assert text == await branched.get_attribute("title")
    await expect(fact(page, "Playbacks").locator("a")).to_have_text(["g", "p"])
    await expect(fact(page, "Playbacks")).to_have_text("4: g p")
    await page.locator(".row.g-steps", has=branched).locator("a").click()
    await expect(page.locator(".branches p")).to_have_text(text)
    await expect(page.locator(".branches li")).to_have_text(
        ["b0 completed, reward 1", "b1 failed, reward 0", "b2 open, reward \N{EN DASH} (not at this step yet)"]
    )
    await page.locator(".branches a").first.click()
    await expect(page.locator("h1")).to_have_text("b0")


async def test_hostile_names_of_playbacks_are_text_in_every_view(empty, open_page):
    """The source, its branch, and the first mismatch."""
    source = await record(empty.store, HOSTILE_ID, *STEPS)
    hostile = f"{HOSTILE_ID}~1"
    first = {"step_id": "s1", "path": ALERT, "value": ALERT, "recorded": ALERT}
    await branch(empty.store, source, "s2", hostile, "x0", reward=1.0, mismatch={"count": 1, "first": first})
    await mark(empty.store, source, rollouts=(hostile,))
    of, played = (quote(name, safe="") for name in (HOSTILE_ID, hostile))
    for where, text in (
        ("", None),
        (f"#/rollout/{played}", ALERT),
        (f"#/rollout/{of}", None),
        (f"#/rollout/{of}/step/s2", "1 branch"),
        (f"#/rollout/{played}/step/s0", "Inherited from"),
    ):
        page = await open_page(f"{empty.url}/ui{where}")
        await page.locator(".inherited, .branchmark, .branches, .tokens .k-context").first.wait_for()
        assert await created_elements(page) == [0, 1, 0]
        assert await page.evaluate(f"!{HIDDEN}.test(document.body.textContent)")
        await expect(page.locator("main")).to_contain_text(text or "gnp.exe")


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_views_of_playbacks_are_accessible_and_fit_a_phone(played, open_page, scheme):
    views = ("#/rollouts", "#/rollout/b0", "#/rollout/p", "#/rollout/a%2Fb")
    steps = (f"#/rollout/b0/step/{played.steps[1]}", f"#/rollout/a%2Fb/step/{played.steps[2]}")
    for where in (*views, *steps):
        for viewport in (None, PHONE):
            page = await open_page(f"{played.url}/ui{where}", scheme=scheme, viewport=viewport)
            await page.locator(".inherited, .fork, .branchmark, .branches li, .tokens .k-context").first.wait_for()
            assert await violations(page) == []
            assert await page.evaluate(FITS)
