"""SkyRL's GeneratorOutput (a956457): lists by key, one entry per row; joined, or step-wise with one row for each turn.

With the stop reason "stop", the response must end in the EOS; a turn that ended with a stop string has none, and is refused.
"""

from typing import Any, ClassVar

from proxy.export.base import BITS, COUNT, FLAG, IDS, JSON, LOGPROBS, TEXT, Batched, Columns, Inexpressible
from proxy.export.sequence_view import RowSource, SequenceView, filled_logprobs, step_reward_ends, turn_rewards
from proxy.export.turn_view import TurnRow, TurnView
from proxy.trajectory.sequence import Row

_COLUMNS: Columns = {
    "prompt_token_ids": [IDS],
    "response_ids": [IDS],
    "rewards": [LOGPROBS],
    "loss_masks": [BITS],
    "stop_reasons": [TEXT],
    "rollout_logprobs": [LOGPROBS],
    "trajectory_ids": [{"instance_id": TEXT, "repetition_id": COUNT}],
    "is_last_step": [FLAG],
    "rollout_metrics": JSON,
}


class _Output(Batched):
    """The common part: the trajectory of a row contains the number of its rollout in the group."""

    columns: ClassVar[Columns] = _COLUMNS

    def numbered(self, row: dict[str, Any], member: int) -> dict[str, Any]:
        ids = [{**trajectory, "repetition_id": member} for trajectory in row["trajectory_ids"]]
        return {**row, "trajectory_ids": ids}


class SkyRlFormat(_Output, SequenceView):
    """A GeneratorOutput with one entry for each rollout."""

    name = "skyrl"
    reward_place = "token"
    reward = "required"
    branches = "one"

    def view(self, row: Row, source: RowSource) -> dict[str, Any]:
        if row.finish_reason == "stop" and row.stop_token_sampled is not True:
            raise _without_eos(source)
        start = row.prompt_len
        return {
            "prompt_token_ids": [row.token_ids[:start]],
            "response_ids": [row.token_ids[start:]],
            "rewards": [step_reward_ends(row, source)],
            "loss_masks": [row.mask[start:]],
            "stop_reasons": [row.finish_reason],
            "rollout_logprobs": [filled_logprobs(row, source)[start:]],
            "trajectory_ids": [_trajectory(source)],
            "is_last_step": None,
            "rollout_metrics": None,
        }


class SkyRlStepwiseFormat(_Output, TurnView):
    """A GeneratorOutput with one entry for each turn.

    The entries of a rollout are consecutive; `is_last_step` marks its last one.
    """

    name = "skyrl_stepwise"
    reward_place = "token"
    reward = "required"
    repeats_reward = False

    def turn(self, turn: TurnRow, source: RowSource) -> dict[str, Any]:
        if turn.choice.finish_reason == "stop" and turn.stop_token_sampled is not True:
            raise _without_eos(source)
        return {
            "prompt_token_ids": [turn.prompt],
            "response_ids": [turn.ids],
            "rewards": [turn_rewards(turn.step.step_id, len(turn.ids), source, is_last=turn.is_last)],
            "loss_masks": [[1] * len(turn.ids)],
            "rollout_logprobs": [turn.logprobs],
            "is_last_step": [turn.is_last],
            "trajectory_ids": [_trajectory(source)],
        }


def _without_eos(source: RowSource) -> Inexpressible:
    return source.refuse("a stop token at the end of each response that stopped", "a response without one")


def _trajectory(source: RowSource) -> dict[str, Any]:
    return {"instance_id": source.facts.group_id or source.facts.rollout_id, "repetition_id": 0}
