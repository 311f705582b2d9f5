"""The canonical rows, of which every other format is a view.

`truncated`: the model did not end the last turn (its limit, an abort, a lost connection), or `max_len` cut the row.
`constrained` of a span: its logprobs are not those of the model alone, but include a grammar or a forced tool call.
`logprobs_over` of a span is only where top-k, top-p or min-p changed its logprobs: `mask`, they are over the tokens of
`sampling_mask` (a list for each token of the row, empty where nothing is trained); `truncated`, they are over tokens that the
engine did not report, and a trainer's logprobs, which are over all tokens, differ: drop or correct such spans.
`routed_experts` are those of every token but the last, once: `{dtype, shape, data}`, base64 of an array of tokens, layers and
experts (SGLang: of tokens, and layers times experts). Rows whose steps lack some have none.
`policy` is only in rows of a named policy, not in those of `default`, `thread` only if threads are requested, `epoch` only in
spans of later epochs than the first. `images` is only
in rows with images: the name of each, and the range of its placeholder in `token_ids`, or null if the engine's ids do not show
it. With `rescore`, `rescored` is what scored the row, and `rescored_logprobs` are its logprobs beside the recorded ones, null
where nothing is trained.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from proxy.export.base import (
    BITS,
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
    Listed,
    Place,
    Plan,
    Planned,
    skipped_rows,
)
from proxy.export.images import PLACED, images_in, placed_json
from proxy.trajectory.facts import RolloutFacts
from proxy.trajectory.sequence import Options, Role, Row, sequences
from proxy.trajectory.step import Step

_SCORED: Columns = {
    "rescored": {"engine": TEXT, "model": TEXT, "policy_version": TEXT},
    "rescored_logprobs": LOGPROBS,
}
_LIKELY: Columns = {"rescored_top_ids": [IDS], "rescored_top_logprobs": [LOGPROBS]}


class SequencesFormat(Listed, Planned):
    """One row per branch of the rollout."""

    name = "sequences"
    has_images: ClassVar[bool] = True
    reward_place: ClassVar[Place] = "token"
    advantage_place: ClassVar[Place] = "token"
    scored: ClassVar[Mapping[Role, Columns]] = {"proximal": _SCORED, "teacher": _SCORED}
    likely: ClassVar[Mapping[Role, Columns]] = {"proximal": _LIKELY, "teacher": _LIKELY}
    columns: ClassVar[Columns] = {
        "rollout_id": TEXT,
        "group_id": TEXT,
        "branch": COUNT,
        "token_ids": IDS,
        "mask": BITS,
        "logprobs": LOGPROBS,
        "prompt_len": COUNT,
        "spans": [
            {
                "start": COUNT,
                "end": COUNT,
                "step_id": TEXT,
                "choice": COUNT,
                "policy_version": TEXT,
                "temperature": LOGPROB,
                "owned": FLAG,
                "constrained": FLAG,
                "epoch": COUNT,
                "logprobs_over": TEXT,
            }
        ],
        "finish_reason": TEXT,
        "truncated": FLAG,
        "stop_token_sampled": FLAG,
        "reward": REWARD,
        "step_rewards": JSON,
        "advantages": JSON,
        "owned": FLAG,
        "metadata": JSON,
        "problems": [TEXT],
        "images": PLACED,
        "sampling_mask": [IDS],
        "routed_experts": JSON,
    }

    def plan(self, facts: RolloutFacts, steps: Sequence[Step], options: Options, fill: Fill = PLAIN) -> Plan:
        """Plan the canonical rows, the oldest leaf's first.

        Only an explicit `fill` replaces null where nothing was sampled.
        """
        found = sequences(steps, facts, options)
        self.check_branches(facts, options, found.branches)
        by_id = {step.step_id: step for step in steps}

        def packed() -> Iterator[Any]:
            return ({**row.as_packed_row(), **placed_json(images_in(row, by_id))} for row in found.each())

        return Plan(
            [branch.step_ids for branch in found.branches],
            skipped_rows(found.skipped),
            lambda: ({**_filled(row, fill), **placed_json(images_in(row, by_id))} for row in found.each()),
            None if fill.scores or fill.prompt_logprob is not None else packed,
            [scores.described() for scores in fill.scores],
            [branch.thread for branch in found.branches],
        )


class SequencesOfPolicies(SequencesFormat):
    """The format of a proxy with named policies, whose columns include the policy."""

    columns: ClassVar[Columns] = {**SequencesFormat.columns, "policy": TEXT}


def _filled(row: Row, fill: Fill) -> dict[str, Any]:
    shown, value = row.as_row(), fill.prompt_logprob
    if value is not None:
        shown["logprobs"] = [
            value if not mask else logprob for mask, logprob in zip(row.mask, row.logprobs, strict=True)
        ]
    if not fill.scores:
        return shown
    scores = fill.scores[row.branch]
    shown |= {"rescored": scores.described(), "rescored_logprobs": scores.filled(row.mask, value)}
    if not scores.top_k:
        return shown
    ids, logprobs = scores.filled_top(row.mask, None)
    return {**shown, "rescored_top_ids": ids, "rescored_top_logprobs": logprobs}
