"""The exit codes of the command line."""

from enum import IntEnum
from typing import Self


class Exit(IntEnum):
    """The exit code of a command."""

    meaning: str

    def __new__(cls, code: int, meaning: str) -> Self:
        """Create an exit code with its description."""
        member = int.__new__(cls, code)
        member._value_ = code
        member.meaning = meaning
        return member

    DONE = 0, "Success. `serve`, `simulate` and `tail` also exit with 0 on SIGINT or SIGTERM."
    FAILED = 1, "Failure. Standard error has the error message."
    MISUSED = 2, "Invalid command line. Nothing was executed."
    FOUND = (
        3,
        "Success, but `check`, `audit` or `certify` found a fault, or calls are in flight after `policy pause --drain-s`.",
    )
    UNTRAINABLE = 4, "Success, but `check` or `certify` found that an engine returns no token IDs, and no other fault."
    ADDRESS_IN_USE = (
        5,
        "Success, but `check` found that another program uses an address to listen on, and no other fault.",
    )
    REFUSED = 78, "The configuration is invalid. A restart cannot help (EX_CONFIG; see deploy/tokentape.service)."
    INTERRUPTED = 130, "Interrupted by Ctrl-C."
