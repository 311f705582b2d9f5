"""Renders a rollout: a header, then each branch of its tree with prompts (dimmed), completions (bright) and drift.

Each step is rendered once. A branch that starts at a step of another branch names that step.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
from rich.text import Text

from proxy.cli.console import visible
from proxy.cli.render.step import (
    BRIGHT,
    DIM,
    block,
    colored,
    completion_lines,
    continuation_lines,
    headline,
    ids_line,
    legend,
    problems,
    prompt_lines,
    recorded_texts,
)
from proxy.cli.render.tables import age, drift, number, status_style


@dataclass(frozen=True, slots=True)
class StepView:
    """What to show of each step. `whole` disables truncation; `with_values` adds logprobs as numbers, for output without color.

    `texts` has token texts that the recorded responses lack, by step ID and position of the choice; None is unknown.
    """

    ids: bool = False
    logprobs: bool = False
    whole: bool = False
    with_values: bool = False
    texts: Mapping[tuple[str, int], Sequence[str | None]] = field(default_factory=dict)


class RolloutView:
    """A rollout, its tree and its steps, as the control API returns them."""

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
        """Yield all lines."""
        yield from header(self._rollout, now_ms)
        yield from self._threads()
        if self._view.logprobs:
            yield legend()
        shown_nodes: set[int] = set()
        shown_prompts: set[str] = set()
        for index, leaf in enumerate(self._leaves()):
            yield from self._branch(index, self._path(leaf), shown_nodes, shown_prompts)
        yield from self._unplaced()

    def _threads(self) -> Iterator[Text]:
        """Yield a line for each thread if there are several: its name, its steps, and the text with which it starts."""
        threads = self._tree.get("threads", ())
        for thread in threads if len(threads) > 1 else ():
            called = f" called by {visible(thread['tool'])}" if thread.get("tool") else ""
            reward = f", reward {number(thread['reward'])}" if "reward" in thread else ""
            steps = f"  {thread['steps']} step{'s' * (thread['steps'] > 1)}{called}{reward}"
            yield Text.assemble(
                ("thread ", DIM), (visible(thread["name"]), "bold"), (f"{steps}  ", DIM), visible(thread["title"])
            )

    def _leaves(self) -> list[int]:
        parents = {node["parent"] for node in self._nodes.values()}
        return [node for node in self._nodes if node not in parents]

    def _path(self, leaf: int) -> list[int]:
        path = [leaf]
        while (parent := self._nodes[path[-1]]["parent"]) in self._nodes:
            path.append(parent)
        return path[::-1]

    def _branch(
        self, branch: int, path: Sequence[int], shown_nodes: set[int], shown_prompts: set[str]
    ) -> Iterator[Text]:
        new = [node for node in path if node not in shown_nodes]
        before = path[len(path) - len(new) - 1] if len(new) < len(path) else None
        continues = "" if before is None else f", continues from step {self._step(before)['index']}"
        count = f"{len(path)} step{'s' * (len(path) > 1)}"
        thread = self._nodes[path[-1]].get("thread") if len(self._tree.get("threads", ())) > 1 else None
        count = count if thread is None else f"{visible(thread)}  {count}"
        yield Text.assemble("\n", (f"── branch {branch}", "bold"), (f"  {count}{continues}", DIM))
        for node in new:
            shown_nodes.add(node)
            yield from self._node(node, shown_prompts)

    def _node(self, index: int, shown_prompts: set[str]) -> Iterator[Text]:
        """Yield a node: its prompt, drift, heading, problems and completion."""
        node, step = self._nodes[index], self._step(index)
        parent = node["parent"] if node["parent"] in self._nodes else None
        if node["step_id"] not in shown_prompts:
            yield from prompt_lines(step, None if parent is None else self._step(parent), whole=self._view.whole)
        shown_prompts.add(node["step_id"])
        for boundary in self._tree["drift"]:
            if boundary["step_id"] == node["step_id"]:
                yield from drift_lines(boundary, self._steps.get(boundary["earlier_step_id"]))
        position = next(i for i, choice in enumerate(step["choices"]) if choice["index"] == node["choice"])
        marks = [
            f"choice {node['choice']}" if len(step["choices"]) > 1 else "",
            "superseded" if node["superseded"] else "",
        ]
        yield headline(step).append("".join(f"  {mark}" for mark in marks if mark), "magenta")
        yield from continuation_lines(step)
        yield from problems(step)
        yield from completion_lines(step, position, is_trained=node["owner"] is not None)
        start = 0 if parent is None else self._nodes[parent]["end"]
        yield from token_lines(step, position, start, self._view, is_trained=node["owner"] is not None)

    def _unplaced(self) -> Iterator[Text]:
        """Yield the steps that are not in the tree: errors, and steps without token IDs."""
        if self._tree["unplaced"]:
            yield Text.assemble("\n", ("── in no branch", "bold"))
        for unplaced in self._tree["unplaced"]:
            step = self._steps.get(unplaced["step_id"])
            if step is not None:
                yield from step_lines(step, self._view, whole=False)

    def _step(self, node: int) -> Mapping[str, Any]:
        return self._steps[self._nodes[node]["step_id"]]


def step_lines(step: Mapping[str, Any], view: StepView, *, whole: bool = True) -> Iterator[Text]:
    """Yield a single step: its complete prompt and every choice. `whole` adds the legend and disables truncation."""
    if whole and view.logprobs:
        yield legend()
    yield from prompt_lines(step, None, whole=view.whole or whole)
    yield headline(step)
    yield from continuation_lines(step)
    yield from problems(step)
    for position, choice in enumerate(step["choices"]):
        if len(step["choices"]) > 1:
            yield Text(f"choice {choice['index']}", "magenta")
        yield from completion_lines(step, position, is_trained=step["fidelity"]["exact"])
        yield from token_lines(step, position, 0, view, is_trained=step["fidelity"]["exact"])


def token_lines(
    step: Mapping[str, Any], position: int, start: int, view: StepView, *, is_trained: bool
) -> Iterator[Text]:
    """Yield the token IDs and logprobs of a choice that the view includes, with prompt IDs from index `start`."""
    choice = step["choices"][position]
    prompts = step.get("prompts") or [step["prompt_ids"] or []]
    if view.ids:
        prompt_ids = prompts[choice["prompt"]][start:] if choice["prompt"] < len(prompts) else []
        yield from block("ids", [ids_line(prompt_ids, DIM), ids_line(choice["ids"], BRIGHT if is_trained else DIM)])
    if view.logprobs and choice["ids"]:
        texts = recorded_texts(step, position) or view.texts.get((step["step_id"], position))
        tokens = colored(texts, choice["ids"], choice["logprobs"], with_values=view.with_values)
        yield from block("logprobs", [tokens])


def header(rollout: Mapping[str, Any], now_ms: int) -> Iterator[Text]:
    """Yield the header lines of a rollout."""
    counts, status = rollout["counts"], rollout["status"]
    yield Text.assemble(
        (visible(rollout["rollout_id"]), "bold"), "  ", (visible(status), status_style(status)), "  ", _facts(rollout)
    )
    total = f"{counts['steps']} step{'s' * (counts['steps'] != 1)}"
    steps = f"{total}: {counts['exact']} exact, {counts['flagged']} flagged, {counts['error']} failed"
    drifted = f"; drift: {visible(drift(rollout['drift']))}" if rollout["drift"] else ""
    ago = age(now_ms - rollout["created_ms"])
    opened = f"; opened {ago if ago == 'now' else f'{ago} ago'}"
    yield Text(f"{steps}; {counts['sampled_tokens']} completion tokens{drifted}{opened}")
    if rollout["metadata"]:
        yield Text(f"metadata {visible(orjson.dumps(rollout['metadata']).decode())}", DIM)


def _facts(rollout: Mapping[str, Any]) -> str:
    reward = "no reward" if rollout["reward"] is None else f"reward {number(rollout['reward'])}"
    facts = (
        ("reason", rollout.get("reason")),
        ("group", rollout["group_id"]),
        ("model", rollout["model"]),
        ("claimed by", rollout["claimed_by"]),
    )
    return "  ".join([reward, *(f"{name} {visible(value)}" for name, value in facts if value)])


def drift_lines(boundary: Mapping[str, Any], earlier: Mapping[str, Any] | None) -> Iterator[Text]:
    """Yield a drift boundary, with the texts or token IDs on both sides."""
    origin = "an earlier step" if earlier is None else f"step {earlier['index']}"
    message = f"drift ({visible(boundary['kind'])}) from {origin}, at token {boundary['index']}"
    if boundary["kind"] == "unexplained":
        message += f"; texts not available ({visible(boundary['texts'])})"
    yield Text.assemble(("~ ", "bold magenta"), (message, "magenta"))
    for name in ("expected", "found"):
        text = boundary[f"{name}_text"]
        ids = boundary[f"{name}_ids"]
        common = boundary["index"] - boundary["around_from"]
        shown = " ".join(map(str, [*ids[:common], "|", *ids[common:]]))  # they differ from the bar on
        if text is not None:
            yield Text(f"    {name:<9} {visible(text)}", "magenta")
        if text is None or boundary["kind"] == "retokenized":
            yield Text(f"    {name if text is None else 'as ids':<9} {shown}", "magenta")
