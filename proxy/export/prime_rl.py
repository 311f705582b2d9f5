"""prime-rl's TrainingSample (559b447): an array without field names, encoded as msgpack.

`columns` names the positions. The last position, which later versions have (pull
request 3431), is null or `[ids, counts]`: the tokens that truncated sampling kept, and their number at each position, 0 where
nothing is trained. Both are int32 as bytes, and base64 in JSON.
"""

from array import array
from collections.abc import Mapping
from itertools import chain
from typing import Any, ClassVar

from proxy.export.base import FLAG, IDS, JSON, LOGPROBS, TEXT, Columns
from proxy.export.sequence_view import RowSource, SequenceView, advantages_from, filled_logprobs, turns
from proxy.trajectory.arrays import to_little_endian
from proxy.trajectory.sequence import Role, Row, Scores


class PrimeRlFormat(SequenceView):
    """One sample for each sequence: a boolean mask, and a temperature and an advantage for every token."""

    name = "prime_rl"
    reward_place = "none"
    advantage_place = "token"
    scored: ClassVar[Mapping[Role, Columns]] = {"teacher": {"ref_logprobs": LOGPROBS}}
    columns: ClassVar[Columns] = {
        "token_ids": IDS,
        "mask": [FLAG],
        "logprobs": LOGPROBS,
        "temperatures": LOGPROBS,
        "env_name": TEXT,
        "ref_logprobs": LOGPROBS,
        "mm_kwargs": JSON,
        "routed_experts": JSON,
        "mm_token_type_ids": IDS,
        "rl_weights": LOGPROBS,
        "ce_weights": LOGPROBS,
        "ref_kl_weights": LOGPROBS,
        "advantages": LOGPROBS,
        "sampling_mask": JSON,
    }

    def view(self, row: Row, source: RowSource) -> list[Any]:
        name = source.env_name()
        if name == "all":  # there it is the name of all environments together
            raise source.refuse("an `env_name` other than 'all', which prime-rl reserves", "'all'")
        required = [
            row.token_ids,
            list(map(bool, row.mask)),
            filled_logprobs(row, source),
            _temperatures(row, source),
            name,
        ]
        return [*required, *[None] * 7, advantages_from(row, source), _sampling_mask(row)]

    def with_scores(self, view: list[Any], row: Row, source: RowSource, scores: Scores) -> list[Any]:
        at = list(self.columns).index("ref_logprobs")
        return [*view[:at], scores.filled(row.mask, 0.0), *view[at + 1 :]]


def _sampling_mask(row: Row) -> list[bytes] | None:
    """Return the kept tokens of all positions and their counts; None without masks."""
    if not row.masks:
        return None
    kept = row.sampling_mask
    return [to_little_endian(array("i", chain.from_iterable(kept))), to_little_endian(array("i", map(len, kept)))]


def _temperatures(row: Row, source: RowSource) -> list[float]:
    """Return a temperature for every token; tokens that were not sampled have the next turn's."""
    temperatures: list[float] = []
    for turn in turns(row):
        temperature = turn.spans[0].temperature
        if temperature is None:
            raise source.refuse(
                "the temperature of each step",
                f"none at step {turn.step_id!r}: neither the request nor the engine reports it. Set "
                "engines.endpoints[].sampling_defaults: {temperature: ...}",
            )
        temperatures += [float(temperature)] * (turn.end - len(temperatures))
    return temperatures
