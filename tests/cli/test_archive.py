"""`tokentape archive` and `tokentape import`."""

from secrets import token_hex

import orjson
import pytest
from tests.support.archives import archived_versions, archiver, finished
from tests.support.stored import stored_rollout
from tests.support.sweeping import Process, SetClock, open_group
from typer.testing import CliRunner

from proxy.cli.archive import archive, import_dataset
from proxy.cli.main import app
from proxy.config.sections import ArchiveSettings
from proxy.config.settings import load
from proxy.rollouts.group import find_group
from storage import open_store
from storage.options import StoreOptions


@pytest.fixture
def settings_to(server, store):
    """A function that returns settings with the test's store."""

    def made(**options):
        section = {"url": f"unix:{server.socket}", "prefix": store.layout.prefix}
        return load(listen="127.0.0.1:0", store=section, archive=ArchiveSettings(**options))

    return made


async def test_rollouts_leave_a_store_and_return(store, settings_to, tmp_path, capsys):
    """The report has the counts."""
    touched = await finished(store, "a", "b", steps=1)
    settings = settings_to(url=str(tmp_path), older_than_s=0, delete=True)
    await archive(settings, once=True, as_json=True)
    left = [name async for name in store.names()]
    await import_dataset(settings, str(tmp_path), as_json=True)
    archived, imported = map(orjson.loads, capsys.readouterr().out.splitlines())

    assert (left, await archived_versions(tmp_path)) == ([], touched)
    assert tuple(archived[name] for name in ("rollouts", "files", "deleted")) == (2, 1, 2)
    assert imported == {"rollouts": 2, "steps": 2, "existing": 0, "groups": 0}


def test_the_commands_pass_their_options(tmp_path):
    """Of an embedded store, which is empty; a duration that is none is a usage error."""
    store, target = f"embedded:{tmp_path}/store", f"{tmp_path}/archive"
    words = ["archive", "--to", target, "--store", store, "--once", "--json", "--older-than"]
    found = CliRunner().invoke(app, [*words, "0s", "--delete", "--when", "finished"])
    wrong = CliRunner().invoke(app, [*words, "soon"])
    without = CliRunner().invoke(app, ["archive", "--store", store, "--once"])
    imported = CliRunner().invoke(app, ["import", target, "--store", store, "--json"])

    assert (found.exit_code, orjson.loads(found.stdout)["rollouts"]) == (0, 0)
    assert (wrong.exit_code, without.exit_code, imported.exit_code) == (2, 1, 0)
    assert "archive.url" in without.stderr


async def test_groups_that_were_trained_are_put_into_the_queue_again(store, server, tmp_path, capsys):
    """Others are not. A repeated import changes nothing while they are queued; one that is not there has a note."""
    for group, status in (("g1", b'"done"'), ("g2", b'"dropped"'), ("g3", b'"done"')):
        for name in await open_group(store, group, 2):
            await Process(store, SetClock()).finisher.finish(await stored_rollout(store, name), "completed", reward=1)
        await store.groups.update_if(group, {"status": status}, expect={}, now_ms=2000)
    await archiver(store, tmp_path).sweep()
    other = await open_store(f"unix:{server.socket}", StoreOptions(prefix=token_hex(8)))
    settings = load(listen="127.0.0.1:0", store={"url": f"unix:{server.socket}", "prefix": other.layout.prefix})
    for options in ({}, {"requeue": True, "max_staleness": 7}, {"requeue": True, "max_staleness": 7}):
        await import_dataset(settings, str(tmp_path), as_json=True, **options)
    await other.groups.update_if("g1", {"status": b'"claimed"', "lease_ms": b"9999999999999"}, expect={}, now_ms=2000)
    await import_dataset(settings, str(tmp_path), as_json=False, requeue=True)
    printed = capsys.readouterr()
    imported = [orjson.loads(line) for line in printed.out.splitlines()]

    assert [(each["rollouts"], each["groups"]) for each in imported] == [(6, 3), (0, 0), (0, 0)]
    assert [each.get("requeued") for each in imported] == [None, 2, 2]
    assert "not requeued: Group 'g1' is claimed" in printed.err
    assert {queued.group for queued in (await other.queue.read(limit=9)).groups} == {"g1", "g3"}
    assert [
        (state.requeued, state.max_staleness)
        for state in [(await find_group(other, name)).states["default"] for name in ("g1", "g3")]
    ] == [(1, 7), (1, 7)]
    await other.close()
