"""`tokentape audit`, run as people run it."""

import asyncio
import io
import sys

import orjson
import pytest
from fakes import proxying
from rich.console import Console
from scoring import honest_row, scoring_as_vllm

from proxy.cli.audit import Request, ServerAddress, audit
from proxy.cli.export import ExportRequest
from proxy.server.listener import simulating
from proxy.simulator.options import Options

ALL = ExportRequest("sequences", (), None, "exact", "ndjson")


async def tokentape(*words: str) -> tuple[int, str, str]:
    """Exit status, standard output, standard error."""
    done = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "proxy", *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, errors = await done.communicate()
    return done.returncode, out.decode(), errors.decode()


@pytest.fixture
def rows(tmp_path):
    """A file of rows, written anew with each call."""

    def written(*rows: dict) -> str:
        path = tmp_path / "rows.ndjson"
        path.write_bytes(b"\n".join(map(orjson.dumps, rows)))
        return str(path)

    return written


async def test_aligned_rows_end_with_0_and_others_with_3(engine, rows, tmp_path):
    """JSON on standard output, a table without --json; nothing to audit is 3 as well."""
    engine.respond = scoring_as_vllm
    wrong = honest_row("wrong")
    wrong["token_ids"][30] = 5
    code, out, _ = await tokentape("audit", "--engine", engine.url, "--file", rows(honest_row()), "--json")
    assert (0, True, {"aligned": 1}) == (code, orjson.loads(out)["aligned"], orjson.loads(out)["verdicts"])

    both = rows(honest_row(), wrong)
    journal = str(tmp_path / "journal")
    code, out, errors = await tokentape("audit", "--engine", engine.url, "--file", both, "--resume", journal)
    assert 3 == code
    assert "wrong" in out
    assert "1 aligned, 1 wrong tokens" in errors
    assert 2 == len((tmp_path / "journal").read_bytes().splitlines())
    code, out, _ = await tokentape("audit", "--engine", engine.url, "--file", both, "--rollout", "r1", "--json")
    assert 0 == code
    code, _, errors = await tokentape("audit", "--engine", engine.url, "--file", both, "--rollout", "r9")
    assert (3, True) == (code, "no sequence" in errors)


async def test_what_has_nothing_to_compare_is_not_wrong_and_proves_nothing(engine, rows):
    """A row of constrained tokens alone beside an aligned one is well; alone it is not, since nothing was compared."""
    engine.respond = scoring_as_vllm
    bound = honest_row("bound", first=200)
    bound["spans"][0]["constrained"] = True
    code, out, errors = await tokentape("audit", "--engine", engine.url, "--file", rows(honest_row(), bound))
    assert (0, True) == (code, "nothing to compare" in out)
    assert "2 sequences, 30 tokens compared, 30 skipped: 1 aligned, 1 nothing to compare" in " ".join(errors.split())

    code, out, _ = await tokentape("audit", "--engine", engine.url, "--file", rows(bound), "--json")
    told = orjson.loads(out)
    assert (3, False, 0, 30) == (code, told["aligned"], told["tokens"], told["skipped"])


async def test_a_piped_table_is_as_wide_as_its_lines(engine, rows):
    """A long note pads no other line, and no line ends in blanks."""
    engine.respond = scoring_as_vllm
    wrong = honest_row("wrong")
    wrong["logprobs"] = [value and value * 1.5 for value in wrong["logprobs"]]
    _, out, _ = await tokentape("audit", "--engine", engine.url, "--file", rows(honest_row(), wrong, {"mask": 1}))
    lines = out.splitlines()

    assert 4 == len(lines)
    assert max(map(len, lines)) > 250
    assert [] == [line for line in lines if line != line.rstrip()]
    assert [] == [line for line in lines if " " * 50 in line]


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        ((), 2, "either --url"),
        (("--url", "http://127.0.0.1:9", "--file", "rows"), 2, "either --url"),
        (("--file", "nowhere.ndjson"), 1, "nowhere.ndjson"),
        (("--url", "http://127.0.0.1:9"), 1, "127.0.0.1:9"),
        (("--file", "x", "--model", "other"), 1, "it serves tiny"),
    ],
)
async def test_what_is_wrong_is_said_in_a_sentence(engine, words, code, told):
    """No traceback, and a code that is not zero."""
    engine.respond = scoring_as_vllm
    ended, _, errors = await tokentape("audit", "--engine", engine.url, *words)

    assert code == ended
    assert told in errors
    assert "Traceback" not in errors


async def test_rows_of_a_running_proxy_are_audited_on_its_engine(store, http, capsys):
    """The whole way: a call is recorded, exported, and scored again by the engine that sampled it."""
    async with simulating("127.0.0.1:0", Options(seed=1)) as engine, proxying(engine, store) as served:
        body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 40}
        async with http.post(f"{served.url}/rollouts/r1/v1/chat/completions", json=body) as response:
            assert 200 == response.status
        out = Console(file=io.StringIO(), width=200)
        request = Request(
            ServerAddress(served.control_url), ALL, ServerAddress(engine), None, None, 0.01, None, 4, None, as_json=True
        )
        is_well = await audit(request, out, Console(file=io.StringIO()))

    told = orjson.loads(capsys.readouterr().out)
    assert is_well
    assert ["r1"] == [each["rollout_id"] for each in told["sequences"]]
    assert told["max"] < 1e-6
