"""The program between TokenTape and valkey-server: sets the parent-death signal and the umask, then executes the server.

It is run by path in isolated mode, so it imports nothing of TokenTape. It is a program because the `preexec_fn` of subprocess
runs in a fork of the whole proxy, in which a lock of another thread can stay locked.

Arguments: the process ID of the owner, then the command to execute.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> None:
    """Stop with the owner, create private files, execute the server."""
    owner, *command = sys.argv[1:]
    os.umask(0o077)
    if sys.platform == "linux":
        # At SIGTERM, the server flushes its append-only file and exits. The setting persists across exec.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(owner):
        sys.exit("the owner of this server has already exited")
    os.execv(command[0], command)  # noqa: S606 - no shell


main()
