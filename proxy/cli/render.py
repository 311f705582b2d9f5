"""Renders rollouts and steps, and tables of rollouts, groups, policies and engines.

A rollout has a header, then each branch of the tree with prompts (dimmed), completions (bright) and drift. Each step is
rendered once. A branch that starts at a step of another branch names that step. All strings in a step come from agents and
engines, so all are escaped with `visible`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import orjson
from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from proxy.cli.console import COLUMN_GAP, new_table, visible, visible_lines
from proxy.clock import SystemClock

DIM: Final = "dim"
BRIGHT: Final = "bold"
# Blue and orange are distinguishable with every kind of color vision; the least likely tokens are also underlined.
_SCALE: Final = (
    (-0.1, "above -0.1", "blue"),
    (-1.0, "to -1", "cyan"),
    (-3.0, "to -3", "default"),
    (-6.0, "to -6", "dark_orange"),
    (float("-inf"), "below -6", "bold underline dark_orange"),
)
_ID_PREFIX: Final = "token_id:"  # vLLM 0.32.0 with --return-tokens-as-token-ids returns these in place of texts
_UNKNOWN: Final = ("none", "dim italic")


def prompts_of(step: Mapping[str, Any]) -> list[list[int]]:
    """Return the ids of the prompts of a step; [] for one without ids."""
    return step.get("prompts") or [step["prompt_ids"] or []]


def recorded_texts(step: Mapping[str, Any], position: int) -> list[str] | None:
    """Return the token texts in the recorded response for a choice, or None unless it has one for each token."""
    logprobs = (_returned(step, position) or {}).get("logprobs") or {}
    texts = logprobs.get("tokens") or [entry.get("token") for entry in logprobs.get("content") or ()]
    is_text = all(isinstance(text, str) and not text.startswith(_ID_PREFIX) for text in texts)
    return texts if texts and is_text and len(texts) == len(step["choices"][position]["ids"]) else None


def legend() -> Text:
    """Return the legend of the logprob colors."""
    parts: list[Any] = ["logprob "]
    for _, label, style in _SCALE:
        parts += [(label, style), "  "]
    parts.append(_UNKNOWN)
    return Text.assemble(*parts)


def colored(
    texts: Sequence[str | None] | None, ids: Sequence[int], logprobs: Sequence[float | None], *, with_values: bool
) -> Text:
    """Return tokens colored by logprob, as texts where known, else as IDs; `with_values` adds the numbers."""
    line = Text()
    for index, token_id in enumerate(ids):
        text = texts[index] if texts else None
        value = logprobs[index] if index < len(logprobs) else None
        style = _UNKNOWN[1] if value is None else next(style for least, _, style in _SCALE if value >= least)
        line.append(str(token_id) if text is None else visible(text), style)
        if with_values:
            line.append("(none)" if value is None else f"({value:.3g})")
        if with_values or text is None:
            line.append(" ")
    return line


ROLE_WIDTH = 10  # cells
MAX_BRANCHES = 8  # of a step
MAX_LINES, MAX_CHARACTERS = 12, 1200  # of a message that is not a completion, without --whole


def summary(step: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON-serializable summary of a step."""
    timing = step["timing"]
    prompts = step.get("prompts") or ([] if step["prompt_ids"] is None else [step["prompt_ids"]])
    usage_tokens = (step["usage"] or {}).get("prompt_tokens")
    ended = timing["last_byte"]
    return {
        "time": timing["stored"] or timing["received"],
        "rollout_id": step["rollout_id"],
        "step_id": step["step_id"],
        "index": step["index"],
        "dialect": step["dialect"],
        "model": step["model"]["served"] or step["model"]["asked"],
        "prompt_tokens": sum(map(len, prompts)) if prompts else usage_tokens,
        "sampled_tokens": sum(len(choice["ids"]) for choice in step["choices"]),
        "finish_reasons": [choice["finish_reason"] for choice in step["choices"]],
        "latency_s": None if ended is None else ended - timing["received"],
        "status": step["status"],
        "delivered": step["delivered"],
        "late": step.get("late", False),
        **({"inherited": step["inherited"]} if "inherited" in step else {}),
        **({"policy": step["policy"]} if "policy" in step else {}),
        "policy_version": step["policy_version"],
        "exact": step["fidelity"]["exact"],
        "problems": step["fidelity"]["problems"],
    }


def counts(row: Mapping[str, Any]) -> str:
    """Format the token counts and finish reasons of a step summary."""
    prompt = "unknown" if row["prompt_tokens"] is None else row["prompt_tokens"]
    reasons = sorted({str(reason or "no finish reason") for reason in row["finish_reasons"]})
    return f"{prompt} prompt tokens, {row['sampled_tokens']} completion tokens  {visible(', '.join(reasons))}"


def latency(row: Mapping[str, Any]) -> str:
    """Format the duration of a step."""
    seconds = row["latency_s"]
    return "" if seconds is None else f"{seconds * 1000:.0f} ms" if seconds < 10 else f"{seconds:.1f} s"


def outcome(row: Mapping[str, Any]) -> str:
    """Format whether the response of a step summary was delivered, was late, and was inherited from another rollout."""
    inherited = row.get("inherited")
    parts = (
        "" if row["delivered"] else "not delivered",
        "late" if row.get("late") else "",
        f"inherited from {visible(inherited['rollout_id'])}" if inherited else "",
    )
    return "".join(f"  {part}" for part in parts if part)


def policy(row: Mapping[str, Any]) -> str:
    """Format the policy of a step summary, unless it is the default one, and its version."""
    parts = [row.get("policy"), row["policy_version"]]
    return " ".join(["policy", *(visible(part) for part in parts if part is not None)]) if any(parts) else ""


def verdict(row: Mapping[str, Any]) -> Text:
    """Return "error", "exact", or the problem codes of a step."""
    if row["status"] == "error":
        return Text("error", "red")
    if row["exact"]:
        return Text("exact", "green")
    return Text(visible(" ".join(row["problems"]) or row["status"]), "yellow")


def headline(step: Mapping[str, Any]) -> Text:
    """Return the heading line of a step."""
    row = summary(step)
    reward = f"reward {step['reward']}" if step["reward"] is not None else ""
    parts = (row["step_id"], row["dialect"], row["model"] or "", counts(row), latency(row), policy(row), reward)
    facts = "  ".join(visible(part) for part in parts if part)
    is_flagged = row["status"] != "error" and not row["exact"]
    exact = Text("flagged", "yellow") if is_flagged else verdict(row)  # `problems` gives the reasons
    return Text.assemble((f"step {row['index']}", "bold cyan"), "  ", (facts + outcome(row), "cyan"), "  ", exact)


def problems(step: Mapping[str, Any]) -> Iterator[Text]:
    """Yield the problems of a step, one per line."""
    for code, why in zip(step["fidelity"]["problems"], step["fidelity"]["why"], strict=False):
        yield Text.assemble(("! ", "bold yellow"), (f"{visible(code)}: {visible(why)}", "yellow"))
    if step["status"] != "complete":
        yield Text.assemble(
            ("! ", "bold red"), (f"{visible(step['status'])}: {visible(step['reason'] or _engine_error(step))}", "red")
        )


def continuation_lines(step: Mapping[str, Any]) -> Iterator[Text]:
    """Yield how a step continues an earlier one by token ids, or the reason why it does not; nothing if neither is recorded."""
    recorded = step.get("extra", {}).get("continuation")
    if not recorded:
        return
    from proxy.continuation.types import REASONS  # only some steps need it

    reason = recorded.get("reason")
    why = "" if reason is None else REASONS.get(reason, reason)
    if "kept" not in recorded:
        yield Text(f"not continued: {visible(why)}", "yellow")
        return
    counts = f"continued: {recorded['kept']} ids kept, {recorded['bridge']} ids rendered"
    yield Text(visible(f"{counts}. {why}" if why else counts), DIM)


def branches_lines(step: Mapping[str, Any], branches: Iterable[Mapping[str, Any]] = ()) -> Iterator[Text]:
    """Yield the step with whose call it branches, and the rollouts that branch before or after it, with their rewards."""
    if (of := step.get("extra", {}).get("branched_from")) and "inherited" not in step:
        how = "with its prompt ids" if of["ids"] else "rendered again"
        yield Text(visible(f"repeats the call of step {of['step_id']} of {of['rollout_id']}, {how}"), "magenta")
    for place in ("before", "through"):
        here = [branch for branch in branches if branch.get(place) == step["step_id"]]
        if not here:
            continue
        earned = [f"{branch['rollout_id']} {_reward(branch)}" for branch in here[:MAX_BRANCHES]]
        rest = f" and {len(here) - MAX_BRANCHES} more" if len(here) > MAX_BRANCHES else ""
        when = {"before": "before", "through": "after"}[place]
        yield Text(visible(f"{len(here)} branched {when} this step: {', '.join(earned)}{rest}"), "magenta")


def prompt_lines(step: Mapping[str, Any], parent: Mapping[str, Any] | None, *, whole: bool) -> Iterator[Text]:
    """Yield the messages or the prompt of a step, dimmed, without the part that its parent already has."""
    body = _body(step)
    messages = body.get("messages")
    if isinstance(messages, list):
        for message in messages[_count_known(messages, parent) :]:
            yield from _block(*_message(message), DIM, whole=whole)
    elif (prompt := body.get("prompt")) is not None:
        yield from _block("prompt", _prompt(prompt, parent), DIM, whole=whole)


def completion_lines(step: Mapping[str, Any], position: int, *, is_trained: bool) -> Iterator[Text]:
    """Yield the completion of a choice, never truncated; bright, or dimmed if no row trains it."""
    choice = _returned(step, position)
    if choice is None:
        return
    role, text = (
        _message(choice["message"]) if isinstance(choice.get("message"), dict) else ("text", choice.get("text"))
    )
    yield from _block(role, "" if text is None else str(text), BRIGHT if is_trained else DIM, whole=True)


def block(role: str, lines: Sequence[Text]) -> Iterator[Text]:
    """Yield lines with the role in the margin of the first."""
    for index, line in enumerate(lines or [Text()]):
        margin = visible(role)[:ROLE_WIDTH] if index == 0 else ""
        yield Text.assemble((f"{margin:<{ROLE_WIDTH}}  ", "dim italic"), line)


def _block(role: str, text: str, style: str, *, whole: bool) -> Iterator[Text]:
    shown = text if whole else text[:MAX_CHARACTERS]
    lines = visible_lines(shown)
    lines = lines if whole else lines[:MAX_LINES]
    is_truncated = len(text) > len(shown) or len(visible_lines(shown)) > len(lines)
    rendered = [Text(line, style) for line in lines]
    if is_truncated:
        rendered.append(Text(f"… truncated, {len(text)} characters in total; use --whole to show all", "italic"))
    yield from block(role, rendered)


def _count_known(messages: list[Any], parent: Mapping[str, Any] | None) -> int:
    """Return how many leading messages are in the parent's request and response."""
    before = _body(parent).get("messages") if parent else None
    if not isinstance(before, list):
        return 0
    same = 0
    while same < min(len(before), len(messages)) and before[same] == messages[same]:
        same += 1
    is_reply = same == len(before) and same < len(messages) and _role(messages[same]) == "assistant"
    return same + is_reply


def _role(message: Any) -> str:
    return str(message.get("role") or "message") if isinstance(message, dict) else "message"


def _message(message: Any) -> tuple[str, str]:
    """Return the role of a message and its text: reasoning, content and tool calls."""
    if not isinstance(message, dict):
        return "message", str(message)
    reasoning = message.get("reasoning") or message.get("reasoning_content")
    calls = [_tool_call(call) for call in message.get("tool_calls") or () if isinstance(call, dict)]
    parts = [f"[reasoning] {reasoning}" if reasoning else "", _content(message.get("content")), *calls]
    return _role(message), "\n".join(part for part in parts if part)


def _content(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(
            str(part.get("text", f"[{part.get('type')}]")) if isinstance(part, dict) else str(part) for part in content
        )
    return "" if content is None else str(content)


def _tool_call(call: Mapping[str, Any]) -> str:
    function = call.get("function") or {}
    return f"[calls {function.get('name')}] {function.get('arguments')}" if isinstance(function, dict) else "[calls ?]"


def _prompt(prompt: Any, parent: Mapping[str, Any] | None) -> str:
    """Return the prompt without the parent's prompt and completion, if it starts with them."""
    if not isinstance(prompt, str):
        return orjson.dumps(prompt).decode()
    before = _body(parent).get("prompt") if parent else None
    texts = [str(choice.get("text")) for choice in _response_choices(parent)] if parent else []
    prefixes = [f"{before}{text}" for text in texts if isinstance(before, str) and prompt.startswith(f"{before}{text}")]
    return prompt.removeprefix(max(prefixes, key=len)) if prefixes else prompt


def _body(step: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body as sent to the engine; dialects that are translated to chat have another client body."""
    request = step["request"] if isinstance(step["request"], dict) else {}
    sent = step.get("sent") or {}
    unset = sent.get("unset") or ()
    return {**{name: value for name, value in request.items() if name not in unset}, **(sent.get("set") or {})}


def _response_choices(step: Mapping[str, Any]) -> list[dict[str, Any]]:
    response: Final = step["response"]
    choices = response.get("choices") if isinstance(response, dict) else None
    return [choice for choice in choices or () if isinstance(choice, dict)]


def _returned(step: Mapping[str, Any], position: int) -> dict[str, Any] | None:
    """Return the choice of the recorded response at the position of a choice."""
    index = step["choices"][position]["index"]
    return next((choice for choice in _response_choices(step) if choice.get("index") == index), None)


def _engine_error(step: Mapping[str, Any]) -> str:
    """Return the status and the error message of the engine's response, or its body."""
    response = step["response"] if isinstance(step["response"], dict) else {}
    body = response.get("body", response)
    try:
        error = orjson.loads(body)["error"]
        message = error["message"] if isinstance(error, dict) else error
    except (orjson.JSONDecodeError, KeyError, TypeError):
        message = body
    return f"{response['status']}: {message}" if "status" in response else str(message)


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
    """A rollout, its tree, its steps and its branches, as the control API returns them."""

    __slots__ = ("_branches", "_nodes", "_rollout", "_steps", "_tree", "_view")

    def __init__(
        self,
        rollout: Mapping[str, Any],
        tree: Mapping[str, Any],
        steps: Sequence[Mapping[str, Any]],
        view: StepView,
        branches: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self._branches = branches
        self._rollout = rollout
        self._tree = tree
        self._steps = {step["step_id"]: step for step in steps}
        self._nodes = {node["node"]: node for node in tree["nodes"] if node["step_id"] in self._steps}
        self._view = view

    def lines(self) -> Iterator[Text]:
        """Yield all lines."""
        yield from header(self._rollout)
        yield from self._threads()
        if self._view.logprobs:
            yield legend()
        shown_nodes: set[int] = set()
        shown_prompts: set[str] = set()
        parents = {node["parent"] for node in self._nodes.values()}
        for index, leaf in enumerate(node for node in self._nodes if node not in parents):
            yield from self._branch(index, leaf, shown_nodes, shown_prompts)
        if self._tree["unplaced"]:  # errors, and steps without token IDs
            yield Text.assemble("\n", ("── in no branch", "bold"))
        for unplaced in self._tree["unplaced"]:
            if (step := self._steps.get(unplaced["step_id"])) is not None:
                yield from step_lines(step, self._view, whole=False)

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

    def _branch(self, branch: int, leaf: int, shown_nodes: set[int], shown_prompts: set[str]) -> Iterator[Text]:
        """Yield a branch: its path from the root, without the nodes that are shown already."""
        path = [leaf]
        while (parent := self._nodes[path[-1]]["parent"]) in self._nodes:
            path.append(parent)
        path.reverse()
        new = [node for node in path if node not in shown_nodes]
        before = path[len(path) - len(new) - 1] if len(new) < len(path) else None
        continues = "" if before is None else f", continues from step {self._step(before)['index']}"
        count = f"{len(path)} step{'s' * (len(path) > 1)}"
        thread = self._nodes[leaf].get("thread") if len(self._tree.get("threads", ())) > 1 else None
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
        yield from branches_lines(step, self._branches)
        yield from problems(step)
        yield from completion_lines(step, position, is_trained=node["owner"] is not None)
        start = 0 if parent is None else self._nodes[parent]["end"]
        yield from token_lines(step, position, start, self._view, is_trained=node["owner"] is not None)

    def _step(self, node: int) -> Mapping[str, Any]:
        return self._steps[self._nodes[node]["step_id"]]


def step_lines(step: Mapping[str, Any], view: StepView, *, whole: bool = True) -> Iterator[Text]:
    """Yield a single step: its complete prompt and every choice. `whole` adds the legend and disables truncation."""
    if whole and view.logprobs:
        yield legend()
    yield from prompt_lines(step, None, whole=view.whole or whole)
    yield headline(step)
    yield from continuation_lines(step)
    yield from branches_lines(step)
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
    if view.ids:
        prompt = dict(enumerate(prompts_of(step))).get(choice["prompt"], [])
        lines = ((prompt[start:], DIM), (choice["ids"], BRIGHT if is_trained else DIM))
        yield from block("ids", [Text(" ".join(map(str, ids)), style) for ids, style in lines])
    if view.logprobs and choice["ids"]:
        texts = recorded_texts(step, position) or view.texts.get((step["step_id"], position))
        tokens = colored(texts, choice["ids"], choice["logprobs"], with_values=view.with_values)
        yield from block("logprobs", [tokens])


def header(rollout: Mapping[str, Any]) -> Iterator[Text]:
    """Yield the header lines of a rollout."""
    counts, status = rollout["counts"], rollout["status"]
    yield Text.assemble(
        (visible(rollout["rollout_id"]), "bold"),
        "  ",
        (visible(status), _STYLES.get(status, "")),
        "  ",
        _facts(rollout),
    )
    total = f"{counts['steps']} step{'s' * (counts['steps'] != 1)}"
    steps = f"{total}: {counts['exact']} exact, {counts['flagged']} flagged, {counts['error']} failed"
    drifted = f"; drift: {visible(drift(rollout['drift']))}" if rollout["drift"] else ""
    ago = age(rollout["created_ms"])
    opened = f"; opened {ago if ago == 'now' else f'{ago} ago'}"
    yield Text(f"{steps}; {counts['sampled_tokens']} completion tokens{drifted}{opened}")
    if playback := rollout.get("playback"):
        yield from _playback_lines(playback)
    if rollout["metadata"]:
        yield Text(f"metadata {visible(orjson.dumps(rollout['metadata']).decode())}", DIM)


def _playback_lines(playback: Mapping[str, Any]) -> Iterator[Text]:
    """Yield what answers the calls of a playback, how many were, and the first that was refused."""
    step = next((f" {name} step {playback[name]}" for name in ("before", "through") if name in playback), "")
    unanswerable = f", {count} cannot be answered" if (count := playback["unanswerable"]) else ""
    total = f"{playback['answered']} of {playback['answerable']} steps answered{unanswerable}, {playback['live']} live"
    yield Text(visible(f"playback of {playback['of']}{step}; {total}"), "magenta")
    if count := playback["mismatches"]:
        refused = f"{count} call{'s' * (count > 1)} refused; the first {_difference(playback['first_mismatch'])}"
        yield Text.assemble(("! ", "bold yellow"), (visible(refused), "yellow"))


def _difference(first: Mapping[str, Any]) -> str:
    """Format how the first refused call differs from the nearest step of the tape."""
    if first["step_id"] is None:
        return "came after all steps were answered"
    nearest = f"differs from step {first['step_id']}"
    if first["path"] is None:
        return f"{nearest} in its dialect"
    return f"{nearest} at {first['path']}: {first['value']!r}, recorded {first['recorded']!r}"


def _facts(rollout: Mapping[str, Any]) -> str:
    facts = (
        ("reason", rollout.get("reason")),
        ("group", rollout["group_id"]),
        ("model", rollout["model"]),
        ("claimed by", rollout["claimed_by"]),
    )
    return "  ".join([_reward(rollout), *(f"{name} {visible(value)}" for name, value in facts if value)])


def _reward(rollout: Mapping[str, Any]) -> str:
    return "no reward" if rollout["reward"] is None else f"reward {number(rollout['reward'])}"


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


_STYLES: Final = {
    "open": "cyan", "completed": "green", "complete": "green", "failed": "red", "aborted": "red", "dropped": "red",
    "limited": "yellow", "truncated": "yellow", "claimed": "magenta",
}  # fmt: skip
MIN_ID_WIDTH = 12  # cells; narrower IDs are avoided by omitting a column
_AGES = ((86_400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def number(value: float | None) -> str:
    """Format a number; None is empty."""
    return "" if value is None else f"{value:g}"


def drift(kinds: Mapping[str, int] | None) -> str:
    """Format the drift counts by kind."""
    return ", ".join(f"{count} {kind}" for kind, count in sorted((kinds or {}).items()))


def age(since_ms: int) -> str:
    """Format the time since a Unix time in its largest unit."""
    seconds = max(SystemClock().now_ms() - since_ms, 0) // 1000
    return next((f"{seconds // unit} {name}" for unit, name in _AGES if seconds >= unit), "now")


def _status(row: Mapping[str, Any]) -> Text:
    return Text(visible(row["status"]), _STYLES.get(row["status"], ""))


def _pause(row: Mapping[str, Any]) -> Text:
    if row["mode"] is None:
        return Text("sent")
    return Text({"wait": "wait", "reject": "rejected"}.get(row["mode"], visible(row["mode"])), "yellow")


def _engine_state(row: Mapping[str, Any]) -> Text:
    if row["healthy"]:
        return Text("healthy", "green")
    return Text("ejected" if row["ejected_until"] else "UNREACHABLE", "red")


def _warning(count: int, style: str) -> Text:
    return Text(str(count), style if count else "")


@dataclass(frozen=True, slots=True)
class Column:
    """A column: its name, its cell for a row, and its rank of omission: the highest is omitted first, 0 never.

    One that `is_rare` is shown if a row has a value for it.
    """

    name: str
    cell: Callable[[Mapping[str, Any]], Text | str | int | None]
    rank: int = 0
    is_number: bool = False
    is_rare: bool = False


def _played(row: Mapping[str, Any]) -> str:
    playback = row.get("playback")
    return "" if playback is None else f"{playback['of']} ({playback['answered']} inherited)"


_PLAYED: Final = Column("playback of", _played, 4, is_rare=True)
# The columns of each kind of objects in responses; `members` are the rollouts of a group.
TABLES: Final = {
    "rollouts": (
        Column("rollout", lambda row: row["rollout_id"]),
        Column("group", lambda row: row["group_id"], 3),
        _PLAYED,
        Column("status", _status),
        Column("reward", lambda row: number(row["reward"]), 1, is_number=True),
        Column("steps", lambda row: row["counts"]["steps"], 1, is_number=True),
        Column("exact", lambda row: row["counts"]["exact"], 5, is_number=True),
        Column("flagged", lambda row: _warning(row["counts"]["flagged"], "yellow"), 2, is_number=True),
        Column("error", lambda row: _warning(row["counts"]["error"], "red"), 6, is_number=True),
        Column("tokens", lambda row: row["counts"]["sampled_tokens"], 4, is_number=True),
        Column("drift", lambda row: drift(row["drift"]), 7),
        Column("age", lambda row: age(row["created_ms"]), 8, is_number=True),
    ),
    "groups": (
        Column("group", lambda row: row["group_id"]),
        Column("status", _status),
        Column("finished", lambda row: f"{row['finished']}/{row['members']}", 1, is_number=True),
        Column("size", lambda row: number(row["size"]), 4, is_number=True),
        Column("policy", lambda row: row["policy_version"], 3),
        Column("consumer", lambda row: row.get("consumer") or row.get("why"), 2),
        Column("age", lambda row: age(row["created_ms"]), 5, is_number=True),
    ),
    "members": (
        Column("rollout", lambda row: row["rollout_id"]),
        _PLAYED,
        Column("status", _status),
        Column("reward", lambda row: number(row["reward"]), 1, is_number=True),
        Column("steps", lambda row: row["steps"], 2, is_number=True),
        Column("flagged", lambda row: _warning(row["flagged"], "yellow"), 4, is_number=True),
        Column("drift", lambda row: drift(row["drift"]), 5),
        Column("ended by", lambda row: row.get("reason"), 6),
        Column("replaced by", lambda row: row.get("replaced_by"), 3),
    ),
    "policies": (
        Column("policy", lambda row: row["name"]),
        Column("version", lambda row: row["version"]),
        Column("epoch", lambda row: row.get("epoch") or None, 3, is_number=True),
        Column("new calls", _pause),
        Column("trained", lambda row: "yes" if row["train"] else "no", 1),
        Column("models", lambda row: ", ".join(row["models"]), 2),
    ),
    "engines": (
        Column("engine", lambda row: row["name"]),
        Column("state", _engine_state),
        Column("kind", lambda row: row["kind"], 1),
        Column("version", lambda row: row["version"], 4),
        Column("in flight", lambda row: row["in_flight"], 2, is_number=True),
        Column("queued", lambda row: row["queued"], 3, is_number=True),
        Column("faults", lambda row: _warning(row["faults"], "yellow"), 5, is_number=True),
        Column("models", lambda row: ", ".join(row["models"]), 6),
        Column("url", lambda row: row["url"], 7),
        Column("last failure", lambda row: row["last_fault"], 8),
    ),
    "training": (
        Column("group", lambda row: row["group_id"]),
        Column("status", _status),
        Column("rewards", lambda row: f"{row['rewards']}/{row['members']}", 1, is_number=True),
        Column("mean", lambda row: number(row["reward"]), is_number=True),
        Column("deviation", lambda row: number(row["spread"]), 3, is_number=True),
        Column("tokens", lambda row: number(row["tokens"]), 4, is_number=True),
        Column("version", lambda row: row["version"], 2),
        Column("staleness", lambda row: row["staleness"], 5, is_number=True),
        Column("age", lambda row: age(row["created_ms"]), 6, is_number=True),
    ),
    "cells": (
        Column("tokens by", lambda row: row["dimension"]),
        Column("value", lambda row: row["value"]),
        Column("tokens", lambda row: row["tokens"], 1, is_number=True),
        Column("mean |d|", lambda row: f"{row['abs_mean']:.2g}", is_number=True),
        Column("mean d", lambda row: f"{row['mean']:+.2g}", 2, is_number=True),
        Column("above 0.5", lambda row: f"{row['tail']:.2%}", 3, is_number=True),
    ),
}


def table(noun: str, rows: Sequence[Mapping[str, Any]], width: int) -> tuple[Table, list[str]]:
    """Return a table of these objects, and the names of the omitted columns."""
    cells = {column: [_cell(column.cell(row)) for row in rows] for column in TABLES[noun]}
    columns = [column for column, values in cells.items() if not column.is_rare or any(map(str, values))]
    widths = {
        column: max(cell_len(str(cell)) for cell in (column.name, *values)) if column.rank else MIN_ID_WIDTH
        for column, values in cells.items()
        if column in columns
    }
    kept = list(columns)
    while sum(widths[column] + COLUMN_GAP for column in kept) > width and any(column.rank for column in kept):
        kept.remove(max(kept, key=lambda column: column.rank))
    made = new_table((column.name, column.is_number, column.rank > 0) for column in kept)
    for row in zip(*(cells[column] for column in kept), strict=True):
        made.add_row(*row)
    return made, [column.name for column in columns if column not in kept]


def _cell(value: Text | str | int | None) -> Text:
    """Return the text of a cell, which is never parsed as markup."""
    return value if isinstance(value, Text) else Text("" if value is None else visible(value))
