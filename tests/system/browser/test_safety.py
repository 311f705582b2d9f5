"""Recorded contents are untrusted: none of them runs or changes the page, and keys stay in the tab.

The `open_page` fixture asserts for every page that no dialog opened, no policy was violated and no error was logged.
"""

from urllib.parse import quote

import pytest
from playwright.async_api import expect
from tests.support.page_contents import ALERT, HOSTILE, HOSTILE_ID, LONG_WORD

UNAUTHORIZED = ("Failed to load resource",)
HIDDEN = "/[\\u0000\\u001b\\u202a-\\u202e\\u2066-\\u2069\\u{e0000}-\\u{e007f}]/u"


@pytest.fixture
def rollout() -> str:
    return f"#/rollout/{quote(HOSTILE_ID, safe='')}"


async def created_elements(page) -> list[int]:
    """Count what hostile contents would create: images, frames, foreign scripts, javascript links, listeners."""
    return await page.evaluate(
        "[document.querySelectorAll('img, iframe, object, embed, base, form').length, document.scripts.length,"
        ' document.querySelectorAll(\'[href^="javascript" i], [onerror], [onload], [onclick], [src^="x"]\').length]'
    )


async def test_hostile_ids_and_texts_are_text_in_lists(contents, open_page):
    """An ID that is markup is listed and opened as plain text."""
    page = await open_page(f"{contents.url}/ui")
    link = page.locator("a[href^='#/rollout/%22']")
    assert HOSTILE_ID.replace("\u202e", "⟨U+202E⟩") == await link.text_content()
    await link.click()
    await expect(page.locator("#steps-0")).to_be_visible()
    assert await created_elements(page) == [0, 1, 0]
    await expect(page.locator(".facts")).to_contain_text(f"group {ALERT}")
    await page.locator(".facts a").click()
    await expect(page.locator("h1")).to_have_text(f"group {ALERT}")


async def test_a_hostile_step_is_text_in_every_view(contents, open_page, rollout):
    """In its messages, tools, tokens, names, sequences, plots and raw JSON."""
    page = await open_page(f"{contents.url}/ui{rollout}")
    await page.locator("#steps-0").click()
    await expect(page.locator(".tokens .t:not(.noid)").first).to_be_visible()
    for text in HOSTILE[:3]:
        await expect(page.locator(".message").filter(has_text=text).first).to_be_visible()
    for fold in await page.locator("details summary").all():
        await fold.click()
    await page.get_by_role("button", name="Raw JSON").click()
    await page.locator(".tokens .t").nth(6).dispatch_event("pointerover")  # it may be on two lines
    assert await created_elements(page) == [0, 1, 0]
    assert await page.evaluate(f"!{HIDDEN}.test(document.body.textContent)")
    for tab in ("sequences", "plots"):
        await page.goto(f"{contents.url}/ui{rollout}/{tab}")
        await page.locator(".row.g-sequences, .plot").first.wait_for()
        assert await created_elements(page) == [0, 1, 0]
    await page.goto(f"{contents.url}/ui{rollout}/sequences")
    await page.locator("select").select_option("flagged")
    await expect(page.locator(".tokens .t:not(.noid)").first).to_be_visible()
    assert await created_elements(page) == [0, 1, 0]


async def test_directional_and_control_characters_are_escaped(contents, open_page, rollout):
    """Bidirectional marks, NUL and escape sequences are shown by name, in messages and in tokens."""
    page = await open_page(f"{contents.url}/ui{rollout}")
    await page.locator("#steps-0").click()
    await expect(page.locator(".tokens .t:not(.noid)").first).to_be_visible()

    await expect(page.locator(".message").nth(3)).to_contain_text("⟨U+202E⟩gnp.exe⟨U+202C⟩")
    await expect(page.locator(".message").nth(3)).to_contain_text("a NUL ⟨U+0000⟩ and an escape ⟨U+001B⟩")
    await expect(page.locator(".message").nth(3)).to_contain_text("a tag ⟨U+E0041⟩")
    await expect(page.locator(".tokens")).to_contain_text("⟨U+202E⟩⟨U+0000⟩")


async def test_a_text_of_a_megabyte_is_folded(contents, open_page, rollout):
    """Nothing grows beyond the page, and the whole text is available on request."""
    page = await open_page(f"{contents.url}/ui{rollout}")
    await page.locator("#steps-0").click()
    await expect(page.locator(".tokens .t:not(.noid)").first).to_be_visible()
    assert await page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    assert await page.evaluate("document.body.textContent.length") < 50_000
    await page.get_by_role("button", name="Show all 1,000,000 characters").click()
    assert len(LONG_WORD) == await page.evaluate(
        "Math.max(...[...document.querySelectorAll('.text')].map((one) => one.textContent.length))"
    )


async def test_the_security_policy_blocks_injected_markup(contents, open_page):
    """If markup got in, no script, listener or eval in it would run, and no other host would be requested."""
    blocked = ("violation:", "Content Security Policy", "unsafe-eval", "Failed to load", "Refused")
    page = await open_page(f"{contents.url}/ui", expected=blocked)
    await page.evaluate(
        """() => {
          window.ran = [];
          const script = document.createElement("script");
          script.textContent = "window.ran.push('inline')";
          document.body.append(script);
          const place = document.createElement("div");
          place.innerHTML = "<img src='nowhere' onerror=\\"window.ran.push('listener')\\">";
          document.body.append(place);
          const link = document.createElement("a");
          link.href = "javascript:window.ran.push('link')";
          document.body.append(link);
          link.click();
        }"""
    )
    outcome = await page.evaluate("fetch('http://127.0.0.2:9/').then(() => 'answered', () => 'refused')")
    reports = await page.evaluate(
        """async () => {
          const found = [];
          addEventListener("securitypolicyviolation", (report) => found.push(report.effectiveDirective));
          for (const [name, attribute, value] of [["link", "href", "http://127.0.0.2:9/a.css"], ["iframe", "src", "/ui"]]) {
            const element = document.createElement(name);
            if (name === "link") element.rel = "stylesheet";
            element.setAttribute(attribute, value);
            document.body.append(element);
          }
          while (found.length < 2) await new Promise((done) => setTimeout(done, 20));
          return found.sort();
        }"""
    )

    assert (await page.evaluate("window.ran"), outcome) == ([], "refused")
    assert reports == ["frame-src", "style-src-elem"]


async def test_no_other_host_is_requested(contents, open_page):
    """The page works without a network: it loads everything from this proxy."""
    page = await open_page(f"{contents.url}/ui#/plots")
    urls = []
    page.on("request", lambda request: urls.append(request.url))
    await page.reload()
    await expect(page.locator(".sum")).to_have_text("20 of 20 rollouts with steps")

    assert len(urls) > 20
    assert [url for url in urls if not url.startswith(contents.url)] == []


async def test_a_key_is_requested_and_kept_for_the_tab(guarded, open_page):
    """A wrong key is requested again; the right one is in the session's storage and nowhere else, until it is
    forgotten.
    """
    page = await open_page(f"{guarded.url}/ui", expected=UNAUTHORIZED)
    await expect(page.locator("h1")).to_have_text("A control key is required")
    await page.locator("#key").fill("a wrong one")
    await page.get_by_role("button", name="Continue").click()
    await expect(page.get_by_role("alert")).to_have_text("A key consists of ASCII characters without spaces.")
    for key, why in (
        ("wrong", "The control key is not valid."),
        ("agent-key", "This API key is for the model API only"),
    ):
        await page.locator("#key").fill(key)
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("alert")).to_contain_text(why)
    await page.locator("#key").fill("control-key")
    await page.keyboard.press("Enter")
    await expect(page.locator("a[href='#/rollout/secret']")).to_be_visible()
    await expect(page.locator("#live")).to_have_text("live")

    kept = await page.evaluate("[{...sessionStorage}, {...localStorage}, document.cookie, location.href]")
    assert kept[0]["tokentape.key"] == "control-key"
    assert [{}, "", f"{guarded.url}/ui"] == kept[1:]
    await page.reload()
    await expect(page.locator("a[href='#/rollout/secret']")).to_be_visible()
    await page.get_by_role("button", name="Forget key").click()
    await expect(page.locator("h1")).to_have_text("A control key is required")
    assert None is await page.evaluate("sessionStorage.getItem('tokentape.key')")


async def test_the_key_is_sent_to_the_control_api_only(guarded, open_page):
    """It is in a request header, never in a URL, and not in requests for the page's own files."""
    page = await open_page(f"{guarded.url}/ui", expected=UNAUTHORIZED)
    await page.locator("#key").fill("control-key")
    requests = []
    page.on("request", lambda request: requests.append((request.url, request.headers.get("authorization"))))
    await page.keyboard.press("Enter")
    await expect(page.locator("a[href='#/rollout/secret']")).to_be_visible()
    await page.reload()
    await expect(page.locator("a[href='#/rollout/secret']")).to_be_visible()

    files = {key for url, key in requests if "/ui" in url}
    assert (files, {key for url, key in requests if "/ui" not in url}) == ({None}, {"Bearer control-key"})
    assert [url for url, _ in requests if "control-key" in url] == []
