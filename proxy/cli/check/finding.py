"""The result of one check."""

from dataclasses import dataclass
from typing import Literal

Grade = Literal["ok", "note", "fault"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check: its subject, its grade, what was found (`seen`), and how to fix it (`fix`).

    A fault prevents or loses recorded steps, or allows unintended access. A note is a warning.
    """

    subject: str
    grade: Grade
    seen: str
    fix: str = ""
