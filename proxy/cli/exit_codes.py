"""The exit codes of the command line."""

from enum import IntEnum
from typing import Self


class Exit(IntEnum):
    """How a command ended."""

    meaning: str

    def __new__(cls, code: int, meaning: str) -> Self:
        """A code with its sentence."""
        made = int.__new__(cls, code)
        made._value_ = code
        made.meaning = meaning
        return made

    DONE = 0, "Done. `serve`, `simulate` and `tail` also end so when they are told to stop."
    FAILED = 1, "It did not work: standard error says in a sentence what was wrong."
    MISUSED = 2, "The command line itself is wrong: nothing was tried."
    FOUND = (
        3,
        "It worked, and found a fault (`check`), or a sequence that is not aligned or nothing to compare (`audit`).",
    )
    INTERRUPTED = 130, "Ctrl-C ended it before it was done."
