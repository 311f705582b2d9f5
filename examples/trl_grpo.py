"""GRPO with TRL: a GRPOTrainer, an agent of two turns through the proxy, and new weights for the engine at each step.

Shows `trl_rollout_func.py` in a trainer (run with TRL 1.16.0 and vLLM 0.32). `policy-recorded` is the largest difference
between the logprobs that the trainer computes with its weights and the recorded ones. If it is not about 0, the engine has
other weights, and the policy gradient is that of another policy.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from trl_rollout_func import Push, make_rollout_func, reward_of_rollout, solve_twice

PROMPTS = ("Name three colours.", "Name two animals.", "Name a city.", "Name four fruits.")


def push_by_disk(engine: str, folder: Path) -> Push:
    """Return a function that updates a vLLM which reads the same disk and was started with VLLM_SERVER_DEV_MODE=1.

    `reload_weights` of vLLM 0.32 does not update an output layer that is tied to the embeddings; the logprobs show it.
    """
    requests = {
        "collective_rpc": {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}},
        "reset_prefix_cache": {},  # computed with the old weights
    }

    def push(trainer: Any) -> None:
        trainer.save_model(str(folder))
        for path, body in requests.items():
            head = {"Content-Type": "application/json"}
            urlopen(Request(f"{engine}/{path}", json.dumps(body).encode(), head)).close()  # noqa: S310 - a fixed URL

    return push


def largest_difference(model: Any, rows: dict[str, list[Any]]) -> float:
    """Return the largest |logprob by the trainer's weights - recorded logprob| of all trained tokens."""
    import torch  # noqa: PLC0415 - a dependency of trl

    worst = 0.0
    columns = (rows[key] for key in ("prompt_ids", "completion_ids", "logprobs", "env_mask"))
    for prompt, ids, recorded, mask in zip(*columns, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + ids], device=model.device)).logits[0, len(prompt) - 1 : -1]
        computed = logits.float().log_softmax(-1)[range(len(ids)), ids].tolist()
        pairs = zip(computed, recorded, mask, strict=True)
        worst = max([worst, *(abs(value - earlier) for value, earlier, is_sampled in pairs if is_sampled)])
    return worst


def train(options: argparse.Namespace) -> list[float]:
    """Train a model; return the largest difference at each step."""
    import torch  # noqa: PLC0415 - `pip install trl` installs all three
    from datasets import Dataset  # noqa: PLC0415
    from trl import GRPOConfig, GRPOTrainer  # noqa: PLC0415

    differences: list[float] = []
    push = push_by_disk(options.engine, (options.out / "weights").absolute()) if options.engine else None
    rollout_func = make_rollout_func(options.url, solve_twice, push=push)

    def watched(prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        rows = rollout_func(prompts, trainer)
        differences.append(largest_difference(trainer.model, rows))
        trained, reward = sum(map(sum, rows["env_mask"])), sum(rows["reward"]) / len(prompts)
        print(
            f"step {trainer.state.global_step}: policy-recorded {differences[-1]:.1e}, {trained} tokens, reward {reward:.3f}"
        )
        return rows

    GRPOTrainer(
        model=options.model,
        args=GRPOConfig(
            output_dir=str(options.out),
            per_device_train_batch_size=options.size,
            num_generations=options.size,
            max_steps=options.steps,
            learning_rate=options.rate,
            report_to=[],
            use_cpu=not torch.cuda.is_available(),
            bf16=torch.cuda.is_available(),
            save_strategy="no",
        ),
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": text}]} for text in PROMPTS]),
        reward_funcs=reward_of_rollout,
        rollout_func=watched,
    ).train()
    return differences


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Train with the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8400", help="URL of the proxy (default: %(default)s)")
    parser.add_argument("--model", required=True, help="the model that the engine serves: a folder or a name")
    parser.add_argument("--engine", help="vLLM to update by disk (default: its weights are not updated)")
    parser.add_argument("--steps", type=int, default=4, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--size", type=int, default=4, help="rollouts per group (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=1e-6, help="learning rate (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("trl-output"), help="output folder (default: %(default)s)")
    return train(parser.parse_args(arguments))


if __name__ == "__main__":
    main()
