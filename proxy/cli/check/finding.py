"""One thing that was looked at.

Holds `Finding`. How findings look is in `terminal.checking`.
"""

from dataclasses import dataclass
from typing import Literal

Grade = Literal["ok", "note", "fault"]


@dataclass(frozen=True, slots=True)
class Finding:
    """What was looked at, how it is, what was seen, and what to do about it.

    A fault keeps steps from being recorded, or loses them, or lets in whom nobody meant; a note is worth knowing.
    """

    subject: str
    grade: Grade
    seen: str
    mend: str = ""
