"""The `tokentape` command: starts the server's command line.

`proxy` and `storage` are also names of users' modules and of other distributions. A wheel has them below `tokentape._server`
(hatch_build.py), where neither hides the other. In a clone they are at its top, which is searched first.
"""

import gc
import sys
from importlib import import_module
from pathlib import Path
from typing import Final

_SERVER: Final = Path(__file__).with_name("_server")


def main() -> None:
    """Run the command line. This is the only module of `tokentape` that imports the server, by name."""
    gc.set_threshold(100_000)  # what imports make stays: collections would take a fifth of a command's time
    server = "tokentape._server.proxy"
    if not _SERVER.is_dir():
        server = "proxy"
        sys.path.insert(0, str(_SERVER.parents[1]))
    import_module(f"{server}.cli.main").main()


if __name__ == "__main__":
    main()
