"""The canonical rows; the other formats are views of them.

`truncated`: the model did not end the last turn (its limit, an abort, a lost connection), or `max_len` cut the row.
`constrained` of a span: a grammar or a forced tool call changed its logprobs.
`logprobs_over` of a span, if top-k, top-p or min-p changed its logprobs: `mask`, they are over the tokens of `sampling_mask`
(a list for each token of the row, empty where nothing is trained); `truncated`, they are over tokens that the engine did not
report: drop or correct such spans.
`resumed` of a span: how many times its call was interrupted and resumed; `mixed`: it was, or may have been, sampled over the
cache of an earlier version, because the weights changed under the call. Both are absent in other spans.
`endpoint`, `engine` (its kind), `model` (an adapter has its own name) and `logprobs_mode` of a span are of its call; `top_p`,
`top_k` and `min_p` are present if they truncated its sampling.
`routed_experts` of every token but the last, once: `{dtype, shape, data}`, base64 of an array of tokens, layers and experts
(SGLang: of tokens, and layers times experts); absent if a step lacks some.
`inherited`, where a row of a playback leaves what it inherited: the last step before its first live token, the rollout that
sampled this step (`of`), and how many tokens before the first live one were sampled in inherited steps; absent in other rows.
`policy` is absent for `default`, `thread` unless threads are requested, `epoch` in spans of the first epoch, and `images`
without images: the name of each, and the range of its placeholder in `token_ids`, or null if the engine's ids do not show it.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from proxy.export.base import BITS, COUNT, FLAG, IDS, JSON, LOGPROB, LOGPROBS, REWARD, TEXT, Columns
from proxy.export.sequence_view import RowSource, SequenceView, placed_json
from proxy.trajectory.images import placed
from proxy.trajectory.sequence import Role, Row, Scores

_SCORED: Columns = {
    "rescored": {"engine": TEXT, "model": TEXT, "policy_version": TEXT},
    "rescored_logprobs": LOGPROBS,
}
_LIKELY: Columns = {"rescored_top_ids": [IDS], "rescored_top_logprobs": [LOGPROBS]}


class SequencesFormat(SequenceView):
    """One row per branch of the rollout."""

    name = "sequences"
    packs = True
    has_images = True
    reward_place = "token"
    advantage_place = "token"
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
                "resumed": COUNT,
                "mixed": FLAG,
                "endpoint": TEXT,
                "engine": TEXT,
                "model": TEXT,
                "logprobs_mode": TEXT,
                "top_p": LOGPROB,
                "top_k": COUNT,
                "min_p": LOGPROB,
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
        "images": [{"image": TEXT, "start": COUNT, "length": COUNT}],
        "sampling_mask": [IDS],
        "routed_experts": JSON,
        "inherited": {"of": TEXT, "step_id": TEXT, "tokens": COUNT},
    }

    def view(self, row: Row, source: RowSource) -> dict[str, Any]:
        """Return the canonical row. Only an explicit fill replaces null where nothing was sampled."""
        shown, value = row.as_row(), source.fill.prompt_logprob
        if value is not None:
            shown["logprobs"] = [
                value if not mask else logprob for mask, logprob in zip(row.mask, row.logprobs, strict=True)
            ]
        return {**shown, **_images(row, source)}

    def packed(self, row: Row, source: RowSource) -> dict[str, Any]:
        return {**row.as_packed_row(), **_images(row, source)}

    def with_scores(self, view: dict[str, Any], row: Row, source: RowSource, scores: Scores) -> dict[str, Any]:
        """Return the row with what scored it and its logprobs, null where nothing is trained."""
        logprobs = scores.filled(row.mask, source.fill.prompt_logprob)
        view |= {"rescored": scores.described(), "rescored_logprobs": logprobs}
        if not scores.top_k:
            return view
        top_ids, top_logprobs = scores.filled_top(row.mask, None)
        return {**view, "rescored_top_ids": top_ids, "rescored_top_logprobs": top_logprobs}


def _images(row: Row, source: RowSource) -> dict[str, Any]:
    """Return the images of a row's last call: the row begins with its prompt."""
    step = source.steps[row.spans[-1].step_id]
    return placed_json(placed(step, step.prompts[0]))
