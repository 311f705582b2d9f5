"""TRL's GRPOTrainer with the page's report, two steps of weights that do not change. Arguments: URL MODEL FOLDER.

It computes its logprobs before the steps because two of them share what was generated.
"""

import json
import sys

from datasets import Dataset
from page import TASKS, definitions_from
from trl import GRPOConfig

url, model, folder = sys.argv[1:]
page = definitions_from(url, "rollout_func", "reported", "ReportingGRPOTrainer")


class Trainer(page["RecordedGRPOTrainer"], page["ReportingGRPOTrainer"]):
    """Trains with the recorded logprobs, and reports its own."""


trainer = Trainer(
    model=model,
    args=GRPOConfig(
        output_dir=folder, per_device_train_batch_size=4, num_generations=2, max_steps=2, report_to=[], use_cpu=True,
        bf16=False, save_strategy="no", temperature=0.7, max_completion_length=16, steps_per_generation=2,
        gradient_accumulation_steps=1, learning_rate=0.0,
    ),
    train_dataset=Dataset.from_list([{"prompt": task} for task in TASKS * 2]),
    reward_funcs=page["recorded_reward"],
    rollout_func=page["rollout_func"],
)  # fmt: skip
with page["Client"](url) as client:
    client.put_policy(0)
    trainer.train()
    print(json.dumps(client.batch_mismatch(f"{page['RUN']}-0")))
