"""Counts linear rollouts that are one sequence in mode `append`, per chat template, with the reasons of the others.

python -m tests.support.continuation_table [faithful]
"""

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from tests.support.bridge_oracle import wrong_bridge
from tests.support.chat_templates import CannotRender, ChatTemplate, originals
from tests.support.continued_rollouts import TOOLS, USER, Plan, Rollout, Turn
from tests.support.template_engine import Call, Reply

from proxy.continuation.types import Mode

TURNS = 6
REASONING = "The cat sees birds.\nSo what?"
PARTS = ("Where is the lake?", "And the cat?")
STOPPED = "Seven red birds"
ANSWER = Reply("Seven red birds.")
CALLS = (Call("look_up", '{"x":"a","k":{"z":[1,2]}}'), Call("run", '{"x":"naïve"}'))

# What an agent meets in its second turn, by name: the reply, and what the agent adds.
INCIDENTS = {
    "cut in a thought": Reply("", REASONING, ending="length", kept=0.5),
    "cut in a call": replace(Reply(calls=CALLS[:1]), ending="length", kept=0.5),
    "cut in a streamed call": replace(Reply(calls=CALLS[:1]), ending="length", kept=0.5, streams=True),
    "cut in a call after a thought": Reply("", REASONING, CALLS[:1], ending="length", kept=0.9),
    "cut after a call": Reply("", "", CALLS[:1], ending="hidden_length"),
    "all in reasoning": Reply("", REASONING),
    "stop string": Reply(STOPPED, ending="stop_string", stop="\n"),
    "text as parts": ANSWER,
}
_TOOL_INCIDENTS = ("cut in a call", "cut in a streamed call", "cut in a call after a thought", "cut after a call")


@dataclass(frozen=True)
class Combination:
    """A template with tools or without, with content beside the calls or without, and with reasoning or without.

    `incident`: what happens in the second turn, by its name in INCIDENTS.
    """

    template: str
    tools: bool = False
    content: bool = False
    reasoning: bool = False
    incident: str = ""

    def __str__(self) -> str:
        names = {"tools": self.tools, "content beside calls": self.content, "reasoning": self.reasoning}
        return self.incident or ", ".join(name for name, has in names.items() if has) or "chat"


@dataclass(frozen=True)
class Outcome:
    """`calls`: the calls after the first. `refused`: the reasons of those that were not continued. `wrong`: wrong bridges."""

    combination: Combination
    calls: int
    refused: Counter[str]
    wrong: int

    @property
    def is_one_sequence(self) -> bool:
        """Whether the whole rollout is one sequence."""
        return self.calls == TURNS - 1 and not self.refused


def combinations() -> Iterator[Combination]:
    """Yield all combinations of the original templates; those with tools of the templates that render their messages."""
    for template in originals():
        for reasoning in (False, True):
            yield Combination(template.name, reasoning=reasoning)
        has_tools = _renders_results(template)
        for content, reasoning in [(False, False), (False, True), (True, False), (True, True)] * has_tools:
            yield Combination(template.name, tools=True, content=content, reasoning=reasoning)
        for incident in INCIDENTS:
            if has_tools or incident not in _TOOL_INCIDENTS:
                yield Combination(template.name, tools=incident in _TOOL_INCIDENTS, incident=incident)


def _renders_results(template: ChatTemplate) -> bool:
    """Return whether a template renders a tool loop: some accept no results of tools."""
    calling = [USER, Reply(calls=CALLS[:1]).message(), _result("red"), ANSWER.message(), USER]
    try:
        template.render(calling, TOOLS)
    except CannotRender:
        return False
    return True


def outcome(combination: Combination, mode: Mode = "append") -> Outcome:
    """Run a rollout of a combination in a fresh process.

    No tokenizer would split the tokens so, and the agent rewrites arguments.
    """
    boundaries = list(Rollout(_plan(combination, mode)).run())
    return Outcome(
        combination,
        len(boundaries),
        Counter(str(boundary.reason) for boundary in boundaries if not boundary.is_continued),
        sum(boundary.is_continued and wrong_bridge(boundary) is not None for boundary in boundaries),
    )


def _plan(combination: Combination, mode: Mode) -> Plan:
    reasoning = REASONING * combination.reasoning
    beside = "Let me look." * combination.content
    answer = Turn(replace(ANSWER, reasoning=reasoning))
    turns = [answer] * TURNS
    if combination.tools:
        calls = [
            Turn(Reply(beside, reasoning, CALLS[:1]), (_result("seven birds"),)),
            Turn(Reply("", reasoning, CALLS[1:]), (_result("red"),)),
        ]
        turns = [*calls, answer] * (TURNS // 3)
    if reply := INCIDENTS.get(combination.incident):
        shows_calls = reply.calls and (reply.streams or reply.ending == "hidden_length")
        turns[1] = Turn(reply, (_result("failed"),)) if shows_calls else Turn(reply)
    first = ({**USER, "content": [{"type": "text", "text": part} for part in PARTS]},)
    return Plan(
        combination.template,
        tuple(turns),
        mode,
        tools=TOOLS if combination.tools else None,
        first=first if combination.incident == "text as parts" else (USER,),
        joins_parts=combination.incident == "text as parts",
        knows_stops=False,
    )


def _result(text: str) -> dict[str, str]:
    return {"role": "tool", "tool_call_id": "call_1", "content": text}


def table(outcomes: list[Outcome]) -> list[str]:
    """Return the lines of a report: the totals, by kind and by reason, then the combinations that are several sequences."""
    whole = sum(one.is_one_sequence for one in outcomes)
    lines = [f"{whole} of {len(outcomes)} combinations are one sequence ({whole / len(outcomes):.1%})"]
    kinds = Counter(str(one.combination) for one in outcomes)
    ones = Counter(str(one.combination) for one in outcomes if one.is_one_sequence)
    lines += [f"{kind:40} {ones[kind]:3} of {count}" for kind, count in kinds.items()]
    refused = sum((one.refused for one in outcomes), Counter[str]())
    lines.append(
        f"{sum(one.calls for one in outcomes)} calls, {sum(one.wrong for one in outcomes)} wrong; {dict(refused)}"
    )
    for one in outcomes:
        if not one.is_one_sequence:
            reasons = ", ".join(f"{reason} {count}" for reason, count in one.refused.items())
            lines.append(f"{one.combination.template:24} {one.combination!s:40} {one.calls} calls: {reasons}")
    return lines


if __name__ == "__main__":
    used: Mode = "faithful" if sys.argv[1:] == ["faithful"] else "append"
    sys.stdout.write("\n".join(table([outcome(combination, used) for combination in combinations()])) + "\n")
