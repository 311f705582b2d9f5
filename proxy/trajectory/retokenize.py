"""Retokenizing: token ids made from text, for engines that return none, and only on request.

The rows are marked as retokenized: these ids were not sampled, and they have no logprobs. A step with ids is never
changed.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import nan
from typing import Any, Final, Protocol

from proxy.trajectory.arrays import Ids
from proxy.trajectory.step import Choice, Step, answers_of

RETOKENIZED: Final = "retokenized"


class Tokenizer(Protocol):
    """A tokenizer with a chat template. Raises ValueError for input that it cannot encode."""

    def render(self, messages: Sequence[Any], tools: Sequence[Any] | None, *, reply: bool) -> list[int]:
        """Return the ids of a conversation; with the start of a reply at its end, if `reply`."""
        ...

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without special tokens around it."""
        ...


def retokenize(step: Step, tokenizer: Tokenizer) -> Step:
    """Return the step with ids made from its text; unchanged if it has ids, is an error, or cannot be encoded.

    Logprobs are NaN, one for each id. If the template rejects the messages, the step is unchanged.
    """
    if "no_token_ids" not in step.problems or step.status == "error" or not step.response:
        return step
    try:
        made = _chat(step, tokenizer) if step.is_chat else _completions(step, tokenizer)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):  # malformed, or rejected by the template
        return step
    if made is None:
        return step
    prompt, choices = made
    problems = tuple(code for code in step.problems if code in _KEPT)
    return replace(step, prompts=(prompt,), choices=choices, problems=(*problems, "no_token_ids", RETOKENIZED))


# Problems that do not concern the ids.
_KEPT: Final = frozenset({"stream_cut", "aborted", "no_finish_reason", "choice_count", "unparsed_event"})


def _chat(step: Step, tokenizer: Tokenizer) -> tuple[Ids, tuple[Choice, ...]]:
    """Return the ids that the template adds for a reply, or the ids of its text if the prompt is then rendered differently."""
    messages, tools = step.body["messages"], step.body.get("tools")
    prompt = tokenizer.render(messages, tools, reply=True)
    choices = []
    for choice, answer in _answers(step):
        message = {key: value for key, value in answer["message"].items() if value is not None}
        whole = tokenizer.render([*messages, message], tools, reply=False)
        continues = whole[: len(prompt)] == prompt
        ids = whole[len(prompt) :] if continues else tokenizer.encode(message.get("content") or "")
        choices.append(_made(choice, ids))
    return array("i", prompt), tuple(choices)


def _completions(step: Step, tokenizer: Tokenizer) -> tuple[Ids, tuple[Choice, ...]] | None:
    """Return the ids of a single prompt, which is a text or ids."""
    prompt = step.request.get("prompt")
    if isinstance(prompt, str):
        prompt = tokenizer.encode(prompt)
    if not isinstance(prompt, list) or not all(type(token) is int for token in prompt):
        return None
    choices = tuple(_made(choice, tokenizer.encode(answer["text"])) for choice, answer in _answers(step))
    return array("i", prompt), choices


def _answers(step: Step) -> list[tuple[Choice, Mapping[str, Any]]]:
    answers = answers_of(step)
    return [(choice, answers[choice.index]) for choice in step.choices]


def _made(choice: Choice, ids: list[int]) -> Choice:
    return replace(choice, ids=array("i", ids), logprobs=array("f", [nan]) * len(ids), prompt=0, spans=())
