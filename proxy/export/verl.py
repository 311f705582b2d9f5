"""verl's AgentLoopOutput (verl 0.9.1), and the DataProto batch that is made from it.

The batch has fixed lengths: prompts are padded on the left, responses on the right. Rollouts that do not fit are
refused, not cut. `position_ids` are the running sum of the attention mask minus one, verl's formula.

The scores of a teacher are `teacher_logprobs` and `teacher_ids`, as verl's own teachers return them: the most likely tokens of
each position of the prompt and the response, or the token itself, shifted: position i describes token i + 1.
"""

from collections.abc import Mapping
from itertools import accumulate
from typing import Any, ClassVar

from proxy.export.base import BITS, COUNT, IDS, JSON, LOGPROBS, REFERENCES, REWARD, TEXT, Batched, Column, Columns
from proxy.export.sequence_view import (
    RowSource,
    SequenceView,
    filled_likely,
    filled_logprobs,
    owned_spans,
    owned_turns,
    policy_versions_from,
    references,
    step_reward_ends,
    turns,
)
from proxy.trajectory.sequence import Role, Row, Scores

_EXTRA: dict[str, Column] = {"rollout_id": TEXT, "min_global_steps": COUNT, "max_global_steps": COUNT}
_TEACHER: dict[str, Column] = {"teacher_ids": [IDS], "teacher_logprobs": [LOGPROBS]}
_BATCHED_TEACHER: Columns = {"teacher_ids": [[IDS]], "teacher_logprobs": [[LOGPROBS]]}


class VerlFormat(SequenceView):
    """One AgentLoopOutput for each rollout. `num_turns` counts its messages without system messages.

    `extra_fields` has its ID.
    """

    name = "verl"
    has_images = True
    branches = "one"
    whole = True
    scored: ClassVar[Mapping[Role, Columns]] = {"teacher": {"extra_fields": {**_EXTRA, **_TEACHER}}}
    likely: ClassVar[Mapping[Role, Columns]] = scored
    columns: ClassVar[Columns] = {
        "prompt_ids": IDS,
        "response_ids": IDS,
        "response_mask": BITS,
        "response_logprobs": LOGPROBS,
        "reward_score": REWARD,
        "num_turns": COUNT,
        "metrics": JSON,
        "extra_fields": _EXTRA,
        "multi_modal_data": {"images": REFERENCES},
    }

    def view(self, row: Row, source: RowSource) -> dict[str, Any]:
        """Return the output. Without a reward `reward_score` is null, and the trainer computes one."""
        start = row.prompt_len
        return {
            "prompt_ids": row.token_ids[:start],
            "response_ids": row.token_ids[start:],
            "response_mask": row.mask[start:],
            "response_logprobs": filled_logprobs(row, source)[start:],
            "reward_score": source.facts.reward,
            "num_turns": _messages(row, source),
            "metrics": {},
            "extra_fields": {"rollout_id": source.facts.rollout_id, **_versions(row, source)},
            **({"multi_modal_data": {"images": images}} if (images := references(row, source)) else {}),
        }

    def with_scores(self, view: dict[str, Any], row: Row, source: RowSource, scores: Scores) -> dict[str, Any]:
        ids, logprobs = _shifted_likely(row, scores)
        fields = {**view["extra_fields"], "teacher_ids": ids, "teacher_logprobs": logprobs}
        return {**view, "extra_fields": fields}


class VerlDataProtoFormat(Batched, SequenceView):
    """The tensors of a DataProto of one rollout, as lists; groups combine them.

    `rm_scores` are included if there is a reward.
    """

    name = "verl_dataproto"
    reward_place = "token"
    reward = "uniform"
    branches = "one"
    pads = ("prompt_length", "response_length")
    scored: ClassVar[Mapping[Role, Columns]] = {
        "proximal": {"old_log_probs": [LOGPROBS]},
        "teacher": _BATCHED_TEACHER,
    }
    likely: ClassVar[Mapping[Role, Columns]] = {"teacher": _BATCHED_TEACHER}
    columns: ClassVar[Columns] = {
        "prompts": [IDS],
        "responses": [IDS],
        "input_ids": [IDS],
        "attention_mask": [BITS],
        "position_ids": [[COUNT]],
        "response_mask": [BITS],
        "rollout_log_probs": [LOGPROBS],
        "rm_scores": [LOGPROBS],
    }

    def view(self, row: Row, source: RowSource) -> dict[str, Any]:
        left, right = _padding(row, source)
        start, pad = row.prompt_len, source.fill.pad_id
        prompt, response = [pad] * left + row.token_ids[:start], row.token_ids[start:] + [pad] * right
        attention = [0] * left + [1] * len(row.token_ids) + [0] * right
        fields = {
            "prompts": [prompt],
            "responses": [response],
            "input_ids": [prompt + response],
            "attention_mask": [attention],
            "position_ids": [[max(count - 1, 0) for count in accumulate(attention)]],
            "response_mask": [row.mask[start:] + [0] * right],
            "rollout_log_probs": [filled_logprobs(row, source)[start:] + [0.0] * right],
        }
        if source.facts.reward is None and not any(
            turn.step_id in source.facts.step_rewards for turn in owned_turns(row)
        ):
            return fields
        return {**fields, "rm_scores": [step_reward_ends(row, source) + [0.0] * right]}

    def with_scores(self, view: dict[str, Any], row: Row, source: RowSource, scores: Scores) -> dict[str, Any]:
        left, right = _padding(row, source)
        if source.fill.role == "proximal":
            return {**view, "old_log_probs": [scores.filled(row.mask, 0.0)[row.prompt_len :] + [0.0] * right]}
        ids, logprobs = _shifted_likely(row, scores)
        width, pad = len(ids[0]), source.fill.pad_id
        return {
            **view,
            "teacher_ids": [[[pad] * width] * left + ids + [[pad] * width] * right],
            "teacher_logprobs": [[[0.0] * width] * left + logprobs + [[0.0] * width] * right],
        }


def _shifted_likely(row: Row, scores: Scores) -> tuple[list[list[int]], list[list[float]]]:
    """Return the most likely ids and logprobs of token i + 1 at position i; zeros where nothing is trained."""
    (_, *ids), (_, *logprobs) = filled_likely(row, scores)
    width = max(1, scores.top_k)
    return [*ids, [0] * width], [*logprobs, [0.0] * width]


def _padding(row: Row, source: RowSource) -> tuple[int, int]:
    lengths = {
        "prompt_length": (source.fill.prompt_length, row.prompt_len),
        "response_length": (source.fill.response_length, len(row.token_ids) - row.prompt_len),
    }
    for name, (padded, length) in lengths.items():
        if padded is None:
            raise source.refuse(f"the parameter {name}, because it pads its rows", f"{length} tokens to pad")
        if padded < length:
            raise source.refuse(f"at most {name}={padded} tokens", f"{length}")
    (prompt, response) = ((padded or 0) - length for padded, length in lengths.values())
    return prompt, response


def _messages(row: Row, source: RowSource) -> int:
    """Return the number of user, assistant and tool messages with the last reply; without messages, the number of calls."""
    calls = turns(row)
    messages = source.steps[calls[-1].step_id].body.get("messages")
    if not isinstance(messages, list):
        return len(calls)
    roles = [message.get("role") for message in messages if isinstance(message, Mapping)]
    return 1 + sum(role in ("user", "assistant", "tool") for role in roles)


def _versions(row: Row, source: RowSource) -> dict[str, int]:
    if all(span.policy_version is None for span in owned_spans(row)):
        return {}
    versions = policy_versions_from(row, source)
    return {"min_global_steps": versions[0], "max_global_steps": versions[-1]}
