"""The page of a step and of a sequence: messages, coloured tokens, values on hover, raw JSON."""

import math

import orjson
from playwright.async_api import expect
from tests.support.fakes import settings_for
from tests.support.page_contents import TOKENS

from proxy.continuation.types import REASONS
from proxy.server.listener import running

BACK = "(name) => getComputedStyle(document.querySelector(name)).backgroundColor"
BINS = (0, -0.05, -0.2, -0.5, -1, -2, -4, -8)


async def opened(contents, open_page, rollout: str, number: int, **named):
    """Open the page of a step; return it, with texts loaded, and the step's JSON."""
    steps = (await contents.control("GET", f"/rollouts/{rollout}/steps"))["steps"]
    step = steps[number]
    page = await open_page(f"{contents.url}/ui#/rollout/{rollout}/step/{step['step_id']}", **named)
    await expect(page.locator(".tokens .t:not(.noid)").first).to_be_visible()
    return page, step


def bin_index(logprob: float) -> int:
    return max(number for number, high in enumerate(BINS) if logprob <= high or number == 0)


async def shown(page) -> list[dict]:
    """Return every token in the document: index, classes, background and text."""
    return await page.evaluate(
        "[...document.querySelectorAll('.tokens .t')].map((t) => ({ i: Number(t.dataset.i), classes: [...t.classList],"
        " back: getComputedStyle(t).backgroundColor, line: getComputedStyle(t).textDecorationLine, text: t.textContent }))"
    )


async def test_tokens_are_coloured_by_mask(contents, open_page):
    """Exactly the sampled tokens have the legend's colour for them, and an underline."""
    page, step = await opened(contents, open_page, "conversation", 1)
    tokens = await shown(page)
    prompt = len(step["prompt_ids"])
    of_legend = await page.evaluate(BACK, ".legend .k-sampled")

    assert prompt + len(step["choices"][0]["ids"]) == len(tokens)
    assert [token["i"] >= prompt for token in tokens] == [token["back"] == of_legend for token in tokens]
    assert [token["i"] >= prompt for token in tokens] == [token["line"] == "underline" for token in tokens]
    assert of_legend != "rgba(0, 0, 0, 0)"


async def test_tokens_are_coloured_by_logprob(contents, open_page):
    """Each sampled token by its own logprob, as in the legend; the choice is kept for the tab."""
    page, step = await opened(contents, open_page, "conversation", 1)
    await page.get_by_role("button", name="by logprob").click()
    legend = [await page.evaluate(BACK, f".legend .l-{number}") for number in range(len(BINS))]
    prompt, logprobs = len(step["prompt_ids"]), step["choices"][0]["logprobs"]
    tokens = await shown(page)

    assert len(BINS) == len(set(legend))
    assert [legend[bin_index(logprob)] for logprob in logprobs] == [token["back"] for token in tokens[prompt:]]
    assert {token["back"] for token in tokens[:prompt]} == {"rgba(0, 0, 0, 0)"}
    assert len({bin_index(logprob) for logprob in logprobs}) > 2
    await page.reload()
    await expect(page.get_by_role("button", name="by logprob")).to_have_attribute("aria-pressed", "true")
    await page.keyboard.press("c")
    await expect(page.get_by_role("button", name="by mask")).to_have_attribute("aria-pressed", "true")


async def test_a_flagged_step_has_the_colour_of_flagged_tokens(contents, open_page):
    """And shows the reason."""
    page, step = await opened(contents, open_page, "branching", 3)
    flagged = await page.evaluate(BACK, ".legend .k-flagged")
    tokens = await shown(page)

    assert {token["back"] for token in tokens[len(step["prompt_ids"]) :]} == {flagged}
    assert flagged not in {token["back"] for token in tokens[: len(step["prompt_ids"])]}
    await expect(page.locator(".facts")).to_contain_text(step["fidelity"]["why"][0])


async def facts(page) -> dict[str, str]:
    found = await page.evaluate(
        "[...document.querySelectorAll('.inspector .fact')].map((f) => [f.dataset.fact, f.querySelector('bdi').textContent])"
    )
    return dict(found)


async def test_hovering_a_token_shows_its_values(contents, open_page):
    """ID, text, logprob, probability, policy version and span."""
    page, step = await opened(contents, open_page, "branching", 2)
    prompt, choice = len(step["prompt_ids"]), step["choices"][0]
    texts = (await contents.control("GET", f"/rollouts/branching/steps/{step['step_id']}/texts"))["texts"]
    for number in (0, prompt, prompt + 10, prompt + 23):
        await page.locator(f"#t-{number}").hover()
        values = await facts(page)
        sampled = number - prompt
        assert (str(number), str([*step["prompt_ids"], *choice["ids"]][number])) == (values["token"], values["id"])
        assert texts[number] == orjson.loads(values["text"])
        if sampled < 0:
            assert (values["mask"], values["logprob"]) == ("prompt", "\N{EN DASH}")
            continue
        logprob = choice["logprobs"][sampled]
        assert math.isclose(logprob, float(values["logprob"]), abs_tol=5e-5)
        assert math.isclose(100 * math.exp(logprob), float(values["probability"][:-2]), rel_tol=0.01)
        assert ("5" if sampled >= 10 else "4") == values["policy version"]
        assert values["span"].startswith(f"{prompt + 10}" if sampled >= 10 else f"{prompt}")


async def test_spans_are_marked_and_reached_by_a_key(contents, open_page):
    """A span starts with the first sampled token and where another version of the weights continues."""
    page, step = await opened(contents, open_page, "branching", 2)
    prompt = len(step["prompt_ids"])
    starts = [token["i"] for token in await shown(page) if "span-start" in token["classes"]]
    assert starts == [prompt, prompt + 10]
    for number in starts:
        await page.keyboard.press("n")
        await expect(page.locator(".t.current")).to_have_id(f"t-{number}")
    await page.keyboard.press("ArrowLeft")
    await expect(page.locator(".t.current")).to_have_id(f"t-{prompt + 9}")
    assert str(prompt + 9) == (await facts(page))["token"]


async def test_ids_are_shown_if_texts_are_unknown(contents, open_page):
    """With everything else that is known of them; the page notes it."""
    (*_, step) = (await contents.control("GET", "/rollouts/drifting/steps"))["steps"]
    async with running(settings_for(None), contents.store) as served:  # the engine that sampled is not configured
        page = await open_page(f"{served.url}/ui#/rollout/drifting/step/{step['step_id']}")
        await expect(page.locator(".source")).to_have_text("Texts: not available; token ids are shown.")
        shown_ids = [int(token["text"]) for token in await shown(page)]
        assert [*step["prompt_ids"], *step["choices"][0]["ids"]] == shown_ids
        await page.locator(f"#t-{len(step['prompt_ids'])}").hover()
        assert (await facts(page))["text"] == "unknown"
        await page.goto("about:blank")


async def test_a_call_without_ids_has_a_note(contents, open_page):
    """A failed call has no tokens; its response is shown."""
    page = await open_page(f"{contents.url}/ui#/rollout/branching/step/branching-4")
    await expect(page.locator(".empty").first).to_have_text("The engine returned no token ids for this call.")
    await expect(page.locator(".message[data-role='error']")).to_contain_text("400 bad <img src=x")


async def test_drift_is_marked_at_its_token(contents, open_page):
    """In the step that drifts and in the earlier one, with both texts."""
    (first, *_) = (await contents.control("GET", "/rollouts/drifting/tree"))["drift"]
    for name in ("step_id", "earlier_step_id"):
        page = await open_page(f"{contents.url}/ui#/rollout/drifting/step/{first[name]}")
        await expect(page.locator(".drifts")).to_contain_text(first["kind"])
        await expect(page.locator(f".tokens #t-{first['index']}.drift")).to_have_count(1)


async def test_messages_are_shown(contents, open_page):
    """The page shows the request's messages, then the reply."""
    page, step = await opened(contents, open_page, "conversation", 1)
    texts = await page.locator(".message").all_inner_texts()
    contents_sent = [message["content"] for message in step["request"]["messages"]]
    reply = step["response"]["choices"][0]["message"]["content"]

    assert [text.split("\n", 1)[1].strip() for text in texts] == [*contents_sent, reply]


async def test_the_messages_sent_to_the_engine_are_shown(contents, open_page):
    """If the client's own body has another shape; the raw JSON has that body."""
    page, step = await opened(contents, open_page, "branching", 1)
    texts = await page.locator(".message").all_inner_texts()

    assert "messages" not in step["request"]
    assert [" ".join(text.split()) for text in texts] == ["system Be brief.", "user Hello?", "assistant Reply 1."]
    await page.get_by_text("1 tools").click()
    await expect(page.locator(".conversation > .fold")).to_contain_text('"type": "function"')


async def test_tokens_open_where_sampling_begins(many, open_page):
    """Behind a prompt of 100,000 tokens, for pointer and keyboard; after scrolling elsewhere, the view stays there."""
    page = await open_page(f"{many.url}/ui#/rollout/long/step/long-0")
    opening, tokens = page.locator(f"#t-{TOKENS // 2}:not(.noid)"), page.locator(".tokens")
    await expect(opening).to_be_visible()
    box, position = await tokens.bounding_box(), await opening.bounding_box()
    assert 0 < position["y"] - box["y"] < 120
    await tokens.focus()
    await expect(page.locator(".t.current")).to_have_id(f"t-{TOKENS // 2}")
    await page.keyboard.press("Home")
    await expect(page.locator("#t-0:not(.noid)")).to_be_in_viewport()


async def test_raw_json_is_one_click_away(contents, open_page):
    """It is shown, and downloaded unchanged."""
    page, step = await opened(contents, open_page, "conversation", 1)
    await page.get_by_role("button", name="Raw JSON").click()
    await expect(page.locator(".rawline").nth(1)).to_contain_text(step["step_id"])
    async with page.expect_download() as download:
        await page.get_by_role("button", name="Download").click()
    saved = await (await download.value).path()

    assert step == orjson.loads(saved.read_bytes())


async def test_sequences_are_shown_as_rows(contents, open_page):
    """As exported; an opened row colours its tokens by mask, and those trained in another row differ."""
    rows = (await contents.control("GET", "/rollouts/branching/export?format=sequences"))["rows"]
    page = await open_page(f"{contents.url}/ui#/rollout/branching/sequences")
    await expect(page.locator(".row.g-sequences:not(.head)")).to_have_count(len(rows))
    for number, row in enumerate(rows):
        await page.locator(f"#sequences-{number}").click()
        await expect(page.locator(".tokens")).to_have_attribute("aria-label", f"Tokens of branch {number}")
        await expect(page.locator(".tokens .t:not(.noid)").first).to_be_visible()
        tokens = await shown(page)
        spans = {index for span in row["spans"] for index in range(span["start"], span["end"])}
        kinds = [
            "sampled" if mask else "context" if token_index in spans else "prompt"
            for token_index, mask in enumerate(row["mask"])
        ]
        assert kinds == [next(name[2:] for name in token["classes"] if name.startswith("k-")) for token in tokens]
    assert {"sampled", "context", "prompt"} == set(kinds)


async def test_a_step_shows_its_continuation(contents, open_page):
    """With a link to the earlier step, or with the reason why it was not continued; other steps show neither."""
    page, step = await opened(contents, open_page, "branching", 1)
    earlier = step["extra"]["continuation"]["step_id"]
    await expect(page.locator(".continuation")).to_have_text("continued: 50 ids kept, 6 ids rendered (earlier step)")
    await expect(page.locator(".continuation a")).to_have_attribute("href", f"#/rollout/branching/step/{earlier}")

    page, _ = await opened(contents, open_page, "branching", 2)
    await expect(page.locator(".continuation")).to_contain_text(f"not continued: {REASONS['history']}")

    page, _ = await opened(contents, open_page, "drifting", 0)  # a later step forks here
    await expect(page.locator(".drifts")).to_contain_text(f"not continued: {REASONS['reasoning_stripped']}")

    page, _ = await opened(contents, open_page, "branching", 0)
    await expect(page.locator("button[title=']']")).to_be_enabled()  # the tree is loaded
    await expect(page.locator(".continuation")).to_have_count(0)


async def test_drift_is_marked_in_sequences(contents, open_page):
    """Also where a row's step departs from a step of another row."""
    (first, *_) = (await contents.control("GET", "/rollouts/drifting/tree"))["drift"]
    rows = (await contents.control("GET", "/rollouts/drifting/export?format=sequences"))["rows"]
    branch = next(row["branch"] for row in rows if first["step_id"] in {span["step_id"] for span in row["spans"]})
    page = await open_page(f"{contents.url}/ui#/rollout/drifting/sequences")
    await page.locator(f"#sequences-{branch}").click()
    await page.locator(f".tokens #t-{first['index']}.drift").hover()

    assert f"{first['kind']}: token ids differ from here" == (await facts(page))["drift"]


async def test_flagged_steps_are_in_rows_on_request(contents, open_page):
    """In their own colour."""
    page = await open_page(f"{contents.url}/ui#/rollout/branching/sequences")
    await page.locator("select").select_option("flagged")
    await expect(page.locator(".row.g-sequences:not(.head)")).to_have_count(3)
    await page.locator("#sequences-2").click()
    await expect(page.locator(".tokens .k-flagged")).to_have_count(16)


async def test_texts_are_loaded_as_they_come_into_view(many, open_page):
    """Of 200,000 tokens, only a window is requested."""
    urls = []
    page = await open_page(f"{many.url}/ui#/rollout/long/step/long-0")
    page.on("request", lambda request: "/texts" in request.url and urls.append(request.url))
    await expect(page.locator(".tokens .t:not(.noid)").first).to_be_visible()
    await page.locator(".jump").fill(str(TOKENS - 1))
    await page.keyboard.press("Enter")
    await expect(page.locator(f"#t-{TOKENS - 1}:not(.noid)")).to_be_visible()

    assert len(urls) < 12


async def values_of(plot) -> list[str]:
    """Return the values that a chart lists."""
    await plot.locator("summary").click()
    await expect(plot.locator(".values li").first).to_be_visible()
    return await plot.locator(".values li").all_text_contents()


async def test_plots_have_axes_units_and_values(contents, open_page):
    """Reward by policy version, tokens per second, logprobs: values are shown by pointer and by keyboard, and listed."""
    page = await open_page(f"{contents.url}/ui#/plots")
    await expect(page.locator(".sum")).to_have_text("20 of 20 rollouts with steps")
    plots = page.locator(".plot")
    charts = plots.get_by_role("img")
    labels = [await chart.get_attribute("aria-label") for chart in await charts.all()]
    assert "Across: policy version of the first reply (line: means). Up: reward." in labels[0]
    assert "Across: seconds since the first call was sent. Up: tokens/s." in labels[1]
    assert "logprob (nats)" in labels[2]
    await charts.nth(2).focus()
    await page.keyboard.press("ArrowRight")
    await expect(plots.nth(2).locator(".value")).to_contain_text("logprob below -10")
    await page.keyboard.press("ArrowRight")
    await expect(plots.nth(2).locator(".value")).to_contain_text("logprob -9.5 to -10")
    await charts.nth(0).hover()
    await expect(plots.nth(0).locator(".value")).to_contain_text("reward")
    rewards = await values_of(plots.nth(0))
    assert len(rewards) == 18  # the two open ones have none
    assert {"1", "2", "3", "4"} <= {value.rsplit(" ", 1)[1] for value in rewards}
    drawn = "(canvas) => canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data.some((value) => value)"
    assert await plots.nth(0).locator("canvas").evaluate(drawn)


async def test_a_rollout_has_its_own_plots(contents, open_page):
    """Speed over time, and its logprobs as the tree counts them."""
    page = await open_page(f"{contents.url}/ui#/rollout/conversation/plots")
    counts = (await contents.control("GET", "/rollouts/conversation/tree"))["logprobs"]["counts"]
    plots = page.locator(".plot")
    bars = await values_of(plots.nth(1))
    shown_counts = [int(bar.partition(": ")[2].partition(" ")[0].replace(",", "")) for bar in bars]

    assert counts == shown_counts[::-1]
    assert len(await values_of(plots.nth(0))) == 4


async def test_a_point_of_a_chart_opens_what_it_is_of(contents, open_page):
    """The group, by a click, by Enter or in the list of values; the way back leads to the point."""
    page = await open_page(f"{contents.url}/ui#/training")
    plot = page.locator(".plot").first
    await plot.locator("canvas").wait_for()
    await plot.get_by_role("img").focus()
    await page.keyboard.press("ArrowRight")
    shown_value = await plot.locator(".value").inner_text()
    await page.keyboard.press("Enter")
    group = shown_value.partition(":")[0]
    await expect(page.locator("h1")).to_have_text(group)
    await page.go_back()
    await expect(page.locator(".plot").first.locator(".value")).to_have_text(shown_value)
    await page.goto(f"{contents.url}/ui#/group/math-3")
    await page.get_by_role("link", name="In the charts of Training").click()
    await expect(page.locator(".plot").nth(1).locator(".value")).to_contain_text("math-3 at ")
    await page.locator(".plot").nth(1).get_by_role("img").click()
    await expect(page.locator("h1")).to_contain_text("math-")
    await page.goto(f"{contents.url}/ui#/training")
    await page.locator(".facts a", has_text="complete").click()
    await expect(page.locator("#filter")).to_have_value("status:complete")
    page = await open_page(f"{contents.url}/ui#/plots")
    await expect(page.locator(".sum")).to_have_text("20 of 20 rollouts with steps")
    await page.locator(".plot summary").first.click()
    await page.locator(".plot").first.locator(".values a").first.click()
    await expect(page.locator("#steps-0")).to_be_visible()


async def test_a_token_has_its_most_likely_alternatives_and_the_entropy(empty, open_page):
    """If the client requested them; the entropy of a part of the distribution is the least one."""
    likely = [{"token": " a", "logprob": math.log(0.5)}, {"token": "b", "logprob": math.log(0.25)}]
    entries = [
        {"token": "x", "logprob": -1.0, "top_logprobs": likely},
        {"token": "y", "top_logprobs": [7, {"token": 1}]},
    ]
    message = {"role": "assistant", "content": "xy"}
    response = {"choices": [{"index": 0, "message": message, "logprobs": {"content": entries}}]}
    usage = {"prompt_tokens_details": {"cached_tokens": 3}, "cost": 0.00125}
    await empty.made("likely", [empty.step("likely", 0, empty.ids(4), empty.ids(2), response=response, usage=usage)])
    page, _ = await opened(empty, open_page, "likely", 0)
    await page.locator("#t-4").hover()
    values = await facts(page)
    assert values["top 2"] == '" a" 50 %, "b" 25 %'
    assert f"at least {round(0.5 * math.log(2) + 0.25 * math.log(4), 3)} nats" == values["entropy"]
    await page.locator("#t-5").hover()
    assert "entropy" not in await facts(page)
    await expect(page.locator(".facts").first).to_contain_text("4 prompt tokens (3 cached), 2 completion tokens")
    await expect(page.locator(".facts").first).to_contain_text("0.00125")
