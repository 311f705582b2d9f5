"""What starts the conversations of a rollout."""

from threaded import call, said, user

from proxy.trajectory.families import Families
from proxy.trajectory.openings import Openings
from proxy.trajectory.thread_starts import Starts

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

    assert [None, *[("s000001", "task")] * 3] == starts(caller, call(2, user(prompt), system="S"), other, wrapped)


def test_a_part_of_an_argument_starts_nothing():
    text = "A line that is long enough.\nAnd another one."
    caller = call(1, user("Task"), reply=said("", ("task", {"prompt": text, "empty": " "})))

    assert [None, None] == starts(caller, call(2, user("A line that is long enough."), system="T"))


def test_a_later_call_with_the_same_text_starts_nothing():
    """As a sub-agent that delegates the whole task again."""
    caller = call(2, user("Other"), reply=said("", ("task", {"prompt": "Do the task"})))

    assert [None, None] == starts(call(1, user("Do the task")), caller)


def test_a_conversation_with_the_summary_of_one_of_its_family_is_started_by_it():
    """The call that samples the summary belongs to it, and other turns of its conversation do not."""
    history = [user("Build a house."), said("I begin.")]
    steps = [
        call(1, history[0], system="S", tools=("bash",), reply="I begin."),
        call(2, *history, user("Summarize."), system="S", reply=SUMMARY),
        call(3, CONTINUED, system="S", tools=("bash",)),
        call(4, CONTINUED, said("ok"), user("More."), system="S", tools=("bash",)),
    ]

    assert [None, *[("s000002", None)] * 3] == starts(*steps)


def test_a_summary_of_another_prompt_is_of_the_conversation_whose_text_it_was_given():
    """Its own call is a thread by itself."""
    work = call(1, user("Build a house."), system="S", tools=("bash",), reply="I begin.")
    summary = call(2, user("Here is it:\n[User]: Build a house."), system="You summarize.", reply=SUMMARY)
    without = call(2, user("Here is another one."), system="You summarize.", reply=SUMMARY)
    with_tools = call(2, user("Here is it:\n[User]: Build a house."), system="T", tools=("a",), reply=SUMMARY)
    asked = user("What did we do so far?")
    continued = call(3, asked, said(SUMMARY), user("Continue."), system="S", tools=("bash",))

    assert [None, None, ("s000002", None)] == starts(work, summary, continued)
    assert [None, None, None] == starts(work, without, continued)
    assert [None, None, None] == starts(work, with_tools, continued)


def test_a_plan_for_a_conversation_that_begins_after_it_is_no_summary():
    """As of a planner that was given the task of the main conversation."""
    plan = "Draw the house first.\nThen build its walls."
    planner = call(1, user("Make a plan for:\nBuild a house."), system="You plan.", reply=plan)
    work = [user("Build a house."), said(f"This is the plan:\n{plan}"), user("Go on.")]

    assert [None, None] == starts(planner, call(2, *work, system="S", tools=("bash",)))
    assert [None, None] == starts(planner, call(2, user("Build a house."), user(f"The plan:\n{plan}"), system="S"))


def test_states_with_earlier_replies_are_no_compactions():
    """As of an agent without a history, which writes its last reply into each state."""
    steps = [
        call(n, user(f"State {n}. Before:\nThis is a long reply {n - 1}."), reply=f"This is a long reply {n}.")
        for n in range(4)
    ]

    assert [None] * 4 == starts(*steps)


def test_an_agent_that_searches_for_its_task_starts_nothing():
    """Also without its replies in its history, which then begins with the task and the results."""
    question = "Who wrote Hamlet in the year 1600?"
    search = said("", ("search", {"query": question}))
    for first, second in (
        ([user(question)], [user(question), user("Nothing was found.")]),
        ([user(f"Question:\n{question}")], [user(f"Question:\n{question}\nResult: nothing")]),
    ):
        steps = [call(n, *m, system="S", tools=("search",), reply=search) for n, m in enumerate((first, second))]
        assert [None, None] == starts(*steps)
    other = call(2, user(question), system="Rank documents.")
    assert [None, ("s000001", "search")] == starts(call(1, user(question), system="S", reply=search), other)


def test_a_line_that_the_source_was_given_is_no_evidence():
    """A reply that repeats the task does not start the next conversation with the same task."""
    task = "Build a house that is blue, with a roof."
    steps = [
        call(1, user(task), reply="I begin."),
        call(2, user(task), said("I begin."), user("More."), reply=f"You want:\n{task}"),
        call(3, user(f"Again, please:\n{task}")),
    ]

    assert [None] * 3 == starts(*steps)
