"""One step: what is said of it on a line, and what its agent wrote and was answered.

Holds the reading of a step as the control API tells it. Everything in it was written by others: texts become visible ones.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import orjson
from rich.text import Text

from proxy.cli.console import visible, visible_lines

DIM: Final = "dim"
BRIGHT: Final = "bold"
# Blue and orange are told apart by every kind of colour vision; the most unlikely ones are underlined besides.
_SCALE: Final = (
    (-0.1, "above -0.1", "blue"),
    (-1.0, "to -1", "cyan"),
    (-3.0, "to -3", "default"),
    (-6.0, "to -6", "dark_orange"),
    (float("-inf"), "below -6", "bold underline dark_orange"),
)
_RENAMED: Final = "token_id:"  # vLLM 0.32.0 with --return-tokens-as-token-ids tells ids where strings would be
_UNKNOWN: Final = ("none", "dim italic")


def texts_of(step: Mapping[str, Any], place: int) -> list[str] | None:
    """The texts of the tokens of one of a step's choices, as its answer told them; None if it did not, for each of them."""
    choice = step["choices"][place]
    answered = ((step["response"] or {}).get("choices") or ()) if isinstance(step["response"], dict) else ()
    told = next((each for each in answered if isinstance(each, dict) and each.get("index") == choice["index"]), {})
    logprobs = told.get("logprobs") or {}
    texts = logprobs.get("tokens") or [each.get("token") for each in logprobs.get("content") or ()]
    is_text = all(isinstance(text, str) and not text.startswith(_RENAMED) for text in texts)
    is_whole = is_text and len(texts) == len(choice["ids"])
    return texts if texts and is_whole else None


def ids_line(ids: Iterable[int], style: str) -> Text:
    """Ids, one behind the other."""
    return Text(" ".join(map(str, ids)), style)


def legend() -> Text:
    """What the colours of logprobs mean."""
    parts: list[Any] = ["logprob "]
    for _, words, style in _SCALE:
        parts += [(words, style), "  "]
    parts.append(_UNKNOWN)
    return Text.assemble(*parts)


def coloured(
    texts: Sequence[str | None] | None, ids: Sequence[int], logprobs: Sequence[float | None], *, with_values: bool
) -> Text:
    """Tokens in the colours of their logprobs; `with_values` also says them, where there are no colours."""
    line = Text()
    for place, token_id in enumerate(ids):
        told = texts[place] if texts else None
        text = f"{token_id}" if told is None else visible(told)
        value = logprobs[place] if place < len(logprobs) else None
        line.append(text, _style(value))
        if with_values:
            line.append("(none)" if value is None else f"({value:.3g})")
        if with_values or told is None:
            line.append(" ")
    return line


def _style(logprob: float | None) -> str:
    if logprob is None:
        return _UNKNOWN[1]
    return next(style for least, _, style in _SCALE if logprob >= least)


_ROLE_CELLS = 10
_SHOWN_LINES, _SHOWN_CHARACTERS = 12, 1200  # of what was not sampled, unless all of it is wanted


def summary(step: Mapping[str, Any]) -> dict[str, Any]:
    """What a line about a step says, JSON-ready."""
    timing = step["timing"]
    prompts = step.get("prompts") or ([] if step["prompt_ids"] is None else [step["prompt_ids"]])
    counted = (step["usage"] or {}).get("prompt_tokens")
    ended = timing["last_byte"]
    return {
        "time": timing["stored"] or timing["received"],
        "rollout_id": step["rollout_id"],
        "step_id": step["step_id"],
        "index": step["index"],
        "dialect": step["dialect"],
        "model": step["model"]["served"] or step["model"]["asked"],
        "prompt_tokens": sum(map(len, prompts)) if prompts else counted,
        "sampled_tokens": sum(len(choice["ids"]) for choice in step["choices"]),
        "finish_reasons": [choice["finish_reason"] for choice in step["choices"]],
        "latency_s": None if ended is None else ended - timing["received"],
        "status": step["status"],
        "delivered": step["delivered"],
        "late": step.get("late", False),
        "policy_version": step["policy_version"],
        "exact": step["fidelity"]["exact"],
        "problems": step["fidelity"]["problems"],
    }


def counts_of(told: Mapping[str, Any]) -> str:
    """How many tokens a step has, and how it ended."""
    prompt = "?" if told["prompt_tokens"] is None else told["prompt_tokens"]
    reasons = sorted({str(reason or "no reason") for reason in told["finish_reasons"]})
    return f"{prompt}+{told['sampled_tokens']} tokens  {visible(', '.join(reasons))}"


def latency_of(told: Mapping[str, Any]) -> str:
    """How long a step took, as people read it."""
    seconds = told["latency_s"]
    return "" if seconds is None else f"{seconds * 1000:.0f} ms" if seconds < 10 else f"{seconds:.1f} s"


def verdict_of(told: Mapping[str, Any]) -> Text:
    """Exact, or what keeps it from being so."""
    if told["status"] == "error":
        return Text("error", "red")
    if told["exact"]:
        return Text("exact", "green")
    return Text(visible(" ".join(told["problems"]) or told["status"]), "yellow")


def headline(step: Mapping[str, Any]) -> Text:
    """The line above a step's tokens."""
    told = summary(step)
    of_policy = f"policy {told['policy_version']}" if told["policy_version"] is not None else ""
    reward = f"reward {step['reward']}" if step["reward"] is not None else ""
    parts = (
        told["step_id"],
        told["dialect"],
        told["model"] or "",
        counts_of(told),
        latency_of(told),
        of_policy,
        reward,
    )
    undelivered = ("" if told["delivered"] else "  not delivered") + ("  late" if told.get("late") else "")
    said = "  ".join(visible(part) for part in parts if part)
    is_flagged = told["status"] != "error" and not told["exact"]
    verdict = Text("flagged", "yellow") if is_flagged else verdict_of(told)  # `troubles` say why
    return Text.assemble((f"step {told['index']}", "bold cyan"), "  ", (said + undelivered, "cyan"), "  ", verdict)


def troubles(step: Mapping[str, Any]) -> Iterator[Text]:
    """What is wrong with a step, a sentence a line."""
    for code, why in zip(step["fidelity"]["problems"], step["fidelity"]["why"], strict=False):
        yield Text.assemble(("! ", "bold yellow"), (f"{visible(code)}: {visible(why)}", "yellow"))
    if step["status"] != "complete":
        yield Text.assemble(
            ("! ", "bold red"), (f"{visible(step['status'])}: {visible(step['reason'] or _refusal(step))}", "red")
        )


def asked(step: Mapping[str, Any], parent: Mapping[str, Any] | None, *, whole: bool) -> Iterator[Text]:
    """What was sent that the step it went on from had not: messages, or a prompt; dimmed, as it was not sampled."""
    body = _body(step)
    messages = body.get("messages")
    if isinstance(messages, list):
        for message in messages[_told_before(messages, parent) :]:
            yield from _block(*_message(message), DIM, whole=whole)
    elif (prompt := body.get("prompt")) is not None:
        yield from _block("prompt", _prompt(prompt, parent), DIM, whole=whole)


def sampled(step: Mapping[str, Any], place: int, *, is_trained: bool) -> Iterator[Text]:
    """What the engine answered with one of its choices, never cut; bright, or dimmed where no row trains it."""
    index = step["choices"][place]["index"]
    choice = next((each for each in _answered(step) if each.get("index") == index), None)
    if choice is None:
        return
    role, text = (
        _message(choice["message"]) if isinstance(choice.get("message"), dict) else ("text", choice.get("text"))
    )
    yield from _block(role, "" if text is None else str(text), BRIGHT if is_trained else DIM, whole=True)


def block(role: str, lines: Sequence[Text]) -> Iterator[Text]:
    """Lines with the name of who wrote them in the margin."""
    for place, line in enumerate(lines or [Text()]):
        margin = visible(role)[:_ROLE_CELLS] if place == 0 else ""
        yield Text.assemble((f"{margin:<{_ROLE_CELLS}}  ", "dim italic"), line)


def _block(role: str, text: str, style: str, *, whole: bool) -> Iterator[Text]:
    shown = text if whole else text[:_SHOWN_CHARACTERS]
    lines = visible_lines(shown)
    lines = lines if whole else lines[:_SHOWN_LINES]
    left = len(text) - len(shown) if len(text) > len(shown) else 0
    was_cut = left or len(visible_lines(shown)) > len(lines)
    made = [Text(line, style) for line in lines]
    if was_cut:
        made.append(Text(f"… cut, {len(text)} characters in all; --whole shows them", "italic"))
    yield from block(role, made)


def _told_before(messages: list[Any], parent: Mapping[str, Any] | None) -> int:
    """How many of the messages were there when the parent was answered, with its answer."""
    before = _body(parent).get("messages") if parent else None
    if not isinstance(before, list):
        return 0
    same = 0
    while same < min(len(before), len(messages)) and before[same] == messages[same]:
        same += 1
    is_answer = same == len(before) and same < len(messages) and _role(messages[same]) == "assistant"
    return same + is_answer


def _role(message: Any) -> str:
    return str(message.get("role") or "message") if isinstance(message, dict) else "message"


def _message(message: Any) -> tuple[str, str]:
    """Who wrote a message, and all of its text: reasoning, content and calls of tools."""
    if not isinstance(message, dict):
        return "message", str(message)
    reasoning = message.get("reasoning") or message.get("reasoning_content")
    calls = [_called(call) for call in message.get("tool_calls") or () if isinstance(call, dict)]
    parts = [f"[reasoning] {reasoning}" if reasoning else "", _content(message.get("content")), *calls]
    return _role(message), "\n".join(part for part in parts if part)


def _content(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(
            str(part.get("text", f"[{part.get('type')}]")) if isinstance(part, dict) else str(part) for part in content
        )
    return "" if content is None else str(content)


def _called(call: Mapping[str, Any]) -> str:
    function = call.get("function") or {}
    return f"[calls {function.get('name')}] {function.get('arguments')}" if isinstance(function, dict) else "[calls ?]"


def _prompt(prompt: Any, parent: Mapping[str, Any] | None) -> str:
    """A prompt; of one that goes on from the parent's, what was added."""
    if not isinstance(prompt, str):
        return orjson.dumps(prompt).decode()
    before = _body(parent).get("prompt") if parent else None
    texts = [str(choice.get("text")) for choice in _answered(parent)] if parent else []
    begun = [f"{before}{text}" for text in texts if isinstance(before, str) and prompt.startswith(f"{before}{text}")]
    return prompt.removeprefix(max(begun, key=len)) if begun else prompt


def _body(step: Mapping[str, Any]) -> dict[str, Any]:
    """The body as it was sent: a client's own may be of another shape, as in dialects that are asked for by way of chat."""
    request = step["request"] if isinstance(step["request"], dict) else {}
    sent = step.get("sent") or {}
    unset = sent.get("unset") or ()
    return {**{name: value for name, value in request.items() if name not in unset}, **(sent.get("set") or {})}


def _answered(step: Mapping[str, Any]) -> list[dict[str, Any]]:
    response: Final = step["response"]
    choices = response.get("choices") if isinstance(response, dict) else None
    return [choice for choice in choices or () if isinstance(choice, dict)]


def _refusal(step: Mapping[str, Any]) -> str:
    """What the engine said against a call: the status, and the sentence if there is one in the body."""
    response = step["response"] if isinstance(step["response"], dict) else {}
    body = response.get("body", response)
    try:
        error = orjson.loads(body)["error"]
        said = error["message"] if isinstance(error, dict) else error
    except (orjson.JSONDecodeError, KeyError, TypeError):
        said = body
    return f"{response['status']}: {said}" if "status" in response else str(said)
