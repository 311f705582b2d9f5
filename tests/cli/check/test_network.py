"""Checks of addresses, open files, the journal's path, and the addresses of engines."""

import resource
from urllib.parse import urlsplit

import pytest
from tests.support.fakes import proxying, settings_for
from tests.support.findings import engine_findings, graded

from proxy.cli.check.network import check_files, check_listening, check_spool, find_engine, is_tokentape, proxy_runs
from proxy.config.settings import Settings, load
from proxy.server.listener import simulating
from proxy.simulator.options import Options

JOURNALING = {"url": "redis://127.0.0.1:9", "on_failure": "spool"}


async def found(settings):
    return check_listening(settings, runs=await proxy_runs(settings))


async def test_a_free_address_is_ok_and_one_in_use_is_a_fault(engine):
    """Both APIs are checked, with who can reach them."""
    taken = engine.url.removeprefix("http://")
    findings = graded(await found(load(listen="127.0.0.1:0", control={"listen": taken})))

    (fault,) = findings["fault"]
    assert "listen: 127.0.0.1:0: any free port; reachable from this machine only -> " == findings["ok"][0]
    assert f"control.listen: cannot listen on {taken}: Address already in use" in fault


async def test_an_address_of_another_machine_is_a_fault():
    """192.0.2.1 is reserved for documentation (RFC 5737)."""
    (fault,) = graded(await found(load(listen="192.0.2.1:8400", insecure=True)))["fault"]

    assert "another address of this machine" in fault


async def test_an_address_in_use_by_a_running_proxy_is_a_note(engine, store):
    async with proxying(engine.url, store) as served:
        (note,) = graded(await found(load(listen=served.url.removeprefix("http://"))))["note"]

    assert "in use by a running TokenTape proxy" in note


async def test_both_addresses_of_a_running_proxy_are_notes(engine, store):
    """The control API reports both, since the model API requires a key."""
    own = {"listen": "127.0.0.1:0", "api_keys": ["k"]}
    async with proxying(engine.url, store, control=own, agents={"api_keys": ["a"]}) as served:
        listen, control = (url.removeprefix("http://") for url in (served.url, served.control_url))
        findings = graded(await found(load(listen=listen, control={"listen": control})))

    assert [] == findings["fault"]
    assert [True, True] == ["in use by a running TokenTape proxy" in note for note in findings["note"]]


def test_a_limit_of_open_files_below_the_calls_in_flight_is_a_note():
    """A call needs two files, a queued one needs one; the note has the number."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = {"endpoints": [{"url": "http://127.0.0.1:9", "max_in_flight": 10}], "max_queued": 10}
    many = {"endpoints": [{"url": "http://127.0.0.1:9", "max_in_flight": limit}], "max_queued": 10}

    assert 1 == len(graded(list(check_files(load(engines=few))))["ok"])
    (note,) = graded(list(check_files(load(engines=many))))["note"]
    assert f"ulimit -n {2 * limit + 10 + 64 + 128}" in note


def test_an_unusable_path_of_the_journal_is_a_fault(tmp_path):
    """The check writes nothing."""
    (tmp_path / "file").touch()
    wrong = [load(store={**JOURNALING, "spool_path": path}) for path in (tmp_path / "file" / "steps", tmp_path)]
    right = load(store={**JOURNALING, "spool_path": tmp_path / "new" / "steps"})

    assert ["is not a folder", "it is a folder"] == [
        words for settings in wrong for words in ("is not a folder", "it is a folder")
        if words in graded(list(check_spool(settings)))["fault"][0]
    ]  # fmt: skip
    assert 1 == len(graded(list(check_spool(right)))["ok"])
    assert ["file"] == [path.name for path in tmp_path.iterdir()]
    assert [] == list(check_spool(settings_for(None)))


@pytest.fixture
async def engine_url():
    """The URL of an engine that lists models, without TLS."""
    async with simulating("127.0.0.1:0", Options()) as url:
        yield url


@pytest.mark.parametrize("wrong", ["{}/v1/chat/completions", "{}/api/", "https://{host}", "https://{host}/v1/x"])
async def test_the_fix_of_a_wrong_engine_url_is_the_right_one(engine_url, wrong):
    """The URL has an additional path, https instead of http, or both."""
    url = wrong.format(engine_url, host=urlsplit(engine_url).netloc)
    (fault,) = graded(await engine_findings(url))["fault"]

    assert f"use {engine_url}, where an engine responds" in fault


async def test_an_engine_url_may_end_in_v1(engine_url):
    assert [] == graded(await engine_findings(f"{engine_url}/v1/"))["fault"]


async def test_an_unreachable_engine_is_one_fault():
    assert await find_engine("http://127.0.0.1:9") is None
    (fault,) = graded(await engine_findings("http://127.0.0.1:9"))["fault"]

    assert 1 == fault.count("is unreachable")
    assert "check that it is running" in fault


async def test_a_tokentape_proxy_as_the_engine_is_a_fault(engine_url, store):
    """It is a running one, or the one that this configuration would start."""
    async with proxying(engine_url, store) as served:
        (fault,) = graded(await engine_findings(served.url))["fault"]

    assert "this is a TokenTape proxy" in fault
    assert await is_tokentape("http://localhost:8400", Settings())
    assert not await is_tokentape(engine_url, Settings())
