"""The commands of `tokentape rollout`, `group`, `policy`, `engines` and `open`."""

import asyncio

import orjson
import pytest
from tests.support.fakes import proxying
from typer.testing import CliRunner

from proxy.cli.commands import pause_policy
from proxy.cli.main import app
from proxy.cli.runner import Exit

POLICIES = {"student": {"models": ["simulated"]}, "judge": {"models": ["j-*"], "train": False}}


@pytest.fixture
async def invoke(address):
    """A function that runs a command against the proxy; it returns the exit code, standard output and standard error."""

    async def run(*words: str, url: str = address.url) -> tuple[int, str, str]:
        done = await asyncio.to_thread(CliRunner().invoke, app, words, env={"TOKENTAPE_URL": url})
        assert isinstance(done.exception, SystemExit | None)
        return done.exit_code, done.stdout, done.stderr

    return run


async def test_rollouts_are_rewarded_finished_and_deleted(invoke, recorded, call_proxy):
    """A negative reward is a number and not an option."""
    step = (await call_proxy("GET", "/rollouts/choices/steps"))["steps"][0]["step_id"]
    assert (0, "", "rollout 'choices': open, reward -1.5\n") == await invoke("rollout", "reward", "choices", "-1.5")
    code, out, _ = await invoke("rollout", "reward", "choices", "--step", f"{step}=2e-1", "--json")
    assert (0, {step: 0.2}, -1.5) == (code, *map(orjson.loads(out).get, ("step_rewards", "reward")))
    code, out, _ = await invoke("rollout", "finish", "choices", "--metadata", '{"task": 1}', "--json")
    assert (0, "completed", {"task": 1}) == (code, *map(orjson.loads(out).get, ("status", "metadata")))
    code, _, errors = await invoke("rollout", "finish", "choices", "--status", "failed")
    assert (Exit.FAILED, True) == (code, "409" in errors)
    assert (0, "", "rollout 'choices': deleted\n") == await invoke("rollout", "delete", "choices")
    missing = "rollout 'choises': does not exist; nothing was deleted\n"
    assert (0, "", missing) == await invoke("rollout", "delete", "choises")


async def test_groups_are_listed_and_shown(invoke, recorded, call_proxy):
    await call_proxy("POST", "/groups", {"group_id": "h", "size": 2})
    code, out, _ = await invoke("group", "list")
    assert (0, ["h", "g"]) == (code, [line.split()[0] for line in out.splitlines()[1:]])
    code, out, _ = await invoke("group", "show", "g")
    assert (0, ["g", "choices"]) == (code, [line.split()[0] for line in out.splitlines() if line][1::2])
    code, out, _ = await invoke("group", "show", "h", "--json")
    assert (0, 2) == (code, len(orjson.loads(out)["rollouts"]))
    assert Exit.FAILED == (await invoke("group", "show", "none"))[0]


async def test_policies_are_listed_announced_paused_and_resumed(store, address, invoke):
    """Each by its name."""
    async with proxying(address.url, store, policies=POLICIES) as served:
        for more in (("-3",), ("5", "--run", "a"), ("-3", "--new-epoch")):
            assert 0 == (await invoke("policy", "set", *more, "--policy", "student", url=served.url))[0]
        code, _, errors = await invoke("policy", "pause", "--policy", "judge", "--drain-s", "30", url=served.url)
        assert (0, "policy 'judge': new calls wait, no calls in flight\n") == (code, errors)
        _, out, _ = await invoke("policy", "list", "--json", url=served.url)
        found = {policy["name"]: (policy["version"], policy["mode"]) for policy in orjson.loads(out)["policies"]}
        assert {"student": ("-3", None), "judge": (None, "wait")}.items() <= found.items()
        code, out, _ = await invoke("policy", "list", url=served.url)
        assert ["student", "-3", "2"] in [line.split()[:3] for line in out.splitlines()]
        assert ["judge", "wait", "no", "j-*"] in [line.split() for line in out.splitlines()]
        assert (0, "policy 'judge': calls are sent\n") == (
            await invoke("policy", "resume", "--policy", "judge", url=served.url)
        )[::2]
        assert Exit.FAILED == (await invoke("policy", "set", "1", "--policy", "none", url=served.url))[0]


@pytest.mark.parametrize(("options", "code"), [((), 0), (("--drain-s", "1"), 3), (("--abort",), 3)])
async def test_a_pause_with_calls_in_flight_is_3_if_they_should_have_ended(invoke, monkeypatch, options, code):
    async def undrained(*_, as_json):
        assert pause_policy
        return False

    monkeypatch.setattr("proxy.cli.commands.pause_policy", undrained)

    assert code == (await invoke("policy", "pause", *options))[0]


async def test_engines_are_listed_with_their_states(invoke, store, address):
    """An engine that does not respond has its last failure."""
    endpoints = [{"url": address.url, "name": "up"}, {"url": "http://127.0.0.1:9", "name": "down"}]
    async with proxying(None, store, engines={"endpoints": endpoints}) as served:
        code, out, _ = await invoke("engines", url=served.url)
        _, as_json, _ = await invoke("engines", "--json", url=served.url)
    up, down = out.splitlines()[1:]

    assert (0, ["up", "healthy"], "down") == (code, up.split()[:2], down.split()[0])
    assert down.split()[1] in {"UNREACHABLE", "ejected"}
    assert "cannot connect to 127.0.0.1:9: Connection refused" in down
    assert [True, False] == [engine["healthy"] for engine in orjson.loads(as_json)["engines"]]


async def test_rewards_of_threads_are_set_by_name(invoke, recorded):
    code, out, _ = await invoke("rollout", "reward", "choices", "--thread", "main=0.25", "--json")
    repeated, _, text = await invoke("rollout", "reward", "choices", "--thread", "main=0.25")
    invalid, _, error = await invoke("rollout", "reward", "choices", "--thread", "main")
    unknown, _, refused = await invoke("rollout", "reward", "choices", "--thread", "other=1")

    assert (0, {"main": 0.25}) == (code, orjson.loads(out)["thread_rewards"])
    assert 0 == repeated
    assert "1 thread with a reward" in text
    assert (2, True) == (invalid, "use THREAD=NUMBER" in error)
    assert unknown != 0
    assert "the threads are main" in refused
