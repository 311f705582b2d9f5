"""Logprobs of given ids by the tiny model at another temperature, or with other weights.

Run it with vLLM's Python: `python other_scores.py FOLDER < question > answer`. The question is `{"ids": [id], "asked":
[{"temperature": float, "seed": int or null}]}`, where a seed draws new weights; the answer is a list of logprobs for
each entry, null for the first id. It uses transformers only.
"""

import json
import sys

import tiny_model
import torch
from transformers import Qwen3ForCausalLM


def scores(model: Qwen3ForCausalLM, ids: list[int], temperature: float) -> list[float | None]:
    """Return the logprob of each id given those before it."""
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, :-1].float() / temperature
    logprobs = torch.log_softmax(logits, dim=-1).gather(1, torch.tensor(ids[1:]).unsqueeze(1))
    return [None, *logprobs.squeeze(1).tolist()]


if __name__ == "__main__":
    question = json.load(sys.stdin)
    own = Qwen3ForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
    answers = []
    for variant in question["asked"]:
        model = own
        if variant["seed"] is not None:
            tiny_model.SEED = variant["seed"]
            model = tiny_model.make_model([0, 1]).float().eval()
        answers.append(scores(model, question["ids"], variant["temperature"]))
    json.dump(answers, sys.stdout)
