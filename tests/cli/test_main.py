"""The command line, run as people run it."""

import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from importlib.metadata import version
from urllib.request import Request, urlopen

import orjson
import pytest
from commands import TOKENTAPE, run, started
from typer.testing import CliRunner

from proxy.cli.exit_codes import Exit
from proxy.cli.main import app


def test_serve_starts_the_simulator_says_so_records_exports_and_stops_cleanly(tmp_path):
    """The whole way, from nothing: serve, a call, an export by URL, SIGTERM, an export from the store."""
    store = f"embedded:{tmp_path / 'store'}"
    rows = tmp_path / "rows.ndjson"
    with started("serve", "--listen", "127.0.0.1:0", "--store", store) as (process, url, said):
        assert "SIMULATOR" in said
        body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
        call = Request(
            f"{url}/rollouts/r1/v1/chat/completions", orjson.dumps(body), {"Content-Type": "application/json"}
        )
        with urlopen(call) as response:
            assert 200 == response.status
        assert 0 == run("export", "--url", url, "--out", str(rows)).returncode
        refused = run("serve", "--listen", "127.0.0.1:0", "--store", store)
        process.send_signal(signal.SIGTERM)
        assert 0 == process.wait(50)

    by_url = rows.read_bytes()
    by_store = run("export", "--store", store)
    assert "r1" == orjson.loads(by_url)["rollout_id"]
    assert by_url.decode() == by_store.stdout
    assert 1 == refused.returncode
    assert "tokentape:" in refused.stderr


def test_a_killed_proxy_loses_no_step_that_a_client_was_told_of(tmp_path):
    """kill -9 amid a load of calls; started again on the same path, every step whose reply was whole is there, once."""
    store = f"embedded:{tmp_path / 'store'}"
    told: list[str] = []

    def call(url: str) -> None:
        body = orjson.dumps({"messages": [{"role": "user", "content": "hi"}], "stream": True})
        while True:
            try:
                sent = Request(f"{url}/rollouts/r1/v1/chat/completions", body, {"Content-Type": "application/json"})
                with urlopen(sent, timeout=10) as response:
                    if response.read().endswith(b"data: [DONE]\n\n"):
                        told.append(response.headers["X-Step-Id"])
            except (OSError, HTTPException):
                return

    serve = ("serve", "--listen", "127.0.0.1:0", "--store", store)
    with started(*serve) as (process, url, _), ThreadPoolExecutor(4) as threads:
        for _ in range(4):
            threads.submit(call, url)
        while len(told) < 40:
            assert process.poll() is None
            time.sleep(0.01)
        process.kill()
    with started(*serve) as (_, url, _), urlopen(f"{url}/rollouts/r1/steps?limit=1000") as response:
        kept = [step["step_id"] for step in orjson.loads(response.read())["steps"]]

    assert len(kept) == len(set(kept))
    assert set(told) <= set(kept)


def test_a_second_signal_ends_it_at_once(tmp_path):
    """Whatever is in flight: a call of minutes is not waited for."""
    with (
        started("simulate", "--listen", "127.0.0.1:0", "--token-delay-s", "60") as (_, engine, _),
        started("serve", "--listen", "127.0.0.1:0", "--store", f"embedded:{tmp_path}", "--engine", engine) as serving,
        ThreadPoolExecutor(1) as threads,
    ):
        process, url, _ = serving
        body = orjson.dumps({"messages": [{"role": "user", "content": "hi"}]})
        sent = Request(f"{url}/rollouts/r1/v1/chat/completions", body, {"Content-Type": "application/json"})
        call = threads.submit(urlopen, sent, timeout=30)
        while b"tokentape_in_flight_calls 1.0" not in urlopen(f"{url}/metrics").read():
            assert not call.done()
        process.send_signal(signal.SIGTERM)
        while "stopping" not in process.stderr.readline():
            pass
        process.send_signal(signal.SIGTERM)
        code = process.wait(30)
        with pytest.raises((OSError, HTTPException)):
            call.result()

    assert -signal.SIGTERM == code


def test_simulate_serves_vllms_protocol():
    """It can be given to serve as an engine, and check finds nothing wrong with it."""
    with started("simulate", "--listen", "127.0.0.1:0", "--seed", "1") as (_, url, _):
        with urlopen(f"{url}/v1/models") as response:
            listed = orjson.loads(response.read())
        checked = run("check", "--engine", url, "--store", "redis://127.0.0.1:9")

    assert "simulated" == listed["data"][0]["id"]
    assert "returns token IDs and logprobs" in checked.stdout
    assert "FAIL store" in checked.stdout
    assert 3 == checked.returncode


def test_simulate_serves_sglangs_protocol():
    """With --shape sglang it is an engine of that kind."""
    with (
        started("simulate", "--listen", "127.0.0.1:0", "--shape", "sglang") as (_, url, _),
        urlopen(f"{url}/model_info") as response,
    ):
        told = orjson.loads(response.read())

    assert "default" == told["weight_version"]


@pytest.mark.parametrize(
    ("words", "environment", "told"),
    [
        (("serve", "--config", "nowhere.yaml"), {}, "nowhere.yaml"),
        (("serve", "--listen", "0.0.0.0:0"), {}, "agents.api_keys"),
        (("serve", "--store", "mysql://x"), {}, "mysql"),
        (("serve", "--engine", "localhost:8000"), {}, "http"),
        (("serve",), {"TOKENTAPE_STORE__DURABILITY": "maybe"}, "store.durability"),
        (("export", "--url", "http://127.0.0.1:9"), {}, "127.0.0.1:9"),
        (("export",), {}, "--url"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(words, environment, told):
    """No traceback: what was wrong, with what; and a code that is not zero."""
    done = run(*words, **environment)

    assert done.returncode in (1, 2)
    assert told in done.stderr
    assert "Traceback" not in done.stderr


def test_a_refused_export_leaves_no_file(tmp_path):
    """Neither whole nor half."""
    done = run("export", "--url", "http://127.0.0.1:9", "--out", str(tmp_path / "rows"))

    assert 1 == done.returncode
    assert not (tmp_path / "rows").exists()


def test_the_server_starts_quickly_and_imports_no_heavy_library():
    """Neither torch nor transformers nor pyarrow is loaded to serve."""
    heavy = "('torch', 'transformers', 'pyarrow')"
    program = f"import sys, proxy.server.listener, proxy.cli.main; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert "[]" == done.stdout.strip()


def test_a_recorded_rollout_is_listed_shown_and_followed(tmp_path):
    """As people do, and as programs: with --json standard output is JSON and nothing else; Ctrl-C leaves `tail` with 0."""
    with started("serve", "--listen", "127.0.0.1:0", "--store", f"embedded:{tmp_path}") as (_, url, _):
        call = Request(f"{url}/rollouts/r1/v1/completions", b'{"prompt": "once"}', {"Content-Type": "application/json"})
        urlopen(call).close()
        listed, shown, missing = (
            CliRunner().invoke(app, said.split(), env={"TOKENTAPE_URL": url})
            for said in ("list", "show r1 --json", "show r2")
        )
        words = [*TOKENTAPE, "tail", "r1", "--json", "--url", url]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as tail:
            told = orjson.loads(tail.stdout.readline())
            tail.send_signal(signal.SIGINT)
            ended = tail.wait(50)

    assert "\x1b" not in listed.stdout
    assert ["r1", "open", "1", "1"] == listed.stdout.splitlines()[1].split()[:4]
    assert "r1" == orjson.loads(shown.stdout)["rollout"]["rollout_id"]
    assert (Exit.FAILED, "") == (missing.exit_code, missing.stdout)
    assert "Rollout 'r2' not found." in missing.stderr
    assert (0, True, Exit.DONE) == (told["index"], told["exact"], ended)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("list --since 2w", "invalid duration"),
        ("list --groups --group g", "cannot be used with --groups"),
        ("export --url http://127.0.0.1:9 --json", "--out"),
        ("export", "either --url"),
        ("audit --engine http://127.0.0.1:9", "either --url"),
        ("show", "rollout"),
        ("list --limit 0", "--limit"),
    ],
)
def test_a_wrong_command_line_ends_with_2(words, told):
    """Whoever finds it wrong, the parser or the command; nothing was tried."""
    done = CliRunner().invoke(app, words.split())

    assert Exit.MISUSED == done.exit_code
    assert told in done.output


@pytest.mark.parametrize(
    "words",
    [
        "list --url http://127.0.0.1:9",
        "show r --url http://127.0.0.1:9",
        "tail --url http://127.0.0.1:9",
        "serve --config no",
    ],
)
def test_what_does_not_work_ends_with_1(words):
    """And a sentence on standard error."""
    done = CliRunner().invoke(app, words.split())

    assert (Exit.FAILED, "") == (done.exit_code, done.stdout)
    assert done.stderr.startswith("tokentape: ")


def test_settings_that_cannot_be_used_are_a_finding_of_check():
    """An address without keys is what check is for: 3, with what to do."""
    done = CliRunner().invoke(app, ["check", "--listen", "0.0.0.0:1", "--json"])
    told = orjson.loads(done.stdout)

    assert Exit.FOUND == done.exit_code
    assert "agents.api_keys is empty" in told["findings"][0]["seen"]


def test_help_loads_neither_the_server_nor_the_settings():
    """It is there at once."""
    heavy = "('aiohttp', 'pydantic', 'redis', 'proxy.config.settings', 'proxy.server.listener', 'storage')"
    program = f"import sys, proxy.cli.main; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert "[]" == done.stdout.strip()


def test_the_version_is_said():
    """As the package has it."""
    done = CliRunner().invoke(app, ["--version"])

    assert (Exit.DONE, f"tokentape {version('tokentape')}\n") == (done.exit_code, done.stdout)
