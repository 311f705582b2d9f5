"""Calls of agents as steps: by hand, drawn, and as real agents made them."""

from pathlib import Path
from typing import Any

import orjson
from hypothesis import strategies as st
from tests.support.forests import make_choice, make_step

from proxy.trajectory.step import Step

TOOLS = [{"type": "function", "function": {"name": "task", "parameters": {}}}]
TITLES = {"role": "system", "content": "You write titles."}
WORK = {"role": "system", "content": "You work on tasks."}
HELP = {"role": "system", "content": "You help others."}
TASK = {"role": "user", "content": "Build a house."}
_RECORDED = Path(__file__).parents[1] / "trajectory" / "agent_calls.json"


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str, *calls: tuple[str, Any]) -> dict[str, Any]:
    """Return a reply with these calls, each a tool and its arguments."""
    made = [{"function": {"name": name, "arguments": orjson.dumps(given).decode()}} for name, given in calls]
    return {"role": "assistant", "content": text, **({"tool_calls": made} if made else {})}


def call(
    number: int,
    *messages: dict[str, Any],
    system: str = "",
    tools: tuple[str, ...] = (),
    reply: Any = "ok",
    model: str = "m",
    agent: str | None = None,
    **facts: Any,
) -> Step:
    """Return a step with ids of its own. `number` is its place in time."""
    prompt = [{"role": "system", "content": system}] if system else []
    body: dict[str, Any] = {"model": model, "messages": [*prompt, *messages]}
    if tools:
        body["tools"] = [{"type": "function", "function": {"name": name}} for name in tools]
    recorded = {
        "request": body,
        "response": {"choices": [{"index": 0, "message": said(reply) if isinstance(reply, str) else reply}]},
        "extra": {} if agent is None else {"agent": agent},
        "model_asked": model,
    }
    return make_step(f"s{number:06}", [10 * number + 1], make_choice(0, [10 * number + 2]), **{**recorded, **facts})


def conversation(turns: int, task: str, **facts: Any) -> list[dict[str, Any]]:
    """Return the facts of the calls of a conversation, in order."""
    messages, calls = [user(task)], []
    for turn in range(turns):
        reply = said(f"{task} reply {turn}")
        calls.append({"messages": list(messages), "reply": reply, **facts})
        messages += [reply, user(f"{task} result {turn}")]
    return calls


@st.composite
def sessions(draw):
    """Draw the threads of a rollout, and two orders of their calls. In both orders a thread follows the call that starts it.

    Returns the two lists of steps; a step has the name of its thread in its metadata (`extra["is"]`).
    """
    agents = draw(st.integers(0, 4))
    task = "Do the whole task"
    calls = [("task", {"prompt": f"Part {number} of it"}) for number in range(agents)]
    main = conversation(draw(st.integers(2, 4)), task, system="You work.", tools=("task", "bash"))
    main[0]["reply"] = said("I delegate.", *calls)
    main[1:] = [{**each, "messages": [user(task), main[0]["reply"], *each["messages"][2:]]} for each in main[1:]]
    same_prompt = draw(st.booleans())  # as opencode's sub-agents
    threads = {"main": main}
    for number in range(agents):
        system = "You work." if same_prompt else "You help."
        threads[f"agent {number}"] = conversation(
            draw(st.integers(1, 3)), f"Part {number} of it", system=system, tools=("bash",)
        )
    for number in range(draw(st.integers(0, 2))):
        threads[f"title {number}"] = conversation(1, f"Title {number} of {task}", system="You write titles.")
    return [_in_order(threads, draw(st.randoms(use_true_random=False))) for _ in range(2)]


def _in_order(threads, random) -> list[Step]:
    """Return the calls in a drawn order: each thread keeps its order, and agents follow the first call of the main thread."""
    left = {name: list(calls) for name, calls in threads.items()}
    steps: list[Step] = []
    while any(left.values()):
        started = len(left["main"]) < len(threads["main"])
        ready = [name for name, calls in left.items() if calls and (started or not name.startswith("agent"))]
        name = random.choice(ready)
        facts = left[name].pop(0)
        others = {key: value for key, value in facts.items() if key != "messages"}
        steps.append(call(len(steps), *facts["messages"], **others, extra={"is": name}))
    return steps


def recorded_calls() -> dict[str, list[tuple[Step, str]]]:
    """Return the calls of real agents in order, each with the thread to which it belongs.

    Their texts are cut to 800 characters.
    """
    found: dict[str, list[tuple[Step, str]]] = {}
    for name, calls in orjson.loads(_RECORDED.read_bytes()).items():
        found[name] = [
            (
                call(number, *each["messages"], model=each["model"], tools=tuple(each["tools"]), reply=each["reply"]),
                each["thread"],
            )
            for number, each in enumerate(calls)
        ]
    return found


async def record_threads(proxy, rollout="r", *, finish=True):
    """Record a title, two turns of the main thread and a sub-agent; return the tree."""
    await proxy.chat(rollout, TITLES, user("Title of it."))
    first = await proxy.chat(rollout, WORK, TASK, tools=TOOLS)
    await proxy.chat(rollout, WORK, TASK, first.message, user("More."), tools=TOOLS)
    await proxy.chat(rollout, HELP, user("Paint it."), tools=TOOLS)
    if finish:
        assert (await proxy.finish(rollout, reward=1.0)).status == 200
    return (await proxy.get(f"/rollouts/{rollout}/tree")).json
