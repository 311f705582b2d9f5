"""`tokentape rollout`, `policy` and `open`, against a running proxy."""

import asyncio

import orjson
import pytest

from proxy.cli.actions import (
    delete_rollout,
    finish_rollout,
    open_page,
    pause_policy,
    requeue_group,
    resume_policy,
    reward_rollout,
    set_policy,
)
from proxy.cli.export import Refused
from proxy.rollouts.policy import unknown_staleness


async def test_a_rollout_is_rewarded_finished_and_deleted_and_each_can_be_repeated(
    address, recorded, call_proxy, capsys
):
    """Other values are an error with the proxy's message."""
    step = (await call_proxy("GET", "/rollouts/choices/steps"))["steps"][0]["step_id"]
    for _ in range(2):
        await reward_rollout(address, "choices", {"reward": -0.5, "step_rewards": {step: 1.0}}, as_json=False)
        body = {"status": "failed", "reward": None, "metadata": {"task": 7}}
        await finish_rollout(address, "choices", body, as_json=False)
    with pytest.raises(Refused, match="409"):
        await finish_rollout(address, "choices", {"status": "completed"}, as_json=False)
    shown = await call_proxy("GET", "/rollouts/choices")
    for _ in range(2):
        await delete_rollout(address, "choices", as_json=False)
    gone = await call_proxy("GET", "/rollouts/choices")

    assert ("failed", -0.5, {step: 1.0}, {"task": 7}) == tuple(
        shown[name] for name in ("status", "reward", "step_rewards", "metadata")
    )
    assert "not_found" == gone["error"]["code"]
    assert [
        "rollout 'choices': open, reward -0.5, 1 steps with a reward",
        "rollout 'choices': failed, reward -0.5",
        "rollout 'choices': failed, reward -0.5, 1 steps with a reward",
        "rollout 'choices': failed, reward -0.5",
        "rollout 'choices': deleted",
        "rollout 'choices': does not exist; nothing was deleted",
    ] == capsys.readouterr().err.splitlines()


async def test_ids_of_any_kind_are_encoded(address, call_proxy, capsys):
    """As JSON the result is the control API's response."""
    name = "a/b c#?\u00e4"
    await call_proxy("POST", "/rollouts", {"rollout_id": name})
    await finish_rollout(address, name, {"status": "completed"}, as_json=True)
    finished = orjson.loads(capsys.readouterr().out)
    assert ("completed", name) == (finished["status"], finished["rollout_id"])
    for exists in (True, False):
        await delete_rollout(address, name, as_json=True)
        assert {"rollout_id": name, "deleted": exists} == orjson.loads(capsys.readouterr().out)


async def test_a_rollout_that_cannot_be_read_is_deleted(address, store, capsys):
    await store.open("damaged", {"metadata": b"{{{"}, now_ms=1)
    await delete_rollout(address, "damaged", as_json=False)

    assert "rollout 'damaged': deleted\n" == capsys.readouterr().err
    assert await store.get("damaged") is None


async def test_the_replacement_of_a_failed_member_is_named(address, call_proxy, capsys):
    opened = await call_proxy("POST", "/groups", {"group_id": "g", "size": 1, "replace": 1})
    await finish_rollout(address, opened["rollouts"][0]["rollout_id"], {"status": "failed"}, as_json=False)

    assert "; replaced by " in capsys.readouterr().err


async def test_a_group_is_requeued_and_an_open_one_is_refused(address, call_proxy, capsys):
    opened = await call_proxy("POST", "/groups", {"group_id": "g/1", "size": 1})
    with pytest.raises(Refused, match="is open"):
        await requeue_group(address, "g/1", {"max_staleness": None, "policy": None}, as_json=False)
    body = {"status": "completed", "reward": 1.0}
    await call_proxy("POST", f"/rollouts/{opened['rollouts'][0]['rollout_id']}/finish", body)
    batch = await call_proxy("POST", "/batches/claim", {"consumer": "c", "min_group": 2})
    assert [("g/1", "too_few_members")] == [(group["group_id"], group["code"]) for group in batch["dropped"]]
    for _ in range(2):
        await requeue_group(address, "g/1", {"max_staleness": 3, "policy": None}, as_json=False)
    await requeue_group(address, "g/1", {"max_staleness": None, "policy": "default"}, as_json=True)
    captured = capsys.readouterr()

    assert ["group 'g/1': complete"] * 2 == captured.err.splitlines()
    assert 1 == orjson.loads(captured.out)["requeued"]


async def test_a_policy_is_announced_paused_and_resumed(address, call_proxy, http, capsys):
    """A pause returns whether no call is in flight."""
    assert await pause_policy(address, "default", {"mode": "reject", "in_flight": "keep"}, 5, as_json=False)
    async with http.post(f"{address.url}/v1/completions", json={"prompt": "once"}) as refused:
        assert 429 == refused.status
    await set_policy(address, "default", {"version": "7"}, as_json=False)
    await set_policy(address, "default", {"version": "-7", "run": "a", "new_epoch": None}, as_json=False)
    await resume_policy(address, "default", as_json=False)
    async with http.post(f"{address.url}/v1/completions", json={"prompt": "once"}) as answered:
        assert 200 == answered.status

    assert "-7" == (await call_proxy("GET", "/policies"))["policies"][0]["version"]
    assert [
        "policy 'default': new calls are rejected, no calls in flight",
        "policy 'default': version 7",
        unknown_staleness("-7"),
        "policy 'default': version -7, epoch 1",
        "policy 'default': calls are sent",
    ] == capsys.readouterr().err.splitlines()
    with pytest.raises(Refused, match="404"):
        await set_policy(address, "no/such", {"version": "1"}, as_json=False)


async def test_a_pause_with_a_call_in_flight_is_not_drained(address, call_proxy, http, monkeypatch):
    slow = {"prompt": "once", "max_tokens": 20_000, "ignore_eos": True}
    call = asyncio.create_task(http.post(f"{address.url}/rollouts/r/v1/completions", json=slow))
    while b"tokentape_in_flight_calls 1.0" not in await (await http.get(f"{address.url}/metrics")).read():
        assert not call.done()
    assert not await pause_policy(address, "default", {"mode": "wait", "in_flight": "keep"}, 0, as_json=False)
    call.cancel()
    await asyncio.wait([call])
    assert await pause_policy(address, "default", {"mode": "wait", "in_flight": "keep"}, 30, as_json=False)


@pytest.mark.parametrize(
    ("names", "path"),
    [((None, None), ""), (("a/b", None), "#/rollout/a%2Fb"), ((None, "g"), "#/group/g")],
)
async def test_the_page_is_opened_in_the_browser_and_printed(address, capsys, monkeypatch, names, path):
    """Without a browser a note explains it."""
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda url: opened.append(url) or len(opened) < 2)
    await open_page(address.url, *names)
    assert "" == capsys.readouterr().err
    await open_page(f"{address.url}/", *names)
    printed = capsys.readouterr()

    assert [f"{address.url}/ui{path}"] * 2 == opened
    assert f"{address.url}/ui{path}\n" == printed.out
    assert "no browser found" in printed.err


async def test_no_page_is_opened_where_no_proxy_responds(monkeypatch):
    monkeypatch.setattr("webbrowser.open", pytest.fail)
    with pytest.raises(OSError, match="Connection refused"):
        await open_page("http://127.0.0.1:9", None, None)
