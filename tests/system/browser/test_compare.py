"""Rollouts and branches side by side: aligned turns, rewards, and the tokens that differ."""

import re
from dataclasses import replace

from playwright.async_api import expect
from tests.support.forests import make_choice

ROWS = ".compared tbody tr"
LAW = """async () => {
  const { difference } = await import('./ui/difference.js');
  const wrong = [];
  for (let seed = 0; seed < 400; seed += 1) {
    let state = seed + 1;
    const draw = (most) => (state = (state * 48271) % 2147483647) % most;
    const list = () => Array.from({ length: draw(12) }, () => draw(3));
    const [one, other] = [list(), list()].map((ids) => ({ ids, logprobs: ids.map(() => -1), prompt: [], version: null }));
    const { runs } = difference(one, other);
    const covered = ['one', 'other'].every((side) =>
      runs.map((run) => run[side]).every(([from, to], at, all) => from === (at ? all[at - 1][1] : 0) && to >= from)
      && (runs.at(-1)?.[side][1] ?? 0) === { one, other }[side].ids.length);
    const same = runs.filter(({ isSame }) => isSame).every((run) =>
      one.ids.slice(...run.one).join() === other.ids.slice(...run.other).join());
    const least = runs.every((run, at) => at === 0 || run.isSame !== runs[at - 1].isSame);
    if (!covered || !same || !least) wrong.push([one.ids, other.ids, runs]);
  }
  return wrong;
}"""


def replying(text: str) -> dict:
    return {"response": {"choices": [{"index": 0, "message": {"role": "assistant", "content": text}}]}}


async def test_members_of_a_group_are_compared(contents, open_page):
    """One column for each member with its reward; the first reply that differs is marked."""
    page = await open_page(f"{contents.url}/ui#/group/math-1")
    await page.get_by_role("link", name="Compare the replies of 4 members").click()
    await expect(page.locator(".compared thead th")).to_have_count(5)
    await expect(page.locator(".compared .parting")).to_have_count(1)
    await expect(page.locator(".compared thead")).to_contain_text("reward")
    await page.keyboard.press("Escape")
    await expect(page).to_have_url(f"{contents.url}/ui#/group/math-1")


async def test_two_selected_rollouts_are_compared_by_token(empty, open_page):
    """Turns with equal texts are in one row. The tokens of the first different turn are shown, those that differ marked."""
    prompt, one = empty.ids(20), list(range(300, 400))
    two = [*one[:50], 1000, 1001, *one[51:]]
    for name, replies in (
        ("long", [("first", one[:9]), ("more", one[:7]), ("last", one)]),
        ("short", [("first", one[:9]), ("last", two)]),
    ):
        steps = [
            empty.step(name, at, [*prompt[:at], *prompt], ids, **replying(text))
            for at, (text, ids) in enumerate(replies)
        ]
        await empty.made(name, steps)
        await empty.finish(name, {"long": 0.25, "short": 1.0}[name])
    page = await open_page(f"{empty.url}/ui#/rollouts?sort=id")
    await page.get_by_label("Select all 2 rows").check()
    await page.get_by_role("link", name="Compare", exact=True).click()
    await expect(page.locator(ROWS)).to_have_count(3)
    assert [
        "|".join(text.strip() for text in await row.locator("td").all_inner_texts())
        for row in await page.locator(ROWS).all()
    ] == ["first|first", "more|", "last|last"]
    await expect(page.locator(".compared thead th").nth(2)).to_contain_text("reward 1 (+0.75)")
    await page.locator(ROWS).nth(2).get_by_role("button", name="Tokens").click()
    tokens = page.locator(ROWS).nth(3)
    await expect(tokens.locator(".t.one")).to_have_attribute("title", re.compile(f"^token 50, id {one[50]}, logprob -"))
    await expect(tokens.locator(".t.other")).to_have_count(2)
    await expect(tokens.locator("th")).to_contain_text(
        "replies: 100 and 101 tokens, 99 equal, different from token 50 on"
    )
    await expect(tokens.locator("th")).to_contain_text("prompts: 22 and 21 tokens")
    await expect(tokens.locator("th")).to_contain_text("logprobs of equal tokens: mean difference")
    await page.reload()
    await expect(page.locator(ROWS)).to_have_count(3)


async def test_branches_of_a_rollout_are_compared(contents, open_page):
    """From their common step to their last ones; the first turn that differs shows its tokens at once."""
    page = await open_page(f"{contents.url}/ui#/rollout/branching")
    for row in (1, 2):
        await page.locator(f"#steps-{row}").get_by_role("checkbox").check()
    await page.get_by_role("link", name="Compare the branches that end there").click()
    await expect(page.locator(".compared thead")).to_contain_text("to step branchin-2")
    await expect(page.locator(".compared .parting th")).to_contain_text("1 ↳ they part here")
    await expect(page.locator(ROWS)).to_have_count(3)
    await expect(page.locator(ROWS).nth(2)).to_contain_text("replies: 40 and 24 tokens")


async def test_choices_of_a_call_are_one_turn_of_a_comparison(empty, open_page):
    """Each with its number; a tool call without text, or in the text of an engine without a parser, is named."""
    raw = '<tool_call>\n{"name": "find", "arguments": {"q": 1}}\n</tool_call>'
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"at": 2}'}}
    messages = [{"content": "plain"}, {"content": raw}, {"content": None, "tool_calls": [call]}]
    for name in ("one", "two"):
        response = {"choices": [{"index": at, "message": each} for at, each in enumerate(messages)]}
        choices = [make_choice(at, empty.ids(3)) for at in range(3)]
        step = empty.step(name, 0, empty.ids(4), empty.ids(3), response=response)
        await empty.made(name, [replace(step, choices=tuple(choices))], group_id="choices")
    page = await open_page(f"{empty.url}/ui#/group/choices")
    await page.get_by_role("link", name="Compare the replies of 2 members").click()
    first = page.locator(".compared tbody tr").first.locator("td").first
    await expect(page.locator(".compared tbody tr")).to_have_count(1)
    await expect(first.locator(".reply")).to_have_text(
        ["choice 0 plain", 'choice 1 calls find {"q": 1}} </tool_call>', 'choice 2 calls look {"at": 2}']
    )


async def test_runs_of_a_difference_are_both_lists(empty, open_page):
    """In their order, without gaps; equal runs have equal tokens, and alternate with different ones."""
    page = await open_page(f"{empty.url}/ui")

    assert await page.evaluate(LAW) == []
