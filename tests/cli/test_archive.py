"""`tokentape archive` and `tokentape import`."""

import orjson
import pytest
from tests.support.archives import archived_versions, finished
from typer.testing import CliRunner

from proxy.cli.archive import archive, import_dataset
from proxy.cli.main import app
from proxy.config.sections import ArchiveSettings
from proxy.config.settings import load


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

    assert ([], touched) == (left, await archived_versions(tmp_path))
    assert (2, 1, 2) == tuple(archived[name] for name in ("rollouts", "files", "deleted"))
    assert {"rollouts": 2, "steps": 2, "existing": 0, "groups": 0} == imported


def test_the_commands_pass_their_options(tmp_path):
    """Of an embedded store, which is empty; a duration that is none is a usage error."""
    store, target = f"embedded:{tmp_path}/store", f"{tmp_path}/archive"
    words = ["archive", "--to", target, "--store", store, "--once", "--json", "--older-than"]
    found = CliRunner().invoke(app, [*words, "0s", "--delete", "--when", "finished"])
    wrong = CliRunner().invoke(app, [*words, "soon"])
    without = CliRunner().invoke(app, ["archive", "--store", store, "--once"])
    imported = CliRunner().invoke(app, ["import", target, "--store", store, "--json"])

    assert (0, 0) == (found.exit_code, orjson.loads(found.stdout)["rollouts"])
    assert (2, 1, 0) == (wrong.exit_code, without.exit_code, imported.exit_code)
    assert "archive.url" in without.stderr
