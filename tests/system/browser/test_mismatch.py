"""The page Training shows what trainers reported: mismatch by policy version, and the cells of the newest batch."""

import numpy as np
import pytest
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import expect
from tests.support.page_contents import ALERT, HOSTILE

from benchmarks.mismatch import CAUSES, VERSION, Batch, simulated
from tokentape.mismatch_sums import mismatch

PHONE = {"width": 360, "height": 740}
FITS = "document.documentElement.scrollWidth <= document.documentElement.clientWidth"


def sums_of(cause):
    batch = Batch(np.random.default_rng(1))
    CAUSES[cause][0](batch)
    return mismatch(*simulated(batch), policy_version=VERSION)


async def report(contents, group, cause, version, **names):
    """Claim a group as a batch, and report its mismatch; `names`: the name of the only value of a dimension."""
    opened = await contents.control("POST", "/groups", {"group_id": group, "size": 1})
    (member,) = opened["rollouts"]
    await contents.turns(member["base_url"], 1)
    await contents.finish(member["rollout_id"], 1.0)
    batch = await contents.control("POST", "/batches/claim", {"consumer": "c"})
    sums = sums_of(cause)
    for dimension, name in names.items():
        (cell,) = sums["cells"][dimension].values()
        sums["cells"][dimension] = {name: cell}
    body = {"policy_version": version, "rows": {member["rollout_id"]: list(range(16))}, "sums": sums}
    await contents.control("POST", f"/batches/{batch['batch_id']}/mismatch", body)
    return batch["batch_id"]


async def reported(contents):
    await report(contents, "g1", "bfloat16", "6")
    await report(contents, "g2", "rows of older versions", ALERT)
    names = {"model": HOSTILE[0], "engine": HOSTILE[3][:60], "truncation": "x" * 200}
    return await report(contents, "g3", "one endpoint with older weights", "7", **names)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("viewport", [None, PHONE], ids=["desk", "phone"])
async def test_reports_are_shown_by_version_and_by_property(empty, open_page, scheme, viewport):
    """Names of values and versions that are attacks are text; axe-core finds no problem, and a phone shows everything."""
    newest = await reported(empty)
    page = await open_page(f"{empty.url}/ui#/training", scheme=scheme, viewport=viewport)
    section = page.locator("section.mismatch")
    await expect(section.locator(".facts")).to_contain_text(newest)
    await expect(section.locator(".facts")).to_contain_text("stale_endpoint")
    await expect(section.locator(".plot canvas")).to_have_count(1)
    await section.locator(".plot summary").click()
    await expect(section.locator(".values li")).to_have_count(3)
    await expect(section.locator(".values")).to_contain_text("lag, mean |d|")
    await expect(section.locator(".values")).to_contain_text(f"at version {ALERT[:40]}")
    row = section.locator("tr", has_text="engine-1")
    await expect(row.locator("td").nth(1)).to_have_text("1,152")
    await expect(section.locator("tr", has_text=HOSTILE[0][:60])).to_have_count(1)
    await expect(section.locator("tr", has_text="⟨U+202E⟩gnp.exe")).to_have_count(1)

    assert await page.evaluate("document.querySelectorAll('img, section script').length") == 0
    assert await page.evaluate(FITS)
    assert (await Axe().run(page)).violations_count == 0


async def test_without_reports_there_is_no_mismatch(contents, open_page):
    page = await open_page(f"{contents.url}/ui#/training")
    await expect(page.locator(".plot canvas")).to_have_count(6)

    await expect(page.locator("section.mismatch")).to_have_count(0)
