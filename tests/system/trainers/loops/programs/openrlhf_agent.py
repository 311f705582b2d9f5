"""The page's OpenRLHF executor, and the trainer's Experience of its response. Arguments: URL."""

import asyncio
import json
import sys

from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator
from page import TASKS, definitions_from
from vllm import SamplingParams

page = definitions_from(sys.argv[1], "AgentExecutor", "AgentExecutor(AgentExecutorBase)")
params = SamplingParams(temperature=0.7, top_p=0.95, top_k=50, max_tokens=16, min_tokens=1, stop=["zzzz"])
playing = page["AgentExecutor"]().execute(TASKS[0][0]["content"], "label", params, 2048, None, None)
response = asyncio.run(playing)
made = SamplesGenerator._process_response_into_experience(None, response, max_len=2048)
names = ("sequences", "action_mask", "rollout_log_probs", "rewards", "response_length", "truncated")
print(json.dumps({"response": response, "experience": {name: getattr(made, name).tolist() for name in names}}))
