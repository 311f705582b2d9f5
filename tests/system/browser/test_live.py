"""Live updates of the page."""

import socket
from contextlib import asynccontextmanager

from playwright.async_api import expect
from tests.support.fakes import settings_for

from proxy.server.listener import running, simulating
from proxy.simulator.options import Options
from storage import StoreOptions, open_store

GONE = ("status of 404",)  # the page requests a deleted rollout, and the browser logs the 404
BROKEN = ("Failed to load resource", "net::ERR")


async def test_a_list_follows_rollouts(contents, open_page):
    """A new rollout appears, changes are shown, and a deleted one disappears."""
    page = await open_page(f"{contents.url}/ui", expected=GONE)
    await expect(page.locator("#live")).to_have_text("live")
    await page.evaluate("window.same = true")
    row = page.locator(".row.g-rollouts", has=page.locator("a[href='#/rollout/followed']"))
    opened = await contents.control("POST", "/rollouts", {"rollout_id": "followed"})
    await expect(row.locator(".c-status")).to_have_text("open")
    await contents.turns(opened["base_url"], 2)
    await expect(row.locator(".c-steps")).to_have_text("2")
    await contents.finish("followed", 0.25)
    await expect(row.locator(".c-status")).to_have_text("completed")
    await expect(row.locator(".c-reward")).to_have_text("0.25")
    async with contents.http.delete(f"{contents.url}/rollouts/followed") as response:
        assert response.status == 204
    await expect(row).to_have_count(0)

    assert await page.evaluate("window.same")


async def test_a_rollout_follows_its_steps(contents, open_page):
    """Each step appears when it is stored; the selected row stays selected."""
    opened = await contents.control("POST", "/rollouts", {"rollout_id": "growing"})
    await contents.turns(opened["base_url"], 1)
    page = await open_page(f"{contents.url}/ui#/rollout/growing", expected=GONE)
    await expect(page.locator("#live")).to_have_text("live")
    await expect(page.locator("#steps-0")).to_be_visible()
    await page.keyboard.press("j")
    await contents.turns(opened["base_url"], 3)
    await expect(page.locator(".row.g-steps:not(.head)")).to_have_count(4)
    await expect(page.locator("#steps-0")).to_have_attribute("aria-selected", "true")
    await contents.finish("growing")
    await expect(page.locator(".facts")).to_contain_text("completed")
    async with contents.http.delete(f"{contents.url}/rollouts/growing") as response:
        assert response.status == 204


async def test_a_group_follows_its_rollouts(contents, open_page):
    """Their statuses and rewards are updated."""
    opened = await contents.control("POST", "/groups", {"group_id": "followed", "size": 2})
    page = await open_page(f"{contents.url}/ui#/group/followed", expected=GONE)
    await expect(page.locator("#live")).to_have_text("live")
    await expect(page.locator(".row.g-members:not(.head)")).to_have_count(2)
    for rollout in opened["rollouts"]:
        await contents.finish(rollout["rollout_id"], 0.75)
    await expect(page.locator(".row.g-members:not(.head) .c-reward")).to_have_text(["0.75", "0.75"])
    await expect(page.locator(".facts")).to_contain_text("2 of 2")
    async with contents.http.delete(f"{contents.url}/groups/followed") as response:
        assert response.status == 204


@asynccontextmanager
async def on_port(port: int, server):
    store = await open_store(f"unix:{server.socket}", StoreOptions(prefix="ui-restarted"))
    async with simulating("127.0.0.1:0", Options()) as engine:
        settings = settings_for(engine, listen=f"127.0.0.1:{port}")
        async with running(settings, store) as served:
            yield served
    await store.close()


async def test_the_page_catches_up_when_the_proxy_returns(server, contents, open_page):
    """What changed during the outage is shown: the page loads everything again."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    async with on_port(port, server) as served:
        page = await open_page(f"{served.url}/ui", expected=BROKEN)
        await expect(page.locator("#live")).to_have_text("live")
    await expect(page.locator("#live")).to_have_text("connecting")
    async with (
        on_port(0, server) as other,
        contents.http.post(f"{other.url}/rollouts", json={"rollout_id": "meanwhile"}) as response,
    ):
        assert response.status == 201
    async with on_port(port, server):
        await expect(page.locator("a[href='#/rollout/meanwhile']")).to_be_visible()
        await expect(page.locator("#live")).to_have_text("live")
        await expect(page.locator(".failure")).to_have_count(0)
        await page.goto("about:blank")


async def test_training_follows_groups_with_one_request_for_each_change(contents, open_page):
    """It has what the newest groups earned, without a request for each rollout; a new group appears."""
    page = await open_page(f"{contents.url}/ui#/training", expected=GONE)
    urls = []
    page.on("request", lambda request: urls.append(request.url))
    await expect(page.locator("#live")).to_have_text("live")
    await expect(page.locator(".plot canvas")).to_have_count(6)
    await page.locator(".plot summary").first.click()
    values = page.locator(".plot").first.locator(".values li")
    await expect(values.first).to_be_visible()
    before = await values.count()
    opened = await contents.control("POST", "/groups", {"group_id": "trained", "size": 2})
    for reward, rollout in enumerate(opened["rollouts"]):
        await contents.finish(rollout["rollout_id"], float(reward))
    await expect(values).to_have_count(before + 1)
    await expect(values.filter(has_text="trained: mean reward 0.5")).to_have_count(1)
    assert {"training", "events"} >= {url.rpartition("/")[2].partition("?")[0] for url in urls if "/ui" not in url}
    async with contents.http.delete(f"{contents.url}/groups/trained") as response:
        assert response.status == 204


async def test_rewards_of_unknown_versions_are_last_and_not_on_the_line_of_means(contents, open_page):
    """Also if a version is named "unknown". Versions of a later epoch follow all of an earlier one."""
    page = await open_page(f"{contents.url}/ui#/training")
    found = [
        ("10", 0, 1.0),
        (None, 1, 0.0),
        ("unknown", 0, 0.7),
        ("9", 0, 0.5),
        ("9", 0, 0.7),
        ("v2", 0, 0.4),
        ("8", 1, 0.3),
    ]
    given = [{"version": version, "epoch": epoch, "reward": reward, "label": "g"} for version, epoch, reward in found]
    shown = await page.evaluate("async (given) => (await import('./ui/plots.js')).byVersion(given)", given)

    assert shown["names"] == ["9", "10", "unknown", "v2", "1:8", "unknown"]
    assert [round(mean["y"], 9) for mean in shown["means"]] == [0.6, 1.0, 0.7, 0.4, 0.3]
    assert round(shown["marks"][1]["x"]) == 5
    assert shown["marks"][1]["label"] == "g at version unknown"
