"""What a process needs of its machine."""

import resource

from fakes import proxying, settings_for
from findings import graded

from proxy.cli.check.network import check_files, check_listening, check_spool, proxy_runs
from proxy.config.settings import load

SPOOLING = {"url": "redis://127.0.0.1:9", "on_failure": "spool"}


async def found(settings):
    return check_listening(settings, runs=await proxy_runs(settings))


async def test_a_free_address_is_well_and_one_in_use_is_a_fault(engine):
    """Both APIs are tried, and who could reach them is said."""
    taken = engine.url.removeprefix("http://")
    told = graded(await found(load(listen="127.0.0.1:0", control={"listen": taken})))

    (fault,) = told["fault"]
    assert "listen: 127.0.0.1:0: any free port; reachable from this machine only -> " == told["ok"][0]
    assert f"control.listen: cannot listen on {taken}: Address already in use" in fault


async def test_an_address_of_another_machine_is_a_fault():
    """192.0.2.1 is nobody's (RFC 5737)."""
    (fault,) = graded(await found(load(listen="192.0.2.1:8400", insecure=True)))["fault"]

    assert "another address of this machine" in fault


async def test_a_proxy_that_runs_there_already_is_only_noted(engine, store):
    """Whoever checks beside a running proxy has made no mistake."""
    async with proxying(engine.url, store) as served:
        (note,) = graded(await found(load(listen=served.url.removeprefix("http://"))))["note"]

    assert "in use by a running TokenTape proxy" in note


async def test_a_proxy_of_two_ports_is_noted_at_both(engine, store):
    """The control API says of both who listens there: the model API wants a key for every word."""
    own = {"listen": "127.0.0.1:0", "api_keys": ["k"]}
    async with proxying(engine.url, store, control=own, agents={"api_keys": ["a"]}) as served:
        listen, control = (url.removeprefix("http://") for url in (served.url, served.control_url))
        told = graded(await found(load(listen=listen, control={"listen": control})))

    assert [] == told["fault"]
    assert [True, True] == ["in use by a running TokenTape proxy" in note for note in told["note"]]


def test_too_few_open_files_for_the_calls_that_may_be_in_flight_are_noted():
    """Two for each call, one for each that waits; the note says how many are needed."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = {"endpoints": [{"url": "http://127.0.0.1:9", "max_in_flight": 10}], "max_queued": 10}
    many = {"endpoints": [{"url": "http://127.0.0.1:9", "max_in_flight": limit}], "max_queued": 10}

    assert 1 == len(graded(list(check_files(load(engines=few))))["ok"])
    (note,) = graded(list(check_files(load(engines=many))))["note"]
    assert f"ulimit -n {2 * limit + 10 + 64 + 128}" in note


def test_a_spool_that_cannot_be_written_is_a_fault(tmp_path):
    """A file where a folder must be, a folder where the file must be; nothing is written by looking."""
    (tmp_path / "file").touch()
    wrong = [load(store={**SPOOLING, "spool_path": path}) for path in (tmp_path / "file" / "steps", tmp_path)]
    right = load(store={**SPOOLING, "spool_path": tmp_path / "new" / "steps"})

    assert ["is not a folder", "it is a folder"] == [
        words for settings in wrong for words in ("is not a folder", "it is a folder")
        if words in graded(list(check_spool(settings)))["fault"][0]
    ]  # fmt: skip
    assert 1 == len(graded(list(check_spool(right)))["ok"])
    assert ["file"] == [path.name for path in tmp_path.iterdir()]
    assert [] == list(check_spool(settings_for(None)))
