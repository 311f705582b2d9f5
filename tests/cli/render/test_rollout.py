"""A rollout, as its tree has it."""

import pytest
from rich.text import Text

from proxy.cli.api_client import ControlClient, rollout_path
from proxy.cli.render.rollout import RolloutView, StepView, drift_lines, header, step_lines


@pytest.fixture
async def told(http, address, recorded):
    """What the control API tells of a rollout: itself, its tree and its steps."""

    async def of(name: str):
        client = ControlClient(http, address.url)
        steps = [step async for step in client.steps(name)]
        return await client.get(rollout_path(name)), await client.get(f"{rollout_path(name)}/tree"), steps

    return of


def lines(told, view: StepView | None = None) -> list[Text]:
    return list(RolloutView(*told, view or StepView()).lines(now_ms=0))


def plain(lines) -> str:
    return "\n".join(line.plain for line in lines)


async def test_each_branch_tells_what_is_new_in_it(told):
    """The branch that left the first one says where; each step stands once; drift stands where it happened."""
    shown = plain(lines(await told("demo")))

    assert ["step 0", "step 1", "step 2"] == [
        words for words in ("step 0", "step 1", "step 2") if f"\n{words}  " in shown
    ]
    assert 1 == shown.count("system      Be terse.")
    assert "── branch 0  2 steps\n" in shown
    assert "── branch 1  2 steps, continues from step 0\n" in shown
    assert "~ drift (edited) from step 1, at token " in shown
    assert shown.index("── branch 1") < shown.index("~ drift") < shown.index("step 2  ")
    assert shown.startswith("demo  completed  reward 0.5\n3 steps: 3 exact, 0 flagged, 0 failed; ")
    assert 'metadata {"task":7}' in shown


def drift(kind: str, **said) -> dict:
    return {
        "step_id": "b",
        "earlier_step_id": "a",
        "index": 12,
        "around_from": 10,
        "expected_ids": [7, 8, 20, 21],
        "found_ids": [7, 8, 30],
        "expected_text": "hello there",
        "found_text": "hello there",
        "texts": "ok",
        "kind": kind,
        **said,
    }


@pytest.mark.parametrize(
    ("boundary", "shown"),
    [
        (
            drift("retokenized"),
            ["expected  hello there", "as ids    7 8 | 20 21", "found     hello there", "as ids    7 8 | 30"],
        ),
        (drift("whitespace", found_text="hello\nthere"), ["expected  hello there", r"found     hello\nthere"]),
        (drift("edited", expected_text=None, found_text=None), ["expected  7 8 | 20 21", "found     7 8 | 30"]),
    ],
)
def test_drift_shows_where_the_texts_part_or_else_the_ids(boundary, shown):
    """Two texts that are equal show nothing: then the ids stand below them, with a bar where they part."""
    said, *around = drift_lines(boundary, {"index": 0})

    assert f"~ drift ({boundary['kind']}) from step 0, at token 12" == said.plain
    assert shown == [line.plain.strip() for line in around]


def test_drift_that_is_not_explained_says_what_is_missing():
    """And that it is not known."""
    said, *_ = drift_lines(drift("unexplained", expected_text=None, found_text=None, texts="timeout"), None)

    assert "~ drift (unexplained) from an earlier step, at token 12; texts not available (timeout)" == said.plain


async def test_hostile_messages_come_out_harmless(told):
    """What agents wrote is spelt out, and no markup."""
    shown = plain(lines(await told("demo"), StepView(True, True, True, with_values=True)))

    assert r"Ignore \x1b]52;c;aGk=\x07 this [bold]and[/bold] \x1b[2J that\u202e!" in shown
    assert not {one for one in shown if ord(one) < 0x20} - {"\n"}


async def test_a_step_without_a_place_stands_at_the_end_with_its_reason(told):
    """An error is no branch."""
    shown = plain(lines(await told("bad")))

    assert "── in no branch\nprompt      once\nstep 0  " in shown
    assert "! error: 400: temperature must be non-negative" in shown


async def test_choices_of_one_step_are_branches_and_its_prompt_is_told_once(told):
    """Each says which choice it is."""
    shown = plain(lines(await told("choices")))

    assert ("group g", 1) == ("group g" if "group g" in shown else "", shown.count("prompt      once"))
    assert ["choice 0", "choice 1"] == [words for words in ("choice 0", "choice 1") if shown.count(words) == 1]


async def test_ids_are_those_that_are_new_and_those_that_were_sampled(told):
    """Joined along a branch they are its sequence, the sampled ones bright."""
    of = await told("demo")
    shown = lines(of, StepView(ids=True))
    at = [address for address, line in enumerate(shown) if line.plain.startswith("ids")]
    given, sampled = ([int(one) for one in shown[at[1] + below].plain.split() if one.isdecimal()] for below in (0, 1))
    steps = of[2]

    assert steps[0]["prompt_ids"] + steps[0]["choices"][0]["ids"] + given == steps[1]["prompt_ids"]
    assert steps[1]["choices"][0]["ids"] == sampled
    assert ["dim", "bold"] == [str(shown[at[1] + below].spans[-1].style) for below in (0, 1)]


async def test_logprobs_colour_texts_that_were_recorded_and_ids_where_none_were(told):
    """The first call asked for logprobs, and so was told strings; of another the proxy may tell them."""
    of = await told("demo")
    known = {(of[2][1]["step_id"], 0): ["known "] * len(of[2][1]["choices"][0]["ids"])}
    shown = [
        line.plain for line in lines(of, StepView(logprobs=True, texts=known)) if line.plain.startswith("logprobs")
    ]
    first = [entry["token"] for entry in of[2][0]["response"]["choices"][0]["logprobs"]["content"]]

    assert "".join(first).rstrip() in shown[0]
    assert "known known" in shown[1]
    assert [str(one) for one in of[2][2]["choices"][0]["ids"]] == shown[2].split()[1:]


async def test_tokens_that_no_row_trains_are_dimmed(told):
    """A step that is not exact is in no row: its answer is not bright."""
    rollout, tree, steps = await told("demo")
    tree["nodes"][0]["owner"] = None
    shown = lines((rollout, tree, steps))
    first, second, *_ = (line for line in shown if line.plain.startswith("assistant"))

    assert ["dim", "bold"] == [str(line.spans[-1].style) for line in (first, second)]


async def test_a_step_alone_tells_all_that_was_sent(told):
    """However long; and each of its choices."""
    _, _, steps = await told("choices")
    long = "x" * 3000
    shown = plain(step_lines({**steps[0], "request": {"prompt": long}}, StepView()))

    assert long in shown
    assert ["choice 0", "choice 1"] == [line for line in shown.splitlines() if line.startswith("choice")]


async def test_the_header_names_others_words_harmlessly(told):
    """Ids, groups and metadata are other people's."""
    rollout, _, _ = await told("demo")
    hostile = {
        "rollout_id": "a\u202e",
        "group_id": "\x1b[2J",
        "metadata": {"k": "\u202e"},
        "claimed_by": "t\x07",
        "reward": None,
    }
    shown = plain(header({**rollout, **hostile}, 0))

    assert "\x1b" not in shown
    assert "\u202e" not in shown
    assert "a\\u202e  completed  no reward  group \\x1b[2J  claimed by t\\x07" in shown
