"""Threads of rollouts: the main one, sub-agents, compactions and auxiliary calls."""

import random
import tracemalloc
from collections import Counter
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.any_json import odd_steps, read_back
from tests.support.threaded import call, conversation, recorded_calls, said, sessions, user

from proxy.trajectory.openings import Openings
from proxy.trajectory.thread_rules import PRESETS, ThreadRule, rules_of
from proxy.trajectory.threads import Families, Starts, find_threads, select_threads

ALL_PRESETS = rules_of(PRESETS, ())
TASK = user("Task")


def kinds(*steps, rules=()):
    """Return the kind of each step's thread."""
    found = find_threads(steps, rules)
    return [found.of[step.step_id].kind for step in steps]


def rollout(*calls):
    """Return calls as the steps of a rollout."""
    return [
        call(n, *facts["messages"], **{k: v for k, v in facts.items() if k != "messages"})
        for n, facts in enumerate(calls)
    ]


def names(*steps, rules=()):
    """Return a number for each step's thread, by its first step."""
    found = find_threads(steps, rules)
    of = [found.of[step.step_id].name for step in steps]
    return [of.index(name) for name in of]


@pytest.mark.parametrize("rules", [(), ALL_PRESETS], ids=["without rules", "with all presets"])
@pytest.mark.parametrize("agent", recorded_calls())
def test_calls_of_real_agents_have_the_threads_to_which_they_belong(agent, rules):
    """Titles, sub-agents, handoffs, selections of a speaker, and compactions."""
    calls = recorded_calls()[agent]
    found = find_threads([step for step, _ in calls], rules)
    by_thread = {}
    for step, thread in calls:
        by_thread.setdefault(thread, set()).add(found.of[step.step_id].name)

    assert [thread.partition(" ")[0] for _, thread in calls] == [found.of[step.step_id].kind for step, _ in calls]
    assert all(len(of) == 1 for of in by_thread.values())
    assert len(by_thread) == len(set.union(*by_thread.values()))


def test_sub_agents_name_their_caller():
    steps = [step for step, _ in recorded_calls()["opencode 1.18.33, sub-agents"]]
    agents = [thread for thread in find_threads(steps).all if thread.kind == "sub-agent"]

    assert [(agent.parent, agent.started_by, agent.tool) for agent in agents] == [("main", "s000001", "task")] * 2
    assert {agent.title for agent in agents} == {
        "Count the files of the folder alpha, please.",
        "Look into the docs and report what they contain.",
    }


def test_a_compaction_names_the_thread_that_it_continues():
    steps = [step for step, _ in recorded_calls()["Codex 0.169.0, compaction"]]
    (compaction,) = [thread for thread in find_threads(steps).all if thread.kind == "compaction"]

    assert (compaction.parent, compaction.started_by, compaction.steps) == ("main", "s000001", 2)
    assert compaction.as_json().keys() == {"name", "kind", "model", "title", "steps", "parent", "started_by"}


@given(orders=sessions())
def test_the_order_of_concurrent_threads_changes_nothing(orders):
    """Each drawn thread is one thread, with the same name and kind in both orders."""
    of = []
    for steps in orders:
        found = find_threads(steps)
        of.append({(step.extra["is"], found.of[step.step_id].name, found.of[step.step_id].kind) for step in steps})
    drawn = {name for name, _, _ in of[0]}

    assert of[0] == of[1]
    assert {name: {"m": "main", "a": "sub-agent", "t": "auxiliary"}[name[0]] for name in drawn} == {
        name: kind for name, _, kind in of[0]
    }
    assert len([name for name in drawn if name[0] != "t"]) == len({found for name, found, _ in of[0] if name[0] != "t"})


@given(orders=sessions(), seed=st.integers())
def test_the_order_of_the_list_changes_nothing(orders, seed):
    steps = orders[0]
    shuffled = random.Random(seed).sample(steps, len(steps))

    assert find_threads(steps) == find_threads(shuffled)


@given(orders=sessions())
def test_every_step_is_of_one_listed_thread(orders):
    found = find_threads(orders[0])

    assert {step.step_id for step in orders[0]} == found.of.keys()
    assert Counter(thread.name for thread in found.of.values()) == {thread.name: thread.steps for thread in found.all}
    assert found.all[0].name == "main"


@given(orders=sessions(), data=st.data())
def test_late_steps_do_not_change_the_threads_of_others(orders, data):
    steps = orders[0]
    late = data.draw(st.sets(st.sampled_from([step.step_id for step in steps])))
    found = find_threads([replace(step, late=step.step_id in late) for step in steps])
    in_time = [step for step in steps if step.step_id not in late] or steps

    assert {step.step_id for step in steps} == found.of.keys()
    assert find_threads(in_time).of == {step.step_id: found.of[step.step_id] for step in in_time}


def test_the_parent_of_a_late_thread_is_a_thread_of_the_rollout():
    """Late calls of a planner would make its thread another one."""
    plan, help_, paint = user("Plan it, please."), "Help me with the house.", "Paint the house in blue."
    calls = [
        {"messages": [TASK], "system": "S", "tools": ("t",), "reply": said("", ("t", {"p": help_})), "late": True},
        {"messages": [user(help_)], "system": "T", "tools": ("t",), "reply": said("", ("t", {"p": paint}))},
        {"messages": [user(paint)], "system": "U", "tools": ("t",), "late": True},
        {"messages": [plan], "system": "V", "tools": ("t",)},
    ]
    found = find_threads(rollout(*calls))
    names = {thread.name for thread in found.all}

    assert all(thread.parent in {None, *names} for thread in found.all)
    assert found.of["s000001"].name == found.of["s000002"].parent


@settings(max_examples=25)
@given(steps=odd_steps())
def test_values_of_any_type_have_threads(steps):
    steps = read_back(steps)
    found = find_threads(steps, (*ALL_PRESETS, ThreadRule("auxiliary", user="a*", system="*", model="*", agent="*")))

    assert {step.step_id for step in steps} == found.of.keys()


@pytest.mark.parametrize(
    "calls",
    [
        conversation(4, "Task", system="S", tools=("a",)),
        [{**each, "system": f"It is 1{n}:0{n}. Work."} for n, each in enumerate(conversation(4, "Task"))],
        [{**each, "system": "S", "tools": (f"t{n}",)} for n, each in enumerate(conversation(4, "Task"))],
        [{**each, "reply": said("rewritten")} for each in conversation(4, "Task", system="S")],
        [*conversation(2, "Task", system="S"), *conversation(2, "Task", system="S")],
        [conversation(1, f"State {n}", system="S")[0] for n in range(4)],
        [{**conversation(1, "Task")[0], "status": "error", "response": {"status": 500}}] * 2,
        [{"messages": [], "dialect": "completions"}] * 3,
    ],
    ids=[
        "linear",
        "time in the prompt",
        "tools change",
        "replies are rewritten",
        "retried",
        "states",
        "failed",
        "texts",
    ],
)
def test_one_conversation_is_the_main_thread(calls):
    assert {thread.name for thread in find_threads(rollout(*calls)).all} == {"main"}


def test_a_call_without_tools_beside_a_longer_thread_with_another_prompt_is_auxiliary():
    work = conversation(2, "Task", system="Work on it until it is done.")
    title = conversation(1, "Task", system="Titles.")
    other_model = conversation(1, "Other", system="Work on it until it is done.", model="small")

    assert kinds(*rollout(*title, *work)) == ["auxiliary", "main", "main"]
    assert kinds(*rollout(*work, *other_model)) == ["main", "main", "auxiliary"]
    assert kinds(*rollout(*work[:1], *conversation(1, "Other", system="Work on it until it is done."))) == [
        "main",
        "main",
    ]


def test_threads_with_tools_or_turns_are_no_auxiliary_ones():
    work = conversation(3, "Task", system="Work on it.", tools=("a",))
    critic = conversation(2, "Judge it", system="Be a critic.")
    expert = conversation(1, "Look it up", system="Look things up.", tools=("b",))

    assert kinds(*rollout(*work, *critic, *expert)) == ["main"] * 3 + ["sub-agent"] * 3


def test_questions_about_the_states_of_another_conversation_are_auxiliary():
    """As the checks of Gemini CLI whether the model or the user is next, by another model."""
    work = conversation(3, "Task", system="Work on it.", tools=("a",))
    ask = [{"messages": [*each["messages"], each["reply"], user("Who is next?")], "model": "small"} for each in work]

    assert (
        kinds(*rollout(*(each for pair in zip(work, ask, strict=True) for each in pair))) == ["main", "auxiliary"] * 3
    )


def test_a_rollout_with_a_plan_has_a_main_thread():
    plan = "Draw the house first.\nThen build its walls."
    planner = conversation(1, "Make a plan for:\nTask", system="You plan.")[0] | {"reply": said(plan)}
    work = conversation(2, f"Task\n{plan}", system="Work on it.", tools=("a",))

    assert kinds(*rollout(planner, *work)) == ["auxiliary", "main", "main"]


def test_the_main_thread_is_the_oldest_that_is_not_auxiliary_and_that_nothing_starts():
    """A rollout of equal threads has a main one, too."""
    equal = [*conversation(1, "One", system="Planner."), *conversation(1, "Two", system="Judge.")]
    title = conversation(1, "Title", system="Titles.")
    work = conversation(1, "Task", system="Work.", tools=("a",))

    assert kinds(*rollout(*equal)) == ["main", "sub-agent"]
    assert kinds(*rollout(*title, *work)) == ["auxiliary", "main"]


def test_many_calls_outweigh_one():
    """As states without a history, beside a title."""
    states = [conversation(1, f"State {n}", system="Work.")[0] for n in range(3)]

    assert kinds(*rollout(*conversation(1, "Title", system="Titles."), *states)) == [
        "auxiliary",
        "main",
        "main",
        "main",
    ]


def test_agents_that_clients_name_are_threads():
    """`main` is the main one; a rule for an agent decides its kind."""
    calls = [
        *conversation(2, "Plan", system="S", agent="planner"),
        *conversation(1, "Work", system="S", agent="main"),
        *conversation(1, "Judge", system="S", agent="judge"),
    ]
    found = find_threads(rollout(*calls), [ThreadRule("auxiliary", agent="ju*")])

    assert [(thread.name, thread.kind) for thread in found.all] == [
        ("main", "main"),
        ("planner", "sub-agent"),
        ("judge", "auxiliary"),
    ]
    assert [*dict.fromkeys(thread.agent for thread in found.of.values())] == ["planner", "main", "judge"]


def test_a_named_agent_can_be_the_only_thread():
    (thread,) = find_threads(rollout(*conversation(2, "Plan", agent="planner"))).all

    assert (thread.name, thread.kind) == ("planner", "main")


def test_a_rule_decides_the_kind_of_the_calls_that_match_it():
    """Also in the middle of a thread, and also for the agent that the client names."""
    work = conversation(3, "Task", system="Work.", tools=("a",))
    work[1]["messages"] = [*work[1]["messages"][:-1], user("Is it done?")]
    named = [{**work[0], "agent": "planner"}, {**work[1], "agent": "planner"}]
    auxiliary, agent = ThreadRule("auxiliary", user="Is it *"), ThreadRule("sub-agent", user="Is it *")

    assert kinds(*rollout(*work), rules=[auxiliary]) == ["main", "auxiliary", "main"]
    assert kinds(*rollout(*work), rules=[agent]) == ["main", "sub-agent", "main"]
    assert kinds(*rollout(*named), rules=[auxiliary]) == ["main", "auxiliary"]
    assert kinds(*rollout(*work), rules=[ThreadRule("auxiliary", system="Work.")]) == ["auxiliary"] * 3
    assert kinds(
        *rollout(*work, *conversation(1, "Other", system="Boss.")), rules=[ThreadRule("main", system="Boss.")]
    ) == ["sub-agent"] * 3 + ["main"]


def test_sub_agents_by_a_rule_are_threads_by_their_first_messages():
    rule = ThreadRule("sub-agent", system="Help.")
    calls = [*conversation(2, "One", system="Help."), *conversation(2, "Two", system="Help.")]

    assert names(*rollout(*calls), rules=[rule]) == [0, 0, 2, 2]


def test_selected_steps_name_their_threads_and_others_are_skipped_with_the_reason():
    steps = rollout(*conversation(1, "Title", system="Titles."), *conversation(2, "Task", system="Work."))
    kept, skipped = select_threads(steps, (), "agents")

    assert [(step.step_id, step.thread) for step in kept] == [("s000001", "main"), ("s000002", "main")]
    assert [(each["step_id"], each["why"]) for each in skipped] == [
        ("s000000", "threads=agents: its thread is auxiliary")
    ]
    assert skipped[0]["thread"].startswith("auxiliary:")
    assert ([replace(step, thread=None) for step in select_threads(steps, (), "all")[0]], []) == ([*steps], [])


def test_titles_are_short_and_one_line():
    (thread,) = find_threads([call(0, user("A  long\ntask " * 100))]).all

    assert " ".join(["A long task"] * 7)[:80] == thread.title


def test_the_words_of_many_long_prompts_are_not_all_kept():
    """An agent may have a map of its files in the prompt, which changes with each call."""
    base = " ".join(map("".join, product("abcdefghij", repeat=4)))
    ends = ["".join(pair) for pair in product("abcdef", repeat=2)]
    steps = rollout(*({"messages": [TASK], "system": f"{base} {end}", "tools": ("t",)} for end in ends))
    tracemalloc.start()
    try:
        assert len(find_threads(steps).all) == 1
        assert tracemalloc.get_traced_memory()[1] < 30 * 2**20
    finally:
        tracemalloc.stop()


LONG = "You work on the task of the user until it is done, and answer with a summary of what you did."
TASK = user("Task")


def families(*steps):
    """Return the family of each step, numbered by their first step."""
    reader = Openings()
    openings = [reader.read(step) for step in steps]
    found = Families(openings, reader.digests)
    return [found.of(at) for at in range(len(openings))]


def test_model_prompt_and_shared_tools_make_a_family():
    same = families(call(1, TASK, system="S", tools=("a", "b")), call(2, user("Other"), system="S", tools=("b", "c")))
    other_model = families(call(1, TASK, system="S"), call(2, user("Other"), system="S", model="n"))
    other_prompt = families(call(1, TASK, system="S"), call(2, user("Other"), system="T"))
    other_tools = families(call(1, TASK, system="S", tools=("a",)), call(2, user("Other"), system="S", tools=("b",)))

    assert [same, other_model, other_prompt, other_tools] == [[0, 0], [0, 1], [0, 1], [0, 1]]


def test_tools_that_change_from_turn_to_turn_are_one_family():
    """Each two turns share one of them."""
    steps = [call(n, user(f"State {n}"), system="S", tools=(f"t{n}", f"t{n + 1}")) for n in range(6)]

    assert set(families(*steps)) == {0}


def test_numbers_in_the_prompt_do_not_count():
    assert families(call(1, TASK, system="It is 12:30."), call(2, user("Other"), system="It is 9:05.")) == [0, 0]


def test_a_conversation_with_a_similar_prompt_is_one_family():
    """The reply of the step before is in its place."""
    first = call(1, TASK, system=f"{LONG} It is Monday.", reply="Reply")
    second = call(2, TASK, said("Reply"), user("More"), system=f"{LONG} It is Tuesday.")

    assert families(first, second) == [0, 0]
    assert families(first, call(2, user("Other"), said("Reply"), system=f"{LONG} It is Tuesday.")) == [0, 1]


def test_a_similar_prompt_and_equal_tools_are_one_family_if_the_agent_rewrites_replies():
    first = call(1, TASK, system=f"{LONG} It is Monday.", tools=("a",))
    second = call(2, TASK, said("Rewritten"), user("More"), system=f"{LONG} It is Tuesday.", tools=("a",))

    assert families(first, second) == [0, 0]


def test_a_title_of_the_same_messages_is_another_family():
    """Its prompt is not similar."""
    steps = [
        call(1, TASK, system=LONG, tools=("a",), reply="Reply"),
        call(2, TASK, said("Reply"), user("Write a title."), system="You write titles."),
    ]

    assert families(*steps) == [0, 1]


def test_a_last_turn_without_tools_is_in_the_family():
    steps = [
        call(1, TASK, system=LONG, tools=("a",), reply="Reply"),
        call(2, TASK, said("Reply"), user("Answer now."), system=LONG),
    ]
    without_prompt = [
        call(1, TASK, tools=("a",), reply="Reply"),
        call(2, TASK, said("Reply"), user("Answer now.")),
    ]

    assert [families(*steps), families(*without_prompt)] == [[0, 0], [0, 0]]


def test_calls_of_one_agent_are_a_family_and_no_others():
    steps = [
        call(1, TASK, system="S", agent="planner"),
        call(2, user("Other"), system="T", model="n", agent="planner"),
        call(3, TASK, system="S"),
        call(4, TASK, system="S", agent="coder"),
    ]

    assert families(*steps) == [0, 0, 1, 2]


SUMMARY = "<summary>\nThe user wants a house that is blue.\nIts roof is done.\n</summary>"
CONTINUED = user(
    "This conversation continues. Summary:\nThe user wants a house that is blue.\nIts roof is done.\nGo on."
)


def starts(*steps):
    """Return for each step the ID of the step that starts it, or what it starts if it samples the summary for it."""
    reader = Openings()
    openings = [reader.read(step) for step in steps]
    found = Starts(openings, Families(openings, reader.digests), reader.digests)
    return [None if (start := found.of(at)) is None else (start.source, start.tool) for at in range(len(openings))]


def test_a_conversation_that_begins_with_an_argument_of_a_call_is_started_by_it():
    """Also as one part of a message, or as lines of it; also with the same prompt and tools as the caller."""
    prompt = "Count the files of the folder."
    caller = call(1, user("Task"), system="S", tools=("task",), reply=said("", ("task", {"prompt": prompt})))
    parts = {"role": "user", "content": [{"type": "text", "text": "Reminder"}, {"type": "text", "text": prompt}]}
    other = call(3, parts, system="T")
    wrapped = call(4, user(f"Your task:\n{prompt}\nBe brief."), system="U")

    assert starts(caller, call(2, user(prompt), system="S"), other, wrapped) == [None, *[("s000001", "task")] * 3]


def test_a_part_of_an_argument_starts_nothing():
    text = "A line that is long enough.\nAnd another one."
    caller = call(1, user("Task"), reply=said("", ("task", {"prompt": text, "empty": " "})))

    assert starts(caller, call(2, user("A line that is long enough."), system="T")) == [None, None]


def test_a_later_call_with_the_same_text_starts_nothing():
    """As a sub-agent that delegates the whole task again."""
    caller = call(2, user("Other"), reply=said("", ("task", {"prompt": "Do the task"})))

    assert starts(call(1, user("Do the task")), caller) == [None, None]


def test_a_conversation_with_the_summary_of_one_of_its_family_is_started_by_it():
    """The call that samples the summary belongs to it, and other turns of its conversation do not."""
    history = [user("Build a house."), said("I begin.")]
    steps = [
        call(1, history[0], system="S", tools=("bash",), reply="I begin."),
        call(2, *history, user("Summarize."), system="S", reply=SUMMARY),
        call(3, CONTINUED, system="S", tools=("bash",)),
        call(4, CONTINUED, said("ok"), user("More."), system="S", tools=("bash",)),
    ]

    assert starts(*steps) == [None, *[("s000002", None)] * 3]


def test_a_summary_of_another_prompt_belongs_to_the_conversation_with_its_text():
    """Its own call is a thread by itself."""
    work = call(1, user("Build a house."), system="S", tools=("bash",), reply="I begin.")
    summary = call(2, user("Here is it:\n[User]: Build a house."), system="You summarize.", reply=SUMMARY)
    without = call(2, user("Here is another one."), system="You summarize.", reply=SUMMARY)
    with_tools = call(2, user("Here is it:\n[User]: Build a house."), system="T", tools=("a",), reply=SUMMARY)
    asked = user("What did we do so far?")
    continued = call(3, asked, said(SUMMARY), user("Continue."), system="S", tools=("bash",))

    assert starts(work, summary, continued) == [None, None, ("s000002", None)]
    assert starts(work, without, continued) == [None, None, None]
    assert starts(work, with_tools, continued) == [None, None, None]


def test_a_plan_for_a_conversation_that_begins_after_it_is_no_summary():
    """As of a planner that was given the task of the main conversation."""
    plan = "Draw the house first.\nThen build its walls."
    planner = call(1, user("Make a plan for:\nBuild a house."), system="You plan.", reply=plan)
    work = [user("Build a house."), said(f"This is the plan:\n{plan}"), user("Go on.")]

    assert starts(planner, call(2, *work, system="S", tools=("bash",))) == [None, None]
    assert starts(planner, call(2, user("Build a house."), user(f"The plan:\n{plan}"), system="S")) == [None, None]


def test_states_with_earlier_replies_are_no_compactions():
    """As of an agent without a history, which writes its last reply into each state."""
    steps = [
        call(n, user(f"State {n}. Before:\nThis is a long reply {n - 1}."), reply=f"This is a long reply {n}.")
        for n in range(4)
    ]

    assert starts(*steps) == [None] * 4


def test_an_agent_that_searches_for_its_task_starts_nothing():
    """Also without its replies in its history, which then begins with the task and the results."""
    question = "Who wrote Hamlet in the year 1600?"
    search = said("", ("search", {"query": question}))
    for first, second in (
        ([user(question)], [user(question), user("Nothing was found.")]),
        ([user(f"Question:\n{question}")], [user(f"Question:\n{question}\nResult: nothing")]),
    ):
        steps = [call(n, *m, system="S", tools=("search",), reply=search) for n, m in enumerate((first, second))]
        assert starts(*steps) == [None, None]
    other = call(2, user(question), system="Rank documents.")
    assert starts(call(1, user(question), system="S", reply=search), other) == [None, ("s000001", "search")]


def test_a_line_that_the_source_was_given_is_no_evidence():
    """A reply that repeats the task does not start the next conversation with the same task."""
    task = "Build a house that is blue, with a roof."
    steps = [
        call(1, user(task), reply="I begin."),
        call(2, user(task), said("I begin."), user("More."), reply=f"You want:\n{task}"),
        call(3, user(f"Again, please:\n{task}")),
    ]

    assert starts(*steps) == [None] * 3
