"""Recorded steps: nothing is joined, so no mask is needed.

Some fields are present only if needed: `policy` (not `default`), `policy_epoch` (not the first one), `thread` (if requested),
`spans` (if the policy version changed during sampling), `inherited` (the step that a playback inherited, with
`inherited=trained`), experts, masks, images, and problems.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

from proxy.export.base import (
    COUNT,
    FLAG,
    IDS,
    JSON,
    LOGPROB,
    LOGPROBS,
    PLAIN,
    REWARD,
    TEXT,
    Columns,
    Fill,
    Format,
    Plan,
    skipped_rows,
)
from proxy.export.sequence_view import placed_json
from proxy.export.turn_view import reward_of
from proxy.trajectory.arrays import unpack_experts, unpack_mask
from proxy.trajectory.facts import RolloutFacts
from proxy.trajectory.images import placed
from proxy.trajectory.ratios import Trained
from proxy.trajectory.sequence import Options, select, temperature_of
from proxy.trajectory.step import DEFAULT_POLICY, Choice, Step, is_unlogged


class StepsFormat(Format):
    """One row per choice, oldest step first."""

    name = "steps"
    has_images = True
    reward_place = "turn"
    columns: ClassVar[Columns] = {
        "rollout_id": TEXT,
        "group_id": TEXT,
        "step_id": TEXT,
        "index": COUNT,
        "choice": COUNT,
        "model": TEXT,
        "prompt_ids": IDS,
        "ids": IDS,
        "logprobs": LOGPROBS,
        "status": TEXT,
        "delivered": FLAG,
        "late": FLAG,
        "finish_reason": TEXT,
        "stop_reason": JSON,
        "policy_version": TEXT,
        "temperature": LOGPROB,
        "constrained": FLAG,
        "reward": REWARD,
        "metadata": JSON,
        "policy_epoch": COUNT,
        "spans": [{"start": COUNT, "end": COUNT, "policy_version": TEXT}],
        "routed_experts": JSON,
        "sampling_mask": [IDS],
        "logprobs_over": TEXT,
        "problems": [TEXT],
        "inherited": {"rollout_id": TEXT, "step_id": TEXT},
    }

    def plan(self, facts: RolloutFacts, steps: Sequence[Step], options: Options, fill: Fill = PLAIN) -> Plan:
        """Plan a row for each choice: `prompt_ids`, the sampled `ids` and their `logprobs`.

        `branches` and `max_len` apply to joined rows only.
        """
        chosen, skipped = select(steps, options)
        threads = [step.thread for step, _ in chosen]
        row_facts = facts.of_rows(threads, split=options.row_weight == "split")
        unlogged = {step.step_id for step in steps if is_unlogged(step)}
        return Plan(
            [(step.step_id,) for step, _ in chosen],
            skipped_rows(skipped),
            lambda: (
                _row(of_row, step, choice, unlogged=step.step_id in unlogged)
                for (step, choice), of_row in zip(chosen, row_facts, strict=True)
            ),
            threads=threads,
            sampled=[Trained(step, choice, len(choice.ids)) for step, choice in chosen],
        )


def _row(facts: RolloutFacts, step: Step, choice: Choice, *, unlogged: bool) -> dict[str, Any]:
    row = {
        "rollout_id": facts.rollout_id,
        "group_id": facts.group_id,
        "step_id": step.step_id,
        "index": step.index,
        "choice": choice.index,
        "model": step.model_served,
        "prompt_ids": step.prompts[choice.prompt].tolist(),
        "ids": choice.ids.tolist(),
        "logprobs": [None] * len(choice.ids) if unlogged else choice.logprobs.tolist(),
        "status": step.status,
        "delivered": step.delivered,
        "late": step.late,
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
        "policy_version": step.policy_version,
        "temperature": temperature_of(step),
        "constrained": step.constrained,
        "reward": reward_of(step, facts),
        "metadata": dict(facts.metadata),
    }
    return {**row, **_rare(step, choice)}


def _rare(step: Step, choice: Choice) -> dict[str, Any]:
    """Return the fields that most rows do not have.

    Experts are encoded as by the engine; `form` is the format of their base64.
    """
    rare: dict[str, Any] = {}
    if step.policy != DEFAULT_POLICY:
        rare["policy"] = step.policy
    if step.policy_epoch:
        rare["policy_epoch"] = step.policy_epoch
    if step.thread is not None:
        rare["thread"] = step.thread
    if step.inherited is not None:
        rare["inherited"] = step.inherited._asdict()
    if len(choice.spans) > 1:
        rare["spans"] = [
            {"start": span.start, "end": span.end, "policy_version": span.policy_version} for span in choice.spans
        ]
    if choice.routed_experts is not None:
        rare["routed_experts"] = {
            "form": choice.routed_experts.form,
            "given": unpack_experts(choice.routed_experts),
        }
    if (over := step.logprobs_over(choice)) is not None:
        rare["logprobs_over"] = over
    if choice.sampling_mask is not None:
        rare["sampling_mask"] = unpack_mask(choice.sampling_mask)
    rare |= placed_json(placed(step, step.prompts[choice.prompt]))
    return {**rare, "problems": list(step.problems)} if step.problems else rare
