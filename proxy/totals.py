"""The metrics of all workers together.

Holds a worker's place among the others.
"""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Crew:
    """A worker's place among the workers: its number, and the folder that only they can enter."""

    number: int
    folder: Path
