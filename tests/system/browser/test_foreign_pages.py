"""Web pages of other origins, which the user has open beside a proxy without keys."""

from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import pytest
import pytest_asyncio
from aiohttp import web
from tests.support.listening import listening

CHAT = '{"messages": [{"role": "user", "content": "hi"}]}'
CHANGES = [
    ("POST", "/rollouts", '{"rollout_id": "planted"}'),
    ("POST", "/rollouts/kept/finish", '{"status": "completed", "reward": 1}'),
    ("POST", "/sessions/kept/complete", '{"reward_info": {"reward": 1}}'),
    ("POST", "/v1/rollout/completed", '{"rollout_id": "kept", "status": "COMPLETED", "reward": 1}'),
    ("POST", "/policy/pause", "{}"),
    ("POST", "/batches/claim", '{"consumer": "evil", "groups": 1, "wait_s": 0}'),
    ("POST", "/rollouts/planted/v1/chat/completions", CHAT),
    ("PATCH", "/rollouts/kept", '{"reward": 1}'),
    ("DELETE", "/rollouts/kept", ""),
]
# Return what the page could see of each attempt: the response's type and status, or the error.
FETCH = """async ([base, changes, mode]) => {
  const seen = [];
  for (const [method, path, body] of changes) {
    const simple = mode === "no-cors" ? {} : { headers: { "Content-Type": "application/json" } };
    const sent = { method: mode === "no-cors" ? "POST" : method, body: body || "{}", mode, ...simple };
    seen.push(await fetch(base + path, sent).then((one) => `${one.type} ${one.status}`, () => "blocked"));
  }
  return seen;
}"""
OTHERS = """async ([base]) => {
  navigator.sendBeacon(base + "/rollouts", '{"rollout_id": "beacon"}');
  const ended = (name, path) => new Promise((done) => {
    const element = document.createElement(name);
    element.onload = () => done("loaded");
    element.onerror = () => done("refused");
    element.src = base + path;
    document.body.append(element);
  });
  const frame = document.createElement("iframe");
  frame.name = "posted";
  document.body.append(frame);
  const form = document.createElement("form");
  Object.assign(form, { method: "POST", action: base + "/rollouts", enctype: "text/plain", target: "posted" });
  const input = document.createElement("input");
  [input.name, input.value] = ['{"rollout_id": "form", "metadata": {"a": "', '"}}'];
  form.append(input);
  document.body.append(form);
  const posted = new Promise((done) => { frame.onload = done; });
  form.submit();
  await posted;
  const events = await new Promise((done) => {
    const source = new EventSource(base + "/events");
    source.onopen = () => done("open");
    source.onerror = () => { source.close(); done("refused"); };
  });
  return [await ended("img", "/rollouts/kept"), await ended("script", "/ui/app.js"), events];
}"""
OPAQUE = r"""([base]) => new Promise((done) => {
  addEventListener("message", (event) => done(event.data));
  const frame = document.createElement("iframe");
  frame.sandbox = "allow-scripts";
  frame.srcdoc = `<script>fetch("${base}/rollouts", { method: "POST", mode: "no-cors", body: '{"rollout_id": "opaque"}' })
    .then(() => parent.postMessage("sent", "*"), () => parent.postMessage("blocked", "*"))<\/script>`;
  document.body.append(frame);
})"""


@asynccontextmanager
async def serving_page(host):
    """A page of another origin, on a port of its own; yield its URL."""

    async def show(request):
        return web.Response(text="<!doctype html><title>another site</title><body></body>", content_type="text/html")

    async with listening(show) as url:
        yield url.replace("127.0.0.1", host) + "/"


@pytest_asyncio.fixture(loop_scope="session")
async def stranger(browser):
    """Open a page in a profile of its own; its console is not read."""
    context = await browser.new_context(service_workers="block")
    yield await context.new_page()
    await context.close()


async def state(contents):
    """Return what a page could change: the rollouts, the rollout `kept`, and whether calls are paused."""
    listed = await contents.control("GET", "/rollouts")
    kept = next(rollout for rollout in listed["rollouts"] if rollout["rollout_id"] == "kept")
    policy = await contents.control("GET", "/policy")
    return sorted(rollout["rollout_id"] for rollout in listed["rollouts"]), kept, policy


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
async def test_a_page_of_another_site_or_port_changes_and_reads_nothing(empty, stranger, host):
    """By fetch with and without a preflight, beacons, forms, frames, images, scripts and event streams."""
    await empty.control("POST", "/rollouts", {"rollout_id": "kept"})
    before = await state(empty)
    async with serving_page(host) as page:
        await stranger.goto(page)
        simple = await stranger.evaluate(FETCH, [empty.url, CHANGES, "no-cors"])
        checked = await stranger.evaluate(FETCH, [empty.url, CHANGES, "cors"])
        others = await stranger.evaluate(OTHERS, [empty.url])
        opaque = await stranger.evaluate(OPAQUE, [empty.url])

    assert ["opaque 0"] * len(CHANGES) == simple  # sent, and refused
    assert ["blocked"] * len(CHANGES) == checked
    assert others == ["refused"] * 3
    assert opaque == "sent"
    assert before == await state(empty)


async def test_after_dns_rebinding_a_page_changes_and_reads_nothing(empty, stranger):
    """Its origin has the proxy's port, and its name resolves to this machine."""
    await empty.control("POST", "/rollouts", {"rollout_id": "kept"})
    before = await state(empty)
    base = f"http://rebound.test:{urlsplit(empty.url).port}"

    async def show(route):  # as the stranger's own server did before the name was rebound
        await route.fulfill(body="<!doctype html><title>rebound</title>", content_type="text/html")

    await stranger.route(base + "/", show)
    await stranger.goto(base + "/")
    seen = await stranger.evaluate(FETCH, [base, CHANGES, "same-origin"])
    read = await stranger.evaluate("(url) => fetch(url).then((one) => one.json())", base + "/rollouts")

    assert ["basic 403"] * len(CHANGES) == seen
    assert read["error"]["code"] == "unknown_host"
    assert before == await state(empty)


async def test_the_pages_own_requests_and_links_to_it_are_served(empty, stranger):
    """Also if the link is on another site; what the page sends to its own origin changes rollouts."""
    await empty.control("POST", "/rollouts", {"rollout_id": "kept"})
    async with serving_page("localhost") as page:
        await stranger.goto(page)
        await stranger.evaluate("(url) => { location.href = url; }", f"{empty.url}/ui")
        await stranger.locator("#rollouts-0").wait_for()
    seen = await stranger.evaluate(FETCH, [empty.url, [["PATCH", "/rollouts/kept", '{"reward": 1}']], "same-origin"])
    _, kept, _ = await state(empty)

    assert (seen, kept["reward"]) == (["basic 200"], 1)
