"""The command line, run as processes."""

import asyncio
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from urllib.request import Request, urlopen

import orjson
import pytest
from aiohttp import web
from tests.support.commands import TOKENTAPE, run, started
from typer.testing import CliRunner

from proxy.cli.main import app
from proxy.cli.runner import Exit


def test_serve_with_the_simulator_records_exports_and_stops_cleanly(tmp_path):
    """This covers serve, a call, an export by URL, SIGTERM, and an export from the store."""
    store = f"embedded:{tmp_path / 'store'}"
    rows = tmp_path / "rows.ndjson"
    with started("serve", "--listen", "127.0.0.1:0", "--store", store) as (process, url, output):
        assert "SIMULATOR" in output
        body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
        call = Request(
            f"{url}/rollouts/r1/v1/chat/completions", orjson.dumps(body), {"Content-Type": "application/json"}
        )
        with urlopen(call) as response:
            assert response.status == 200
        assert run("export", "--url", url, "--out", str(rows)).returncode == 0
        refused = run("serve", "--listen", "127.0.0.1:0", "--store", store)
        process.send_signal(signal.SIGTERM)
        assert process.wait(50) == 0

    by_url = rows.read_bytes()
    by_store = run("export", "--store", store)
    assert orjson.loads(by_url)["rollout_id"] == "r1"
    assert by_url.decode() == by_store.stdout
    assert refused.returncode == 1
    assert "tokentape:" in refused.stderr


def test_a_killed_proxy_loses_no_delivered_step(tmp_path):
    """With SIGKILL under load, every step with a complete response is stored once."""
    store = f"embedded:{tmp_path / 'store'}"
    delivered: list[str] = []

    def call(url: str) -> None:
        body = orjson.dumps({"messages": [{"role": "user", "content": "hi"}], "stream": True})
        while True:
            try:
                sent = Request(f"{url}/rollouts/r1/v1/chat/completions", body, {"Content-Type": "application/json"})
                with urlopen(sent, timeout=50) as response:
                    if response.read().endswith(b"data: [DONE]\n\n"):
                        delivered.append(response.headers["X-Step-Id"])
            except (OSError, HTTPException):
                return

    serve = ("serve", "--listen", "127.0.0.1:0", "--store", store)
    with started(*serve) as (process, url, _), ThreadPoolExecutor(4) as threads:
        for _ in range(4):
            threads.submit(call, url)
        while len(delivered) < 40:
            assert process.poll() is None
            time.sleep(0.01)
        process.kill()
    with started(*serve) as (_, url, _), urlopen(f"{url}/rollouts/r1/steps?limit=1000") as response:
        stored = [step["step_id"] for step in orjson.loads(response.read())["steps"]]

    assert len(stored) == len(set(stored))
    assert set(delivered) <= set(stored)


def test_a_second_signal_ends_the_process_immediately(tmp_path):
    """Calls in flight are aborted."""
    with (
        started("simulate", "--listen", "127.0.0.1:0", "--token-delay-s", "60") as (_, engine, _),
        started("serve", "--listen", "127.0.0.1:0", "--store", f"embedded:{tmp_path}", "--engine", engine) as serving,
        ThreadPoolExecutor(1) as threads,
    ):
        process, url, _ = serving
        body = orjson.dumps({"messages": [{"role": "user", "content": "hi"}]})
        sent = Request(f"{url}/rollouts/r1/v1/chat/completions", body, {"Content-Type": "application/json"})
        call = threads.submit(urlopen, sent, timeout=50)
        while b"tokentape_in_flight_calls 1.0" not in urlopen(f"{url}/metrics").read():
            assert not call.done()
        process.send_signal(signal.SIGTERM)
        while "stopping" not in process.stderr.readline():
            pass
        process.send_signal(signal.SIGTERM)
        code = process.wait(30)
        with pytest.raises((OSError, HTTPException)):
            call.result()

    assert code == -signal.SIGTERM


def test_simulate_serves_vllms_protocol():
    """`check` accepts it as an engine."""
    with started("simulate", "--listen", "127.0.0.1:0", "--seed", "1") as (_, url, _):
        with urlopen(f"{url}/v1/models") as response:
            listed = orjson.loads(response.read())
        checked = run("check", "--engine", url, "--store", "redis://127.0.0.1:9")

    assert listed["data"][0]["id"] == "simulated"
    assert "returns token IDs and logprobs" in checked.stdout
    assert "FAIL store" in checked.stdout
    assert checked.returncode == 3


def test_simulate_renders_a_template_from_a_file(tmp_path):
    """The template renders the prompt, the turn ends at `--eos`, and tokens can be split."""
    (tmp_path / "t.jinja").write_text("{% for m in messages %}<u>{{ m.content }}<e>{% endfor %}<a>")
    options = ("--template", str(tmp_path / "t.jinja"), "--eos", "<e>", "--noncanonical-rate", "1", "--seed", "1")
    body = {"model": "simulated", "messages": [{"role": "user", "content": "hi"}], "return_token_ids": True}
    with started("simulate", "--listen", "127.0.0.1:0", *options) as (_, url, _):
        chat = post(f"{url}/v1/chat/completions", body)
        prompt = post(f"{url}/detokenize", {"tokens": chat["prompt_token_ids"]})
        sampled = chat["choices"][0]["token_ids"]
        texts = [post(f"{url}/detokenize", {"tokens": [token]})["prompt"] for token in sampled]

    assert prompt == {"prompt": "<u>hi<e><a>"}
    assert texts[-1] == "<e>"
    assert {len(text) for text in texts[:-1]} == {1}


def post(url, body):
    """The response to a JSON body."""
    with urlopen(Request(url, orjson.dumps(body), {"Content-Type": "application/json"})) as response:
        return orjson.loads(response.read())


def test_simulate_serves_sglangs_protocol():
    with (
        started("simulate", "--listen", "127.0.0.1:0", "--shape", "sglang") as (_, url, _),
        urlopen(f"{url}/model_info") as response,
    ):
        model_info = orjson.loads(response.read())

    assert model_info["weight_version"] == "default"


@pytest.mark.parametrize(
    ("words", "environment", "message"),
    [
        (("serve", "--config", "nowhere.yaml"), {}, "nowhere.yaml"),
        (("serve", "--listen", "0.0.0.0:0"), {}, "agents.api_keys"),
        (("serve", "--store", "mysql://x"), {}, "mysql"),
        (("serve", "--engine", "localhost:8000"), {}, "http"),
        (("serve",), {"TOKENTAPE_STORE__DURABILITY": "maybe"}, "store.durability"),
        (("export", "--url", "http://127.0.0.1:9"), {}, "127.0.0.1:9"),
        (("export", "--url", "file://x"), {}, "http://HOST:PORT"),
        (("simulate", "--template", "nowhere.jinja"), {}, "nowhere.jinja"),
        (("simulate", "--eos", "</s>"), {}, "EOS '</s>' is not a single token"),
        (("simulate", "--noncanonical-rate", "2"), {}, "--noncanonical-rate"),
    ],
)
def test_an_error_is_a_message_without_a_traceback_and_a_nonzero_status(monkeypatch, words, environment, message):
    monkeypatch.setattr("proxy.cli.serve.set_up", lambda *_: None)  # it would log to this command's standard error
    done = CliRunner().invoke(app, words, env=environment)

    assert done.exit_code in (Exit.FAILED, Exit.MISUSED, Exit.REFUSED)
    assert isinstance(done.exception, SystemExit)
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_failed_export_leaves_no_file(tmp_path):
    done = run("export", "--url", "http://127.0.0.1:9", "--out", str(tmp_path / "rows"))

    assert done.returncode == 1
    assert not (tmp_path / "rows").exists()


@pytest.mark.parametrize(
    "words",
    [
        "list", "show r", "diff a b", "tail r", "export", "engines", "mismatch b", "search x", "training", "open",
        "request GET /policies", "rollout finish r", "rollout open", "group list", "group open 2", "batch claim --consumer c",
        "batch ack b", "policy list", "policy set 1",
    ],
)  # fmt: skip
def test_a_verb_of_a_running_proxy_imports_only_what_it_needs(words):
    """No server, no settings, no store and no other HTTP client: so it starts fast."""
    heavy = [
        "aiohttp",
        "httpx2",
        "redis",
        "prometheus_client",
        "opentelemetry",
        "numpy",
        "pyarrow",
        "transformers",
        "torch",
    ]
    ours = ["storage", *(f"proxy.{room}" for room in ("api", "config", "upstream", "telemetry", "simulator", "export"))]
    program = f"""
import sys
from proxy.cli.main import app
sys.argv = ["tokentape", *{[*words.split(), "--url", "http://127.0.0.1:9"]!r}]
try:
    app()
except SystemExit as ended:
    print(ended.code > 0, [name for name in {heavy + ours!r} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "True []", done.stderr
    assert "Is it running?" in done.stderr
    assert "--url or TOKENTAPE_URL" in done.stderr


def test_commands_find_the_proxy_that_runs_at_another_address(tmp_path, monkeypatch):
    """A second start at its address names it, and the option for another one."""
    monkeypatch.setenv("HOME", str(tmp_path))
    with started("serve", "--listen", "127.0.0.1:0", "--store", f"embedded:{tmp_path}") as (_, url, _):
        listed, exported = run("list"), run("export")
        again = run("serve", "--listen", url.removeprefix("http://"), "--store", f"embedded:{tmp_path / 'other'}")
        same = run("serve", "--listen", "127.0.0.1:0", "--store", f"embedded:{tmp_path}")

    assert (listed.returncode, exported.returncode) == (0, 0)
    assert "no rollouts" in listed.stderr
    assert again.returncode == 1
    assert "A TokenTape proxy runs there" in again.stderr
    assert "--listen" in again.stderr
    assert (same.returncode, f"A TokenTape proxy runs at {url}\n" in same.stderr) == (1, True)


def test_list_show_and_tail_print_a_recorded_rollout(tmp_path):
    """With --json standard output is JSON only; Ctrl-C ends `tail` with 0."""
    with started("serve", "--listen", "127.0.0.1:0", "--store", f"embedded:{tmp_path}") as (_, url, _):
        call = Request(f"{url}/rollouts/r1/v1/completions", b'{"prompt": "once"}', {"Content-Type": "application/json"})
        urlopen(call).close()
        listed, shown, missing = (
            CliRunner().invoke(app, command.split(), env={"TOKENTAPE_URL": url})
            for command in ("list", "show r1 --json", "show r2")
        )
        words = [*TOKENTAPE, "tail", "r1", "--json", "--url", url]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as tail:
            step = orjson.loads(tail.stdout.readline())
            tail.send_signal(signal.SIGINT)
            status = tail.wait(50)

    assert "\x1b" not in listed.stdout
    assert listed.stdout.splitlines()[1].split()[:4] == ["r1", "open", "1", "1"]
    assert orjson.loads(shown.stdout)["rollout"]["rollout_id"] == "r1"
    assert (missing.exit_code, missing.stdout) == (Exit.FAILED, "")
    assert "Rollout 'r2' not found." in missing.stderr
    assert (step["index"], step["exact"], status) == (0, True, Exit.DONE)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("list --since 2w", "invalid duration"),
        ("rollout reward r", "specify the reward"),
        ("rollout reward r nan", "not a finite number"),
        ("rollout reward r --step s1", "STEP_ID=NUMBER"),
        ("rollout reward r --step s1=inf", "STEP_ID=NUMBER"),
        ("rollout reward r 1 2", "2"),
        ("rollout finish r --metadata 7", "must be a JSON object"),
        ("rollout finish r --metadata {", "is not JSON"),
        ("rollout finish r --status open", "--status"),
        ("policy pause --drain-s -1", "--drain-s"),
        ("open r --group g", "either a rollout or --group"),
        ("export --url http://127.0.0.1:9 --json", "--out"),
        ("show", "rollout"),
        ("list --limit 0", "--limit"),
    ],
)
def test_a_wrong_command_line_has_exit_status_2(words, message):
    done = CliRunner().invoke(app, words.split())

    assert done.exit_code == Exit.MISUSED
    assert message in done.output


@pytest.mark.parametrize(
    "words",
    [
        "list --url http://127.0.0.1:9",
        "show r --url http://127.0.0.1:9",
        "tail --url http://127.0.0.1:9",
        "engines --url http://127.0.0.1:9",
        "open --url http://127.0.0.1:9",
        "group show g --url http://127.0.0.1:9",
        "policy list --url http://127.0.0.1:9",
        "rollout delete r --url http://127.0.0.1:9",
    ],
)
def test_a_failed_command_has_exit_status_1_and_a_message_on_standard_error(words):
    done = CliRunner().invoke(app, words.split())

    assert (done.exit_code, done.stdout) == (Exit.FAILED, "")
    assert done.stderr.startswith("tokentape: ")
    assert "127.0.0.1:9: Connection refused" in done.stderr
    assert not re.search(r"Errno|ssl:", done.stderr)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("serve --config no", "No such file or directory: no"),
        ("serve --listen 0.0.0.0:0", "agents.api_keys is empty"),
        ("serve --listen 127.0.0.1:0 --store mysql://x", "mysql"),
        ("serve --listen 127.0.0.1:0 --store mysql://x --workers 2", "mysql"),
        ("list --store embedded:x", "unknown setting"),
    ],
)
def test_a_refused_configuration_has_exit_status_78(words, message):
    """systemd does not restart a service with this status."""
    environment = {"TOKENTAPE_NO_SUCH": "1", "TOKENTAPE_STORE__NO_SUCH": "1"} if "--store embedded" in words else {}
    done = run(*words.split(), **environment)

    assert (done.returncode, done.stdout) == (78, "")
    assert message in done.stderr


@pytest.mark.parametrize("command", ["serve --store embedded:{}", "serve --store embedded:{} --workers 2", "simulate"])
def test_a_port_in_use_is_a_sentence_and_exit_status_1(tmp_path, engine, command):
    """A restart can succeed later."""
    address = engine.url.removeprefix("http://")
    done = run(*command.format(tmp_path).split(), "--listen", address)

    assert done.returncode == 1
    assert done.stderr.startswith(f"tokentape: Cannot listen on {address}: Address already in use")
    assert (command != "simulate") == ("Another program uses it" in done.stderr)


def test_invalid_settings_are_findings_of_check_by_the_names_of_settings():
    """The exit status is 3."""
    done = CliRunner().invoke(app, ["check", "--listen", "0.0.0.0:1", "--json"])
    report = orjson.loads(done.stdout)

    assert Exit.FOUND == done.exit_code == report["exit_code"]
    assert [finding["subject"] for finding in report["findings"]] == ["agents.api_keys"]
    assert "agents.api_keys is empty" in report["findings"][0]["seen"]

    report = orjson.loads(CliRunner().invoke(app, ["check", "--listen", "1", "--engine", "x", "--json"]).stdout)
    assert [finding["subject"] for finding in report["findings"]] == ["listen", "engines.endpoints.0.url"]


async def test_check_has_exit_statuses_for_a_port_in_use_and_for_an_engine_without_token_ids(tmp_path, engine):
    """An unreachable engine beside it is 3. The store is not created."""
    taken = ("--listen", engine.url.removeprefix("http://"))
    free, store = ("--listen", "127.0.0.1:0"), ("--store", f"embedded:{tmp_path / 'data'}")

    async def respond(request, body):
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": "m"}]})
        if request.path == "/v1/chat/completions":
            return web.json_response({"choices": [{"message": {"content": "hi"}}]})
        return web.Response(status=404)

    engine.fixed_responses, engine.respond = {}, respond
    chats = ("--engine", engine.url)
    codes = [
        (await asyncio.to_thread(run, "check", *options, *store)).returncode
        for options in (
            free,
            taken,
            (*free, *chats),
            (*taken, *chats),
            (*free, *chats, "--engine", "http://127.0.0.1:9"),
        )
    ]

    assert codes == [Exit.DONE, Exit.ADDRESS_IN_USE, Exit.UNTRAINABLE, Exit.FOUND, Exit.FOUND]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("main", ("aiohttp", "pydantic", "redis", "proxy.config.settings", "proxy.server.listener", "storage")),
        ("control", ("aiohttp", "pydantic", "redis", "proxy.config.settings", "storage")),
        ("audit", ("redis", "pydantic", "prometheus_client", "proxy.upstream.client")),
        ("archive", ("aiohttp", "proxy.api", "proxy.server.app")),
        ("serve", ("torch", "transformers", "pyarrow")),
    ],
)
def test_a_command_imports_only_what_it_needs(module, heavy):
    """Imports are most of the time that a command takes to start."""
    program = f"import sys, proxy.cli.{module}; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[]"
