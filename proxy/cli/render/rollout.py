"""A rollout, as its tree has it: the header, then branch by branch what was asked (dimmed) and sampled (bright).

Holds the order in which steps are told. Each step is told once; a branch that goes on from a step of another one says so.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
from rich.text import Text

from proxy.cli.console import visible
from proxy.cli.render import step as one
from proxy.cli.render.step import BRIGHT, DIM, coloured, ids_line, legend, texts_of
from proxy.cli.render.tables import age, drift, number, status_style


@dataclass(frozen=True, slots=True)
class StepView:
    """What of each step is wanted besides its text. `with_values`: logprobs are said where colours cannot show them.

    `texts`: those of tokens that answers do not tell, by step id and place of the choice; None in one: not known.
    """

    ids: bool = False
    logprobs: bool = False
    whole: bool = False
    with_values: bool = False
    texts: Mapping[tuple[str, int], Sequence[str | None]] = field(default_factory=dict)


class Picture:
    """A rollout put together of what the control API tells of it: itself, its tree and its steps."""

    __slots__ = ("_nodes", "_rollout", "_steps", "_tree", "_view")

    def __init__(
        self, rollout: Mapping[str, Any], tree: Mapping[str, Any], steps: Sequence[Mapping[str, Any]], view: StepView
    ) -> None:
        self._rollout = rollout
        self._tree = tree
        self._steps = {step["step_id"]: step for step in steps}
        self._nodes = {node["node"]: node for node in tree["nodes"] if node["step_id"] in self._steps}
        self._view = view

    def lines(self, now_ms: int) -> Iterator[Text]:
        """All of it, line by line."""
        yield from header(self._rollout, now_ms)
        if self._view.logprobs:
            yield legend()
        told: set[int] = set()
        asked: set[str] = set()
        for place, leaf in enumerate(self._leaves()):
            yield from self._branch(place, self._path(leaf), told, asked)
        yield from self._unplaced()

    def _leaves(self) -> list[int]:
        parents = {node["parent"] for node in self._nodes.values()}
        return [place for place in self._nodes if place not in parents]

    def _path(self, leaf: int) -> list[int]:
        path = [leaf]
        while (parent := self._nodes[path[-1]]["parent"]) in self._nodes:
            path.append(parent)
        return path[::-1]

    def _branch(self, place: int, path: Sequence[int], told: set[int], asked: set[str]) -> Iterator[Text]:
        new = [node for node in path if node not in told]
        before = path[len(path) - len(new) - 1] if len(new) < len(path) else None
        goes_on = "" if before is None else f", goes on from step {self._step(before)['index']}"
        count = f"{len(path)} step{'s' * (len(path) > 1)}"
        yield Text.assemble("\n", (f"── branch {place}", "bold"), (f"  {count}{goes_on}", DIM))
        for node in new:
            told.add(node)
            yield from self._told(node, asked)

    def _told(self, place: int, asked: set[str]) -> Iterator[Text]:
        """One node: what was asked, the step's own line, what was sampled."""
        node, step = self._nodes[place], self._step(place)
        parent = node["parent"] if node["parent"] in self._nodes else None
        if node["step_id"] not in asked:
            yield from one.asked(step, None if parent is None else self._step(parent), whole=self._view.whole)
        asked.add(node["step_id"])
        for boundary in self._tree["drift"]:
            if boundary["step_id"] == node["step_id"]:
                yield from _drifted(boundary, self._steps.get(boundary["earlier_step_id"]))
        at = next(at for at, choice in enumerate(step["choices"]) if choice["index"] == node["choice"])
        marks = [
            f"choice {node['choice']}" if len(step["choices"]) > 1 else "",
            "superseded" if node["superseded"] else "",
        ]
        yield one.headline(step).append("".join(f"  {mark}" for mark in marks if mark), "magenta")
        yield from one.troubles(step)
        yield from one.sampled(step, at, is_trained=node["owner"] is not None)
        begun = 0 if parent is None else self._nodes[parent]["end"]
        yield from token_lines(step, at, begun, self._view, is_trained=node["owner"] is not None)

    def _unplaced(self) -> Iterator[Text]:
        """Steps that have no place in the tree: errors, and those without ids."""
        if self._tree["unplaced"]:
            yield Text.assemble("\n", ("── in no branch", "bold"))
        for outside in self._tree["unplaced"]:
            step = self._steps.get(outside["step_id"])
            if step is not None:
                yield from alone(step, self._view, is_whole=False)

    def _step(self, place: int) -> Mapping[str, Any]:
        return self._steps[self._nodes[place]["step_id"]]


def alone(step: Mapping[str, Any], view: StepView, *, is_whole: bool = True) -> Iterator[Text]:
    """A step by itself: all that its agent sent, and every choice. `is_whole`: nothing of it is cut."""
    if is_whole and view.logprobs:
        yield legend()
    yield from one.asked(step, None, whole=view.whole or is_whole)
    yield one.headline(step)
    yield from one.troubles(step)
    for at, choice in enumerate(step["choices"]):
        if len(step["choices"]) > 1:
            yield Text(f"choice {choice['index']}", "magenta")
        yield from one.sampled(step, at, is_trained=step["fidelity"]["exact"])
        yield from token_lines(step, at, 0, view, is_trained=step["fidelity"]["exact"])


def token_lines(step: Mapping[str, Any], at: int, begun: int, view: StepView, *, is_trained: bool) -> Iterator[Text]:
    """The tokens of a choice, by id and by logprob, as far as they are wanted; `begun`: prompt ids that were told before."""
    choice = step["choices"][at]
    prompts = step.get("prompts") or [step["prompt_ids"] or []]
    if view.ids:
        given = prompts[choice["prompt"]][begun:] if choice["prompt"] < len(prompts) else []
        yield from one.block("ids", [ids_line(given, DIM), ids_line(choice["ids"], BRIGHT if is_trained else DIM)])
    if view.logprobs and choice["ids"]:
        texts = texts_of(step, at) or view.texts.get((step["step_id"], at))
        made = coloured(texts, choice["ids"], choice["logprobs"], with_values=view.with_values)
        yield from one.block("logprobs", [made])


def header(rollout: Mapping[str, Any], now_ms: int) -> Iterator[Text]:
    """What stands above a rollout."""
    counts, status = rollout["counts"], rollout["status"]
    yield Text.assemble(
        (visible(rollout["rollout_id"]), "bold"), "  ", (visible(status), status_style(status)), "  ", _of(rollout)
    )
    in_all = f"{counts['steps']} step{'s' * (counts['steps'] != 1)}"
    steps = f"{in_all}: {counts['exact']} exact, {counts['flagged']} flagged, {counts['error']} in error"
    drifted = f"; drift: {visible(drift(rollout['drift']))}" if rollout["drift"] else ""
    ago = age(now_ms - rollout["created_ms"])
    opened = f"; opened {ago if ago == 'now' else f'{ago} ago'}"
    yield Text(f"{steps}; {counts['sampled_tokens']} tokens sampled{drifted}{opened}")
    if rollout["metadata"]:
        yield Text(f"metadata {visible(orjson.dumps(rollout['metadata']).decode())}", DIM)


def _of(rollout: Mapping[str, Any]) -> str:
    reward = "no reward" if rollout["reward"] is None else f"reward {number(rollout['reward'])}"
    held = (("group", rollout["group_id"]), ("model", rollout["model"]), ("claimed by", rollout["claimed_by"]))
    return "  ".join([reward, *(f"{name} {visible(value)}" for name, value in held if value)])


def _drifted(boundary: Mapping[str, Any], earlier: Mapping[str, Any] | None) -> Iterator[Text]:
    came_from = "an earlier step" if earlier is None else f"step {earlier['index']}"
    said = f"drift ({visible(boundary['kind'])}) from {came_from}, at token {boundary['index']}"
    if boundary["kind"] == "unexplained":
        said += f"; its texts are missing ({visible(boundary['texts'])})"
    yield Text.assemble(("~ ", "bold magenta"), (said, "magenta"))
    for name in ("expected", "found"):
        text = boundary[f"{name}_text"]
        ids = boundary[f"{name}_ids"]
        common = boundary["index"] - boundary["around_from"]
        shown = " ".join(map(str, [*ids[:common], "|", *ids[common:]]))  # they part at the bar
        if text is not None:
            yield Text(f"    {name:<9} {visible(text)}", "magenta")
        if text is None or boundary["kind"] == "retokenized":
            yield Text(f"    {name if text is None else 'as ids':<9} {shown}", "magenta")
