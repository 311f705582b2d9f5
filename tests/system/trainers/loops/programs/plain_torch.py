"""The page's plain torch loop: it claims a group, and reports it. Arguments: URL MODEL."""

import asyncio
import json
import sys

from page import TASKS, definitions_from
from transformers import AutoModelForCausalLM

url, model = sys.argv[1:]
page = definitions_from(url, "logprobs_of")
report, noted = page["AsyncClient"].mismatch, []


async def watched(client, batch, *args, **options):
    """Report, and read what was stored."""
    made = await report(client, batch, *args, **options)
    noted.append(await client.batch_mismatch(batch.batch_id))
    return made


async def main():
    """Play a group at a temperature other than 1, and report it."""
    page["AsyncClient"].mismatch = watched
    async with page["AsyncClient"](url) as client:
        await client.put_policy(3)
        await page["play"](client, TASKS[0], 2, page["rules"](16, temperature=0.7))
    return await page["report_next"](AutoModelForCausalLM.from_pretrained(model), 3)


verdicts = asyncio.run(main())
print(json.dumps({**noted[0], "returned": verdicts}))
