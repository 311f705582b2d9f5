"""What an installed `tokentape` must do without the repository: serve, record, show its page, export, stop."""

import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import orjson

_CALL = orjson.dumps({"model": "policy", "messages": [{"role": "user", "content": "hi"}]})


def exported_by(command: Sequence[str | Path], folder: Path, *options: str) -> dict[str, Any]:
    """Serve in a folder, with the simulator and an embedded store; return the one row of one recorded call.

    `command` starts the command line. Python's own variables are not set, so that it imports only what is installed.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "TOKENTAPE_"))}
    serve = [*command, "serve", "--listen", "127.0.0.1:0", *options]
    with subprocess.Popen(serve, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            log = ""
            while not (found := re.search(r"listening (http://\S+)", log)):
                line = process.stderr.readline()
                assert line, log
                log += line
            url = found[1]
            call = Request(f"{url}/rollouts/r1/v1/chat/completions", _CALL, {"Content-Type": "application/json"})
            assert urlopen(call).status == 200
            assert b"TokenTape" in urlopen(f"{url}/ui").read()
            exported = subprocess.run(
                [*command, "export", "--url", url], cwd=folder, env=environment, capture_output=True, check=True
            ).stdout
        finally:
            process.terminate()
            log += process.communicate(timeout=60)[1]
    assert process.returncode == 0, log
    return orjson.loads(exported)
