"""Fixtures of the real engines: vLLM, SGLang and llama.cpp on the CPU, each started once for the whole run.

environment.py installs them. The weights of vLLM's and SGLang's model are random: constrain vLLM's output with a seed,
`logit_bias`, `ignore_eos` or `structured_outputs`, and SGLang's, which ignores seeds, with temperature 0, `logit_bias`,
`ignore_eos` or `regex`. llama.cpp serves a small chat model: constrain it with `grammar`.
"""

import http.client
import io
import os
import random
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic
from types import MappingProxyType
from typing import Any

import aiohttp
import openai
import orjson
import pytest
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from proxy.cli.audit import Request, ServerAddress, audit
from proxy.cli.export import ExportRequest

from . import environment

START_S = 300.0  # about 20 s on two idle cores, nearly all of it Python's imports
STOP_S = 20.0
TEST_S = 120.0
FLAGS = (
    "--dtype=float32",
    "--max-model-len=2048",
    "--max-num-seqs=16",
    "--enforce-eager",
    # By default a separate process runs the model and is awaited in a loop of sched_yield calls. On Linux 6.18 and two
    # cores that starves all other processes of the machine, including these tests, for seconds.
    "--distributed-executor-backend=uni",
)
PARSERS = ("--enable-auto-tool-choice", "--tool-call-parser=hermes", "--reasoning-parser=qwen3")
SCALE_OUT = "--enable-scale-out"  # tokens in, tokens out
OWN_TEMPLATES = "--trust-request-chat-template"
VARIABLES = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    # Otherwise vLLM 0.32 on a CPU replaces the executor above (platforms/cpu.py); the variable has no other effect on a
    # server. With that executor we set the number of threads: one core for the engine, the others for the tests.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "OMP_NUM_THREADS": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # pause, weight version
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
}
SGLANG_FLAGS = (
    "--device=cpu",
    "--dtype=float32",
    "--attention-backend=torch_native",
    "--sampling-backend=pytorch",
    "--disable-overlap-schedule",
    "--cuda-graph-backend-decode=disabled",
    "--cuda-graph-backend-prefill=disabled",
    "--context-length=2048",
    "--max-total-tokens=16384",
    "--trust-request-chat-template",
    "--sleep-on-idle",  # otherwise the scheduler polls, and uses one core without a request
    "--enable-metrics",
)
SGLANG_PARSERS = ("--tool-call-parser=hermes", "--reasoning-parser=qwen3")
SGLANG_VARIABLES = {
    "PYTHONPATH": str(environment.SGLANG_ABSENT),
    "SGLANG_USE_CPU_ENGINE": "1",
    "TORCHDYNAMO_DISABLE": "1",  # it would compile with a C++ compiler
}
METRICS: dict[str, dict[str, tuple[str, dict[str, str]]]] = {
    "vllm": {
        "running": ("vllm:num_requests_running", {}),
        "sampled": ("vllm:generation_tokens_total", {}),
        "cached": ("vllm:prefix_cache_hits_total", {}),
    },
    "sglang": {
        "running": ("sglang:num_running_reqs", {}),
        "sampled": ("sglang:realtime_tokens_total", {"mode": "decode"}),
        "cached": ("sglang:cached_tokens_total", {}),
        "renderings": ("sglang:http_requests_total", {"endpoint": "/v1/tokenize"}),
    },
}


@dataclass(frozen=True, slots=True)
class Engine:
    """A running engine: its port, its log and its kind, as the proxy detects it."""

    port: int
    log: Path
    kind: str

    @property
    def url(self) -> str:
        """The engine's root, without `/v1`."""
        return f"http://127.0.0.1:{self.port}"

    async def score(self, ids: list[int]) -> list[float]:
        """Return the engine's logprob of each id after the first, given those before it."""
        if self.kind == "sglang":
            sampling = {"max_new_tokens": 0}
            body = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}
            scored = await self._post("/generate", body)
            entries = scored["meta_info"]["input_token_logprobs"]
            last = max(ids)  # of the vocabulary, it is reported as 0 (logprob_result_processor.py:53)
            assert [entry[1] or last for entry in entries] == [token or last for token in ids]
            return [entry[0] for entry in entries[1:]]
        body = {"model": "tiny", "prompt": ids, "max_tokens": 1, "prompt_logprobs": 0}
        (choice,) = (await self._post("/v1/completions", body))["choices"]
        pairs = zip(ids[1:], choice["prompt_logprobs"][1:], strict=True)
        return [entry[str(token)]["logprob"] for token, entry in pairs]

    async def metric(self, name: str) -> float:
        """Return a Prometheus metric of the engine, by its name in METRICS, summed over its labels."""
        async with aiohttp.ClientSession() as http, http.get(f"{self.url}/metrics") as response:
            families = text_string_to_metric_families(await response.text())
        family, labels = METRICS[self.kind][name]
        samples = [sample for found in families for sample in found.samples if sample.name == family]
        return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())

    async def running(self) -> float:
        """Return the number of requests that the engine is running."""
        return await self.metric("running")

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        async with aiohttp.ClientSession() as http, http.post(self.url + path, json=body) as response:
            assert response.status == 200, await response.text()
            return await response.json()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option of `make certified`."""
    parser.addoption(
        "--record-certified", action="store_true", help="Write docs/certified instead of comparing with it."
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Apply each test's timeout to the test alone: building and starting the engine takes minutes."""
    for item in items:
        if item.path.is_relative_to(environment.HERE):
            item.add_marker(pytest.mark.timeout(TEST_S, func_only=True))


@pytest.fixture(scope="session")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A vLLM that serves the tiny model as `tiny`, with a tool parser and a reasoning parser."""
    log = tmp_path_factory.mktemp("engine") / "vllm.log"
    with start_vllm(environment.ensure().model, "tiny", log, *PARSERS, SCALE_OUT, OWN_TEMPLATES) as engine:
        yield engine


@pytest.fixture(scope="session")
def processed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A vLLM with logprobs over the tokens that sampling keeps; it does not report these tokens."""
    log = tmp_path_factory.mktemp("engine") / "vllm.log"
    with start_vllm(environment.ensure().model, "tiny", log, "--logprobs-mode=processed_logprobs", SCALE_OUT) as engine:
        yield engine


@pytest.fixture(scope="session")
def sglang(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An SGLang that serves the tiny model as `tiny`, with a tool parser and a reasoning parser."""
    log = tmp_path_factory.mktemp("engine") / "sglang.log"
    with start_sglang(environment.ensure_sglang().model, "tiny", log, *SGLANG_PARSERS) as engine:
        yield engine


@pytest.fixture(scope="session")
def sglang_without_parsers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """The same without a tool parser and a reasoning parser."""
    log = tmp_path_factory.mktemp("engine") / "sglang.log"
    with start_sglang(environment.ensure_sglang().model, "tiny", log) as engine:
        yield engine


@pytest.fixture(scope="session")
def llamacpp(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A llama.cpp server that serves SmolLM2-135M-Instruct as `smollm2`, with two slots of 4096 tokens."""
    made = environment.ensure_llamacpp()
    engine = Engine(_free_port(), tmp_path_factory.mktemp("engine") / "llamacpp.log", "llamacpp")
    program = environment.HERE / "llamacpp_server.py"
    with _process([str(made.python), str(program), str(made.model), str(engine.port)], engine):
        yield engine


@pytest.fixture(params=["vllm", "sglang"])
def engine(request: pytest.FixtureRequest) -> Engine:
    """Each of the engines that give token ids, logprobs of a prompt, and tokens in."""
    started: Engine = request.getfixturevalue(request.param)
    return started


@pytest.fixture
async def direct(vllm: Engine) -> AsyncIterator[openai.AsyncOpenAI]:
    """OpenAI's client, connected to the engine without the proxy."""
    async with openai.AsyncOpenAI(base_url=f"{vllm.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def audited(engine, tmp_path):
    """A function that audits rows of a file, or of a proxy, with the engine, and returns the JSON report.

    `version`: that of the engine's weights.
    """
    number = iter(range(100))

    async def run(*rows: dict, url: str | None = None, version: str | None = None) -> dict:
        path = tmp_path / f"rows-{next(number)}"
        path.write_bytes(b"\n".join(map(orjson.dumps, rows)))
        export = ExportRequest("sequences", (), None, "exact", "ndjson")
        scorer = ServerAddress(engine.url)
        request = Request(path, export, scorer, None, None, 0.01, None, 4, None, as_json=True, policy_version=version)
        request = request if url is None else replace(request, source=ServerAddress(url))
        with redirect_stdout(io.StringIO()) as out:
            is_well = await audit(request, Console(file=io.StringIO()), Console(file=io.StringIO()))
        report = orjson.loads(out.getvalue())
        assert is_well == report["aligned"]
        return report

    return run


@contextmanager
def start_vllm(model: Path, name: str, log: Path, *flags: str) -> Iterator[Engine]:
    """Start a vLLM that serves this model under this name; stop it at the end."""
    engine = Engine(_free_port(), log, "vllm")
    command = [
        *(str(environment.ensure().python), "-m", "vllm.entrypoints.openai.api_server", *FLAGS, *flags),
        *(f"--served-model-name={name}", "--model", str(model), "--host=127.0.0.1", f"--port={engine.port}"),
    ]
    with _process(command, engine):
        yield engine


@contextmanager
def start_sglang(model: Path, name: str, log: Path, *flags: str) -> Iterator[Engine]:
    """Start an SGLang that serves this model under this name; stop it at the end."""
    engine = Engine(_free_port(), log, "sglang")
    command = [
        *(str(environment.ensure_sglang().python), "-m", "sglang.launch_server", *SGLANG_FLAGS, *flags),
        *(f"--served-model-name={name}", f"--model-path={model}", "--host=127.0.0.1", f"--port={engine.port}"),
        f"--nccl-port={_free_port()}",
    ]
    # As for vLLM, one core for the engine: SGLang binds itself to the cores that this variable lists, by default to all.
    core = {"SGLANG_CPU_OMP_THREADS_BIND": str(min(os.sched_getaffinity(0)))}
    with _process(command, engine, SGLANG_VARIABLES | core):
        yield engine


def _free_port() -> int:
    """Return a free port below those that the kernel hands out: an engine listens on it only after half a minute."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


@contextmanager
def _process(command: list[str], engine: Engine, more: Mapping[str, str] = MappingProxyType({})) -> Iterator[None]:
    """Start the engine in a new process group, wait until it is ready, and stop it in any case."""
    # SIGTERM must stop the engine as Ctrl-C does.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    with engine.log.open("wb") as log:
        process = subprocess.Popen(
            command,
            env={**os.environ, **VARIABLES, **more},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        _wait_until_ready(process, engine)
        yield
    finally:
        _stop(process)
        signal.signal(signal.SIGTERM, before)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Terminate the engine, then kill what is left of its process group."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], engine: Engine) -> None:
    deadline = monotonic() + START_S
    while not _is_healthy(engine):
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.25)
            pytest.fail(f"The engine exited with code {process.returncode}.\n{_tail(engine)}", pytrace=False)
        if monotonic() > deadline:
            pytest.fail(f"The engine was not ready within {START_S:.0f} s.\n{_tail(engine)}", pytrace=False)


def _is_healthy(engine: Engine) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", engine.port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def _tail(engine: Engine) -> str:
    lines = engine.log.read_text(errors="replace").splitlines()
    return "\n".join([f"The last lines of {engine.log}:", *lines[-40:]])
