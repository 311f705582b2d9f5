"""Fixtures of the real engines: vLLM and llama.cpp on the CPU, each started once for the whole run.

environment.py installs them. vLLM's weights are random: constrain its output with a seed, `logit_bias`, `ignore_eos` or
`structured_outputs`. llama.cpp serves a small chat model: constrain it with `grammar`.
"""

import http.client
import os
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import monotonic

import aiohttp
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

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


@dataclass(frozen=True, slots=True)
class Engine:
    """A running engine: its port and its log."""

    port: int
    log: Path

    @property
    def url(self) -> str:
        """The engine's root, without `/v1`."""
        return f"http://127.0.0.1:{self.port}"


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
def llamacpp(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A llama.cpp server that serves SmolLM2-135M-Instruct as `smollm2`, with two slots of 4096 tokens."""
    made = environment.ensure_llamacpp()
    engine = Engine(_free_port(), tmp_path_factory.mktemp("engine") / "llamacpp.log")
    program = environment.HERE / "llamacpp_server.py"
    with _process([str(made.python), str(program), str(made.model), str(engine.port)], engine):
        yield engine


@pytest.fixture
async def direct(vllm: Engine) -> AsyncIterator[openai.AsyncOpenAI]:
    """OpenAI's client, connected to the engine without the proxy."""
    async with openai.AsyncOpenAI(base_url=f"{vllm.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def metric(vllm: Engine) -> Callable[[str], Awaitable[float]]:
    """A function that reads one of the engine's Prometheus metrics, summed over its labels."""

    async def read(name: str) -> float:
        async with aiohttp.ClientSession() as session, session.get(f"{vllm.url}/metrics") as response:
            families = text_string_to_metric_families(await response.text())
        return sum(sample.value for family in families for sample in family.samples if sample.name == name)

    return read


@pytest.fixture
def running_requests(metric: Callable[[str], Awaitable[float]]) -> Callable[[], Awaitable[float]]:
    """A function that returns the number of the engine's running requests."""
    return partial(metric, "vllm:num_requests_running")


@contextmanager
def start_vllm(model: Path, name: str, log: Path, *flags: str) -> Iterator[Engine]:
    """Start a vLLM that serves this model under this name; stop it at the end."""
    engine = Engine(_free_port(), log)
    command = [
        *(str(environment.ensure().python), "-m", "vllm.entrypoints.openai.api_server", *FLAGS, *flags),
        *(f"--served-model-name={name}", "--model", str(model), "--host=127.0.0.1", f"--port={engine.port}"),
    ]
    with _process(command, engine):
        yield engine


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@contextmanager
def _process(command: list[str], engine: Engine) -> Iterator[None]:
    """Start the engine in a new process group, wait until it is ready, and stop it in any case."""
    # SIGTERM must stop the engine as Ctrl-C does.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    with engine.log.open("wb") as log:
        process = subprocess.Popen(
            command,
            env=os.environ | VARIABLES,
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
