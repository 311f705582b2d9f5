"""A trainer in plain torch: forward passes over claimed rows, and small updates of the weights that the engine serves.

Run it with vLLM's Python: `python torch_trainer.py FOLDER RATE`. Each line of stdin is a question of these forms, each line of
stdout its answer:

- `{"rows": [[ids, mask]], "version": 0, "dtype": "bfloat16", "temperature": 1.0, "fault": null}`: the logprobs of the trained
  tokens of each row, by the weights after so many updates. A fault is that the position ids restart after each reply, as
  where each turn is a sequence of its own (`positions`), that the mask or the logits are one token off, or that the ids are
  one higher (`ids`).
- `{"rows": [[ids, mask]], "folder": path}`: one update with AdamW, after which the weights are written into this folder.
"""

import copy
import json
import sys
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

Row = tuple[list[int], list[int]]


class Trainer:
    """The weights of each version, in float32, and the optimizer of the latest."""

    def __init__(self, folder: str, rate: float) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        if self.model.config.tie_word_embeddings:  # vLLM does not reload an output layer that is tied to them
            self.model.get_input_embeddings().requires_grad_(requires_grad=False)
        trained = [weight for weight in self.model.parameters() if weight.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=rate)
        self.versions = [copy.deepcopy(self.model)]

    @torch.no_grad()
    def score(
        self, rows: list[Row], *, version: int, dtype: str, temperature: float, fault: str | None
    ) -> list[list[float]]:
        """Return the logprobs of the trained tokens of each row."""
        model = copy.deepcopy(self.versions[version]).to(getattr(torch, dtype))
        return [logprobs(model, row, temperature, fault).tolist() for row in rows]

    def update(self, rows: list[Row], folder: str) -> int:
        """Make every second row likelier and the others less likely; return the new version."""
        self.optimizer.zero_grad()
        trained = sum(sum(mask) for _, mask in rows)
        for number, row in enumerate(rows):
            loss = logprobs(self.model, row).sum() * (1 if number % 2 else -1) / trained
            loss.backward()
        self.optimizer.step()
        self.model.save_pretrained(folder)
        self.versions.append(copy.deepcopy(self.model))
        return len(self.versions) - 1


def logprobs(model: PreTrainedModel, row: Row, temperature: float = 1.0, fault: str | None = None) -> torch.Tensor:
    """Return the logprobs of the trained tokens of a row."""
    ids, mask = torch.tensor(row[0]), torch.tensor(row[1])
    at = torch.arange(len(ids))
    if fault == "positions":
        ends = torch.nn.functional.pad((mask[:-1] == 1) & (mask[1:] == 0), (1, 0))
        at -= torch.cummax(at * ends, dim=0).values
    logits = model(ids[None], position_ids=at[None], use_cache=False).logits[0].float() / temperature
    logits = logits[1:] if fault == "logits" else logits[:-1]
    scored = ids[1:] + 1 if fault == "ids" else ids[1:]
    found = torch.log_softmax(logits, dim=-1).gather(1, scored[:, None] % logits.shape[1])[:, 0]
    return found[(mask.roll(-1) if fault == "mask" else mask)[1:] == 1]


if __name__ == "__main__":
    trainer = Trainer(sys.argv[1], float(sys.argv[2]))
    for line in sys.stdin:
        question: dict[str, Any] = json.loads(line)
        answer = trainer.update(**question) if "folder" in question else trainer.score(**question)
        sys.stdout.write(f"{json.dumps(answer)}\n")
        sys.stdout.flush()
