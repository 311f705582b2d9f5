"""The command `tokentape mismatch`."""

import orjson

from proxy.cli.runner import Exit
from tokentape.mismatch_sums import report


async def test_the_mismatch_of_a_batch_is_shown(invoke, call_proxy):
    """With --json the response of the proxy; a batch of which nothing was reported is an error."""
    (opened,) = (await call_proxy("POST", "/groups", {"group_id": "g", "size": 1}))["rollouts"]
    name = opened["rollout_id"]
    chat = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
    await call_proxy("POST", f"/rollouts/{name}/v1/chat/completions", chat)
    await call_proxy("POST", f"/rollouts/{name}/finish", {"status": "completed", "reward": 1.0})
    batch = await call_proxy("POST", "/batches/claim", {"consumer": "c", "format": "sequences"})
    missing, _, errors = await invoke("mismatch", batch["batch_id"])
    (row,) = batch["groups"][0]["data"]
    recorded = [value for value, bit in zip(row["logprobs"], row["mask"], strict=True) if bit]
    batch_id, body = report(batch["batch_id"], [row], [recorded], policy_version="1", rank=0)
    await call_proxy("POST", f"/batches/{batch_id}/mismatch", body)
    code, out, _ = await invoke("mismatch", batch_id)
    _, as_json, _ = await invoke("mismatch", batch_id, "--json")

    assert (missing, "no part of it was reported" in errors) == (Exit.FAILED, True)
    assert (code, out[:9]) == (0, "too_few: ")
    assert out.splitlines()[1] == "1 rows, log of the ratio: mean 0, absolute 0"
    assert ["all", "all", str(len(recorded))] == out.splitlines()[4].split()[:3]
    assert len(recorded) == orjson.loads(as_json)["tokens"]
