"""The page's AReaL workflow: two episodes, checked and batched by the trainer. Arguments: URL."""

import asyncio
import json
import sys

from areal.api.cli_args import GenerationHyperparameters
from areal.infra.workflow_executor import check_trajectory_format
from areal.utils.data import concat_padded_tensors
from page import TASKS, definitions_from

page = definitions_from(sys.argv[1], "RecordedWorkflow")
gconfig = GenerationHyperparameters(temperature=0.7, top_p=0.95, top_k=50, max_new_tokens=16, stop=["zzzz"])
workflow = page["RecordedWorkflow"](gconfig)


async def main():
    """Run an episode of each task."""
    async with page["AsyncClient"](sys.argv[1]) as client:
        await client.put_policy(3)
    return [await workflow.arun_episode(None, {"messages": task}) for task in TASKS]


episodes = asyncio.run(main())
assert all(check_trajectory_format(episode) for episode in episodes)
print(json.dumps({name: tensor.tolist() for name, tensor in concat_padded_tensors(episodes).items()}))
