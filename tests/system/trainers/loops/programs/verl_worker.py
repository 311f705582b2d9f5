"""verl's agent loop worker with the page's loop: registry, padding, DataProto. Arguments: URL MODEL."""

import asyncio
import json
import sys
from pathlib import Path

import numpy as np
import verl
from hydra import compose, initialize_config_dir
from page import TASKS, definitions_from
from verl import DataProto
from verl.experimental.agent_loop.agent_loop import AgentLoopWorker

url, model = sys.argv[1:]
page = definitions_from(url, "RecordedLoop")
with initialize_config_dir(str(Path(verl.__file__).parent / "trainer" / "config"), version_base=None):
    config = compose("ppo_trainer", overrides=[
        f"actor_rollout_ref.model.path={model}", "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.agent.default_agent_loop=tokentape", "actor_rollout_ref.rollout.prompt_length=64",
        "actor_rollout_ref.rollout.response_length=16", "actor_rollout_ref.rollout.temperature=0.7",
        "actor_rollout_ref.rollout.top_p=0.95", "actor_rollout_ref.rollout.top_k=50",
        "actor_rollout_ref.rollout.calculate_log_probs=True",
    ])  # fmt: skip


async def main():
    """Generate the sequences of four prompts, as the trainer's step does."""
    worker = AgentLoopWorker(config, llm_client=None)
    prompts = np.empty(4, dtype=object)
    prompts[:] = [task for task in TASKS for _ in range(2)]
    return await worker.generate_sequences(DataProto.from_dict(non_tensors={"raw_prompt": prompts}))


made = asyncio.run(main())
print(json.dumps({
    "tensors": {name: tensor.tolist() for name, tensor in made.batch.items()},
    "rollouts": made.non_tensor_batch["rollout_id"].tolist(),
    "turns": made.non_tensor_batch["__num_turns__"].tolist(),
}))  # fmt: skip
