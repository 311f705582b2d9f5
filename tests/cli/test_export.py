"""`tokentape export`: files, options, reports, and posting to Atropos."""

import asyncio

import aiohttp
import orjson
import pytest
from aiohttp import web
from tests.support.fakes import proxying, settings_for
from typer.testing import CliRunner

from proxy.cli.console import notes
from proxy.cli.control import ControlAddress
from proxy.cli.export import ExportRequest, download, export_to
from proxy.cli.main import app
from proxy.cli.push import PushOptions, post_groups
from proxy.server.listener import running, simulating
from proxy.simulator.options import Options


def export_request(*rollouts: str, container: str = "ndjson") -> ExportRequest:
    return ExportRequest("sequences", rollouts, None, "exact", container)


async def test_the_report_has_the_bytes_rows_and_skipped_steps(address, recorded, tmp_path, capsys):
    """Standard error has the skipped steps too."""
    out = tmp_path / "rows"
    await export_to(address, export_request("demo", "bad"), out, as_json=True)
    printed = capsys.readouterr()
    report = orjson.loads(printed.out)

    assert (str(out), "sequences", "ndjson") == (report["out"], report["format"], report["container"])
    assert (out.stat().st_size, 2) == (report["bytes"], report["rows"])
    assert len(out.read_bytes().splitlines()) == 2
    (skipped,) = report["skipped"]
    assert skipped.startswith("1; ")
    assert f"skipped: {skipped}" in printed.err


async def test_without_json_standard_output_has_the_rows_only(address, recorded, capfdbinary):
    await export_to(address, export_request("demo"), None, as_json=False)
    rows = capfdbinary.readouterr().out.splitlines()

    assert [orjson.loads(row)["rollout_id"] for row in rows] == ["demo", "demo"]


async def test_rows_of_a_container_without_lines_are_not_counted(address, recorded, tmp_path, capsys):
    """The number of rows is null."""
    await export_to(address, export_request("demo", container="json"), tmp_path / "rows", as_json=True)

    assert None is orjson.loads(capsys.readouterr().out)["rows"]


@pytest.mark.parametrize("scored", [True, False])
async def test_the_report_of_a_push_has_a_result_per_group(address, call_proxy, engine, capsys, scored):
    async def respond(request, body):
        return web.json_response({"max_token_len": 0, "status": "received"})

    engine.respond = respond
    engine.fixed_responses = {}
    await call_proxy("POST", "/groups", {"group_id": "g", "size": 1})
    (member,) = (await call_proxy("GET", "/groups/g"))["rollouts"]
    name = member["rollout_id"]
    await call_proxy("POST", f"/rollouts/{name}/v1/completions", {"prompt": "once", "max_tokens": 4})
    if scored:
        await call_proxy("POST", f"/rollouts/{name}/finish", {"status": "completed", "reward": 1.0})
    is_received = await post_groups(address, export_request(), PushOptions(engine.url), notes(), as_json=True)
    report = orjson.loads(capsys.readouterr().out)

    assert (report["received"], report["groups"][0]["result"] == "received") == (is_received, scored)
    assert bool(report["groups"][0]["reasons"]) != scored


API_KEYS = {"agents": {"api_keys": ["agent"]}, "control": {"api_keys": ["control"]}}


@pytest.fixture
async def recorded_store(tmp_path):
    """A store with two rollouts in two groups: its settings and the proxy's URL."""
    async with simulating("127.0.0.1:0", Options()) as engine:
        settings = settings_for(engine, store={"url": f"embedded:{tmp_path / 'store'}"}, **API_KEYS)
        async with running(settings) as served, aiohttp.ClientSession(headers={"X-Api-Key": "agent"}) as http:
            for name in ("a/b", "c"):
                headers = {"X-Rollout-Id": name, "X-Rollout-Group": f"g-{name}"}
                body = {"messages": [{"role": "user", "content": "hi"}]}
                async with http.post(served.url + "/v1/chat/completions", json=body, headers=headers) as response:
                    assert response.status == 200
            yield settings, served.url


def file_request(**named) -> ExportRequest:
    return ExportRequest(
        **{"format": "sequences", "rollouts": (), "group": None, "include": "exact", "container": "ndjson", **named}
    )


async def rows(out, url, *, settings=None, key="control", **named) -> list[str]:
    await download(ControlAddress(url, settings, key), file_request(**named), out)
    return sorted(orjson.loads(line)["rollout_id"] for line in out.read_bytes().splitlines())


async def test_an_export_is_of_the_named_rollouts_a_group_or_everything(recorded_store, tmp_path):
    _, url = recorded_store
    out = tmp_path / "rows"

    assert await rows(out, url) == ["a/b", "c"]
    assert await rows(out, url, rollouts=("a/b",)) == ["a/b"]
    assert await rows(out, url, rollouts=("c", "a/b")) == ["a/b", "c"]
    assert await rows(out, url, group="g-c") == ["c"]


async def test_a_failed_export_raises_and_keeps_the_previous_file(recorded_store, tmp_path):
    """The reasons are a missing key, an unknown rollout or format, and an unreachable proxy."""
    _, url = recorded_store
    out = tmp_path / "rows"
    out.write_text("before")
    for named in ({"key": None}, {"rollouts": ("absent",)}, {"format": "nope"}):
        with pytest.raises(OSError, match="returned 40"):
            await rows(out, url, **named)
    with pytest.raises(OSError, match="request to .* failed"):
        await rows(out, "http://127.0.0.1:9")

    assert out.read_text() == "before"


async def test_other_options_are_sent_as_query_parameters(recorded_store, tmp_path):
    """An unknown one is an error of the proxy, which lists the valid ones."""
    _, url = recorded_store
    out = tmp_path / "rows"
    prompt_too_long = ("max_len", "1")

    assert await rows(out, url, more=(prompt_too_long, ("overlong", "drop"))) == []
    with pytest.raises(OSError, match="Unknown query parameter 'branchs'; use one of .*branches"):
        await rows(out, url, more=(("branchs", "last"),))


async def test_rollouts_that_the_format_cannot_express_are_skipped_with_the_reason(recorded_store, tmp_path):
    """Two conversations in one rollout are two sequences."""
    _, url = recorded_store
    async with aiohttp.ClientSession(headers={"X-Api-Key": "agent", "X-Rollout-Id": "c"}) as http:
        body = {"messages": [{"role": "user", "content": "another"}]}
        async with http.post(url + "/v1/chat/completions", json=body) as response:
            assert response.status == 200
    out = tmp_path / "rows"
    report = await download(ControlAddress(url, None, "control"), file_request(format="trl"), out)

    assert (report.rows, len(out.read_bytes().splitlines())) == (1, 1)
    assert [why.partition(".")[0] for why in report.skipped] == [
        "Format 'trl' requires one sequence per rollout; rollout 'c' has 2 sequences"
    ]


async def test_policy_selects_the_steps_of_one_policy(store, http, tmp_path):
    """Given as `--policy`; an unknown one is an error of the proxy, which lists the policies."""
    policies = {"planner": {"models": ["planner"]}, "judge": {"models": ["judge"], "train": False}}
    async with simulating("127.0.0.1:0", Options()) as engine, proxying(engine, store, policies=policies) as served:
        for model in policies:
            body = {"model": model, "prompt": "once", "max_tokens": 2}
            async with http.post(f"{served.url}/rollouts/{model}/v1/completions", json=body) as response:
                assert response.status == 200
        out = tmp_path / "rows"
        assert await rows(out, served.url) == ["planner"]
        for policy in policies:
            options = ["--url", served.url, "--out", str(out), "--policy", policy]
            done = await asyncio.to_thread(CliRunner().invoke, app, ["export", *options])
            assert (done.exit_code, orjson.loads(out.read_bytes())["policy"]) == (0, policy)
        with pytest.raises(OSError, match="Policy 'critic' not found. The policies are planner, judge, default."):
            await rows(out, served.url, more=(("policy", "critic"),))


async def test_rescore_adds_the_logprobs_of_the_policy_now(store, http, tmp_path):
    """Given as `--rescore`; the most likely tokens by `--query`."""
    async with simulating("127.0.0.1:0", Options()) as engine, proxying(engine, store) as served:
        body = {"model": "simulated", "prompt": "once", "max_tokens": 2}
        async with http.post(f"{served.url}/rollouts/r/v1/completions", json=body) as response:
            assert response.status == 200
        out = tmp_path / "rows"
        options = ["--url", served.url, "--out", str(out), "--rescore", "policy", "--query", "rescore_top_k=1"]
        done = await asyncio.to_thread(CliRunner().invoke, app, ["export", *options])
        row = orjson.loads(out.read_bytes())

    assert (done.exit_code, row["rescored"]["model"]) == (0, "simulated")
    assert row["logprobs"] == pytest.approx(row["rescored_logprobs"], abs=1e-6)
    assert len(row["rescored_top_ids"][-1]) == 1
