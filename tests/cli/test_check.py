"""Checks of addresses, open files, the journal's path, keys, the store and addresses of engines; printing findings."""

import asyncio
import resource
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import orjson
import pytest
from tests.support.fakes import proxying, settings_for
from tests.support.findings import engine_findings, graded

from proxy.cli.check import (
    Finding,
    check_files,
    check_keys,
    check_listening,
    check_spool,
    check_store,
    find_engine,
    is_tokentape,
    print_findings,
    proxy_runs,
    refused,
)
from proxy.cli.runner import Exit
from proxy.cli.settings import InvalidSettings
from proxy.clock import SystemClock
from proxy.config.sections import StoreSettings
from proxy.config.settings import Settings, load
from proxy.server.listener import simulating
from proxy.simulator.options import Options
from storage.embedded.server import bundled_server
from storage.opening import connections_to
from storage.options import StoreOptions, parse_url

JOURNALING = {"url": "redis://127.0.0.1:9", "on_failure": "spool"}


async def found(settings):
    return check_listening(settings, runs=await proxy_runs(settings))


async def test_a_free_address_is_ok_and_one_in_use_is_a_fault(engine):
    """Both APIs are checked, with who can reach them."""
    taken = engine.url.removeprefix("http://")
    findings = graded(await found(load(listen="127.0.0.1:0", control={"listen": taken})))

    (fault,) = findings["fault"]
    assert findings["ok"][0] == "listen: 127.0.0.1:0: any free port; reachable from this machine only -> "
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

    assert findings["fault"] == []
    assert ["in use by a running TokenTape proxy" in note for note in findings["note"]] == [True, True]


def test_a_limit_of_open_files_below_the_calls_in_flight_is_a_note():
    """A call needs two files, a queued one needs one; the note has the number."""
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = {"endpoints": [{"url": "http://127.0.0.1:9", "max_in_flight": 10}], "max_queued": 10}
    many = {"endpoints": [{"url": "http://127.0.0.1:9", "max_in_flight": limit}], "max_queued": 10}

    assert len(graded(list(check_files(load(engines=few))))["ok"]) == 1
    (note,) = graded(list(check_files(load(engines=many))))["note"]
    assert f"ulimit -Hn {2 * limit + 10 + 64 + 128}" in note


def test_an_unusable_path_of_the_journal_is_a_fault(tmp_path):
    """The check writes nothing."""
    (tmp_path / "file").touch()
    wrong = [load(store={**JOURNALING, "spool_path": path}) for path in (tmp_path / "file" / "steps", tmp_path)]
    right = load(store={**JOURNALING, "spool_path": tmp_path / "new" / "steps"})

    assert [
        words for settings in wrong for words in ("is not a folder", "it is a folder")
        if words in graded(list(check_spool(settings)))["fault"][0]
    ] == ["is not a folder", "it is a folder"]  # fmt: skip
    assert len(graded(list(check_spool(right)))["ok"]) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert list(check_spool(settings_for(None))) == []


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
    assert graded(await engine_findings(f"{engine_url}/v1/"))["fault"] == []


async def test_an_unreachable_engine_is_one_fault():
    assert await find_engine("http://127.0.0.1:9") is None
    (fault,) = graded(await engine_findings("http://127.0.0.1:9"))["fault"]

    assert fault.count("is unreachable") == 1
    assert "check that it is running" in fault


@pytest.mark.parametrize("keys", [[], ["a-key"]])
async def test_a_tokentape_proxy_as_the_engine_is_a_fault(engine_url, store, keys):
    """It is a running one, also if it requires keys, or the one that this configuration would start."""
    async with proxying(engine_url, store, agents={"api_keys": keys}, control={"api_keys": keys}) as served:
        (fault,) = graded(await engine_findings(served.url))["fault"]

    assert "this is a TokenTape proxy" in fault
    assert await is_tokentape("http://localhost:8400", Settings())
    assert not await is_tokentape(engine_url, Settings())


GOOD, OTHER = "v7pQ2mXw9sKd4TfR8zLb", "kJ3nYc6hWq1uGe5aPo0i"


def key_findings(agents=(), control=(), control_listen=None, **settings):
    return graded(
        list(
            check_keys(
                load(agents={"api_keys": agents}, control={"api_keys": control, "listen": control_listen}, **settings)
            )
        )
    )


def test_strong_keys_and_no_keys_on_loopback_have_no_findings():
    assert key_findings() == {"ok": [], "note": [], "fault": []}
    assert key_findings([GOOD], [OTHER], listen="0.0.0.0:8400") == {"ok": [], "note": [], "fault": []}


def test_an_open_address_without_keys_is_a_note():
    """It requires --insecure; each API is checked with its own address."""
    (note,) = key_findings(listen="0.0.0.0:0", insecure=True)["note"]
    assert "agents.api_keys and control.api_keys are empty" in note
    (note,) = key_findings([GOOD], listen="127.0.0.1:0", control_listen="0.0.0.0:0", insecure=True)["note"]
    assert "control.api_keys is empty" in note


def test_an_open_control_api_beside_agents_keys_is_a_note():
    """On one address it requires --insecure, on an address of its own it does not."""
    (shared,) = key_findings([GOOD], insecure=True)["note"]
    (own,) = key_findings([GOOD], control_listen="127.0.0.1:8401")["note"]

    assert "control API at 127.0.0.1:8400 requires no key" in shared
    assert "control API at 127.0.0.1:8401 requires no key" in own
    assert key_findings([], [OTHER]) == {"ok": [], "note": [], "fault": []}


@pytest.mark.parametrize(
    "key", ["hunter2", "aaaaaaaaaaaaaaaaaaaaaaaa", "my-secret-key-of-ours", "CHANGEME-0123456789", "a-key-for-agents"]
)
def test_a_weak_key_is_a_fault_and_on_loopback_a_note(key):
    """The finding does not contain the key."""
    (note,) = key_findings([key], [OTHER])["note"]
    (fault,) = key_findings([GOOD], [key], listen="0.0.0.0:8400")["fault"]

    assert "agents.api_keys[0] is weak" in note
    assert "control.api_keys[0] is weak" in fault
    assert key not in note + fault


def test_a_key_of_both_apis_is_a_fault():
    """Agents could use the control API."""
    (fault,) = key_findings([GOOD, OTHER], [OTHER])["fault"]

    assert "agents.api_keys and control.api_keys" in fault


def test_a_duplicate_key_is_a_note_and_a_key_like_a_minted_one_a_fault():
    """The proxy would look up the rollout of such a key."""
    (note,) = key_findings([GOOD, GOOD], [OTHER])["note"]
    (fault,) = key_findings([], ["tt-cjE.0123456789abcdefghij"])["fault"]

    assert "agents.api_keys[1] is a duplicate" in note
    assert "control.api_keys[0] has the prefix of rollout keys" in fault


@pytest.fixture
async def lax_server(tmp_path, unused_tcp_port):
    """A server without persistence that evicts keys: its URL, and a function that runs a command."""
    words = ["--port", str(unused_tcp_port), "--dir", str(tmp_path), "--save", "", "--maxmemory", "50mb"]
    server = await asyncio.create_subprocess_exec(
        str(bundled_server()), *words, "--maxmemory-policy", "allkeys-lru", stdout=asyncio.subprocess.PIPE
    )
    try:
        async for line in server.stdout:
            if b"Ready to accept connections" in line:
                break
        url = f"redis://127.0.0.1:{unused_tcp_port}"
        connections = connections_to("127.0.0.1", unused_tcp_port, parse_url(url), StoreOptions())

        async def setting(*command: str) -> None:
            await connections.execute(b"", [command])

        yield url, setting
        await connections.close()
    finally:
        server.kill()
        await server.wait()


async def store_findings(url: str, clock=None, *, runs=False, **options):
    settings = StoreSettings(url=url, timeout_s=2, **options)
    return graded([finding async for finding in check_store(settings, clock or SystemClock(), runs=runs)])


class Late(SystemClock):
    """A clock that is an hour behind."""

    def now(self) -> float:
        return super().now() - 3600


async def test_a_store_without_persistence_is_a_fault_until_it_is_configured(lax_server):
    """The fix has the right value of each setting."""
    url, setting = lax_server
    faults = (await store_findings(url))["fault"]
    assert [fix for fault in faults for fix in ("noeviction", "appendonly yes") if fix in fault] == [
        "noeviction",
        "appendonly yes",
    ]

    await setting("CONFIG", "SET", "maxmemory-policy", "noeviction", "appendonly", "yes", "appendfsync", "no")
    after = await store_findings(url)
    assert after["fault"] == []
    assert "appendfsync everysec" in after["note"][0]
    assert len(after["ok"]) == 1


async def test_a_durability_that_the_store_cannot_provide_is_a_fault_with_a_fix(lax_server):
    (fault,) = (await store_findings(lax_server[0], durability="fsync"))["fault"]

    assert "durability fsync requires an append-only file" in fault
    assert "choose a lower store.durability" in fault


async def test_a_replica_is_a_fault_with_the_primarys_address(lax_server):
    url, setting = lax_server
    await setting("REPLICAOF", "127.0.0.1", "9")

    (fault,) = (await store_findings(url))["fault"]
    assert "use its primary, 127.0.0.1:9" in fault
    assert fault.endswith("-> set store.url to an address that accepts writes")


async def test_a_store_with_another_clock_is_a_note(lax_server):
    """The clock is read with TIME."""
    assert any("3600 s ahead of ours" in note for note in (await store_findings(lax_server[0], Late()))["note"])


async def test_an_unreachable_store_is_a_fault_without_its_password():
    (fault,) = (await store_findings("redis://u:hunter2@127.0.0.1:9"))["fault"]

    assert "check that the server is running" in fault
    assert "hunter2" not in fault


async def test_an_embedded_store_in_use_is_a_fault_unless_a_proxy_of_this_configuration_runs(tmp_path):
    async with open_embedded(tmp_path / "store") as url:
        (fault,) = (await store_findings(url))["fault"]
        with_running_proxy = await store_findings(url, runs=True)

    assert "only one process can open an embedded store" in fault
    assert with_running_proxy["fault"] == []
    assert "no action is needed if that is the running proxy" in with_running_proxy["note"][0]


@asynccontextmanager
async def open_embedded(path):
    """Open an embedded store."""
    from storage import open_store

    store = await open_store(f"embedded:{path}")
    try:
        yield f"embedded:{path}"
    finally:
        await store.close()


@pytest.mark.parametrize("path", ["data", "new/deeper/data"])
async def test_a_check_does_not_create_an_embedded_store(tmp_path, path):
    """It opens a temporary one beside it, and leaves nothing."""
    url = f"embedded:{tmp_path / path}"
    found = [finding async for finding in check_store(StoreSettings(url=url), SystemClock())]

    assert [finding.grade for finding in found] == ["ok"]
    assert found[0].subject == f"store {url}"
    assert "not created yet" in found[0].seen
    assert list(tmp_path.iterdir()) == []


async def test_an_embedded_store_below_a_file_is_a_fault_without_errno(tmp_path):
    (tmp_path / "file").touch()
    (fault,) = (await store_findings(f"embedded:{tmp_path}/file/data"))["fault"]

    assert "Not a directory" in fault
    assert "Errno" not in fault
    assert "choose a path that this user can create and write to (store.url)" in fault


FOUND = (
    Finding("listen", "ok", "free"),
    Finding("store", "note", "clock \x1b[2J", "set [it]"),
    Finding("engine", "fault", "unreachable\nsecond line", "start it"),
)


async def each(*findings):
    for finding in findings:
        yield finding


async def test_a_finding_has_its_grade_and_its_fix_below(make_console):
    """Quotations are escaped; a fault fails the check."""
    out = make_console()
    code = await print_findings(each(*FOUND), out, as_json=False)

    assert code == Exit.FOUND
    assert out.file.getvalue().splitlines() == [
        "ok   listen: free",
        "note store: clock \\x1b[2J",
        "     -> set [it]",
        "FAIL engine: unreachable",
        "     second line",
        "     -> start it",
    ]


async def test_notes_do_not_fail_the_check(make_console):
    assert await print_findings(each(*FOUND[:2]), make_console(), as_json=False) == Exit.DONE


async def test_faults_with_the_same_exit_code_have_it_and_others_have_3(make_console):
    """A note does not count, with any exit code."""
    port, ids = (Finding("s", "fault", "x", "y", code) for code in (Exit.ADDRESS_IN_USE, Exit.UNTRAINABLE))
    note = Finding("s", "note", "x", "y", Exit.UNTRAINABLE)
    cases = {(port, port): 5, (ids,): 4, (port, ids): 3, (ids, FOUND[2]): 3, (note,): 0, (port, note): 5}

    for findings, code in cases.items():
        assert code == await print_findings(each(*findings), make_console(), as_json=False)


async def test_each_invalid_setting_is_a_finding_with_its_name():
    """Without a name it is about the configuration as a whole."""
    faults = [("listen", "invalid address"), ("", "unreadable")]
    findings = [finding async for finding in refused(InvalidSettings("invalid configuration:", faults))]

    assert [(f.subject, f.seen) for f in findings] == [("listen", "invalid address"), ("configuration", "unreadable")]


async def test_with_json_all_findings_are_one_document(make_console, capsys):
    out = make_console()
    await print_findings(each(FOUND[2]), out, as_json=True)

    assert orjson.loads(capsys.readouterr().out) == {
        "well": False,
        "exit_code": 3,
        "findings": [
            {
                "subject": "engine",
                "grade": "fault",
                "seen": "unreachable\nsecond line",
                "fix": "start it",
                "exit_code": 3,
            }
        ],
    }
    assert out.file.getvalue() == ""
