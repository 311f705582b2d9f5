"""Continuation of text completions: a prompt that begins with the prompt and the completion of an earlier step."""

from array import array
from collections.abc import Collection, Generator, Mapping
from typing import Any

from proxy.continuation.matching import Ambiguous, Sampler, call_problem, nearest, turn_problem
from proxy.continuation.turns import Turn, Turns, options_of
from proxy.continuation.types import Continuation, Detokenize, Lookup, LookupFailed, LookupResult, Reason, Tokenize


def match_text(
    turns: Turns, body: Mapping[str, Any], sampler: Sampler, *, undelivered: Collection[str] = ()
) -> Turn | Ambiguous | Reason | None:
    """Return the turn that a text prompt continues, the reason why it continues none, or None if it is a first prompt.

    Several turns match: the one with the longest text; of equal ones that of the same agent, then delivered ones.
    """
    prompt = body.get("prompt")
    if not len(turns) or not isinstance(prompt, str):
        return None
    options = options_of(body)
    reason: Reason | None = None
    for equal in turns.of_text(prompt):
        problems = {turn: call_problem(body) or turn_problem(turn, options, sampler) for turn in equal}
        usable = [turn for turn, problem in problems.items() if problem is None]
        if usable:
            usable = [turn for turn in usable if turn.agent == sampler.agent] or usable
            usable = [turn for turn in usable if turn.is_delivered] or usable
            return nearest(usable, undelivered) or Ambiguous(usable)
        reason = reason or problems[equal[-1]]
    return reason


def continue_text(turn: Turn, prompt: str) -> Generator[Lookup, LookupResult, Continuation]:
    """Return the prompt ids of a text prompt that continues a turn, or the reason for sending it unchanged.

    The text of the sampled ids, which includes stop tokens, must follow the text of the earlier prompt; the rest is tokenized.
    """
    text: Any = yield Detokenize(turn.ids)
    if not isinstance(text, str):
        raise LookupFailed("the engine cannot detokenize")
    if not text or not prompt.startswith(text, turn.text_start):
        return Continuation(None, "close")
    rest = prompt[turn.text_start + len(text) :]
    tokenized: Any = (yield Tokenize(rest)) if rest else []
    if tokenized is None or isinstance(tokenized, str):
        raise LookupFailed("the engine cannot tokenize")
    recorded = turn.prompt_ids + turn.ids
    return Continuation(recorded + array("i", tokenized), kept=len(recorded), bridge=len(tokenized))
