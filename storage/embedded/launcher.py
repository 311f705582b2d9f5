"""The step between TokenTape and the valkey-server it starts, run as a program of its own.

Holds what a child must do before it becomes the server. It must import nothing of ours, and little else: it is started
by path, in isolated mode, and must be gone in milliseconds. It is a program rather than subprocess's `preexec_fn`
because that runs in a fork of the whole proxy, where another thread's lock may be held for ever.

Arguments: the process id of the owner, then the command to become.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> None:
    """Die with the owner, keep files private, become the server."""
    owner, *command = sys.argv[1:]
    os.umask(0o077)
    if sys.platform == "linux":
        # SIGTERM: the server flushes its append-only file and ends. It stays set over exec.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(owner):
        sys.exit("the process that wanted this server is gone already")
    os.execv(command[0], command)  # noqa: S606 - no shell is wanted


main()
