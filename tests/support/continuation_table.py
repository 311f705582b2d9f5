"""Counts linear rollouts that are one sequence in mode `append`, per chat template, with the reasons of the others.

PYTHONPATH=.:tests/support python -m continuation_table
"""

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from bridge_oracle import wrong_bridge
from chat_templates import originals
from continued_rollouts import TOOLS, Plan, Rollout, Turn
from template_engine import Call, Reply

TURNS = 6
REASONING = "The cat sees birds.\nSo what?"


@dataclass(frozen=True)
class Combination:
    """A template with tools or without, with content beside the calls or without, and with reasoning or without."""

    template: str
    tools: bool
    content: bool
    reasoning: bool

    def __str__(self) -> str:
        names = {"tools": self.tools, "content beside calls": self.content, "reasoning": self.reasoning}
        return ", ".join(name for name, has in names.items() if has) or "chat"


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
    """Yield all combinations of the original templates; those with tools of the templates that render tool calls."""
    for template in originals():
        for reasoning in (False, True):
            yield Combination(template.name, tools=False, content=False, reasoning=reasoning)
            if template.call_stop is not None:
                yield Combination(template.name, tools=True, content=False, reasoning=reasoning)
                yield Combination(template.name, tools=True, content=True, reasoning=reasoning)


def outcome(combination: Combination) -> Outcome:
    """Run a rollout of a combination, with token splits that no tokenizer chooses and rewritten arguments."""
    boundaries = list(Rollout(_plan(combination)).run())
    return Outcome(
        combination,
        len(boundaries),
        Counter(str(boundary.reason) for boundary in boundaries if not boundary.is_continued),
        sum(boundary.is_continued and wrong_bridge(boundary) is not None for boundary in boundaries),
    )


def _plan(combination: Combination) -> Plan:
    reasoning = REASONING * combination.reasoning
    beside = "Let me look." * combination.content
    answer = Turn(Reply("Seven red birds.", reasoning))
    first = Call("look_up", '{"x":"a","k":{"z":[1,2]}}')
    calls = [
        Turn(Reply(beside, reasoning, (first,)), (_result("seven birds"),)),
        Turn(Reply("", reasoning, (Call("run", '{"x":"naïve"}'),)), (_result("red"),)),
    ]
    turns = [*calls, answer] * (TURNS // 3) if combination.tools else [answer] * TURNS
    return Plan(combination.template, tuple(turns), tools=TOOLS if combination.tools else None)


def _result(text: str) -> dict[str, str]:
    return {"role": "tool", "tool_call_id": "call_1", "content": text}


def table(outcomes: list[Outcome]) -> list[str]:
    """Return the lines of a report: the totals, then the combinations that are several sequences."""
    whole = sum(one.is_one_sequence for one in outcomes)
    lines = [f"{whole} of {len(outcomes)} combinations are one sequence ({whole / len(outcomes):.1%})"]
    for one in outcomes:
        if not one.is_one_sequence:
            reasons = ", ".join(f"{reason} {count}" for reason, count in one.refused.items())
            lines.append(f"{one.combination.template:24} {one.combination!s:40} {one.calls} calls: {reasons}")
    return lines


if __name__ == "__main__":
    sys.stdout.write("\n".join(table([outcome(combination) for combination in combinations()])) + "\n")
