"""What the tiny model would have said otherwise: the logprobs of given ids at another temperature, or from other weights.

Run by the python that has vLLM: `python other_scores.py FOLDER < question > answer`. Holds the scoring by transformers
alone; the question is `{"ids": [id], "asked": [{"temperature": float, "seed": int or null}]}`, where a seed draws weights
anew, and the answer one list of logprobs for each, null for the first id.
"""

import json
import sys

import tiny_model
import torch
from transformers import Qwen3ForCausalLM


def scores(model: Qwen3ForCausalLM, ids: list[int], temperature: float) -> list[float | None]:
    """The logprob of each id after those before it."""
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, :-1].float() / temperature
    told = torch.log_softmax(logits, dim=-1).gather(1, torch.tensor(ids[1:]).unsqueeze(1))
    return [None, *told.squeeze(1).tolist()]


if __name__ == "__main__":
    question = json.load(sys.stdin)
    own = Qwen3ForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
    answers = []
    for asked in question["asked"]:
        model = own
        if asked["seed"] is not None:
            tiny_model.SEED = asked["seed"]
            model = tiny_model.make_model([0, 1]).float().eval()
        answers.append(scores(model, question["ids"], asked["temperature"]))
    json.dump(answers, sys.stdout)
