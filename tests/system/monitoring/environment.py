"""Download what the monitoring tests need: Prometheus with promtool, and the TypeScript types of Grafana's dashboards.

Both are cached in `$XDG_CACHE_HOME/tokentape` or `~/.cache/tokentape` (120 MB, safe to delete). Debian's Prometheus package
is unpacked and not installed, so its service never starts.
"""

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

GRAFANA_SCHEMA, TYPESCRIPT = "11.6.0", "5.9.3"


class EnvironmentUnavailable(Exception):
    """A tool is missing; the message names it and the fix."""


def prometheus() -> Path:
    """Return the folder with `prometheus` and `promtool`, from PATH or from Debian's package."""
    found = shutil.which("prometheus"), shutil.which("promtool")
    if all(found) and Path(found[0]).parent == Path(found[1]).parent:
        return Path(found[0]).parent
    if shutil.which("apt-get") is None:
        raise EnvironmentUnavailable(
            "Prometheus not found: put prometheus and promtool on PATH (https://prometheus.io/download)"
        )
    return _made(_home() / f"prometheus-{_key(Path('/etc/os-release').read_text())}", _unpack) / "usr" / "bin"


def grafana_types() -> Path:
    """Return the folder of an npm project with Grafana's types of a dashboard and the TypeScript compiler."""
    if shutil.which("npm") is None:
        raise EnvironmentUnavailable("npm not found: install Node.js 20 or newer (Debian: apt-get install npm)")
    return _made(_home() / f"grafana-types-{_key(GRAFANA_SCHEMA, TYPESCRIPT)}", _install_types)


def _unpack(folder: Path) -> None:
    try:
        _run(folder, "apt-get", "download", "prometheus")
    except EnvironmentUnavailable:
        if os.geteuid() != 0:
            raise
        _run(folder, "apt-get", "update")  # the package lists are missing or old
        _run(folder, "apt-get", "download", "prometheus")
    (package,) = folder.glob("*.deb")
    _run(folder, "dpkg-deb", "--extract", package.name, ".")
    package.unlink()


def _install_types(folder: Path) -> None:
    (folder / "package.json").write_text('{"private": true, "type": "module"}')
    packages = (f"@grafana/schema@{GRAFANA_SCHEMA}", f"typescript@{TYPESCRIPT}")
    _run(folder, "npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", "--legacy-peer-deps", *packages)


def _home() -> Path:
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tokentape"
    home.mkdir(parents=True, exist_ok=True)
    return home


def _key(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def _made(folder: Path, make: Callable[[Path], None]) -> Path:
    """Create a folder if it is missing: in a sibling that is renamed once complete, so that an interrupted run leaves none."""
    if not folder.exists():
        part = Path(tempfile.mkdtemp(prefix=f"{folder.name}.part-", dir=folder.parent))
        part.chmod(0o755)  # apt's own user downloads into it
        try:
            make(part)
            part.rename(folder)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return folder


def _run(folder: Path, *command: str) -> None:
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0:
        tail = "\n".join(done.stdout.splitlines()[-15:])
        raise EnvironmentUnavailable(
            f"`{' '.join(command)}`, which the monitoring tests need, failed with exit code {done.returncode}. "
            f"Check the network and the configuration of {command[0]}, or install it yourself, then try again.\n{tail}"
        )
