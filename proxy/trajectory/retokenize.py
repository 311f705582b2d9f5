"""Retokenizing: ids made from text, for engines that give none, and only where somebody asks for it.

Holds the making of ids for a step that has none, by a tokenizer that is given. What it makes says so in every row: nobody
sampled these ids, and no logprob belongs to them. A step that has ids is never touched.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import nan
from typing import Any, Final, Protocol

from proxy.trajectory.step import Choice, Ids, Step, answers_of

RETOKENIZED: Final = "retokenized"


class Tokenizer(Protocol):
    """A tokenizer with a chat template. Raises ValueError for what it cannot tell in ids."""

    def render(self, messages: Sequence[Any], tools: Sequence[Any] | None, *, reply: bool) -> list[int]:
        """The ids of a conversation; with the opening of a reply at its end, if `reply`."""
        ...

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without any that open or close one."""
        ...


def retokenize(step: Step, tokenizer: Tokenizer) -> Step:
    """The step with ids made from its text; the step itself if it has ids, is an error, or cannot be told in ids.

    Logprobs are NaN, one for each id. A template that refuses the messages leaves the step as it is.
    """
    if "no_token_ids" not in step.problems or step.status == "error" or not step.response:
        return step
    try:
        made = _chat(step, tokenizer) if step.is_chat else _completions(step, tokenizer)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):  # odd, or refused by the template
        return step
    if made is None:
        return step
    prompt, choices = made
    problems = tuple(code for code in step.problems if code in _STAYING)
    return replace(step, prompts=(prompt,), choices=choices, problems=(*problems, "no_token_ids", RETOKENIZED))


# What is wrong with the step beside its ids.
_STAYING: Final = frozenset({"stream_cut", "aborted", "no_finish_reason", "choice_count", "unparsed_event"})


def _chat(step: Step, tokenizer: Tokenizer) -> tuple[Ids, tuple[Choice, ...]]:
    """What the template adds for a reply to its messages; its text alone where the template spells the beginning anew."""
    messages, tools = step.body["messages"], step.body.get("tools")
    prompt = tokenizer.render(messages, tools, reply=True)
    choices = []
    for choice, said in _told(step):
        message = {key: value for key, value in said["message"].items() if value is not None}
        whole = tokenizer.render([*messages, message], tools, reply=False)
        goes_on = whole[: len(prompt)] == prompt
        ids = whole[len(prompt) :] if goes_on else tokenizer.encode(message.get("content") or "")
        choices.append(_made(choice, ids))
    return array("i", prompt), tuple(choices)


def _completions(step: Step, tokenizer: Tokenizer) -> tuple[Ids, tuple[Choice, ...]] | None:
    """Only of one prompt, which is a text or ids."""
    prompt = step.request.get("prompt")
    if isinstance(prompt, str):
        prompt = tokenizer.encode(prompt)
    if not isinstance(prompt, list) or not all(type(token) is int for token in prompt):
        return None
    choices = tuple(_made(choice, tokenizer.encode(said["text"])) for choice, said in _told(step))
    return array("i", prompt), choices


def _told(step: Step) -> list[tuple[Choice, Mapping[str, Any]]]:
    """Each choice with what the response says of it."""
    answers = answers_of(step)
    return [(choice, answers[choice.index]) for choice in step.choices]


def _made(choice: Choice, ids: list[int]) -> Choice:
    return replace(choice, ids=array("i", ids), logprobs=array("f", [nan]) * len(ids), prompt=0, spans=())
