"""The lines of a rollout."""

import pytest
from rich.text import Text

from proxy.cli.api_client import ControlClient, rollout_path
from proxy.cli.render.rollout import RolloutView, StepView, drift_lines, header, step_lines


@pytest.fixture
async def read(http, address, recorded):
    """A function that reads a rollout, its tree and its steps."""

    async def read_all(name: str):
        client = ControlClient(http, address.url)
        steps = [step async for step in client.steps(name)]
        return await client.get(rollout_path(name)), await client.get(f"{rollout_path(name)}/tree"), steps

    return read_all


def lines(parts, view: StepView | None = None) -> list[Text]:
    return list(RolloutView(*parts, view or StepView()).lines(now_ms=0))


def plain(lines) -> str:
    return "\n".join(line.plain for line in lines)


async def test_each_branch_shows_its_new_steps_and_where_it_begins(read):
    """Each step is shown once; drift is shown at its step."""
    shown = plain(lines(await read("demo")))

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


def drift(kind: str, **fields) -> dict:
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
        **fields,
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
def test_drift_shows_the_texts_or_if_they_are_equal_the_ids(boundary, shown):
    """A bar marks the first difference of the ids."""
    head, *around = drift_lines(boundary, {"index": 0})

    assert f"~ drift ({boundary['kind']}) from step 0, at token 12" == head.plain
    assert shown == [line.plain.strip() for line in around]


def test_unexplained_drift_shows_why_texts_are_not_available():
    head, *_ = drift_lines(drift("unexplained", expected_text=None, found_text=None, texts="timeout"), None)

    assert "~ drift (unexplained) from an earlier step, at token 12; texts not available (timeout)" == head.plain


async def test_messages_are_escaped(read):
    """Markup is not interpreted."""
    shown = plain(lines(await read("demo"), StepView(True, True, True, with_values=True)))

    assert r"Ignore \x1b]52;c;aGk=\x07 this [bold]and[/bold] \x1b[2J that\u202e!" in shown
    assert not {character for character in shown if ord(character) < 0x20} - {"\n"}


async def test_a_failed_step_is_shown_at_the_end_with_its_error(read):
    """It is in no branch."""
    shown = plain(lines(await read("bad")))

    assert "── in no branch\nprompt      once\nstep 0  " in shown
    assert "! error: 400: temperature must be non-negative" in shown


async def test_choices_of_a_step_are_branches_and_its_prompt_is_shown_once(read):
    shown = plain(lines(await read("choices")))

    assert ("group g", 1) == ("group g" if "group g" in shown else "", shown.count("prompt      once"))
    assert ["choice 0", "choice 1"] == [words for words in ("choice 0", "choice 1") if shown.count(words) == 1]


async def test_ids_of_a_branch_are_new_prompt_ids_and_sampled_ids(read):
    """Together they are the sequence of the branch; sampled ids are bold."""
    parts = await read("demo")
    shown = lines(parts, StepView(ids=True))
    rows = [row for row, line in enumerate(shown) if line.plain.startswith("ids")]
    prompt, sampled = (
        [int(word) for word in shown[rows[1] + below].plain.split() if word.isdecimal()] for below in (0, 1)
    )
    steps = parts[2]

    assert steps[0]["prompt_ids"] + steps[0]["choices"][0]["ids"] + prompt == steps[1]["prompt_ids"]
    assert steps[1]["choices"][0]["ids"] == sampled
    assert ["dim", "bold"] == [str(shown[rows[1] + below].spans[-1].style) for below in (0, 1)]


async def test_logprobs_colour_recorded_texts_or_ids(read):
    """The first call requested logprobs, so its texts are recorded; the second gets them from the proxy."""
    parts = await read("demo")
    texts = {(parts[2][1]["step_id"], 0): ["text "] * len(parts[2][1]["choices"][0]["ids"])}
    shown = [
        line.plain for line in lines(parts, StepView(logprobs=True, texts=texts)) if line.plain.startswith("logprobs")
    ]
    first = [entry["token"] for entry in parts[2][0]["response"]["choices"][0]["logprobs"]["content"]]

    assert "".join(first).rstrip() in shown[0]
    assert "text text" in shown[1]
    assert [str(token) for token in parts[2][2]["choices"][0]["ids"]] == shown[2].split()[1:]


async def test_untrained_tokens_are_dim(read):
    """A step that is not exact is in no row."""
    rollout, tree, steps = await read("demo")
    tree["nodes"][0]["owner"] = None
    shown = lines((rollout, tree, steps))
    first, second, *_ = (line for line in shown if line.plain.startswith("assistant"))

    assert ["dim", "bold"] == [str(line.spans[-1].style) for line in (first, second)]


async def test_a_single_step_is_shown_with_its_complete_prompt_and_all_choices(read):
    _, _, steps = await read("choices")
    long = "x" * 3000
    shown = plain(step_lines({**steps[0], "request": {"prompt": long}}, StepView()))

    assert long in shown
    assert ["choice 0", "choice 1"] == [line for line in shown.splitlines() if line.startswith("choice")]


async def test_each_step_shows_its_continuation(read):
    """In its branch, below its headline, and alone."""
    rollout, tree, steps = await read("demo")
    steps[1]["extra"]["continuation"] = {"step_id": "a", "choice": 0, "kept": 7, "bridge": 2}
    steps[2]["extra"]["continuation"] = {"reason": "edited"}
    shown = plain(lines((rollout, tree, steps)))
    alone = plain(step_lines(steps[1], StepView()))

    assert shown.index("step 1  ") < shown.index("continued: 7 ids kept, 2 ids rendered\n") < shown.index("step 2  ")
    assert shown.index("step 2  ") < shown.index("not continued: The messages differ")
    assert 2 == shown.count("continued: ")
    assert "continued: 7 ids kept, 2 ids rendered\n" in alone


async def test_ids_groups_and_metadata_in_the_header_are_escaped(read):
    rollout, _, _ = await read("demo")
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


async def test_the_header_has_the_reason_of_a_rollout_that_exceeded_its_deadline(read):
    rollout, _, _ = await read("demo")
    shown = plain(header({**rollout, "status": "aborted", "reason": "deadline"}, 0))

    assert shown.startswith("demo  aborted  reward 0.5  reason deadline")


async def test_several_threads_are_listed_and_branches_name_theirs(read):
    """With the tool that calls a thread, and its reward."""
    rollout, tree, steps = await read("demo")
    other = {
        "name": "sub-agent:1",
        "kind": "sub-agent",
        "steps": 2,
        "title": "Count\x1bfiles",
        "tool": "task",
        "reward": 0.5,
    }
    nodes = [{**node, "thread": "sub-agent:1" if node["node"] == 2 else "main"} for node in tree["nodes"]]
    shown = plain(lines((rollout, {**tree, "threads": [*tree["threads"], other], "nodes": nodes}, steps)))

    assert "\nthread sub-agent:1  2 steps called by task, reward 0.5  Count" in shown
    assert "\x1b" not in shown
    assert "── branch 0  main  2 steps\n" in shown
    assert "── branch 1  sub-agent:1  2 steps, continues from step 0\n" in shown


async def test_a_single_thread_is_not_listed(read):
    shown = plain(lines(await read("demo")))

    assert "thread " not in shown
