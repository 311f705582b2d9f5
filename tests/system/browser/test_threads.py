"""The threads of a rollout: their names and steps, and marks in the tree."""

from playwright.async_api import expect


async def test_a_rollout_with_several_threads_lists_them_and_marks_their_steps(empty, open_page):
    """A rollout with one thread names none."""
    messages = [{"role": "user", "content": "hi"}]
    for rollout, agent in (("r1", "main"), ("r1", "searcher"), ("r2", "main")):
        call = empty.http.post(
            f"{empty.url}/rollouts/{rollout}/v1/chat/completions",
            json={"model": "policy", "messages": messages, "max_tokens": 4},
            headers={"X-Agent-Name": agent},
        )
        async with call as response:
            assert response.status == 200
    page = await open_page(f"{empty.url}/ui#/rollout/r1")
    threads = page.locator(".facts div", has_text="Threads").locator("dd")
    await expect(threads).to_have_text("main (1) · searcher (1)")
    await expect(page.locator(".threadmark")).to_have_text(["≡ searcher"])
    assert "thread searcher" in await page.locator(".threadmark").get_attribute("title")

    page = await open_page(f"{empty.url}/ui#/rollout/r2")
    await expect(page.locator(".row.g-steps:not(.head)")).to_have_count(1)
    await expect(page.locator(".facts div", has_text="Threads")).to_have_count(0)
