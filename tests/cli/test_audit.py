"""`tokentape audit`: its output, its exit status, and the rows that it reads."""

import asyncio
import io

import orjson
import pytest
from aiohttp import web
from rich.console import Console
from tests.support.fakes import proxying
from tests.support.scoring import honest_row, scoring_as_vllm
from typer.testing import CliRunner

from proxy.cli.audit import Request, ServerAddress, audit, rows_of_file, rows_of_proxy
from proxy.cli.export import ExportRequest
from proxy.cli.main import app
from proxy.server.listener import simulating
from proxy.simulator.options import Options

ALL = ExportRequest("sequences", (), None, "exact", "ndjson")


async def tokentape(*words: str) -> tuple[int, str, str]:
    """Run a command in a thread; return exit status, standard output and standard error."""
    done = await asyncio.to_thread(CliRunner().invoke, app, words)
    assert isinstance(done.exception, SystemExit | None)
    return done.exit_code, done.stdout, done.stderr


@pytest.fixture
def rows(tmp_path):
    """A function that writes rows to a file and returns its path."""

    def written(*rows: dict) -> str:
        path = tmp_path / "rows.ndjson"
        path.write_bytes(b"\n".join(map(orjson.dumps, rows)))
        return str(path)

    return written


async def test_the_exit_status_is_0_if_all_rows_are_aligned_and_otherwise_3(engine, rows, tmp_path):
    """With --json standard output is JSON, otherwise a table; without rows the status is 3."""
    engine.respond = scoring_as_vllm
    wrong = honest_row("wrong")
    wrong["token_ids"][30] = 5
    code, out, _ = await tokentape("audit", "--engine", engine.url, "--file", rows(honest_row()), "--json")
    assert (code, orjson.loads(out)["aligned"], orjson.loads(out)["verdicts"]) == (0, True, {"aligned": 1})

    both = rows(honest_row(), wrong)
    journal = str(tmp_path / "journal")
    code, out, errors = await tokentape("audit", "--engine", engine.url, "--file", both, "--resume", journal)
    assert code == 3
    assert "wrong" in out
    assert "1 aligned, 1 wrong tokens" in errors
    assert len((tmp_path / "journal").read_bytes().splitlines()) == 2
    code, out, _ = await tokentape("audit", "--engine", engine.url, "--file", both, "--rollout", "r1", "--json")
    assert code == 0
    code, _, errors = await tokentape("audit", "--engine", engine.url, "--file", both, "--rollout", "r9")
    assert (code, "no sequence" in errors) == (3, True)


async def test_a_row_without_comparable_tokens_passes_only_beside_aligned_rows(engine, rows):
    """All its tokens are constrained."""
    engine.respond = scoring_as_vllm
    bound = honest_row("bound", first=200)
    bound["spans"][0]["constrained"] = True
    code, out, errors = await tokentape("audit", "--engine", engine.url, "--file", rows(honest_row(), bound))
    assert (code, "nothing to compare" in out) == (0, True)
    assert "2 sequences, 30 tokens compared, 30 skipped: 1 aligned, 1 nothing to compare" in " ".join(errors.split())

    code, out, _ = await tokentape("audit", "--engine", engine.url, "--file", rows(bound), "--json")
    payload = orjson.loads(out)
    assert (code, payload["aligned"], payload["tokens"], payload["skipped"]) == (3, False, 0, 30)


async def test_a_piped_table_has_no_padding_for_the_longest_line(engine, rows):
    """No line ends in spaces."""
    engine.respond = scoring_as_vllm
    wrong = honest_row("wrong")
    wrong["logprobs"] = [value and value * 1.5 for value in wrong["logprobs"]]
    _, out, _ = await tokentape("audit", "--engine", engine.url, "--file", rows(honest_row(), wrong, {"mask": 1}))
    lines = out.splitlines()

    assert len(lines) == 4
    assert max(map(len, lines)) > 250
    assert [line for line in lines if line != line.rstrip()] == []
    assert [line for line in lines if " " * 50 in line] == []


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("--file", "nowhere.ndjson"), 1, "nowhere.ndjson"),
        (("--url", "http://127.0.0.1:9"), 1, "127.0.0.1:9"),
        (("--file", "x", "--model", "other"), 1, "it serves tiny"),
    ],
)
async def test_an_error_of_audit_is_a_message_and_a_nonzero_status(engine, words, code, message):
    engine.respond = scoring_as_vllm
    status, _, errors = await tokentape("audit", "--engine", engine.url, *words)

    assert code == status
    assert message in errors
    assert "Traceback" not in errors


async def test_rows_of_a_running_proxy_are_audited_on_its_engine(store, http, capsys):
    """A recorded call is exported, and scored by the engine that sampled it."""
    async with simulating("127.0.0.1:0", Options(seed=1)) as engine, proxying(engine, store) as served:
        body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 40}
        async with http.post(f"{served.url}/rollouts/r1/v1/chat/completions", json=body) as response:
            assert response.status == 200
        out = Console(file=io.StringIO(), width=200)
        request = Request(
            ServerAddress(served.control_url), ALL, ServerAddress(engine), None, None, 0.01, None, 4, None, as_json=True
        )
        is_well = await audit(request, out, Console(file=io.StringIO()))

    payload = orjson.loads(capsys.readouterr().out)
    assert is_well
    assert [sequence["rollout_id"] for sequence in payload["sequences"]] == ["r1"]
    assert payload["max"] < 1e-6


FILE_ROWS = [{"rollout_id": "a", "group_id": "g", "token_ids": [1] * 50_000}, {"rollout_id": "b", "group_id": None}]
FILE_TEXT = b"\n".join(map(orjson.dumps, FILE_ROWS))


def export_request(*rollouts: str, group: str | None = None) -> ExportRequest:
    return ExportRequest("sequences", rollouts, group, "exact", "ndjson")


@pytest.mark.parametrize("end", [b"", b"\n", b"\n\n"])
async def test_rows_of_a_file_can_be_filtered_by_rollout_and_group(tmp_path, end):
    """The last line may lack its line end."""
    path = tmp_path / "rows"
    path.write_bytes(FILE_TEXT + end)

    async def names(chosen):
        return [row["rollout_id"] async for row in rows_of_file(path, chosen)]

    assert await names(export_request()) == ["a", "b"]
    assert await names(export_request("b")) == ["b"]
    assert await names(export_request(group="g")) == ["a"]


@pytest.mark.parametrize("end", [b"", b"\n"])
async def test_rows_of_a_proxy_are_read_line_by_line(engine, end):
    """Lines may be long, and split in any way."""

    async def respond(request, body):
        assert request.raw_path == "/rollouts/a%2Fb/export?format=sequences&include=exact&container=ndjson"
        return web.Response(body=FILE_TEXT + end)

    engine.respond = respond
    source = ServerAddress(engine.url + "/")
    assert [row async for row in rows_of_proxy(source, export_request("a/b"))] == FILE_ROWS


async def test_a_line_that_is_not_json_is_an_error_with_its_number(tmp_path):
    path = tmp_path / "rows"
    path.write_bytes(b'{"a": 1}\nPAR1')

    with pytest.raises(ValueError, match="line 2: not JSON"):
        [row async for row in rows_of_file(path, export_request())]
