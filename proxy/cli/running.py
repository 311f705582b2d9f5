"""The addresses of the proxies that this user runs on this machine: each keeps a locked file with its own while it runs.

A lock ends with its process, also if that is killed. A file that is not locked is of a process that has ended, and is removed.
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from typing import Final

DEFAULT_URL: Final = "http://127.0.0.1:8400"
_FOLDER: Final = ".cache/tokentape/running"  # in the home, to which only its user can write: commands send keys there


@contextmanager
def announced(url: str) -> Iterator[None]:
    """Keep the file of this process with this address. Without a home that can be written to there is none."""
    with ExitStack() as stack:
        with suppress(OSError, RuntimeError, ImportError):
            import fcntl  # not available on Windows

            path = _folder() / f"{token_hex(8)}{_suffix()}"  # a process ID may be in several containers with this home
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            part = path.with_suffix(".part")  # a file is not seen before it is locked
            file = stack.enter_context(part.open("w", encoding="utf-8"))
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(url)
            file.flush()
            part.replace(path)
            stack.callback(path.unlink, missing_ok=True)
        yield


def running_urls() -> list[str]:
    """Return the addresses of the proxies that run."""
    found: list[str] = []
    with suppress(OSError, RuntimeError, ImportError):
        import fcntl

        for path in sorted(_folder().glob(f"*{_suffix()}")):
            with suppress(OSError, UnicodeDecodeError), path.open(encoding="utf-8") as file:
                if os.fstat(file.fileno()).st_uid != os.getuid():
                    continue  # HOME is a folder such as /tmp
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    found.append(file.read())
                else:
                    path.unlink()
    return [url for url in found if url.startswith(("http://", "https://"))]


def url_of_commands() -> str:
    """Return the address of the only proxy that runs; the default one if several run, or none."""
    urls = running_urls()
    return urls[0] if len(urls) == 1 else DEFAULT_URL


def unreachable_hint() -> str:
    """Return what to do if no proxy can be reached."""
    urls = ", ".join(running_urls())
    start = f"Proxies that run here: {urls}" if urls else "`tokentape serve` starts one"
    return f"Is it running? {start}; --url or TOKENTAPE_URL is the address of another."


def _folder() -> Path:
    return Path.home() / _FOLDER


def _suffix() -> str:
    """Return the end of the files of this machine: a home may be on several, with names such as `gpu` and `gpu-1`."""
    return f"@{os.uname().nodename}.url"
