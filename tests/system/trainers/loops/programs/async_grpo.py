"""TRL's AsyncGRPOTrainer, two epochs of two groups, with the page's worker and its report. Arguments: URL MODEL FOLDER.

Weights are not pushed to the engine, because the trainer does that with NCCL, which needs GPUs. The learning rate is 0,
so the engine has the trainer's weights.
"""

import json
import sys

import plain_attention
from datasets import Dataset
from page import TASKS, definitions_from
from trl.experimental.async_grpo import AsyncGRPOConfig

url, model, folder = sys.argv[1:]
plain_attention.install()
page = definitions_from(url, "reported", "RecordedWorker", "ReportingWorker")


class NoTransfer:
    """TRL's WeightTransferProtocol without a transfer."""

    def init_weight_transfer(self):
        """Do nothing."""

    pause = resume = destroy = init_weight_transfer

    def send_weights(self, iterator):
        """Read the weights, as a transfer does."""
        for _ in iterator:
            pass


args = AsyncGRPOConfig(
    output_dir=folder, per_device_train_batch_size=2, gradient_accumulation_steps=1, num_generations=2,
    num_train_epochs=2, max_completion_length=16, temperature=0.7, report_to=[], use_cpu=True,
    bf16=False, save_strategy="no", token_budget=0, max_staleness=8, logging_steps=1, learning_rate=0.0,
    gradient_checkpointing=False, dtype="float32",
)  # fmt: skip
trainer = page["ReportingAsyncGRPOTrainer"](
    model=model,
    args=args,
    train_dataset=Dataset.from_list([{"prompt": task} for task in TASKS]),
    rollout_worker=page["ReportingWorker"](TASKS, args),
    weight_transfer=NoTransfer(),
)
trainer.train()
with page["Client"](url) as client:
    mismatch = client.batch_mismatch(f"{page['RUN']}-1")
print(json.dumps({
    "steps": trainer.state.global_step, "ceiling": trainer.args.max_steps, "groups": sorted(trainer._trained_groups),
    "log": trainer.state.log_history, "mismatch": mismatch,
}))  # fmt: skip
