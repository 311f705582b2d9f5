"""prime-rl's TrainingSample (559b447): an array, in which the position is the name; its wire is msgpack.

`columns` names the 13 positions. The encoder there always writes all of them.
"""

from typing import Any, ClassVar

from proxy.export.base import FLAG, IDS, JSON, LOGPROBS, TEXT, Columns, Listed
from proxy.export.sequence_view import RowSource, SequenceView, advantages_of, logprobs_of, turns
from proxy.trajectory.sequence import Row


class PrimeRlFormat(Listed, SequenceView):
    """One sample for each sequence: bools for the mask, a temperature for every token, an advantage for every token."""

    name = "prime_rl"
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
    }

    def view(self, row: Row, source: RowSource) -> list[Any]:
        """The array."""
        name = source.env_name()
        if name == "all":  # there it is the name of all environments together
            raise source.refuse("its environment is called 'all', which the trainer keeps for itself")
        required = [
            row.token_ids,
            list(map(bool, row.mask)),
            logprobs_of(row, source),
            _temperatures(row, source),
            name,
        ]
        return [*required, *[None] * 7, advantages_of(row, source)]


def _temperatures(row: Row, source: RowSource) -> list[float]:
    """A temperature for every token: of what was not sampled, that of the turn which it leads up to."""
    told: list[float] = []
    for turn in turns(row):
        temperature = turn.spans[0].temperature
        if temperature is None:
            raise source.refuse(
                f"the temperature of step {turn.step_id!r} is not known: its request has none, and neither does the engine "
                "show its default; set engines.endpoints[].sampling_defaults: {temperature: ...}"
            )
        told += [float(temperature)] * (turn.end - len(told))
    return told
