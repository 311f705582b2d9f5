"""Processes of third-party programs, run unmodified: the engine's address comes from the environment only."""

import asyncio
import os
import signal
from contextlib import suppress
from pathlib import Path

import orjson

from .environment import Environment

PROGRAMS = Path(__file__).with_name("programs")
QUIET = ("main", "litellm")  # CrewAI and aider warn on every import
_VERSION = "import importlib.metadata as m, sys; print(m.version(sys.argv[1]))"


def address(url: str, rollout: str | None = None) -> dict[str, str]:
    """Return the variables that the official clients read. Without a rollout, the address is the engine's own."""
    root = url if rollout is None else f"{url}/rollouts/{rollout}"
    return {
        "OPENAI_BASE_URL": f"{root}/v1",
        "OPENAI_API_KEY": "none",
        "ANTHROPIC_BASE_URL": root,
        "ANTHROPIC_API_KEY": "none",
        "GOOGLE_GEMINI_BASE_URL": root,
        "GEMINI_API_KEY": "none",
    }


async def run(
    runs: str, program: Path, *words: str, where: dict[str, str], environment: Environment, folder: Path
) -> str:
    """Run a program and return its output; it must exit with 0. `runs` is a Python environment, `node`, `bash`, or
    `cli`.
    """
    variables = {
        **where,
        "HOME": str(folder),
        "PATH": os.environ["PATH"],
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # otherwise it downloads prices from GitHub
        "MSWEA_SILENT_STARTUP": "1",
        "LANGSMITH_TRACING": "false",
        "CREWAI_DISABLE_TELEMETRY": "true",  # otherwise it waits for a server that it does not reach
    }
    if runs in QUIET:
        variables["PYTHONWARNINGS"] = "error"  # including those for responses that a client does not accept as they are
    if runs == "cli":
        variables["PATH"] = f"{environment.programs}:{variables['PATH']}"
    try:
        return await run_command([*_starting(runs, program, environment, folder), *words], variables, folder)
    finally:
        _kill_left_behind(folder)


def _kill_left_behind(home: Path) -> None:
    """Kill what a program leaves running (its home is the same): Cline's hub, which later programs would use."""
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it has ended, or belongs to another user
            if f"HOME={home}".encode() in environ.read_bytes().split(b"\0"):
                os.kill(int(environ.parent.name), signal.SIGKILL)


def _starting(runs: str, program: Path, environment: Environment, folder: Path) -> list[str]:
    if runs == "node":  # it looks for packages from the program's own folder
        (folder / "node_modules").symlink_to(environment.packages("node"))
        for source in {program, *PROGRAMS.glob("*.mjs")}:
            (folder / source.name).write_bytes(source.read_bytes())
        return ["node", str(folder / program.name)]
    if runs in ("bash", "cli"):
        return ["bash", "-euo", "pipefail", str(program)]
    return [str(environment.python(runs)), str(program)]


async def installed_version(runs: str, package: str, environment: Environment) -> str:
    """Return the version that ran."""
    if runs == "bash":
        return (await run_command(["curl", "--version"])).split()[1]
    if runs in ("node", "cli"):
        described = (environment.packages(runs) / package / "package.json").read_bytes()
        return orjson.loads(described)["version"]
    return (await run_command([str(environment.python(runs)), "-c", _VERSION, package])).strip()


async def run_command(command: list[str], environ: dict[str, str] | None = None, folder: Path | None = None) -> str:
    """Run a command and return its output; it must exit with 0."""
    started = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        env=environ, cwd=folder,
    )  # fmt: skip
    try:
        printed, complained = await started.communicate()
    finally:
        if started.returncode is None:
            started.kill()
            await started.wait()
    assert started.returncode == 0, f"{printed.decode()}\n{complained.decode()}"
    return printed.decode()
