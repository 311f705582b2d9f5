"""verifiers' TrainingExample (fa7f5fa): one for each step; the reward is never null."""

from typing import Any, ClassVar

from proxy.export.base import Listed
from proxy.export.columns import BITS, IDS, LOGPROBS, REWARD, Columns
from proxy.export.turnwise import Sampled, TurnView, prompt_fill, step_reward
from proxy.export.views import Source


class TrainingExamplesFormat(Listed, TurnView):
    """One example for each turn. `max_len` cuts as `max_seq_len` does there; of an overlong prompt no example is left."""

    name = "training_examples"
    cuts = True
    columns: ClassVar[Columns] = {"token_ids": IDS, "logprobs": LOGPROBS, "mask": BITS, "reward": REWARD}

    def turn(self, turn: Sampled, source: Source) -> dict[str, Any]:
        """The example."""
        return {
            "token_ids": turn.prompt + turn.ids,
            "logprobs": [prompt_fill(source)] * len(turn.prompt) + turn.logprobs,
            "mask": [0] * len(turn.prompt) + [1] * len(turn.ids),
            "reward": step_reward(turn.step, source),
        }
