"""Renderings of steps and rollouts."""

import pytest
from rich.text import Text

from proxy.cli import render as show
from proxy.cli.control import Control
from proxy.cli.render import (
    RolloutView,
    StepView,
    colored,
    drift_lines,
    header,
    legend,
    recorded_texts,
    step_lines,
)
from proxy.cli.tail import line as line_of_tail
from proxy.continuation.types import REASONS


def step(**fields) -> dict:
    """Return a chat step that sampled two tokens."""
    return {
        "step_id": "S1",
        "rollout_id": "r1",
        "index": 4,
        "dialect": "chat",
        "model": {"asked": "policy", "served": "m"},
        "request": {"messages": [{"role": "user", "content": "hi"}]},
        "response": {"choices": [{"index": 0, "message": {"role": "assistant", "content": "hello"}}]},
        "prompt_ids": [1, 2, 3],
        "choices": [{"index": 0, "prompt": 0, "ids": [7, 8], "logprobs": [-1.0, -2.0], "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 3},
        "timing": {"received": 10.0, "last_byte": 10.25, "stored": 10.5},
        "status": "complete",
        "reason": None,
        "delivered": True,
        "reward": None,
        "policy_version": None,
        "fidelity": {"exact": True, "problems": [], "why": []},
        "extra": {},
        **fields,
    }


def texts(lines) -> list[str]:
    return [line.plain.rstrip() for line in lines]


def test_a_summary_has_the_values_of_a_line():
    summary = show.summary(step())

    assert tuple(
        summary[name]
        for name in (
            "time",
            "rollout_id",
            "index",
            "model",
            "prompt_tokens",
            "sampled_tokens",
            "finish_reasons",
            "latency_s",
        )
    ) == (10.5, "r1", 4, "m", 3, 2, ["stop"], 0.25)


@pytest.mark.parametrize(
    ("fields", "count"),
    [
        ({"prompts": [[1], [2, 3]], "prompt_ids": None}, 3),
        ({"prompt_ids": None}, 3),
        ({"prompt_ids": None, "usage": None}, None),
    ],
)
def test_prompt_tokens_are_counted_by_ids_or_taken_from_usage(fields, count):
    """Otherwise they are unknown."""
    assert count == show.summary(step(**fields))["prompt_tokens"]


def test_a_headline_has_policy_version_reward_and_delivery_if_present():
    assert (
        show.headline(step()).plain == "step 4  S1  chat  m  3 prompt tokens, 2 completion tokens  stop  250 ms  exact"
    )
    line = show.headline(step(policy_version="v\x1b", reward=0.5, delivered=False)).plain
    assert "policy v\\x1b  reward 0.5  not delivered" in line
    assert "policy planner 9  reward 0.5" in show.headline(step(policy="planner", policy_version="9", reward=0.5)).plain
    assert "policy planner  reward 0.5" in show.headline(step(policy="planner", reward=0.5)).plain
    assert "not delivered  late" in show.headline(step(delivered=False) | {"late": True}).plain


def test_a_headline_names_the_rollout_that_sampled_an_inherited_step():
    """So does the line of the step in `tokentape tail`."""
    inherited = step(inherited={"rollout_id": "r\x1b0", "step_id": "S1"}, delivered=False)

    assert "not delivered  inherited from r\\x1b0  exact" in show.headline(inherited).plain
    assert "inherited from r\\x1b0" in line_of_tail(show.summary(inherited), with_rollout=False).plain
    assert "inherited" not in show.summary(step())


def test_problems_are_shown_with_their_code_and_explanation():
    """An engine error is shown by its message, not as JSON."""
    flagged = step(fidelity={"exact": False, "problems": ["echo"], "why": ["The call requested echo."]})
    response = {"status": 400, "body": '{"error": {"message": "no \\u001b[2J way"}}'}

    assert texts(show.problems(flagged)) == ["! echo: The call requested echo."]
    assert "flagged" in show.headline(flagged).plain
    assert texts(show.problems(step(status="error", response=response))) == ["! error: 400: no \\x1b[2J way"]
    assert texts(show.problems(step(status="partial", reason="the client left"))) == ["! partial: the client left"]
    assert texts(show.problems(step(status="error", response={"body": None}))) == ["! error: None"]


@pytest.mark.parametrize(
    ("recorded", "shown"),
    [
        (None, []),
        ({"step_id": "S0", "choice": 0, "kept": 457, "bridge": 12}, ["continued: 457 ids kept, 12 ids rendered"]),
        (
            {"step_id": "S0", "choice": 0, "kept": 457, "bridge": 0, "rendered": 480, "reason": "history"},
            [f"continued: 457 ids kept, 0 ids rendered. {REASONS['history']}"],
        ),
        ({"step_id": "S0", "choice": 0, "reason": "close"}, [f"not continued: {REASONS['close']}"]),
        ({"reason": "of a newer proxy\x1b"}, [r"not continued: of a newer proxy\x1b"]),
    ],
)
def test_a_continuation_is_shown_with_its_ids_or_the_reason_why_there_is_none(recorded, shown):
    """An unknown reason is shown as it is."""
    extra = {} if recorded is None else {"continuation": recorded}

    assert shown == texts(show.continuation_lines(step(extra=extra)))


def test_only_new_messages_of_a_conversation_are_shown():
    """They follow the parent's messages and its response; a rewritten conversation is shown completely."""
    first = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    parent = step(request={"messages": first})
    response, tool = {"role": "assistant", "content": "a"}, {"role": "tool", "content": "t"}
    continued = step(request={"messages": [*first, response, tool]})
    rewritten = step(request={"messages": [{"role": "user", "content": "other"}, response]})

    assert texts(show.prompt_lines(continued, parent, whole=False)) == ["tool        t"]
    assert len(texts(show.prompt_lines(continued, None, whole=False))) == 4
    assert texts(show.prompt_lines(rewritten, parent, whole=False)) == ["user        other", "assistant   a"]


def test_the_shown_messages_are_those_sent_to_the_engine():
    """The client's body has another shape in dialects that are translated to chat."""
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    response = {"role": "assistant", "content": "a"}
    own = {"instructions": "s", "input": "u", "prompt": "stored"}
    parent = step(request=own, sent={"set": {"messages": chat}, "unset": [*own]})
    continued = step(
        request={**own, "messages": [7]}, sent={"set": {"messages": [*chat, response, *chat[1:]]}, "unset": [*own]}
    )

    assert texts(show.prompt_lines(parent, None, whole=False)) == ["system      s", "user        u"]
    assert texts(show.prompt_lines(continued, parent, whole=False)) == ["user        u"]
    assert texts(show.prompt_lines(step(sent={"set": {}, "unset": ["messages"]}), None, whole=False)) == []


def test_only_the_new_part_of_a_continued_prompt_is_shown():
    """A prompt of ids is shown as sent."""
    parent = step(request={"prompt": "one "}, response={"choices": [{"index": 0, "text": "two "}]})

    assert texts(show.prompt_lines(step(request={"prompt": "one two three"}), parent, whole=False)) == [
        "prompt      three"
    ]
    assert texts(show.prompt_lines(step(request={"prompt": "four"}), parent, whole=False)) == ["prompt      four"]
    assert texts(show.prompt_lines(step(request={"prompt": [1, 2]}), None, whole=False)) == ["prompt      [1,2]"]
    assert texts(show.prompt_lines(step(request=None), None, whole=False)) == []


def test_messages_are_dim_and_trained_samples_bold():
    (prompt,) = show.prompt_lines(step(), None, whole=False)
    (trained,) = show.completion_lines(step(), 0, is_trained=True)
    (untrained,) = show.completion_lines(step(), 0, is_trained=False)

    assert [str(line.spans[-1].style) for line in (prompt, trained, untrained)] == ["dim", "bold", "dim"]


def test_reasoning_content_parts_and_tool_calls_are_shown():
    call = {"function": {"name": "add", "arguments": '{"a": 1}'}}
    message = {
        "role": "assistant",
        "reasoning": "hm",
        "content": [{"type": "text", "text": "x"}, {"type": "image_url"}],
    }
    response = {"choices": [{"index": 0, "message": {**message, "tool_calls": [call, "odd"]}}]}

    assert texts(show.completion_lines(step(response=response), 0, is_trained=True)) == [
        "assistant   [reasoning] hm",
        "            x",
        "            [image_url]",
        '            [calls add] {"a": 1}',
    ]


@pytest.mark.parametrize(
    "response", [None, "cut off", {"choices": None}, {"choices": ["odd"]}, {"choices": [{"index": 3}]}]
)
def test_an_invalid_response_has_no_lines(response):
    assert texts(show.completion_lines(step(response=response), 0, is_trained=True)) == []


def test_a_long_message_is_truncated_with_a_note():
    """The limit is in lines and characters; sampled text is never truncated."""
    for text in ("x" * 5000, "line\n" * 500):
        long = step(request={"messages": [{"role": "user", "content": text}]})
        shown = texts(show.prompt_lines(long, None, whole=False))
        assert len(shown) <= 13
        assert f"{len(text)} characters in total; use --whole" in shown[-1]
        assert "--whole" not in str(texts(show.prompt_lines(long, None, whole=True)))
    response = {"choices": [{"index": 0, "message": {"role": "assistant", "content": "line\n" * 500}}]}

    assert len(texts(show.completion_lines(step(response=response), 0, is_trained=True))) == 501


def test_text_is_escaped_in_every_line_of_a_step():
    bad = "\x1b]0;x\x07"
    message = {"role": bad, "content": bad, "tool_calls": [{"function": {"name": bad, "arguments": bad}}]}
    hostile = step(
        step_id=bad,
        dialect=bad,
        model={"asked": None, "served": bad},
        request={"messages": [message, bad]},
        response={"choices": [{"index": 0, "message": message}]},
        choices=[{"index": 0, "prompt": 0, "ids": [1], "logprobs": [-1.0], "finish_reason": bad}],
        status=bad,
        reason=bad,
        fidelity={"exact": False, "problems": [bad], "why": [bad]},
    )
    lines = [
        show.headline(hostile),
        *show.problems(hostile),
        *show.prompt_lines(hostile, None, whole=True),
        *show.completion_lines(hostile, 0, is_trained=True),
        show.verdict(show.summary(hostile)),
    ]

    assert "\x1b" not in "".join(line.plain for line in lines)
    assert "\\x1b]0;x\\x07" in lines[0].plain


def step_of(response, ids=(1, 2)) -> dict:
    return {"response": response, "choices": [{"index": 1, "ids": list(ids)}]}


CHAT = {"content": [{"token": "a"}, {"token": "b"}]}
COMPLETION = {"tokens": ["a", "b"]}


@pytest.mark.parametrize("logprobs", [CHAT, COMPLETION])
def test_token_texts_come_from_the_same_choice_in_the_response(logprobs):
    response = {"choices": [{"index": 0, "logprobs": None}, {"index": 1, "logprobs": logprobs}]}

    assert recorded_texts(step_of(response), 0) == ["a", "b"]


@pytest.mark.parametrize(
    "response",
    [None, "cut", {}, {"choices": None}, {"choices": [{"index": 1, "logprobs": None}]}, {"choices": [{"index": 0}]}],
)
def test_a_response_without_logprobs_has_no_token_texts(response):
    assert recorded_texts(step_of(response), 0) is None


def test_token_texts_that_do_not_match_the_ids_are_ignored():
    """So are ids in place of texts."""
    response = {"choices": [{"index": 1, "logprobs": COMPLETION}]}
    renamed = {"choices": [{"index": 1, "logprobs": {"tokens": ["a", "token_id:2"]}}]}

    assert recorded_texts(step_of(response, ids=[1, 2, 3]), 0) is None
    assert recorded_texts(step_of(renamed), 0) is None


def test_each_range_of_logprobs_has_a_colour():
    """Tokens without a logprob are dim."""
    line = colored(None, [1, 2, 3, 4, 5, 6, 7], [-0.01, -0.5, -2.0, -4.0, -9.0, None], with_values=False)
    styles = [str(span.style) for span in line.spans]

    assert line.plain == "1 2 3 4 5 6 7 "
    assert styles == [
        "blue",
        "cyan",
        "default",
        "dark_orange",
        "bold underline dark_orange",
        "dim italic",
        "dim italic",
    ]
    assert all(style in {str(span.style) for span in legend().spans} for style in styles)


def test_with_values_each_token_is_followed_by_its_logprob():
    """Texts are escaped; a token without a text is shown by its id."""
    line = colored(["a\x1b", None], [7, 8], [-0.125, None], with_values=True)

    assert line.plain == "a\\x1b(-0.125) 8(none) "


@pytest.fixture
async def read(http, address, recorded):
    """A function that reads a rollout, its tree and its steps."""

    async def read_all(name: str):
        client = Control(address.url)
        steps = [step async for step in client.steps(name)]
        return await client.rollout(name), await client.tree(name), steps

    return read_all


def lines(parts, view: StepView | None = None) -> list[Text]:
    return list(RolloutView(*parts, view or StepView()).lines())


def plain(lines) -> str:
    return "\n".join(line.plain for line in lines)


async def test_each_branch_shows_its_new_steps_and_where_it_begins(read):
    """Each step is shown once; drift is shown at its step."""
    shown = plain(lines(await read("demo")))

    assert [words for words in ("step 0", "step 1", "step 2") if f"\n{words}  " in shown] == [
        "step 0",
        "step 1",
        "step 2",
    ]
    assert shown.count("system      Be terse.") == 1
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

    assert head.plain == "~ drift (unexplained) from an earlier step, at token 12; texts not available (timeout)"


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

    assert ("group g" if "group g" in shown else "", shown.count("prompt      once")) == ("group g", 1)
    assert [words for words in ("choice 0", "choice 1") if shown.count(words) == 1] == ["choice 0", "choice 1"]


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
    assert [str(shown[rows[1] + below].spans[-1].style) for below in (0, 1)] == ["dim", "bold"]


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

    assert [str(line.spans[-1].style) for line in (first, second)] == ["dim", "bold"]


async def test_a_single_step_is_shown_with_its_complete_prompt_and_all_choices(read):
    _, _, steps = await read("choices")
    long = "x" * 3000
    shown = plain(step_lines({**steps[0], "request": {"prompt": long}}, StepView()))

    assert long in shown
    assert [line for line in shown.splitlines() if line.startswith("choice")] == ["choice 0", "choice 1"]


async def test_each_step_shows_its_continuation(read):
    """In its branch, below its headline, and alone."""
    rollout, tree, steps = await read("demo")
    steps[1]["extra"]["continuation"] = {"step_id": "a", "choice": 0, "kept": 7, "bridge": 2}
    steps[2]["extra"]["continuation"] = {"reason": "edited"}
    shown = plain(lines((rollout, tree, steps)))
    alone = plain(step_lines(steps[1], StepView()))

    assert shown.index("step 1  ") < shown.index("continued: 7 ids kept, 2 ids rendered\n") < shown.index("step 2  ")
    assert shown.index("step 2  ") < shown.index("not continued: The messages continue no earlier step")
    assert shown.count("continued: ") == 2
    assert "continued: 7 ids kept, 2 ids rendered\n" in alone


def test_a_live_step_names_the_step_with_its_call():
    """Its prompt ids are those, or rendered again. An inherited step names none."""
    of = {"rollout_id": "r\x1b0", "step_id": "S4", "ids": True}
    extra, rendered = {"branched_from": of}, {"branched_from": {**of, "ids": False}}

    assert "repeats the call of step S4 of r\\x1b0, with its prompt ids" in texts(
        step_lines(step(extra=extra), StepView())
    )
    assert "repeats the call of step S4 of r\\x1b0, rendered again" in texts(
        step_lines(step(extra=rendered), StepView())
    )
    assert "repeats" not in "".join(texts(step_lines(step(extra=extra, inherited=of), StepView())))


async def test_a_step_lists_its_branches_with_their_rewards(read):
    """Those before it and those after it, up to eight each."""
    rollout, tree, steps = await read("demo")
    branches = [{"rollout_id": f"b{n}\x1b", "reward": n / 2, "before": steps[1]["step_id"]} for n in range(9)]
    branches.append({"rollout_id": "c", "reward": None, "through": steps[1]["step_id"]})
    shown = plain(RolloutView(rollout, tree, steps, StepView(), branches).lines())
    (listed,) = [line for line in shown.split("\n") if "branched before" in line]

    assert listed.startswith("9 branched before this step: b0\\x1b reward 0, b1\\x1b reward 0.5, ")
    assert listed.endswith("b7\\x1b reward 3.5 and 1 more")
    assert shown.index("step 1  ") < shown.index("1 branched after this step: c no reward\n") < shown.index("step 2  ")


async def test_ids_groups_and_metadata_in_the_header_are_escaped(read):
    rollout, _, _ = await read("demo")
    hostile = {
        "rollout_id": "a\u202e",
        "group_id": "\x1b[2J",
        "metadata": {"k": "\u202e"},
        "claimed_by": "t\x07",
        "reward": None,
    }
    shown = plain(header({**rollout, **hostile}))

    assert "\x1b" not in shown
    assert "\u202e" not in shown
    assert "a\\u202e  completed  no reward  group \\x1b[2J  claimed by t\\x07" in shown


async def test_the_header_of_a_playback_has_its_source_and_its_mismatches(read):
    rollout, _, _ = await read("demo")
    playback = {"of": "r\x1b0", "on_mismatch": "branch", "answerable": 5, "unanswerable": 0, "mismatches": 0}
    playback |= {"answered": 3, "live": 2, "branched": True}
    missed = {"unanswerable": 1, "mismatches": 2}
    first = {"step_id": "S4", "path": "tools", "value": "\u202e", "recorded": None}

    assert "playback of r\\x1b0; 3 of 5 steps answered, 2 live\n" in plain(header({**rollout, "playback": playback}))
    for name in ("before", "through"):
        shown = plain(header({**rollout, "playback": {**playback, **missed, name: "S4", "first_mismatch": first}}))
        assert f"playback of r\\x1b0 {name} step S4; 3 of 5 steps answered, 1 cannot be answered, 2 live\n" in shown
        assert "! 2 calls refused; the first differs from step S4 at tools: '\\u202e', recorded None\n" in shown
    for change, why in (
        ({"path": None}, "differs from step S4 in its dialect"),
        ({"step_id": None}, "came after all steps were answered"),
    ):
        refused = {**playback, "mismatches": 1, "first_mismatch": {**first, **change}}
        assert f"! 1 call refused; the first {why}\n" in plain(header({**rollout, "playback": refused}))
    assert "playback" not in plain(header(rollout))


async def test_the_header_has_the_reason_of_a_rollout_that_exceeded_its_deadline(read):
    rollout, _, _ = await read("demo")
    shown = plain(header({**rollout, "status": "aborted", "reason": "deadline"}))

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
