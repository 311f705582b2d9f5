"""TRL's GRPOTrainer, two steps, with the page's rollout function. Arguments: URL MODEL FOLDER."""

import json
import sys

from datasets import Dataset
from page import TASKS, definitions_from
from trl import GRPOConfig

url, model, folder = sys.argv[1:]
page = definitions_from(url, "rollout_func")
handed, compared = [], []


def watched(prompts, trainer):
    """Call the page's function and note its prompts and its result."""
    made = page["rollout_func"](prompts, trainer)
    handed.append({"prompts": prompts, "ids": made["completion_ids"], "mask": made["env_mask"]})
    return made


class WatchedTrainer(page["RecordedGRPOTrainer"]):
    """The page's trainer; notes the logprobs with which the ratio of its loss compares."""

    def _compute_loss(self, model, inputs):
        masks = inputs["completion_mask"].bool()
        compared.extend(row[mask].tolist() for row, mask in zip(inputs["old_per_token_logps"], masks, strict=True))
        return super()._compute_loss(model, inputs)


trainer = WatchedTrainer(
    model=model,
    args=GRPOConfig(
        output_dir=folder, per_device_train_batch_size=4, num_generations=2, max_steps=2, report_to=[], use_cpu=True,
        bf16=False, save_strategy="no", temperature=0.7, top_p=0.95, top_k=50, min_p=0.01, max_completion_length=16,
        generation_kwargs={"stop": ["zzzz"]}, logging_steps=1, learning_rate=1e-3,
    ),
    train_dataset=Dataset.from_list([{"prompt": task} for task in TASKS]),
    reward_funcs=page["recorded_reward"],
    rollout_func=watched,
)  # fmt: skip
trainer.train()
print(json.dumps({"steps": trainer.state.global_step, "handed": handed, "compared": compared}))
