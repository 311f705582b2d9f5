"""`tokentape export`: rows fetched into a file."""

import aiohttp
import orjson
import pytest
from fakes import settings_for

from proxy.cli.export import ExportRequest, download
from proxy.server.listener import running, simulating
from proxy.simulator.options import Options

KEYS = {"agents": {"api_keys": ["agent"]}, "control": {"api_keys": ["control"]}}


@pytest.fixture
async def recorded(tmp_path):
    """A store with two rollouts of one step each, in groups of their own, and the settings to open it."""
    async with simulating("127.0.0.1:0", Options()) as engine:
        settings = settings_for(engine, store={"url": f"embedded:{tmp_path / 'store'}"}, **KEYS)
        async with running(settings) as served, aiohttp.ClientSession(headers={"X-Api-Key": "agent"}) as http:
            for name in ("a/b", "c"):
                headers = {"X-Rollout-Id": name, "X-Rollout-Group": f"g-{name}"}
                body = {"messages": [{"role": "user", "content": "hi"}]}
                async with http.post(served.url + "/v1/chat/completions", json=body, headers=headers) as response:
                    assert 200 == response.status
            yield settings, served.url


def wanted(**named) -> ExportRequest:
    return ExportRequest(
        **{"format": "sequences", "rollouts": (), "group": None, "include": "exact", "container": "ndjson", **named}
    )


async def rows(out, url, *, settings=None, key="control", **named) -> list[str]:
    await download(url, settings, wanted(**named), out, api_key=key)
    return sorted(orjson.loads(line)["rollout_id"] for line in out.read_bytes().splitlines())


async def test_rollouts_are_chosen_by_name_by_group_or_not_at_all(recorded, tmp_path):
    """Names of any kind."""
    _, url = recorded
    out = tmp_path / "rows"

    assert ["a/b", "c"] == await rows(out, url)
    assert ["a/b"] == await rows(out, url, rollouts=("a/b",))
    assert ["a/b", "c"] == await rows(out, url, rollouts=("c", "a/b"))
    assert ["c"] == await rows(out, url, group="g-c")


async def test_a_refusal_is_told_and_leaves_the_file_of_before(recorded, tmp_path):
    """A missing key, an unknown rollout, nobody there."""
    _, url = recorded
    out = tmp_path / "rows"
    out.write_text("before")
    for named in ({"key": None}, {"rollouts": ("nobody",)}, {"format": "nope"}):
        with pytest.raises(OSError, match="returned 40"):
            await rows(out, url, **named)
    with pytest.raises(OSError, match="request to .* failed"):
        await rows(out, "http://127.0.0.1:9")

    assert "before" == out.read_text()


async def test_whatever_else_the_route_takes_is_passed_on_and_what_it_does_not_take_is_refused(recorded, tmp_path):
    """By the route's own names; its sentence says which there are."""
    _, url = recorded
    out = tmp_path / "rows"
    prompt_too_long = ("max_len", "1")

    assert [] == await rows(out, url, more=(prompt_too_long, ("overlong", "drop")))
    with pytest.raises(OSError, match="Unknown query parameter 'branchs'; use one of .*branches"):
        await rows(out, url, more=(("branchs", "last"),))


async def test_rollouts_that_the_format_cannot_say_are_told_and_no_row(recorded, tmp_path):
    """Two conversations under one name are two sequences; the other rollout's row is there, and nothing else."""
    _, url = recorded
    async with aiohttp.ClientSession(headers={"X-Api-Key": "agent", "X-Rollout-Id": "c"}) as http:
        body = {"messages": [{"role": "user", "content": "another"}]}
        async with http.post(url + "/v1/chat/completions", json=body) as response:
            assert 200 == response.status
    out = tmp_path / "rows"
    report = await download(url, None, wanted(format="trl"), out, api_key="control")

    assert (1, 1) == (report.rows, len(out.read_bytes().splitlines()))
    assert ["Format 'trl' requires one sequence per rollout; rollout 'c' has 2 sequences"] == [
        why.partition(".")[0] for why in report.skipped
    ]
