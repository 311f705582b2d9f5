"""`tokentape export`: what it says, and its report."""

import orjson
import pytest
from aiohttp import web

from proxy.cli.export import ExportRequest, export_to
from proxy.cli.push import PushOptions, push_all


def wanted(*rollouts: str, container: str = "ndjson") -> ExportRequest:
    return ExportRequest("sequences", rollouts, None, "exact", container)


async def test_the_report_counts_what_is_in_the_file(address, recorded, tmp_path, capsys):
    """Bytes and rows; what is left out is told by count and reason, to people as well."""
    out = tmp_path / "rows"
    await export_to(address.url, None, wanted("demo", "bad"), out, api_key=None, as_json=True)
    said = capsys.readouterr()
    told = orjson.loads(said.out)

    assert (str(out), "sequences", "ndjson") == (told["out"], told["format"], told["container"])
    assert (out.stat().st_size, 2) == (told["bytes"], told["rows"])
    assert 2 == len(out.read_bytes().splitlines())
    (left_out,) = told["skipped"]
    assert left_out.startswith("1; ")
    assert f"skipped: {left_out}" in said.err


async def test_without_json_standard_output_is_the_rows_alone(address, recorded, capfdbinary):
    """So that it can be piped."""
    await export_to(address.url, None, wanted("demo"), None, api_key=None, as_json=False)
    rows = capfdbinary.readouterr().out.splitlines()

    assert ["demo", "demo"] == [orjson.loads(row)["rollout_id"] for row in rows]


async def test_rows_of_a_container_without_lines_are_not_counted(address, recorded, tmp_path, capsys):
    """Null, rather than a guess."""
    await export_to(address.url, None, wanted("demo", container="json"), tmp_path / "rows", api_key=None, as_json=True)

    assert None is orjson.loads(capsys.readouterr().out)["rows"]


@pytest.mark.parametrize("scored", [True, False])
async def test_groups_are_told_one_by_one(address, call_proxy, engine, capsys, scored):
    """What became of each, and whether the service has them all."""

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
    is_received = await push_all(address.url, None, wanted(), PushOptions(engine.url), api_key=None, as_json=True)
    told = orjson.loads(capsys.readouterr().out)

    assert (is_received, scored) == (told["received"], told["groups"][0]["result"] == "received")
    assert bool(told["groups"][0]["reasons"]) != scored
