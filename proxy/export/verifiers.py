"""verifiers' TrajectoryStep (PyPI 0.1.9 to 0.3.1; removed in 0.4.0): a call with its messages, its response and its tokens.

A step without ids has null `tokens`, and is in the report. `is_truncated`: the limit, an abort, `max_len` or a lost connection
ended the reply. `trajectory_id` is the rollout's id.
"""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Final

from proxy.export.base import BITS, COUNT, FLAG, IDS, JSON, LOGPROB, LOGPROBS, REWARD, TEXT, Columns
from proxy.export.sequence_view import RowSource
from proxy.export.turn_view import TurnRow, TurnView, prompt_fill, reward_of, step_reward
from proxy.trajectory.sequence import is_cut
from proxy.trajectory.step import Choice, Step, answers_of
from proxy.trajectory.tree import placeable

_NONE: Final = Choice(0, array("i"), array("f"))  # for a response without a recorded choice


class VerifiersFormat(TurnView):
    """One TrajectoryStep for each choice, oldest first. `max_len` cuts as verifiers' `max_seq_len` does."""

    name = "verifiers"
    reward_place = "turn"
    advantage_place = "turn"
    whole = True
    has_images = True  # in its messages
    cuts = True
    keeps_empty = True
    columns: ClassVar[Columns] = {
        "prompt": JSON,
        "completion": JSON,
        "response": JSON,
        "tokens": {
            "prompt_ids": IDS,
            "prompt_mask": BITS,
            "completion_ids": IDS,
            "completion_mask": BITS,
            "completion_logprobs": LOGPROBS,
            "overlong_prompt": FLAG,
            "is_truncated": FLAG,
        },
        "reward": REWARD,
        "advantage": LOGPROB,
        "is_truncated": FLAG,
        "trajectory_id": TEXT,
        "extras": {"step_id": TEXT, "choice": COUNT, "policy_version": TEXT},
    }

    def without_tokens(self, steps: Sequence[Step]) -> Iterable[tuple[Step, Choice]]:
        """Return the choices of complete steps for which the engine returned no ids."""
        return [
            (step, choice)
            for step in steps
            for choice in step.choices or (_NONE,)
            if step.status == "complete" and not placeable(step, choice)
        ]

    def bare(self, step: Step, choice: Choice, source: RowSource) -> dict[str, Any]:
        return _shown(step, choice, None, source)

    def turn(self, turn: TurnRow, source: RowSource) -> dict[str, Any]:
        tokens = {
            "prompt_ids": turn.prompt,
            "prompt_mask": [0] * len(turn.prompt),
            "completion_ids": turn.ids,
            "completion_mask": [1] * len(turn.ids),
            "completion_logprobs": turn.logprobs,
            "overlong_prompt": turn.overlong_prompt,
            # verifiers sets this for `max_seq_len` only, since the response has "length"; it does not show a lost connection.
            "is_truncated": turn.cut or turn.step.status == "partial",
        }
        return _shown(turn.step, turn.choice, tokens, source)


def _shown(step: Step, choice: Choice, tokens: dict[str, Any] | None, source: RowSource) -> dict[str, Any]:
    """Return the step with this choice alone in its response: verifiers raises an error for several choices."""
    response = dict(step.response or {})
    answer = answers_of(step).get(choice.index)
    shown = [] if answer is None else [answer]
    completion = [_message(answer["message"]) if "message" in answer else answer.get("text") for answer in shown]
    prompt = step.body.get("messages", step.body.get("prompt"))
    return {
        "prompt": prompt,
        "completion": completion if step.is_chat else next(iter(completion), None),
        "response": {**response, "choices": shown},
        "tokens": tokens,
        "reward": reward_of(step, source.facts),
        "advantage": _advantage(step, source.facts.advantages),
        "is_truncated": is_cut(step, choice) or (tokens is not None and tokens["is_truncated"]),
        "trajectory_id": source.facts.rollout_id,
        "extras": {"step_id": step.step_id, "choice": choice.index, "policy_version": step.policy_version},
    }


def _message(message: Any) -> Any:
    """Return the reply as verifiers 0.1.9 parses it (`parse_response_messages`), with the fields that it drops."""
    if not isinstance(message, Mapping):
        return message
    fields = {name: value for name, value in message.items() if name != "tool_calls" or value}
    return {"role": "assistant", "content": "", **_without_nulls(fields)}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _advantage(step: Step, advantages: Any) -> float | None:
    value = advantages.get(step.step_id) if isinstance(advantages, Mapping) else advantages
    return float(value) if isinstance(value, int | float) else None


class TrainingExamplesFormat(TurnView):
    """One example for each turn.

    `max_len` cuts as verifiers' `max_seq_len` does; an overlong prompt leaves no example.
    """

    name = "training_examples"
    reward_place = "turn"
    reward = "required"
    cuts = True
    columns: ClassVar[Columns] = {"token_ids": IDS, "logprobs": LOGPROBS, "mask": BITS, "reward": REWARD}

    def turn(self, turn: TurnRow, source: RowSource) -> dict[str, Any]:
        return {
            "token_ids": turn.prompt + turn.ids,
            "logprobs": [prompt_fill(source)] * len(turn.prompt) + turn.logprobs,
            "mask": [0] * len(turn.prompt) + [1] * len(turn.ids),
            "reward": step_reward(turn.step, source),
        }
