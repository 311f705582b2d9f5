"""The result of one check."""

from dataclasses import dataclass
from typing import Literal

from proxy.cli.exit_codes import Exit

Grade = Literal["ok", "note", "fault"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check: its subject, its grade, what was found (`seen`), and how to fix it (`fix`).

    A fault prevents or loses recorded steps, or allows unintended access. A note is a warning. `exit_code` is that of a `check`
    whose only faults have this one.
    """

    subject: str
    grade: Grade
    seen: str
    fix: str = ""
    exit_code: Exit = Exit.FOUND
